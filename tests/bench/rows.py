"""What is measured."""

from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30
MICRO = 1e6

Metric = Literal["cost", "rate"]
Key = Literal["RSA", "ECDSA"]


@dataclass(frozen=True)
class Target:
    """What the ratio ours/Java of a metric must and should be."""

    metric: Metric
    must: float
    should: float | None = None

    def __str__(self) -> str:
        sign = "≤" if self.metric == "cost" else "≥"
        return f"{sign} {self.must:g}" + (f", aim {self.should:g}" if self.should is not None else "")

    def verdict(self, ratio: float) -> str:
        """How a ratio stands to it."""
        if self.should is not None and self._holds(ratio, self.should):
            return "aim met"
        return "met" if self._holds(ratio, self.must) else "missed"

    def _holds(self, ratio: float, limit: float) -> bool:
        return ratio <= limit if self.metric == "cost" else ratio >= limit


@dataclass(frozen=True)
class Tls:
    """The sides of a relay that are in TLS 1.3: that of clients, with a proxy's certificate of this kind; brokers'."""

    client: Key | None = None
    broker: bool = False

    def __str__(self) -> str:
        sides = (["clients"] if self.client else []) + (["broker"] if self.broker else [])
        return f"TLS to {' and '.join(sides)}"


@dataclass(frozen=True)
class Row:
    """One kind of load.

    ``under_way``: requests under way on each connection for lookups; ``frame_bytes``: of a bulk transfer, or of the
    body of an HTTP message; ``framed``: measures the cost of tracking frame boundaries, compared with not tracking:
    its targets are of that ratio; ``resumed``: clients come back with a ticket of TLS; ``token``: HTTP clients
    authenticate themselves.
    """

    name: str
    title: str
    program: str
    connections: int
    targets: tuple[Target, ...] = ()
    under_way: int = 1
    frame_bytes: int = 256 << 10
    framed: bool = False
    tls: Tls = Tls()
    resumed: bool = False
    token: bool = False

    @property
    def title_with_sides(self) -> str:
        """The title behind the sides that have TLS, if any."""
        return f"{self.tls}: {self.title}" if self.tls.client or self.tls.broker else self.title

    @property
    def in_bytes(self) -> bool:
        """Whether it counts GiB; otherwise operations."""
        return self.program in {"bulk", "bulk-down", "http-down", "http-up"}

    @property
    def is_single(self) -> bool:
        """Whether a measurement is one event, which ends by itself, instead of a window of time."""
        return self.program == "reconnect"

    @property
    def has_latency(self) -> bool:
        """Whether the load waits for each operation by itself."""
        return self.program == "echo" and not self.framed

    @property
    def handshake(self) -> str:
        """What the load does of TLS, in the generator's words."""
        return "" if self.tls.client is None else "resumed" if self.resumed else "full"

    def target(self, metric: Metric) -> Target | None:
        """The target for a metric."""
        return next((target for target in self.targets if target.metric == metric), None)


ROWS = (
    Row("echo1", "echo of 100 B, 1 connection", "echo", 1, (Target("cost", 1.2, 1.0),)),
    Row("echo32", "echo of 100 B, 32 connections", "echo", 32, (Target("cost", 1.0, 0.7),)),
    Row("echo500", "echo of 100 B, 500 connections", "echo", 500, (Target("cost", 1.0, 0.7),)),
    Row("bulk1", "bulk, 1 connection", "bulk", 1, (Target("cost", 0.6), Target("rate", 1.2, 1.4))),
    Row("bulk16", "bulk, 16 connections", "bulk", 16, (Target("cost", 0.6), Target("rate", 1.2, 1.4))),
    Row("connect", "connect, 16 at once", "connect", 16),
    Row("reconnect", "reconnect, 5,000 at once", "reconnect", 5000),
    Row("lookup1", "lookup, 1 connection, 1 under way", "lookup", 1),
    Row("lookup", "lookup, 1 connection, 64 under way", "lookup", 1, under_way=64),
    Row("storm", "lookup, 32 connections, 500 under way on each", "lookup", 32, (Target("cost", 3.0, 1.0),), 500),
    Row("fresh", "connect and 10 lookups, 16 at once (a lookup)", "fresh", 16, (Target("cost", 1.0),)),
)

_ECHO, _LARGE, _SMALL = (Target("cost", most) for most in (1.5, 1.5, 2.2))
FRAMED_ROWS = (
    Row("follow-echo1", "echo of 100 B, 1 connection", "echo", 1, (_ECHO,), framed=True),
    Row("follow-echo32", "echo of 100 B, 32 connections", "echo", 32, (_ECHO,), framed=True),
    Row("follow-1k", "bulk in frames of 1 kB, 4 connections", "bulk", 4, (_SMALL,), 1, 1_000, framed=True),
    Row("follow-10k", "bulk in frames of 10 kB, 4 connections", "bulk", 4, (_LARGE,), 1, 10_000, framed=True),
    Row("follow-100k", "bulk in frames of 100 kB, 4 connections", "bulk", 4, (_LARGE,), 1, 100_000, framed=True),
    Row("follow-1m", "bulk in frames of 1 MB, 4 connections", "bulk", 4, (_LARGE,), 1, 1_000_000, framed=True),
)

_CLIENT, _ECDSA, _BROKER, _BOTH = Tls("RSA"), Tls("ECDSA"), Tls(broker=True), Tls("RSA", broker=True)
TLS_ROWS = (
    Row("tls-echo1", "echo of 100 B, 1 connection", "echo", 1, tls=_CLIENT),
    Row("tls-echo32", "echo of 100 B, 32 connections", "echo", 32, tls=_CLIENT),
    Row("tls-echo500", "echo of 100 B, 500 connections", "echo", 500, tls=_CLIENT),
    Row("tls-up1", "bulk to the broker, 1 connection", "bulk", 1, tls=_CLIENT),
    Row("tls-up16", "bulk to the broker, 16 connections", "bulk", 16, tls=_CLIENT),
    Row("tls-down1", "bulk from the broker, 1 connection", "bulk-down", 1, tls=_CLIENT),
    Row("tls-down16", "bulk from the broker, 16 connections", "bulk-down", 16, tls=_CLIENT),
    Row("tls-connect-rsa", "connect, 16 at once, RSA", "connect", 16, tls=_CLIENT),
    Row("tls-resume-rsa", "connect, 16 at once, RSA, resumed", "connect", 16, tls=_CLIENT, resumed=True),
    Row("tls-connect-ecdsa", "connect, 16 at once, ECDSA", "connect", 16, tls=_ECDSA),
    Row("tls-resume-ecdsa", "connect, 16 at once, ECDSA, resumed", "connect", 16, tls=_ECDSA, resumed=True),
    Row("tls-broker-echo32", "echo of 100 B, 32 connections", "echo", 32, tls=_BROKER),
    Row("tls-broker-up1", "bulk to the broker, 1 connection", "bulk", 1, tls=_BROKER),
    Row("tls-broker-connect", "connect, 16 at once", "connect", 16, tls=_BROKER),
    Row("tls-both-echo32", "echo of 100 B, 32 connections", "echo", 32, tls=_BOTH),
    Row("tls-both-up1", "bulk to the broker, 1 connection", "bulk", 1, tls=_BOTH),
)
TLS_WINDOW_MAX_S = 0.6
TLS_WARM_UPS = {"echo": 0.5, "bulk": 0.5, "bulk-down": 0.5, "connect": 1.5}
"""Of a contender's usual time. The JIT needs longest for handshakes: the cost of one falls to a tenth meanwhile."""

_GET, _BODY = (Target("cost", 2.0),), (Target("cost", 1.2),)
HTTP_ROWS = (
    Row("http-get", "GET of 300 B, 32 connections", "http-get", 32, _GET, frame_bytes=300),
    Row("http-down", "body of 1 GiB from the broker", "http-down", 1, _BODY, frame_bytes=GIB),
    Row("http-up", "body of 1 GiB to the broker", "http-up", 1, _BODY, frame_bytes=GIB),
    Row("http-token", "GET of 300 B, 32 connections, with a token", "http-get", 32, frame_bytes=300, token=True),
)
HTTP_WARM_UP_BYTES = {"http-get": 300, "http-down": 64 << 20, "http-up": 64 << 20}

IDLE = "idle"
IDLE_RELAYS = 2000
IDLE_BYTES_MAX = 8 * 1024

SHARED = "shared"
SHARED_CLIENTS = 1000
