"""The analytics' errors. ConfigError, which the proxy raises too, is in proxy.common.errors.

AnalyticsError: BadOption, BadPrices, BadSpan, CannotReopen, DecodeError, HistogramError, Incompatible,
    LockTimeoutError, LostSegments, NotCommittedError, QueryFailed, SpoolError, TablesError, TooManyHours,
    UnsupportedError
DecodeError: BoundError, TooLargeError
SpoolError: SpoolFullError
TablesError: BilledTwice, ChangedMeanwhile, NoTables, OtherFormat
"""


class AnalyticsError(Exception):
    """Root of the analytics' errors."""
