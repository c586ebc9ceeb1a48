"""Whose fault it is: the two kinds of protocol error, told apart by type (as h11 does)."""


class RemoteProtocolError(Exception):
    """The peer broke the protocol. Its text is fit for a log and for the peer."""


class LocalProtocolError(Exception):
    """We would have broken the protocol: a defect of the proxy."""
