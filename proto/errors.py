"""Errors of the wire: the peer's violations of the protocol and our own are different types (as in h11).

ProtoError: AddressInvalid, EnvelopeRefused, LocalProtocolError, RemoteProtocolError, RequestRefused, SealBroken
RemoteProtocolError: ChallengeOutOfTurn, CommandCorrupt, FrameCorrupt, FrameInvalid, FrameTooLarge,
    ProxyHeaderInvalid, RpcCorrupt
AddressInvalid: PortMissing
FrameInvalid: CommandHeadInvalid, FrameSizeInvalid
"""


class ProtoError(Exception):
    """Root of the errors of the wire."""


class RemoteProtocolError(ProtoError):
    """The peer violated the protocol. The text is fit for a log and for the peer."""


class LocalProtocolError(ProtoError):
    """The proxy would have violated the protocol: an internal error."""
