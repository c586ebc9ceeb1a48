"""Directory of the brokers of ``brokers.service_url``: round robin over healthy ones, with outlier ejection.

A broker is ejected once it failed ``ejection_failures`` times with no answer in between, or did not answer a probe. It
returns when its time is over, or when a probe shows that it answers; unless it failed in a way that a probe (a PING
before any handshake) cannot see. The first failure then ejects it again, for twice as long, until it answers a lookup.
Ejected brokers are asked last; where all are ejected, it is as if none was: to ask a broker that may be down is better
than to ask none. Outliers, to which relays fail, are ejected by lookup.brokers.outliers.
"""

import math
import random
from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakSet

import trio

from lookup.brokers.credential_checks import CredentialChecks, LogIn
from lookup.brokers.discovery import BrokerDiscovery, CredentialVerdict, Endpoint
from lookup.brokers.names import BrokerNames
from lookup.brokers.original_data import CHECKED, IGNORED, UNKNOWN, agreed, verdict_name
from lookup.brokers.outliers import OutlierEjection, ejection_s
from lookup.brokers.port_pairs import PortPairs
from lookup.brokers.probe import probe
from lookup.metrics import BrokerMetrics
from proto.addresses import HostPort, parse_broker_url
from proto.rpc_pb2 import OriginalData
from proxy.common.logs import get_logger
from proxy.config.types import Config
from proxy.runtime.dns.resolver import Resolver
from proxy.runtime.loop.tasks import run_every, seconds
from proxy.runtime.network.dialing import Dialer

PROBES_MAX = 64
"""Probes at a time."""

_INVISIBLE_TO_PROBES = frozenset({"handshake", "timeout"})


@dataclass(frozen=True, slots=True)
class DirectoryOptions:
    """What a directory may be given beside its collaborators."""

    before: "BrokerDirectory | None" = None
    """The directory of the configuration before: what is known of brokers carries over."""
    log_in: LogIn | None = None
    """Logs in at a broker with the proxy's own credentials; None: they are not checked."""
    rng: random.Random | None = None
    """Source of the random choices by weight; None: a new one."""


class BrokerDirectory:
    """Brokers, their health, and the order in which they are asked."""

    def __init__(
        self,
        config: Config,
        dialer: Dialer,
        resolver: Resolver,
        metrics: BrokerMetrics,
        options: DirectoryOptions = DirectoryOptions(),
    ) -> None:
        before, log_in = options.before, options.log_in
        self._config = config.brokers
        self._dialer = dialer
        self._metrics = metrics
        self._rng = options.rng or random.Random()  # noqa: S311 -- to share load, not to keep a secret
        self._scope = trio.CancelScope()
        self._probe_limiter = trio.CapacityLimiter(PROBES_MAX)
        self._probing: set[Endpoint] = set()
        self._counted_causes: WeakSet[object] = WeakSet()
        self._round_robin_index = -1
        self._choices: tuple[Endpoint, ...] = ()
        self._running_sums: list[float] | None = None
        self._next_readmission_at = math.inf
        self._by_name: dict[HostPort, Endpoint] = {}
        self._url = url = parse_broker_url(self._config.service_url)
        self.names: BrokerNames = BrokerNames(url, None if before is None else before.names)
        self.port_pairs: PortPairs = PortPairs(self._config, None if before is None else before.port_pairs)
        known: BrokerDiscovery | None = None if before is None else before.discovery
        self.discovery: BrokerDiscovery = BrokerDiscovery(url, resolver, known)
        self.outliers: OutlierEjection = OutlierEjection(
            self._config, self.discovery, metrics, self._label, self._update_choices
        )
        interval_ms = self._config.login_interval_ms
        self.credential_checks: CredentialChecks | None = None
        if log_in is not None and interval_ms:
            known_logins = None if before is None else before.credential_checks
            interval_s = seconds(interval_ms)
            self.credential_checks = CredentialChecks(
                log_in, lambda: self.discovery.endpoints, interval_s, self._report_metrics, before=known_logins
            )
        self.discovery.on_change = self._update_choices
        self._update_choices()

    async def run(self) -> None:
        """Discover and probe brokers until ``stop``."""
        with self._scope:
            self._report_metrics()
            async with trio.open_nursery() as nursery:

                def look_at_new_ones() -> None:
                    self._update_choices()
                    for endpoint in self.discovery.endpoints:
                        if endpoint.health.reachable is None and endpoint not in self._probing:
                            nursery.start_soon(self._probe, endpoint)

                self.discovery.on_change = look_at_new_ones
                nursery.start_soon(self.discovery.run)
                nursery.start_soon(run_every, seconds(self._config.probe_interval_ms), self.probe_all)
                if self.credential_checks is not None:
                    nursery.start_soon(self.credential_checks.run)

    def stop(self) -> None:
        """Stop discovery and probes, and take back the metrics."""
        self._scope.cancel()
        self._metrics.forget_brokers()

    # ---- choice

    def next_broker(self) -> Endpoint | None:
        """Return the next broker in round-robin order, or by weight; None where none is known (yet)."""
        if self._next_readmission_at != math.inf and self._next_readmission_at <= trio.current_time():
            self._update_choices()
        choices = self._choices
        if not choices:
            return None
        if self._running_sums is not None:
            return choices[bisect(self._running_sums, self._rng.random() * self._running_sums[-1], hi=len(choices) - 1)]
        self._round_robin_index = turn = (self._round_robin_index + 1) % len(choices)
        return choices[turn]

    def brokers_in_order(self, first: Endpoint | None = None) -> list[Endpoint]:
        """Return all brokers in the order in which to ask them: ``first`` or the next one, and ejected ones last."""
        first = first or self.next_broker()
        others = [endpoint for endpoint in self.discovery.endpoints if endpoint is not first]
        others.sort(key=self._order_key)
        return others if first is None else [first, *others]

    def _order_key(self, endpoint: Endpoint) -> tuple[bool, int, float]:
        """Order by priority, and at random by weight within one.

        The least of exponential variables is RFC 2782's choice.
        """
        health = endpoint.health
        return health.ejected, health.priority, self._rng.expovariate(health.weight)

    def broker_named(self, name: HostPort) -> Endpoint | None:
        """Return the broker of this name, or None where there is none or more than one."""
        return self._by_name.get(name)

    def listed_brokers(self) -> Sequence[HostPort]:
        """Return the brokers as ``brokers.service_url`` lists them, or as its SRV records do, in their order."""
        return self._url.hosts or [one.name for one in self.discovery.endpoints]

    @property
    def none_known_reason(self) -> str:
        """Why no broker is known, for the log."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.discovery.failures.items())
        return reasons or "no broker of brokers.service_url is known"

    def _update_choices(self) -> None:
        """Compute which brokers are asked from now on, after a change of brokers or ejections."""
        now = trio.current_time()
        endpoints = self.discovery.endpoints
        for endpoint in endpoints:
            self.names.learn_name(endpoint.host)
            if endpoint.health.ejected and endpoint.health.ejected_until <= now:
                self._readmit(endpoint, "its time is over")
        up = [endpoint for endpoint in endpoints if not endpoint.health.ejected] or endpoints
        best = min((endpoint.health.priority for endpoint in up), default=0)
        self._choices = tuple(endpoint for endpoint in up if endpoint.health.priority == best)
        shares = [endpoint.health.weight for endpoint in self._choices]
        self._running_sums = list(accumulate(shares)) if len(set(shares)) > 1 else None
        returns = (endpoint.health.ejected_until for endpoint in endpoints if endpoint.health.ejected)
        self._next_readmission_at = min(returns, default=math.inf)
        names = Counter(endpoint.name for endpoint in endpoints)
        self._by_name = {endpoint.name: endpoint for endpoint in endpoints if names[endpoint.name] == 1}
        self._report_metrics()

    # ---- health

    def record_answer(self, broker: HostPort) -> None:
        """Record that a broker answered a lookup, with an error or not."""
        if not isinstance(broker, Endpoint):  # another broker named it
            return
        health = broker.health
        if health.failures or health.ejections:
            health.failures = health.ejections = 0
            health.visible_to_probes = True
            if health.ejected and health.reachable is not False and not health.outlier_reason:
                self._readmit(broker, "it answered")
                self._update_choices()

    def record_failure(self, broker: HostPort, reason: str, cause: object) -> None:
        """Record that a broker could not be asked, or did not answer.

        ``reason``: a short stable name for metrics. ``cause``: the connection or the exception; many lookups may report
        one, which counts once.
        """
        if not isinstance(broker, Endpoint) or cause in self._counted_causes:
            return
        self._counted_causes.add(cause)
        health = broker.health
        health.failures += 1
        health.visible_to_probes = health.visible_to_probes and reason not in _INVISIBLE_TO_PROBES
        if health.failures >= self._config.ejection_failures and not health.ejected:
            self._eject(broker, reason)
            self._update_choices()

    def count_fatal_request(self, kind: str) -> None:
        """Count a request, by kind, upon which a broker closed a connection: it says nothing of the broker."""
        self._metrics.count_fatal_request(kind)

    def _eject(self, endpoint: Endpoint, reason: str) -> None:
        health = endpoint.health
        pause_s = ejection_s(self._config, health.ejections)
        health.ejected = True
        health.ejected_until = trio.current_time() + pause_s
        health.ejections += 1
        self._metrics.count_ejection(reason)
        get_logger().warning(
            "a broker is ejected",
            broker=self._label(endpoint),
            reason=reason,
            failures=health.failures,
            pause_s=pause_s,
        )

    def _readmit(self, endpoint: Endpoint, reason: str) -> None:
        endpoint.health.ejected = False
        endpoint.health.outlier_reason = ""
        endpoint.health.ejected_until = -math.inf
        get_logger().info("a broker is no longer ejected", broker=self._label(endpoint), reason=reason)

    # ---- probes

    async def probe_all(self) -> None:
        """Probe all brokers once, at the same time."""
        async with trio.open_nursery() as nursery:
            for endpoint in self.discovery.endpoints:
                nursery.start_soon(self._probe, endpoint)

    async def _probe(self, endpoint: Endpoint) -> None:
        if endpoint in self._probing:
            return
        self._probing.add(endpoint)
        try:
            async with self._probe_limiter:
                reachable, detail = await probe(self._dialer, endpoint, endpoint.addresses)
        finally:
            self._probing.remove(endpoint)
        health = endpoint.health
        health.probed_at = trio.current_time()
        before, health.reachable, health.detail = health.reachable, reachable, detail
        if reachable and before is not True:
            health.reachable_since = trio.current_time()
            get_logger().info("a broker is reachable", broker=self._label(endpoint))
        elif not reachable and before is not False:
            get_logger().error("a broker is not reachable", broker=self._label(endpoint), reason=detail)
        was_ejected = health.ejected
        if not reachable:
            if not was_ejected:
                self._eject(endpoint, "probe")
            next_look_s = 2 * seconds(self._config.probe_interval_ms) + seconds(self._config.handshake_timeout_ms)
            health.ejected_until = max(health.ejected_until, trio.current_time() + next_look_s)
        elif was_ejected and health.visible_to_probes and not health.outlier_reason:
            self._readmit(endpoint, "it answers")
        if (health.reachable, health.ejected) != (before, was_ejected):
            self._update_choices()

    # ---- for operators

    @property
    def any_reachable(self) -> bool:
        """Return True if a broker can be asked, of those that count for readiness."""
        return any(True for _ in self._ready_endpoints())

    @property
    def credentials_refused(self) -> bool:
        """Return True if every broker that counts for readiness refuses the proxy's own credentials."""
        logins = self.credential_checks
        return logins is not None and {logins.verdict_of(endpoint) for endpoint in self._ready_endpoints()} == {
            CredentialVerdict.REFUSED
        }

    @property
    def original_data_checked(self) -> str:
        """Which of the brokers that count for readiness check clients' own credentials, or take no client at all:
        ``all``, ``some`` or ``none``. Those that refuse the proxy's own do not count as checking by themselves.
        """
        logins = self.credential_checks
        if logins is None:
            return "none"
        ready = list(self._ready_endpoints())
        checking = sum(logins.original_data_of(one) == CHECKED for one in ready)
        refusing = sum(logins.verdict_of(one) is CredentialVerdict.REFUSED for one in ready)
        if not checking:
            return "none"
        return "all" if checking + refusing == len(ready) else "some"

    def original_data_of(self, broker: HostPort, addresses: tuple[str, ...]) -> OriginalData:
        """Return whether a target checks clients' own credentials, or only seems to.

        The logins at the target's addresses decide, however a client writes its name. At others it is taken for one of
        the same cluster (the URL may name a service of Kubernetes, and targets its pods): all reachable brokers must
        agree. Another proxy never checks any.
        """
        logins = self.credential_checks
        if logins is None or self._config.through_proxy:
            return IGNORED if self._config.through_proxy else UNKNOWN
        whole = self.discovery.by_key.get((broker, addresses))
        own = [whole] if whole else self.discovery.endpoints_at(addresses, broker.port)
        brokers = own or [one for one in self.discovery.endpoints if one.health.reachable]
        return agreed(map(logins.graded_original_data_of, brokers))

    def _ready_endpoints(self) -> Iterator[Endpoint]:
        """Yield the reachable brokers that count for readiness.

        A new one counts once it has accepted or refused the proxy's credentials, or has taken too long for that:
        otherwise clients would be sent here before it is known that all brokers refuse them.
        """
        for endpoint in self.discovery.endpoints:
            if endpoint.health.reachable and not (
                self.credential_checks is not None and self.credential_checks.is_first_login_pending(endpoint)
            ):
                yield endpoint

    @property
    def changed_s_ago(self) -> float | None:
        """Seconds since brokers were last found or lost; None: none was found yet."""
        return _age(self.discovery.changed_at, trio.current_time())

    def status(self) -> list[dict[str, object]]:
        """Return one entry for each broker that was probed or ejected, and one for each name without brokers."""
        now = trio.current_time()
        known = [
            {
                "broker": self._label(endpoint),
                "addresses": list(endpoint.addresses),
                "reachable": bool(endpoint.health.reachable),
                "probed_s_ago": _age(endpoint.health.probed_at, now),
                "set_aside_s": round(max(0.0, endpoint.health.ejected_until - now), 1),
                "failures": endpoint.health.failures,
                **self._credentials_status(endpoint),
            }
            for endpoint in self.discovery.endpoints
        ]
        unknown = [
            {"broker": name, "reachable": False, "detail": f"not resolved: {reason}"}
            for name, reason in self._unresolved()
        ]
        return sorted([*known, *unknown], key=lambda entry: str(entry["broker"]))

    def _credentials_status(self, endpoint: Endpoint) -> dict[str, object]:
        health = endpoint.health
        detail = f"{health.detail}; {health.outlier_reason}" if health.outlier_reason else health.detail
        if self.credential_checks is None:
            return {"detail": detail}
        state = self.credential_checks.status_of(endpoint)
        if endpoint.health.reachable and state.detail:  # of one that is down, why it is says enough
            detail = f"{detail}; {state.detail}"
        original_data = verdict_name(self.credential_checks.original_data_of(endpoint))
        return {"credentials": state.verdict.value, "original_data": original_data, "detail": detail}

    def _unresolved(self) -> list[tuple[str, str]]:
        """Return the names without a broker, not even one from before, and why."""
        found = self.discovery
        return [(name, reason) for name, reason in found.failures.items() if not found.has_brokers(name)]

    def _report_metrics(self) -> None:
        if self._scope.cancel_called:
            return
        endpoints = {self._label(endpoint): endpoint for endpoint in self.discovery.endpoints}
        healths = {name: endpoint.health for name, endpoint in endpoints.items()}
        up = {name: health.reachable for name, health in healths.items() if health.reachable is not None}
        up.update((name, False) for name, _ in self._unresolved())
        accepted: dict[str, bool] = {}
        checks_clients: dict[str, bool] = {}
        if self.credential_checks is not None:
            verdicts = {name: self.credential_checks.verdict_of(endpoint) for name, endpoint in endpoints.items()}
            known = {name: verdict for name, verdict in verdicts.items() if verdict is not CredentialVerdict.UNKNOWN}
            accepted = {name: verdict is CredentialVerdict.ACCEPTED for name, verdict in known.items()}
            found = {name: self.credential_checks.original_data_of(endpoint) for name, endpoint in endpoints.items()}
            checks_clients = {name: one == CHECKED for name, one in found.items() if one != UNKNOWN}
        ejected = {name: health.ejected for name, health in healths.items()}
        self._metrics.show_brokers(up, ejected, accepted, checks_clients)

    def _label(self, endpoint: Endpoint) -> str:
        """Return a broker's name, with its addresses where others have the same name."""
        name = endpoint.name
        return str(name) if name in self._by_name else f"{name} at {' and '.join(endpoint.addresses)}"


def _age(at: float, now: float) -> float | None:
    return None if at == -math.inf else round(now - at, 1)
