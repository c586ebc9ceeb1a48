from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Method(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    METHOD_UNSPECIFIED: _ClassVar[Method]
    AUTHENTICATE: _ClassVar[Method]
    BROKER_CREDENTIALS: _ClassVar[Method]
    ENVELOPE: _ClassVar[Method]
    RESOLVE_TARGET: _ClassVar[Method]
    BROKER_PROFILE: _ClassVar[Method]
    REPORT_OUTLIER: _ClassVar[Method]
    SUM_CONNECTIONS: _ClassVar[Method]
    START: _ClassVar[Method]
    SET_PEERS: _ClassVar[Method]
    CONFIGURE: _ClassVar[Method]
    DRAIN: _ClassVar[Method]
    COLLECT_METRICS: _ClassVar[Method]
    GET_STATUS: _ClassVar[Method]
    TAKE_OVER_FILES: _ClassVar[Method]
    LIST_CONNECTIONS: _ClassVar[Method]
    END_CONNECTIONS: _ClassVar[Method]
    SET_LOG_LEVEL: _ClassVar[Method]
    CLUSTER_STATUS: _ClassVar[Method]
    CLUSTER_DRAIN: _ClassVar[Method]
    CLUSTER_RELOAD: _ClassVar[Method]
    CLUSTER_UPGRADE: _ClassVar[Method]
    CLUSTER_CONNECTIONS: _ClassVar[Method]
    CLUSTER_DISCONNECT: _ClassVar[Method]
    CLUSTER_LOG_LEVEL: _ClassVar[Method]
    CLUSTER_UNREADY: _ClassVar[Method]
    REPORT_HEALTH: _ClassVar[Method]
    REPORT_READINESS: _ClassVar[Method]
    REPORT_STATUS: _ClassVar[Method]
    REPORT_PLACES: _ClassVar[Method]
    REPORT_METRICS: _ClassVar[Method]
    REPORT_OVERVIEW: _ClassVar[Method]

class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OK: _ClassVar[Status]
    CLUSTER_AUTHORIZATION_FAILED: _ClassVar[Status]
    UNSUPPORTED_VERSION: _ClassVar[Status]
    INVALID_REQUEST: _ClassVar[Status]
    TOO_MANY_REQUESTS: _ClassVar[Status]
    REQUEST_TIMED_OUT: _ClassVar[Status]
    UNKNOWN_SERVER_ERROR: _ClassVar[Status]
    PRINCIPAL_DESERIALIZATION_FAILURE: _ClassVar[Status]

class OriginalData(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORIGINAL_DATA_UNKNOWN: _ClassVar[OriginalData]
    ORIGINAL_DATA_IGNORED: _ClassVar[OriginalData]
    ORIGINAL_DATA_CHECKED: _ClassVar[OriginalData]
    ORIGINAL_DATA_SEEMS_CHECKED: _ClassVar[OriginalData]
METHOD_UNSPECIFIED: Method
AUTHENTICATE: Method
BROKER_CREDENTIALS: Method
ENVELOPE: Method
RESOLVE_TARGET: Method
BROKER_PROFILE: Method
REPORT_OUTLIER: Method
SUM_CONNECTIONS: Method
START: Method
SET_PEERS: Method
CONFIGURE: Method
DRAIN: Method
COLLECT_METRICS: Method
GET_STATUS: Method
TAKE_OVER_FILES: Method
LIST_CONNECTIONS: Method
END_CONNECTIONS: Method
SET_LOG_LEVEL: Method
CLUSTER_STATUS: Method
CLUSTER_DRAIN: Method
CLUSTER_RELOAD: Method
CLUSTER_UPGRADE: Method
CLUSTER_CONNECTIONS: Method
CLUSTER_DISCONNECT: Method
CLUSTER_LOG_LEVEL: Method
CLUSTER_UNREADY: Method
REPORT_HEALTH: Method
REPORT_READINESS: Method
REPORT_STATUS: Method
REPORT_PLACES: Method
REPORT_METRICS: Method
REPORT_OVERVIEW: Method
OK: Status
CLUSTER_AUTHORIZATION_FAILED: Status
UNSUPPORTED_VERSION: Status
INVALID_REQUEST: Status
TOO_MANY_REQUESTS: Status
REQUEST_TIMED_OUT: Status
UNKNOWN_SERVER_ERROR: Status
PRINCIPAL_DESERIALIZATION_FAILURE: Status
ORIGINAL_DATA_UNKNOWN: OriginalData
ORIGINAL_DATA_IGNORED: OriginalData
ORIGINAL_DATA_CHECKED: OriginalData
ORIGINAL_DATA_SEEMS_CHECKED: OriginalData

class Principal(_message.Message):
    __slots__ = ("type", "name", "method", "expires_at_unix_ms", "proxy")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PROXY_FIELD_NUMBER: _ClassVar[int]
    type: str
    name: str
    method: str
    expires_at_unix_ms: int
    proxy: str
    def __init__(self, type: _Optional[str] = ..., name: _Optional[str] = ..., method: _Optional[str] = ..., expires_at_unix_ms: _Optional[int] = ..., proxy: _Optional[str] = ...) -> None: ...

class SealedPrincipal(_message.Message):
    __slots__ = ("principal", "mac")
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    principal: bytes
    mac: bytes
    def __init__(self, principal: _Optional[bytes] = ..., mac: _Optional[bytes] = ...) -> None: ...

class AuthenticateRequest(_message.Message):
    __slots__ = ("authentication_id", "first_round", "method", "data", "client_address", "client_certificate", "original_principal", "through_proxy", "over", "original_token", "http")
    AUTHENTICATION_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROUND_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    THROUGH_PROXY_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    authentication_id: int
    first_round: bool
    method: str
    data: bytes
    client_address: str
    client_certificate: bytes
    original_principal: str
    through_proxy: bool
    over: bool
    original_token: bytes
    http: bool
    def __init__(self, authentication_id: _Optional[int] = ..., first_round: _Optional[bool] = ..., method: _Optional[str] = ..., data: _Optional[bytes] = ..., client_address: _Optional[str] = ..., client_certificate: _Optional[bytes] = ..., original_principal: _Optional[str] = ..., through_proxy: _Optional[bool] = ..., over: _Optional[bool] = ..., original_token: _Optional[bytes] = ..., http: _Optional[bool] = ...) -> None: ...

class AuthenticateResponse(_message.Message):
    __slots__ = ("challenge", "authenticated", "denied")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    AUTHENTICATED_FIELD_NUMBER: _ClassVar[int]
    DENIED_FIELD_NUMBER: _ClassVar[int]
    challenge: bytes
    authenticated: Authenticated
    denied: Denied
    def __init__(self, challenge: _Optional[bytes] = ..., authenticated: _Optional[_Union[Authenticated, _Mapping]] = ..., denied: _Optional[_Union[Denied, _Mapping]] = ...) -> None: ...

class Authenticated(_message.Message):
    __slots__ = ("principal", "sealed_principal", "credentials")
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    SEALED_PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    principal: Principal
    sealed_principal: bytes
    credentials: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, principal: _Optional[_Union[Principal, _Mapping]] = ..., sealed_principal: _Optional[bytes] = ..., credentials: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Denied(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class BrokerCredentialsRequest(_message.Message):
    __slots__ = ("exchange_id", "broker_host", "challenge")
    EXCHANGE_ID_FIELD_NUMBER: _ClassVar[int]
    BROKER_HOST_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    exchange_id: int
    broker_host: str
    challenge: bytes
    def __init__(self, exchange_id: _Optional[int] = ..., broker_host: _Optional[str] = ..., challenge: _Optional[bytes] = ...) -> None: ...

class BrokerCredentialsResponse(_message.Message):
    __slots__ = ("method", "data", "incomplete", "expires_at_unix_ms")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    method: str
    data: bytes
    incomplete: bool
    expires_at_unix_ms: int
    def __init__(self, method: _Optional[str] = ..., data: _Optional[bytes] = ..., incomplete: _Optional[bool] = ..., expires_at_unix_ms: _Optional[int] = ...) -> None: ...

class EnvelopeRequest(_message.Message):
    __slots__ = ("requests", "principal_type", "principal_name", "sealed_principal", "client_address", "original_auth_method", "original_auth_data", "version", "proxies")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_TYPE_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_NAME_FIELD_NUMBER: _ClassVar[int]
    SEALED_PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_AUTH_METHOD_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_AUTH_DATA_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROXIES_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedScalarFieldContainer[bytes]
    principal_type: str
    principal_name: str
    sealed_principal: bytes
    client_address: str
    original_auth_method: str
    original_auth_data: str
    version: int
    proxies: int
    def __init__(self, requests: _Optional[_Iterable[bytes]] = ..., principal_type: _Optional[str] = ..., principal_name: _Optional[str] = ..., sealed_principal: _Optional[bytes] = ..., client_address: _Optional[str] = ..., original_auth_method: _Optional[str] = ..., original_auth_data: _Optional[str] = ..., version: _Optional[int] = ..., proxies: _Optional[int] = ...) -> None: ...

class EnvelopeResponse(_message.Message):
    __slots__ = ("error", "error_message", "frames", "answered", "refused")
    class Error(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[EnvelopeResponse.Error]
        CLUSTER_AUTHORIZATION_FAILED: _ClassVar[EnvelopeResponse.Error]
        UNSUPPORTED_VERSION: _ClassVar[EnvelopeResponse.Error]
        INVALID_REQUEST: _ClassVar[EnvelopeResponse.Error]
        PRINCIPAL_DESERIALIZATION_FAILURE: _ClassVar[EnvelopeResponse.Error]
    NONE: EnvelopeResponse.Error
    CLUSTER_AUTHORIZATION_FAILED: EnvelopeResponse.Error
    UNSUPPORTED_VERSION: EnvelopeResponse.Error
    INVALID_REQUEST: EnvelopeResponse.Error
    PRINCIPAL_DESERIALIZATION_FAILURE: EnvelopeResponse.Error
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    error: EnvelopeResponse.Error
    error_message: str
    frames: bytes
    answered: _containers.RepeatedScalarFieldContainer[int]
    refused: _containers.RepeatedCompositeFieldContainer[RefusedRequest]
    def __init__(self, error: _Optional[_Union[EnvelopeResponse.Error, str]] = ..., error_message: _Optional[str] = ..., frames: _Optional[bytes] = ..., answered: _Optional[_Iterable[int]] = ..., refused: _Optional[_Iterable[_Union[RefusedRequest, _Mapping]]] = ...) -> None: ...

class RefusedRequest(_message.Message):
    __slots__ = ("index", "error", "error_message")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    index: int
    error: EnvelopeResponse.Error
    error_message: str
    def __init__(self, index: _Optional[int] = ..., error: _Optional[_Union[EnvelopeResponse.Error, str]] = ..., error_message: _Optional[str] = ...) -> None: ...

class ResolveTargetRequest(_message.Message):
    __slots__ = ("target", "client_address", "principal_name", "sealed_principal", "server_name", "any_broker", "upstream", "tls")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_NAME_FIELD_NUMBER: _ClassVar[int]
    SEALED_PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    SERVER_NAME_FIELD_NUMBER: _ClassVar[int]
    ANY_BROKER_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    target: str
    client_address: str
    principal_name: str
    sealed_principal: bytes
    server_name: bool
    any_broker: bool
    upstream: str
    tls: bool
    def __init__(self, target: _Optional[str] = ..., client_address: _Optional[str] = ..., principal_name: _Optional[str] = ..., sealed_principal: _Optional[bytes] = ..., server_name: _Optional[bool] = ..., any_broker: _Optional[bool] = ..., upstream: _Optional[str] = ..., tls: _Optional[bool] = ...) -> None: ...

class ResolveTargetResponse(_message.Message):
    __slots__ = ("host", "port", "addresses", "denial", "detail", "others", "original_data")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    DENIAL_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_DATA_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    denial: str
    detail: str
    others: _containers.RepeatedCompositeFieldContainer[OtherBroker]
    original_data: OriginalData
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., denial: _Optional[str] = ..., detail: _Optional[str] = ..., others: _Optional[_Iterable[_Union[OtherBroker, _Mapping]]] = ..., original_data: _Optional[_Union[OriginalData, str]] = ...) -> None: ...

class OtherBroker(_message.Message):
    __slots__ = ("host", "port", "addresses", "original_data")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_DATA_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    original_data: OriginalData
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., original_data: _Optional[_Union[OriginalData, str]] = ...) -> None: ...

class BrokerProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BrokerProfileResponse(_message.Message):
    __slots__ = ("connected",)
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    connected: bytes
    def __init__(self, connected: _Optional[bytes] = ...) -> None: ...

class ReportOutlierRequest(_message.Message):
    __slots__ = ("addresses", "port", "owners", "owners_failing", "last_error", "window_ms")
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FAILING_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    WINDOW_MS_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    port: int
    owners: int
    owners_failing: int
    last_error: str
    window_ms: int
    def __init__(self, addresses: _Optional[_Iterable[str]] = ..., port: _Optional[int] = ..., owners: _Optional[int] = ..., owners_failing: _Optional[int] = ..., last_error: _Optional[str] = ..., window_ms: _Optional[int] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("pid", "role")
    PID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    pid: int
    role: str
    def __init__(self, pid: _Optional[int] = ..., role: _Optional[str] = ...) -> None: ...

class StartRequest(_message.Message):
    __slots__ = ("config", "seal_key", "peers", "index", "relays_outlive_supervisor")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    SEAL_KEY_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RELAYS_OUTLIVE_SUPERVISOR_FIELD_NUMBER: _ClassVar[int]
    config: bytes
    seal_key: bytes
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    index: int
    relays_outlive_supervisor: bool
    def __init__(self, config: _Optional[bytes] = ..., seal_key: _Optional[bytes] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., index: _Optional[int] = ..., relays_outlive_supervisor: _Optional[bool] = ...) -> None: ...

class SetPeersRequest(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class ConfigureRequest(_message.Message):
    __slots__ = ("config",)
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    config: bytes
    def __init__(self, config: _Optional[bytes] = ...) -> None: ...

class TakeOverFilesRequest(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[FileStamp]
    def __init__(self, files: _Optional[_Iterable[_Union[FileStamp, _Mapping]]] = ...) -> None: ...

class FileStamp(_message.Message):
    __slots__ = ("path", "stamp")
    PATH_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    path: str
    stamp: str
    def __init__(self, path: _Optional[str] = ..., stamp: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_ms", "hand_over")
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    hand_over: bool
    def __init__(self, timeout_ms: _Optional[int] = ..., hand_over: _Optional[bool] = ...) -> None: ...

class Text(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReloadRequest(_message.Message):
    __slots__ = ("force",)
    FORCE_FIELD_NUMBER: _ClassVar[int]
    force: bool
    def __init__(self, force: _Optional[bool] = ...) -> None: ...

class LogLevelRequest(_message.Message):
    __slots__ = ("level", "for_ms", "role")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    FOR_MS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    level: str
    for_ms: int
    role: str
    def __init__(self, level: _Optional[str] = ..., for_ms: _Optional[int] = ..., role: _Optional[str] = ...) -> None: ...

class UnreadyRequest(_message.Message):
    __slots__ = ("unready", "reason")
    UNREADY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    unready: bool
    reason: str
    def __init__(self, unready: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class ConnectionFilter(_message.Message):
    __slots__ = ("principal", "network", "broker", "kinds")
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    BROKER_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    principal: str
    network: str
    broker: str
    kinds: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, principal: _Optional[str] = ..., network: _Optional[str] = ..., broker: _Optional[str] = ..., kinds: _Optional[_Iterable[str]] = ...) -> None: ...

class ConnectionsRequest(_message.Message):
    __slots__ = ("filter", "after", "started_until_unix_ms", "pid")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNTIL_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    filter: ConnectionFilter
    after: int
    started_until_unix_ms: int
    pid: int
    def __init__(self, filter: _Optional[_Union[ConnectionFilter, _Mapping]] = ..., after: _Optional[int] = ..., started_until_unix_ms: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class Connection(_message.Message):
    __slots__ = ("client_address", "principal", "method", "proxy", "broker", "started_at_unix_ms", "bytes_to_broker", "bytes_to_client", "ends_at_unix_ms", "kind")
    CLIENT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PROXY_FIELD_NUMBER: _ClassVar[int]
    BROKER_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    BYTES_TO_BROKER_FIELD_NUMBER: _ClassVar[int]
    BYTES_TO_CLIENT_FIELD_NUMBER: _ClassVar[int]
    ENDS_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    client_address: str
    principal: str
    method: str
    proxy: str
    broker: str
    started_at_unix_ms: int
    bytes_to_broker: int
    bytes_to_client: int
    ends_at_unix_ms: int
    kind: str
    def __init__(self, client_address: _Optional[str] = ..., principal: _Optional[str] = ..., method: _Optional[str] = ..., proxy: _Optional[str] = ..., broker: _Optional[str] = ..., started_at_unix_ms: _Optional[int] = ..., bytes_to_broker: _Optional[int] = ..., bytes_to_client: _Optional[int] = ..., ends_at_unix_ms: _Optional[int] = ..., kind: _Optional[str] = ...) -> None: ...

class ConnectionsPage(_message.Message):
    __slots__ = ("connections", "next", "forwarders")
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    FORWARDERS_FIELD_NUMBER: _ClassVar[int]
    connections: _containers.RepeatedCompositeFieldContainer[Connection]
    next: int
    forwarders: _containers.RepeatedCompositeFieldContainer[ForwarderProcess]
    def __init__(self, connections: _Optional[_Iterable[_Union[Connection, _Mapping]]] = ..., next: _Optional[int] = ..., forwarders: _Optional[_Iterable[_Union[ForwarderProcess, _Mapping]]] = ...) -> None: ...

class ForwarderProcess(_message.Message):
    __slots__ = ("pid", "index")
    PID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    pid: int
    index: int
    def __init__(self, pid: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class ConnectionSums(_message.Message):
    __slots__ = ("principals", "interval_ms")
    PRINCIPALS_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    principals: _containers.RepeatedCompositeFieldContainer[PrincipalSum]
    interval_ms: int
    def __init__(self, principals: _Optional[_Iterable[_Union[PrincipalSum, _Mapping]]] = ..., interval_ms: _Optional[int] = ...) -> None: ...

class PrincipalSum(_message.Message):
    __slots__ = ("principal", "connections", "bytes_per_s_to_broker", "bytes_per_s_to_client")
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_TO_BROKER_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_TO_CLIENT_FIELD_NUMBER: _ClassVar[int]
    principal: str
    connections: int
    bytes_per_s_to_broker: int
    bytes_per_s_to_client: int
    def __init__(self, principal: _Optional[str] = ..., connections: _Optional[int] = ..., bytes_per_s_to_broker: _Optional[int] = ..., bytes_per_s_to_client: _Optional[int] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("role", "index", "leaving_pid")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LEAVING_PID_FIELD_NUMBER: _ClassVar[int]
    role: str
    index: int
    leaving_pid: int
    def __init__(self, role: _Optional[str] = ..., index: _Optional[int] = ..., leaving_pid: _Optional[int] = ...) -> None: ...

class Places(_message.Message):
    __slots__ = ("places",)
    PLACES_FIELD_NUMBER: _ClassVar[int]
    places: _containers.RepeatedCompositeFieldContainer[Place]
    def __init__(self, places: _Optional[_Iterable[_Union[Place, _Mapping]]] = ...) -> None: ...

class Reasons(_message.Message):
    __slots__ = ("reasons", "notes")
    REASONS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    reasons: _containers.RepeatedScalarFieldContainer[str]
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, reasons: _Optional[_Iterable[str]] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class StoreMessage(_message.Message):
    __slots__ = ("dropped_relays", "dropped_pipes", "table", "relays", "pipes", "complete", "listeners", "address_tables", "left_behind", "predecessor_pid", "ended_predecessor_pids")
    DROPPED_RELAYS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_PIPES_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    PIPES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    LISTENERS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_TABLES_FIELD_NUMBER: _ClassVar[int]
    LEFT_BEHIND_FIELD_NUMBER: _ClassVar[int]
    PREDECESSOR_PID_FIELD_NUMBER: _ClassVar[int]
    ENDED_PREDECESSOR_PIDS_FIELD_NUMBER: _ClassVar[int]
    dropped_relays: _containers.RepeatedScalarFieldContainer[int]
    dropped_pipes: _containers.RepeatedScalarFieldContainer[int]
    table: bool
    relays: _containers.RepeatedCompositeFieldContainer[StoredRelay]
    pipes: _containers.RepeatedCompositeFieldContainer[StoredPipe]
    complete: bool
    listeners: int
    address_tables: _containers.RepeatedScalarFieldContainer[int]
    left_behind: _containers.RepeatedCompositeFieldContainer[RelayLeftBehind]
    predecessor_pid: int
    ended_predecessor_pids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dropped_relays: _Optional[_Iterable[int]] = ..., dropped_pipes: _Optional[_Iterable[int]] = ..., table: _Optional[bool] = ..., relays: _Optional[_Iterable[_Union[StoredRelay, _Mapping]]] = ..., pipes: _Optional[_Iterable[_Union[StoredPipe, _Mapping]]] = ..., complete: _Optional[bool] = ..., listeners: _Optional[int] = ..., address_tables: _Optional[_Iterable[int]] = ..., left_behind: _Optional[_Iterable[_Union[RelayLeftBehind, _Mapping]]] = ..., predecessor_pid: _Optional[int] = ..., ended_predecessor_pids: _Optional[_Iterable[int]] = ...) -> None: ...

class RelayLeftBehind(_message.Message):
    __slots__ = ("id", "client_ip")
    ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_IP_FIELD_NUMBER: _ClassVar[int]
    id: int
    client_ip: str
    def __init__(self, id: _Optional[int] = ..., client_ip: _Optional[str] = ...) -> None: ...

class StoredRelay(_message.Message):
    __slots__ = ("id", "client_address", "principal", "target", "started_at_unix_ms", "expires_at_unix_ms", "proxy", "session", "credentials", "leave_at_ms", "client_kernel_tls", "broker_kernel_tls", "passed", "method", "listener")
    ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PROXY_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    LEAVE_AT_MS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_KERNEL_TLS_FIELD_NUMBER: _ClassVar[int]
    BROKER_KERNEL_TLS_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    LISTENER_FIELD_NUMBER: _ClassVar[int]
    id: int
    client_address: str
    principal: str
    target: str
    started_at_unix_ms: int
    expires_at_unix_ms: int
    proxy: str
    session: StoredSession
    credentials: _containers.RepeatedScalarFieldContainer[bytes]
    leave_at_ms: int
    client_kernel_tls: bool
    broker_kernel_tls: bool
    passed: bool
    method: str
    listener: str
    def __init__(self, id: _Optional[int] = ..., client_address: _Optional[str] = ..., principal: _Optional[str] = ..., target: _Optional[str] = ..., started_at_unix_ms: _Optional[int] = ..., expires_at_unix_ms: _Optional[int] = ..., proxy: _Optional[str] = ..., session: _Optional[_Union[StoredSession, _Mapping]] = ..., credentials: _Optional[_Iterable[bytes]] = ..., leave_at_ms: _Optional[int] = ..., client_kernel_tls: _Optional[bool] = ..., broker_kernel_tls: _Optional[bool] = ..., passed: _Optional[bool] = ..., method: _Optional[str] = ..., listener: _Optional[str] = ...) -> None: ...

class RelayRequest(_message.Message):
    __slots__ = ("client_address", "principal", "proxy", "credentials", "target", "expires_at_unix_ms", "first_to_client", "first_to_broker")
    CLIENT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    PROXY_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TO_CLIENT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TO_BROKER_FIELD_NUMBER: _ClassVar[int]
    client_address: str
    principal: str
    proxy: str
    credentials: _containers.RepeatedScalarFieldContainer[bytes]
    target: str
    expires_at_unix_ms: int
    first_to_client: bytes
    first_to_broker: bytes
    def __init__(self, client_address: _Optional[str] = ..., principal: _Optional[str] = ..., proxy: _Optional[str] = ..., credentials: _Optional[_Iterable[bytes]] = ..., target: _Optional[str] = ..., expires_at_unix_ms: _Optional[int] = ..., first_to_client: _Optional[bytes] = ..., first_to_broker: _Optional[bytes] = ...) -> None: ...

class StoredSession(_message.Message):
    __slots__ = ("principal", "expires", "lifetime_ms_max", "challenge", "spares_producers", "frame_bytes_max", "answer_bytes_max", "counts_messages", "failure_delay_ms", "context", "grace_ms", "broker_host", "listener_bind", "passes_answers")
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_MS_MAX_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    SPARES_PRODUCERS_FIELD_NUMBER: _ClassVar[int]
    FRAME_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    ANSWER_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    COUNTS_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    BROKER_HOST_FIELD_NUMBER: _ClassVar[int]
    LISTENER_BIND_FIELD_NUMBER: _ClassVar[int]
    PASSES_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    principal: Principal
    expires: bool
    lifetime_ms_max: int
    challenge: bytes
    spares_producers: bool
    frame_bytes_max: int
    answer_bytes_max: int
    counts_messages: bool
    failure_delay_ms: int
    context: bytes
    grace_ms: int
    broker_host: str
    listener_bind: str
    passes_answers: bool
    def __init__(self, principal: _Optional[_Union[Principal, _Mapping]] = ..., expires: _Optional[bool] = ..., lifetime_ms_max: _Optional[int] = ..., challenge: _Optional[bytes] = ..., spares_producers: _Optional[bool] = ..., frame_bytes_max: _Optional[int] = ..., answer_bytes_max: _Optional[int] = ..., counts_messages: _Optional[bool] = ..., failure_delay_ms: _Optional[int] = ..., context: _Optional[bytes] = ..., grace_ms: _Optional[int] = ..., broker_host: _Optional[str] = ..., listener_bind: _Optional[str] = ..., passes_answers: _Optional[bool] = ...) -> None: ...

class StoredClient(_message.Message):
    __slots__ = ("connect", "certificate")
    CONNECT_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    connect: bytes
    certificate: bytes
    def __init__(self, connect: _Optional[bytes] = ..., certificate: _Optional[bytes] = ...) -> None: ...

class StoredPipe(_message.Message):
    __slots__ = ("id", "wanted_bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    WANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    id: int
    wanted_bytes: int
    def __init__(self, id: _Optional[int] = ..., wanted_bytes: _Optional[int] = ...) -> None: ...
