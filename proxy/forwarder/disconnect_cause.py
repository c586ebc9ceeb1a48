"""Causes of the end of a client's connection: one list for the log and for the metric's label."""

import enum


class DisconnectCause(enum.StrEnum):
    """Why a client's connection ended. The values are the labels of pulsar_proxy_ended_connections_total.

    ``DENIED``: the deny list names its credentials. ``DISCONNECTED``: an operator has ended it.
    ``GAVE_WAY``: evicted for a newcomer before it had authenticated. ``OVER_SHARE``: closed for a newcomer, since its
    principal or address had most connections. ``MAX_CONNECTIONS``: no connection gave way to it. ``QUOTA``: a
    quota of its principal or tenant is used up. ``DEFECT``: an internal error of the proxy.
    """

    CLIENT_CLOSED = "client_closed"
    CLIENT_BROKE_OFF = "client_broke_off"
    PROTOCOL_ERROR = "protocol_error"
    TLS_FAILED = "tls_failed"
    FRAME_TOO_LARGE = "frame_too_large"
    NOT_ALLOWED = "not_allowed"
    AUTHENTICATION_FAILED = "authentication_failed"
    AUTHENTICATION_UNAVAILABLE = "authentication_unavailable"
    TARGET_DENIED = "target_denied"
    BROKER_FAILED = "broker_failed"
    RELAY_NOT_BEGUN = "relay_not_begun"
    SESSION_EXPIRED = "session_expired"
    REAUTHENTICATION_FAILED = "reauthentication_failed"
    LOOKUP_UNAVAILABLE = "lookup_unavailable"
    ENVELOPE_UNSUPPORTED = "envelope_unsupported"
    HANDSHAKE_TIMEOUT = "handshake_timeout"
    NO_MEMORY = "no_memory"
    DENIED = "denied"
    DISCONNECTED = "disconnected"
    GAVE_WAY = "gave_way"
    OVER_SHARE = "over_share"
    MAX_CONNECTIONS = "max_connections"
    QUOTA = "quota"
    KEEP_ALIVE_TIMEOUT = "keep_alive_timeout"
    CLIENT_DOES_NOT_READ = "client_does_not_read"
    RELAY_ENDED = "relay_ended"
    MAX_AGE = "max_age"
    SHUT_DOWN = "shut_down"
    DEFECT = "defect"
