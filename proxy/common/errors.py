"""The proxy's errors.

ProxyError: AncestryUnknown, BrokerLinkFailed, ChannelLost, ClientLeft, ClientSlow, ConfigError, DialFailed,
    FilterInvalid, FilterRefused, ForkFailed, ForwarderLost, KernelTlsBroken, KernelTlsNotPossible, LogLevelRefused,
    MessageCut, MessageMalformed, MessageTooLong, MetricsTooLarge, NoMoreConnections, NotSupervisor,
    PassedConnectionInvalid, RelayStartFailed, ReloadRefused, ResolutionFailed, ResponseCut, RpcError, RpcRefused,
    StartFailed, StoppedBySecondSignal, StoreLost, TargetDenied, TargetRefused, TlsFailed, TrialNotRun,
    UpgradeRefused, WriterFull, WrongListener
PassedConnectionInvalid: PassedConnectionGone
RelayStartFailed: RelayMustWait
RpcError: RpcCallRefused, RpcConnectionLost, RpcDeadlineExceeded, RpcResponseCorrupt
"""


class ProxyError(Exception):
    """Root of the proxy's errors."""


class ConfigError(ProxyError):
    """A configuration that cannot be used; its text names the key and says what is wrong with it."""
