"""The lookup worker's service: Envelopes in, answers out (KIP-590); and which targets a relay may open."""

import time
from functools import partial

from lookup.brokers.credential_checks import LogIn
from lookup.brokers.directory import Brokers
from lookup.brokers.discovery import Endpoint
from lookup.brokers.login import Login, log_in
from lookup.connections.pool import BrokerPool
from lookup.connections.principals import LookupPrincipal, LookupPrincipals
from lookup.metrics import BrokerMetrics, LookupMetrics
from lookup.requests.envelope_reply import Answers
from lookup.requests.executor import Lookups
from lookup.requests.scheduler import LookupScheduler, RequestBatch
from lookup.targets.name_resolver import TargetResolver
from lookup.targets.rules import TargetDenied, TargetRules
from proto.addresses import client_network
from proto.connect_rules import OriginalCredentials
from proto.envelope import EnvelopeRefused, parse_embedded_request, verify_envelope_principal, verify_target_principal
from proto.lookup_answers import ClientAnswer
from proto.lookup_kinds import failure
from proto.pulsar_pb2 import CommandConnected
from proto.request_rules import RequestRefused
from proto.roles import Role
from proto.rpc_pb2 import (
    BrokerProfileResponse,
    EnvelopeRequest,
    EnvelopeResponse,
    Method,
    ResolveTargetRequest,
    ResolveTargetResponse,
    Status,
)
from proto.varints import varint
from proxy import __version__
from proxy.common.logs import get_logger
from proxy.config.session_lifetime import observed_listeners
from proxy.config.types import Config
from proxy.runtime.dns.resolver import Resolver
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.loop.tick import current_tick
from proxy.runtime.network.broker_link import BrokerLinkFactory
from proxy.runtime.network.credentials import credentials_for
from proxy.runtime.network.dialing import Dialer
from proxy.runtime.process.worker import WorkerContext
from proxy.runtime.rpc.peers import Caller
from proxy.runtime.rpc.server import Handler, ReplyStream, RpcRefused, StreamingHandler

_NOT_A_FORWARDER = EnvelopeResponse(
    error=EnvelopeResponse.CLUSTER_AUTHORIZATION_FAILED, error_message="this role may not send Envelopes"
).SerializeToString()
"""What callers are answered that lack KIP-590's right to ClusterAction (proto.roles)."""


class LookupService:
    """See the module."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._turn = current_tick()
        self._metrics = LookupMetrics(context.registry)
        self._askers = LookupPrincipals()
        self._broker_metrics = BrokerMetrics(context.registry)
        self._auth = context.new_rpc_pool(Role.AUTH)
        lookups = self._use(context.config, None, None)
        self._desk = LookupScheduler(context.config, lookups, self._metrics, context.nursery)

    def _use(self, config: Config, brokers: Brokers | None, profile: CommandConnected | None) -> Lookups:
        """Build everything that depends on the configuration, on top of what is known of the brokers."""
        dialer = Dialer(config.brokers)  # may raise; nothing has changed yet
        self._config = config
        configured = self._resolver("brokers")
        logs_in = None if config.brokers.credentials is None else self._log_in(config, dialer)
        self._brokers = Brokers(config, dialer, configured, self._broker_metrics, brokers, log_in=logs_in)
        known, others = self._resolver("known_targets"), self._resolver("targets")
        targets = TargetResolver(self._brokers.names, configured=configured, known=known, others=others)
        self._rules = TargetRules(config.brokers, targets, self._brokers)
        nursery, logins = self._context.nursery, self._brokers.logins
        self._pool = BrokerPool(config, dialer, self._auth, nursery, profile=profile, logins=logins)
        return Lookups(config, self._pool, self._rules, self._brokers)

    def _log_in(self, config: Config, dialer: Dialer) -> LogIn:
        """Make what logs in at a broker with the proxy's own credentials."""
        greeter = BrokerLinkFactory(dialer, config.limits.max_broker_frame_bytes, f"pulsar-trio-proxy-{__version__}")

        async def log_in_at(broker: Endpoint) -> Login:
            credentials = credentials_for(self._auth, broker.host, configured=True)
            return await log_in(greeter, broker, credentials, config)

        return log_in_at

    def _resolver(self, names: str) -> Resolver:
        """Of one group of names: the operator's, those below them or said by brokers, or any that clients choose."""
        brokers = self._config.brokers
        return Resolver(
            self._context.nursery,
            timeout_s=seconds(brokers.connect_timeout_ms),
            ttl_max_s=seconds(brokers.dns_ttl_max_ms),
            use_system_resolver=names == "brokers",
            on_failure=partial(self._broker_metrics.dns_failed, names),
        )

    def handlers(self) -> dict[int, Handler | StreamingHandler]:
        """The methods served to forwarders."""
        return {
            Method.ENVELOPE: StreamingHandler(self._envelope, unauthorized_response=_NOT_A_FORWARDER),
            Method.RESOLVE_TARGET: self._resolve_target,
            Method.BROKER_PROFILE: self._broker_profile,
        }

    async def start(self) -> None:
        """Begin to look after brokers. A broker that is down does not keep the cluster from starting."""
        self._context.nursery.start_soon(self._auth.run)
        self._context.nursery.start_soon(self._desk.run)
        self._begin()

    def _begin(self) -> None:
        self._context.nursery.start_soon(self._pool.run)
        self._context.nursery.start_soon(self._brokers.run)

    async def configure(self, config: Config) -> None:
        """Take over new settings; lookups under way finish under the old ones."""
        old_pool, old_brokers, patience_s = self._pool, self._brokers, seconds(self._config.limits.lookup_timeout_ms)
        self._desk.use(config, self._use(config, old_brokers, old_pool.profile))
        old_brokers.stop()
        self._begin()
        self._context.nursery.start_soon(old_pool.retire, patience_s)

    async def drain(self, timeout_s: float, *, hand_over: bool) -> None:  # noqa: ARG002
        """Answer what is under way."""
        await self._desk.under_way.wait_until_empty(timeout_s=timeout_s)

    def status(self) -> dict[str, object]:
        """Brokers, connections to them, and lookups under way."""
        return {
            "ready": self._brokers.any_reachable and not self._brokers.credentials_refused,
            "credentials_refused": self._brokers.credentials_refused,
            "brokers": self._brokers.status(),
            "broker_connections": len(self._pool),
            "lookups_under_way": self._desk.under_way.count,
        }

    # ---- Envelope

    def _envelope(self, data: bytes, _caller: Caller, answer: ReplyStream) -> None:
        request = EnvelopeRequest.FromString(data)
        try:
            principal = verify_envelope_principal(request, self._seal_key, self._now_unix_ms())
        except EnvelopeRefused as refused:
            name = self._refused(request, refused)
            answer(EnvelopeResponse(error=name, error_message=str(refused)).SerializeToString(), False)
            return
        requests = list(request.requests)
        answers = Answers(len(requests), answer)
        sender = RequestBatch(self._asker(request, principal.name), request.client_address, answers)
        with self._turn:
            for index, embedded in enumerate(requests):
                try:
                    asked, request_id = parse_embedded_request(embedded)
                except EnvelopeRefused as refused:
                    answers.refuse(index, self._refused(request, refused), str(refused))
                except RequestRefused as refused:
                    self._refuse(refused, index, sender)
                else:
                    self._desk.ask(asked, request_id, index, sender)

    @property
    def _seal_key(self) -> bytes | None:
        """What principals are sealed with; None where clients are not authenticated."""
        return self._context.seal_key if self._config.authentication.enabled else None

    def _now_unix_ms(self) -> int | None:
        """The time that principals of Envelopes must outlast; None: none, since sessions go on past their end. Which
        listener a client came in at, only the forwarder says, so one that observes is enough.
        """
        return None if any(observed_listeners(self._config)) else int(time.time() * 1000)

    def _asker(self, request: EnvelopeRequest, principal: str) -> LookupPrincipal:
        if not request.original_auth_data:
            return self._askers.get(principal)
        credentials = OriginalCredentials(request.original_auth_method, request.original_auth_data)
        return self._askers.get(principal, credentials)

    def _refused(self, request: EnvelopeRequest, refused: EnvelopeRefused) -> str:
        """Count and log; gives the error's name."""
        name = EnvelopeResponse.Error.Name(refused.error)
        self._metrics.envelope_error(name)
        get_logger().warning("an Envelope was refused", client=request.client_address, error=name, reason=str(refused))
        return name

    def _refuse(self, refused: RequestRefused, index: int, sender: RequestBatch) -> None:
        """Answer its sender alone: upon this request a broker would close the connection that others share."""
        kind = refused.kind
        self._metrics.invalid(kind.name, refused.reason)
        get_logger().warning(
            "a lookup request was refused: upon it a broker would close the connection",
            client=sender.client,
            principal=sender.asker.principal,
            request=kind.name,
            reason=refused.reason,
            detail=str(refused),
        )
        answer = ClientAnswer(failure(kind, 0, refused.code, str(refused)))
        sender.answers.put(index, answer.frame(varint(refused.request_id)))

    # ---- relays

    async def _resolve_target(self, data: bytes, _caller: Caller) -> bytes:
        request = ResolveTargetRequest.FromString(data)
        response = ResolveTargetResponse()
        try:
            verify_target_principal(request, self._seal_key, int(time.time() * 1000))
        except EnvelopeRefused as refused:
            self._metrics.target_denied("bad_principal")
            get_logger().warning(
                "a target was refused: whose relay it would be is not known",
                client=request.client_address,
                reason=str(refused),
            )
            raise RpcRefused(Status.PRINCIPAL_DESERIALIZATION_FAILURE, str(refused)) from None
        try:
            if request.any_broker:
                target, *others = await self._rules.any_broker()
            else:
                target, others = await self._rules.check(request.target, self._owner(request)), []
        except TargetDenied as denied:
            self._metrics.target_denied(denied.reason)
            get_logger().warning(
                "a target was refused",
                client=request.client_address,
                principal=request.principal_name,
                target=request.target,
                reason=denied.reason,
                detail=str(denied),
            )
            response.denial, response.detail = denied.reason, str(denied)
        else:
            response.host, response.port = target.broker.host, target.broker.port
            response.addresses.extend(target.addresses)
            for other in others:
                response.others.add(host=other.broker.host, port=other.broker.port, addresses=other.addresses)
        return response.SerializeToString()

    def _owner(self, request: ResolveTargetRequest) -> str:
        """Who has turns of their own among those whose targets are resolved: a principal; those who are nobody, or
        the anonymous role as anybody may be, by their addresses (which the forwarder says; it decides an order only).
        """
        authentication = self._config.authentication
        if authentication.enabled and request.principal_name not in {"", authentication.anonymous_role}:
            return f"principal {request.principal_name}"
        return f"address {client_network(request.client_address)}"

    async def _broker_profile(self, _data: bytes, _caller: Caller) -> bytes:
        response = BrokerProfileResponse()
        if self._pool.profile is not None:
            response.connected = self._pool.profile.SerializeToString()
        return response.SerializeToString()
