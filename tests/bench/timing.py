"""Whether the time to an AuthenticationError tells if a user exists: an unknown user against a wrong password.

Without `failure_delay_ms`, which would cover it. The kinds take turns in random order, so what disturbs the machine
disturbs all of them. The noise is what the difference of medians is when it is chance who belongs to which kind.
"""

import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from local.console import print_status
from passlib.hash import bcrypt

from auth.providers.scram import credential_line
from proto.pulsar_pb2 import BaseCommand
from tests.e2e.lab.cluster import ProxyCluster
from tests.e2e.lab.scram import MECHANISMS, ScramDialogue
from tests.e2e.lab.wire import WireClient

SAMPLES = 400
SHUFFLES = 1000
USERS = 20
PASSWORD = "the right password"
WRONG = "a wrong one"
HTPASSWD_COST = 5  # what `htpasswd -B` takes by itself

Measure = Callable[[int, str], float]
"""Port and user to microseconds."""


@dataclass(frozen=True)
class Comparison:
    """Two kinds of samples, in microseconds."""

    first: Sequence[float]
    second: Sequence[float]

    @property
    def difference(self) -> float:
        """Of the medians, second less first."""
        return statistics.median(self.second) - statistics.median(self.first)

    def noise(self) -> float:
        """What 95 of 100 differences stay below if the kinds are the same."""
        chance = random.Random(1)
        both, found = [*self.first, *self.second], []
        for _ in range(SHUFFLES):
            chance.shuffle(both)
            halves = Comparison(both[: len(self.first)], both[len(self.first) :])
            found.append(abs(halves.difference))
        return sorted(found)[int(0.95 * SHUFFLES)]

    def z(self) -> float:
        """Mann and Whitney's U in standard deviations: beyond 2 or so, one kind is slower."""
        ranks = {value: rank for rank, value in enumerate(sorted([*self.first, *self.second]), 1)}
        n, m = len(self.first), len(self.second)
        u = sum(ranks[value] for value in self.second) - m * (m + 1) / 2
        return (u - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)

    def __str__(self) -> str:
        medians = " and ".join(f"{statistics.median(kind):,.0f} µs" for kind in (self.first, self.second))
        noise = self.noise()
        verdict = "not told apart" if abs(self.difference) <= noise else "TOLD APART"
        return f"{medians}: {self.difference:+.0f} µs, noise {noise:.0f} µs, z {self.z():+.1f}: {verdict}"


def basic(port: int, user: str) -> float:
    """CONNECT to the error."""
    with WireClient(port) as client:
        return _timed(
            client, lambda: client.send_connect(auth_method_name="basic", auth_data=f"{user}:{WRONG}".encode())
        )


def scram(mechanism: str) -> tuple[Measure, Measure]:
    """CONNECT to the challenge; the proof to the error."""

    def first(port: int, user: str) -> float:
        with WireClient(port) as client:
            dialogue = ScramDialogue(client, user, WRONG, mechanism)
            return _timed(client, dialogue.connect, BaseCommand.AUTH_CHALLENGE)

    def final(port: int, user: str) -> float:
        with WireClient(port) as client:
            dialogue = ScramDialogue(client, user, WRONG, mechanism)
            proof = dialogue.begin()
            return _timed(client, lambda: dialogue.respond(proof))

    return first, final


def _timed(client: WireClient, send: Callable[[], None], expected: int = BaseCommand.ERROR) -> float:
    started_at = time.perf_counter()
    send()
    answer = client.receive()
    took_s = time.perf_counter() - started_at
    assert answer.type == expected, answer
    return took_s * 1e6


def compare(port: int, measure: Measure, first: Callable[[], str], second: Callable[[], str]) -> Comparison:
    """Samples of both kinds, taking turns in random order; the first ones of each do not count."""
    kinds: tuple[list[float], list[float]] = ([], [])
    for _ in range(SAMPLES + 20):
        turns = [(kinds[0], first), (kinds[1], second)]
        random.shuffle(turns)
        for samples, user in turns:
            samples.append(measure(port, user()))
    return Comparison(kinds[0][20:], kinds[1][20:])


def run() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="timing-") as name:
        cluster = ProxyCluster(_tables(Path(name)))
        try:
            cluster.start(ready=False)  # there is no broker, and no client gets as far as one
            _compare_all(cluster.port)
        finally:
            cluster.stop()


def _compare_all(port: int) -> None:
    names = _names()

    def exists() -> str:
        return random.choice(names[::2])

    def does_not() -> str:
        return random.choice(names[1::2])

    measures: dict[str, Measure] = {"basic": basic}
    for mechanism in MECHANISMS:
        first, final = scram(mechanism)
        measures |= {f"{mechanism}, challenge": first, f"{mechanism}, error": final}
    print_status.line(f"A user who exists against one who does not, {SAMPLES} each, none with the right password:")
    for what, measure in measures.items():
        print_status(f"Measuring {what}")
        print_status.line(f"{what}: {compare(port, measure, exists, does_not)}")
    # What is refused before anything is hashed: so unknown users would look without stand-ins.
    print_status.line(f"basic without a check of the password, as a control: {compare(port, basic, exists, str)}")


def _names() -> list[str]:
    """Every other one exists: letters differ in what SASLprep takes for them, so names of users must not."""
    return [f"user-{number}" for number in range(10, 10 + 2 * USERS)]


def _tables(directory: Path) -> dict[str, dict[str, object]]:
    users = _names()[::2]
    hashes = bcrypt.using(rounds=HTPASSWD_COST)
    (directory / "basic").write_text("".join(f"{user}:{hashes.hash(PASSWORD)}\n" for user in users))
    lines = [credential_line(user, PASSWORD, mechanism) for user in users for mechanism in MECHANISMS]
    (directory / "scram").write_text("\n".join(lines))
    return {
        "cluster": {"forwarders": 1},
        "authentication": {"enabled": True, "failure_delay_ms": 0},
        "authentication.basic": {"file": str(directory / "basic")},
        "authentication.scram": {"file": str(directory / "scram")},
    }
