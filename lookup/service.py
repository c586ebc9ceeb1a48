"""The lookup worker's service: Envelopes in, answers out (KIP-590); and checks of relay targets."""

import time
from functools import partial

from lookup.brokers.credential_checks import LogIn
from lookup.brokers.directory import BrokerDirectory, DirectoryOptions
from lookup.brokers.discovery import Endpoint
from lookup.brokers.login import LoginFactory, LoginResult
from lookup.connections.pool import BrokerPool
from lookup.connections.principals import CredentialsRefused, LookupPrincipal, LookupPrincipals
from lookup.metrics import BrokerMetrics, LookupMetrics
from lookup.requests.envelope_reply import EnvelopeReply
from lookup.requests.executor import LookupExecutor
from lookup.requests.scheduler import LookupScheduler, RequestBatch
from lookup.targets.name_resolver import TargetResolver
from lookup.targets.rules import Target, TargetRules
from lookup.targets.upstreams import HttpUpstreams
from proto.connect_rules import OriginalCredentials
from proto.envelope import EnvelopeRefused, EnvelopeVerifier, parse_embedded_request
from proto.lookup_answers import ClientAnswer
from proto.lookup_kinds import failure_answer
from proto.lookup_requests import RequestParser
from proto.pulsar_pb2 import CommandConnected
from proto.request_rules import RequestRefused
from proto.roles import Role
from proto.rpc_pb2 import (
    BrokerProfileResponse,
    EnvelopeRequest,
    EnvelopeResponse,
    Method,
    Principal,
    ReportOutlierRequest,
    ResolveTargetRequest,
    ResolveTargetResponse,
    Status,
)
from proto.varints import varint
from proxy import SERVER_VERSION
from proxy.common.logs import get_logger
from proxy.config.binds import listener_binds
from proxy.config.session_lifetime import observed_listeners
from proxy.config.sni import routes_sni
from proxy.config.types import Config
from proxy.runtime.dns.resolver import Resolver
from proxy.runtime.fairness.owners import owner_of
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.loop.tick import current_tick
from proxy.runtime.network.broker_link import BrokerLinkFactory
from proxy.runtime.network.credentials import credentials_for
from proxy.runtime.network.dial_rules import TargetDenied
from proxy.runtime.network.dialing import Dialer
from proxy.runtime.observability.quota_refusals import QuotaRefusals
from proxy.runtime.process.worker import WorkerContext
from proxy.runtime.rpc.peers import Caller
from proxy.runtime.rpc.server import AnyHandler, EagerHandler, ReplyStream, RpcRefused, StreamingHandler

_NOT_A_FORWARDER = EnvelopeResponse(
    error=EnvelopeResponse.CLUSTER_AUTHORIZATION_FAILED, error_message="this role may not send Envelopes"
).SerializeToString()
"""What callers are answered that lack KIP-590's right to ClusterAction (proto.roles)."""


class LookupService:
    """RPC service of a lookup worker: builds the collaborators from the configuration, and serves forwarders."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._tick = current_tick()
        self._metrics = LookupMetrics(context.registry)
        self._principals = LookupPrincipals()
        self._request_parser = RequestParser()
        self._verifier = EnvelopeVerifier()
        self._broker_metrics = BrokerMetrics(context.registry)
        self._auth = context.new_rpc_pool(Role.AUTH)
        lookups = self._build_collaborators(context.config, None, None, None)
        on_quota_exceeded = QuotaRefusals(context.registry).count_refusal
        self._scheduler = LookupScheduler(context.config, lookups, self._metrics, context.nursery, on_quota_exceeded)

    def _build_collaborators(
        self,
        config: Config,
        brokers: BrokerDirectory | None,
        upstreams: HttpUpstreams | None,
        profile: CommandConnected | None,
    ) -> LookupExecutor:
        """Build all that depends on the configuration; the brokers' health and the pool's profile carry over."""
        dialer = Dialer(config.brokers, listener_binds(config))  # may raise; nothing has changed yet
        self._config = config
        configured = self._resolver("brokers")
        logs_in = None if config.brokers.credentials is None else self._login_function(config, dialer)
        self._brokers = BrokerDirectory(
            config, dialer, configured, self._broker_metrics, DirectoryOptions(brokers, logs_in)
        )
        known, others = self._resolver("known_targets"), self._resolver("targets")
        new_resolver = partial(TargetResolver, configured=configured, known=known, others=others)
        self._rules = TargetRules(config.brokers, new_resolver(self._brokers.names), self._brokers)
        self._upstreams = HttpUpstreams(config, configured, new_resolver, upstreams)
        nursery, logins = self._context.nursery, self._brokers.credential_checks
        self._pool = BrokerPool(config, dialer, self._auth, nursery, logins)
        self._pool.profile = profile
        self._pool.original_data_of = self._brokers.original_data_of
        self._pool.observe_reauthentication = self._broker_metrics.reauthentication_seconds.observe
        return LookupExecutor(config, self._pool, self._rules, self._brokers)

    def _login_function(self, config: Config, dialer: Dialer) -> LogIn:
        """Return a function that logs in at a broker with the proxy's own credentials."""
        link_factory = BrokerLinkFactory(dialer, config.limits.max_broker_frame_bytes, SERVER_VERSION)
        logins = LoginFactory(link_factory, config)

        async def log_in_at(broker: Endpoint, finds_original_data: bool) -> LoginResult:  # noqa: FBT001 -- a LogIn
            new_credentials = partial(credentials_for, self._auth, broker.host, configured=True)
            return await logins.log_in(broker, new_credentials, finds_original_data=finds_original_data)

        return log_in_at

    def _resolver(self, names: str) -> Resolver:
        """Return a resolver for one group of names.

        ``names``: "brokers" (the operator's), "known_targets" (below those, or named by brokers) or "targets" (any
        other that clients choose).
        """
        brokers = self._config.brokers
        return Resolver(
            self._context.nursery,
            timeout_s=seconds(brokers.connect_timeout_ms),
            ttl_max_s=seconds(brokers.dns_ttl_max_ms),
            on_failure=partial(self._broker_metrics.count_dns_failure, names),
        )

    def handlers(self) -> dict[int, AnyHandler]:
        """Return the methods served to forwarders."""
        return {
            Method.ENVELOPE: StreamingHandler(self._handle_envelope, unauthorized_response=_NOT_A_FORWARDER),
            Method.RESOLVE_TARGET: EagerHandler(self._resolve_target),
            Method.BROKER_PROFILE: EagerHandler(self._broker_profile),
            Method.REPORT_OUTLIER: EagerHandler(self._report_outlier),
        }

    async def start(self) -> None:
        """Start to watch brokers. A broker that is down does not keep the cluster from starting."""
        self._context.nursery.start_soon(self._auth.run)
        self._context.nursery.start_soon(self._scheduler.run)
        self._start_collaborators()

    def _start_collaborators(self) -> None:
        self._context.nursery.start_soon(self._pool.run)
        self._context.nursery.start_soon(self._brokers.run)
        self._context.nursery.start_soon(self._upstreams.run)

    async def configure(self, config: Config) -> None:
        """Take over new settings; lookups under way finish under the old ones."""
        old_pool, old_brokers, old_upstreams = self._pool, self._brokers, self._upstreams
        grace_s = seconds(self._config.limits.lookup_timeout_ms)
        lookups = self._build_collaborators(config, old_brokers, old_upstreams, old_pool.profile)
        self._scheduler.apply_config(config, lookups)
        old_brokers.stop()
        old_upstreams.stop()
        self._start_collaborators()
        self._context.nursery.start_soon(old_pool.retire_after, grace_s)

    async def drain(self, timeout_s: float, *, hand_over: bool) -> None:  # noqa: ARG002
        """Answer the lookups under way."""
        await self._scheduler.under_way.wait_until_empty(timeout_s=timeout_s)

    def status(self) -> dict[str, object]:
        """BrokerDirectory, connections to them, and lookups under way."""
        return {
            "ready": self._brokers.any_reachable and not self._brokers.credentials_refused,
            "credentials_refused": self._brokers.credentials_refused,
            "original_data_checked": self._brokers.original_data_checked,
            "brokers": self._brokers.status(),
            "brokers_changed_s_ago": self._brokers.changed_s_ago,
            "broker_connections": len(self._pool),
            "lookups_under_way": self._scheduler.under_way.count,
        }

    # ---- Envelope

    def _handle_envelope(self, data: bytes, _caller: Caller, answer: ReplyStream) -> None:
        request = EnvelopeRequest.FromString(data)
        try:
            principal = self._verifier.verify_envelope(request, self._seal_key, self._now_unix_ms())
        except EnvelopeRefused as refused:
            name = self._refuse_envelope(request, refused)
            answer(EnvelopeResponse(error=name, error_message=str(refused)).SerializeToString(), False)
            return
        requests = list(request.requests)
        answers = EnvelopeReply(len(requests), answer)
        submit = self._scheduler.submit_request
        try:
            lookup_principal = self._principal_of(request, principal)
        except CredentialsRefused:
            get_logger().warning(
                "lookups were refused: there is no memory left for their forwarded credentials",
                client=request.client_address,
                principal=principal.name,
            )
            lookup_principal, submit = LookupPrincipal(principal.name), self._scheduler.refuse_request
        batch = RequestBatch(lookup_principal, request.client_address, answers)
        parser = self._request_parser
        with self._tick:
            for index, embedded in enumerate(requests):
                try:
                    asked, request_id = parse_embedded_request(embedded, parser)
                except EnvelopeRefused as refused:
                    answers.add_refusal(index, self._refuse_envelope(request, refused), str(refused))
                except RequestRefused as refused:
                    self._refuse_request(refused, index, batch)
                else:
                    submit(asked, request_id, index, batch)

    @property
    def _seal_key(self) -> bytes | None:
        """The key of principals' seals; None where clients are not authenticated."""
        return self._context.seal_key if self._config.authentication.enabled else None

    def _now_unix_ms(self) -> int | None:
        """Return the time that principals of Envelopes must outlast, in milliseconds since 1970.

        None: they need not, since sessions go on past their end. Only the forwarder knows at which listener a client
        came in, so one listener that observes is enough.
        """
        return None if any(observed_listeners(self._config)) else int(time.time() * 1000)

    def _principal_of(self, request: EnvelopeRequest, principal: Principal) -> LookupPrincipal:
        credentials, expires_at_unix_ms = None, 0
        if request.original_auth_data:
            credentials = OriginalCredentials(request.original_auth_method, request.original_auth_data)
            expires_at_unix_ms = principal.expires_at_unix_ms
        return self._principals.get_principal(
            principal.name, credentials, expires_at_unix_ms, principal.method, request.proxies
        )

    def _refuse_envelope(self, request: EnvelopeRequest, refused: EnvelopeRefused) -> str:
        """Count and log a refused Envelope or request; return the error's name."""
        name = EnvelopeResponse.Error.Name(refused.error)
        self._metrics.count_envelope_error(name)
        get_logger().warning("an Envelope was refused", client=request.client_address, error=name, reason=str(refused))
        return name

    def _refuse_request(self, refused: RequestRefused, index: int, batch: RequestBatch) -> None:
        """Refuse a request to its client alone: upon it a broker would close the connection that others share."""
        kind = refused.kind
        self._metrics.count_invalid_request(kind.name, refused.reason)
        get_logger().warning(
            "a lookup request was refused: upon it a broker would close the connection",
            client=batch.client_address,
            principal=batch.principal.name,
            request=kind.name,
            reason=refused.reason,
            detail=str(refused),
        )
        answer = ClientAnswer(failure_answer(kind, 0, refused.code, str(refused)))
        batch.reply.add_answer(index, answer.frame_for(varint(refused.request_id)))

    # ---- relays, and requests over HTTP

    async def _resolve_target(self, data: bytes, caller: Caller) -> bytes:
        request = ResolveTargetRequest.FromString(data)
        if (caller.role is Role.HTTP) is not bool(request.upstream):
            raise RpcRefused(Status.CLUSTER_AUTHORIZATION_FAILED, "HTTP workers ask for upstreams, and they alone")
        response = ResolveTargetResponse()
        try:
            principal = self._verifier.verify_target(
                request, self._seal_key, int(time.time() * 1000), routes_sni=routes_sni(self._config)
            )
        except EnvelopeRefused as refused:
            self._metrics.count_denied_target("bad_principal")
            get_logger().warning(
                "a target was refused: whose relay it would be is not known",
                client=request.client_address,
                reason=str(refused),
            )
            raise RpcRefused(Status.PRINCIPAL_DESERIALIZATION_FAILURE, str(refused)) from None
        owner = owner_of(principal.name, request.client_address, self._config.authentication.anonymous_role)
        try:
            target, *others = await self._targets_for(request, owner)
        except TargetDenied as denied:
            self._metrics.count_denied_target(denied.reason)
            get_logger().warning(
                "a target was refused",
                client=request.client_address,
                principal=request.principal_name,
                target=request.target,
                **({"upstream": request.upstream} if request.upstream else {}),
                reason=denied.reason,
                detail=str(denied),
            )
            response.denial, response.detail = denied.reason, str(denied)
        else:
            response.host, response.port = target.broker.host, target.broker.port
            response.addresses.extend(target.addresses)
            response.original_data = self._brokers.original_data_of(target.broker, target.addresses)
            for other in others:
                response.others.add(
                    host=other.broker.host,
                    port=other.broker.port,
                    addresses=other.addresses,
                    original_data=self._brokers.original_data_of(other.broker, other.addresses),
                )
        return response.SerializeToString()

    async def _targets_for(self, request: ResolveTargetRequest, owner: str) -> list[Target]:
        """Return where to dial, in the order to try. Raises TargetDenied."""
        if request.upstream:
            upstream = self._upstreams.rules_of(request.upstream)
            if request.target:
                return [await upstream.check_redirect(request.target, owner, tls=request.tls)]
            return await upstream.own_targets()
        if request.any_broker:
            return await self._rules.targets_for_any_broker()
        if request.server_name:
            return [await self._rules.check_server_name(request.target, owner)]
        return [await self._rules.check_target(request.target, owner)]

    async def _report_outlier(self, data: bytes, _caller: Caller) -> bytes:
        self._brokers.outliers.eject_reported(ReportOutlierRequest.FromString(data))
        return b""

    async def _broker_profile(self, _data: bytes, _caller: Caller) -> bytes:
        response = BrokerProfileResponse()
        if self._pool.profile is not None:
            response.connected = self._pool.profile.SerializeToString()
        return response.SerializeToString()
