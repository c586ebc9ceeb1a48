"""The two kinds of protocol error, the peer's and our own, as different types (as in h11)."""


class RemoteProtocolError(Exception):
    """The peer violated the protocol. The text is fit for a log and for the peer."""


class LocalProtocolError(Exception):
    """The proxy would have violated the protocol: an internal error."""
