"""The lookup worker's service: Envelopes in, answers out (KIP-590); and which targets a relay may open."""

import time

import trio

from lookup.broker_pool import Asker, BrokerPool
from lookup.health import HealthChecks, broker_up_gauge
from lookup.lookups import Lookups
from lookup.metrics import LookupMetrics
from lookup.targets import TargetDenied, TargetRules
from proto.addresses import AddressInvalid, parse_host_port
from proto.commands import CommandCorrupt, command_name, parse_command
from proto.connect_rules import OriginalCredentials
from proto.lookups import KINDS, LookupKind, client_request_id, error_of, failure, kind_of
from proto.pulsar_pb2 import BaseCommand, CommandConnected, ServerError
from proto.roles import Role
from proto.rpc_pb2 import (
    BrokerProfileResponse,
    EnvelopeError,
    EnvelopeRequest,
    EnvelopeResponse,
    Method,
    ResolveTargetRequest,
    ResolveTargetResponse,
)
from proto.sealed_principal import SealBroken, unseal
from proxy.config.types import Config
from proxy.runtime.dialing import Dialer
from proxy.runtime.logs import get_logger
from proxy.runtime.peers import Caller
from proxy.runtime.rpc_client import RpcClient, RpcPool, connect_unix
from proxy.runtime.rpc_server import Handler
from proxy.runtime.tasks import InFlight, seconds
from proxy.runtime.worker import WorkerContext


class _EnvelopeRefused(Exception):
    def __init__(self, error: int, message: str) -> None:
        super().__init__(message)
        self.error = error


class LookupService:
    """See the module."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._metrics = LookupMetrics(context.registry)
        self._broker_up = broker_up_gauge(context.registry)
        self._in_flight = InFlight()
        self._auth = RpcPool(
            [
                RpcClient(
                    connect_unix(context.socket_path(Role.AUTH, index)), max_frame_bytes=context.rpc_frame_bytes_max()
                )
                for index in range(context.config.cluster.auth_workers)
            ]
        )
        self._use(context.config, None, None)

    def _use(self, config: Config, health: HealthChecks | None, profile: CommandConnected | None) -> None:
        """Build everything that depends on the configuration, on top of what is known of the brokers."""
        dialer = Dialer(config.brokers)  # may raise; nothing has changed yet
        self._config = config
        self._rules = TargetRules(config.brokers)
        self._pool = BrokerPool(config, dialer, self._auth, self._context.nursery, profile)
        self._health = HealthChecks(config, dialer, self._broker_up, health)
        self._lookups = Lookups(config, self._pool, self._rules, self._health.known_down)

    def handlers(self) -> dict[int, Handler]:
        """The methods served to forwarders."""
        return {
            Method.ENVELOPE: self._envelope,
            Method.RESOLVE_TARGET: self._resolve_target,
            Method.BROKER_PROFILE: self._broker_profile,
        }

    async def start(self) -> None:
        """Begin to look after brokers. A broker that is down does not keep the cluster from starting."""
        self._context.nursery.start_soon(self._auth.run)
        self._begin()

    def _begin(self) -> None:
        self._context.nursery.start_soon(self._pool.run)
        self._context.nursery.start_soon(self._health.run)

    async def configure(self, config: Config) -> None:
        """Take over new settings; lookups under way finish under the old ones."""
        old_pool, old_health, patience_s = self._pool, self._health, seconds(self._config.limits.lookup_timeout_ms)
        self._use(config, old_health, old_pool.profile)
        old_health.stop()
        self._begin()
        self._context.nursery.start_soon(old_pool.retire, patience_s)

    async def drain(self, timeout_s: float, *, hand_over: bool) -> None:  # noqa: ARG002
        """Answer what is under way."""
        await self._in_flight.wait_until_empty(timeout_s=timeout_s)

    def status(self) -> dict[str, object]:
        """Brokers, connections to them, and lookups under way."""
        return {
            "ready": self._health.any_reachable,
            "brokers": self._health.status(),
            "broker_connections": len(self._pool),
            "lookups_under_way": self._in_flight.count,
        }

    # ---- Envelope

    async def _envelope(self, data: bytes, _caller: Caller) -> bytes:
        request = EnvelopeRequest.FromString(data)
        response = EnvelopeResponse()
        try:
            principal = self._principal(request)
            command, kind = _inner_request(request)
        except _EnvelopeRefused as refused:
            name = EnvelopeError.Name(refused.error)
            self._metrics.envelope_error(name)
            get_logger().warning(
                "an Envelope was refused", client=request.client_address, error=name, reason=str(refused)
            )
            response.error, response.error_message = refused.error, str(refused)  # type: ignore[assignment]
            return response.SerializeToString()
        answer = await self._measured_answer(command, kind, _asker(request, principal), request.client_address)
        response.response = answer.SerializeToString()
        return response.SerializeToString()

    def _principal(self, request: EnvelopeRequest) -> str:
        """Who asks: the sealed principal, and nothing else, decides. KIP-590: no second authentication."""
        try:
            parse_host_port(request.client_address)
        except AddressInvalid as error:
            text = f"no client address: {error}"
            raise _EnvelopeRefused(EnvelopeError.ENVELOPE_INVALID_REQUEST, text) from None
        if not self._config.authentication.enabled:
            return ""
        try:
            principal = unseal(request.sealed_principal, self._context.seal_key, int(time.time() * 1000))
        except SealBroken as error:
            text = f"the sealed principal is {error}"
            raise _EnvelopeRefused(EnvelopeError.PRINCIPAL_DESERIALIZATION_FAILURE, text) from None
        if (principal.type, principal.name) != (request.principal_type, request.principal_name):
            text = "the principal is not the one under the seal"
            raise _EnvelopeRefused(EnvelopeError.PRINCIPAL_DESERIALIZATION_FAILURE, text)
        return principal.name

    async def _measured_answer(self, command: BaseCommand, kind: LookupKind, asker: Asker, client: str) -> BaseCommand:
        started = trio.current_time()
        self._metrics.received(kind.name)
        if self._in_flight.count >= self._config.limits.max_concurrent_lookups:
            self._metrics.rejected(kind.name)
            text = "The proxy has too many lookups under way"
            return failure(kind, client_request_id(command, kind), ServerError.TooManyRequests, text)
        with self._in_flight:
            answer = await self._lookups.answer(command, kind, asker, client)
        self._metrics.answered(kind.name, error_of(answer), trio.current_time() - started)
        return answer

    # ---- relays

    async def _resolve_target(self, data: bytes, _caller: Caller) -> bytes:
        request = ResolveTargetRequest.FromString(data)
        response = ResolveTargetResponse()
        try:
            target = await self._rules.check(request.target)
        except TargetDenied as denied:
            self._metrics.target_denied(denied.reason)
            response.denial, response.detail = denied.reason, str(denied)
        else:
            response.host, response.port = target.broker.host, target.broker.port
            response.addresses.extend(target.addresses)
        return response.SerializeToString()

    async def _broker_profile(self, _data: bytes, _caller: Caller) -> bytes:
        response = BrokerProfileResponse()
        if self._pool.profile is not None:
            response.connected = self._pool.profile.SerializeToString()
        return response.SerializeToString()


def _asker(request: EnvelopeRequest, principal: str) -> Asker:
    if not request.original_auth_data:
        return Asker(principal)
    return Asker(principal, OriginalCredentials(request.original_auth_method, request.original_auth_data))


def _inner_request(request: EnvelopeRequest) -> tuple[BaseCommand, LookupKind]:
    try:
        command = parse_command(request.request)
        if command.type not in KINDS:
            text = f"{command_name(command.type)} may not be forwarded"
            raise _EnvelopeRefused(EnvelopeError.ENVELOPE_INVALID_REQUEST, text)
        return command, kind_of(command)
    except CommandCorrupt as error:
        raise _EnvelopeRefused(EnvelopeError.ENVELOPE_UNSUPPORTED_VERSION, str(error)) from None
