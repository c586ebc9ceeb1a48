"""The proxy's errors.

ProxyError: AncestryUnknown, BrokerLinkFailed, ChannelLost, ConfigError, DialFailed, ForkFailed, MessageTooLong,
    MetricsTooLarge, NoMoreConnections, NotSupervisor, ReloadRefused, ResolutionFailed, RpcError, RpcRefused,
    StartFailed, StoppedBySecondSignal, StoreLost, TargetDenied, TlsFailed, TrialNotRun, UpgradeRefused, WriterFull,
    WrongListener
RpcError: RpcCallRefused, RpcConnectionLost, RpcDeadlineExceeded, RpcResponseCorrupt
"""


class ProxyError(Exception):
    """Root of the proxy's errors."""


class ConfigError(ProxyError):
    """A configuration that cannot be used; its text names the key and says what is wrong with it."""
