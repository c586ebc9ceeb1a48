"""Answer a client's lookup on behalf of the brokers: ask one, follow its redirects, give only the final answer.

PIP-1: "If the downstream broker replies with a redirection, the proxy will have to handle that internally and only
reply to client once it has the final response."
"""

from collections import deque
from functools import partial

import trio

from lookup.brokers.directory import Brokers
from lookup.brokers.discovery import Endpoint
from lookup.connections.broker_connection import Asked, BrokerConnection, BrokerConnectionLost
from lookup.connections.losses import Trial
from lookup.connections.pool import BrokerPool
from lookup.connections.principals import LookupPrincipal
from lookup.targets.rules import Locate, Target, TargetDenied, TargetRules
from proto.addresses import AddressInvalid, HostPort, parse_service_url, speaks_tls
from proto.commands import error_name
from proto.lookup_answers import BrokerAnswer, ClientAnswer
from proto.lookup_kinds import LookupKind, error_of, failure, subject_of
from proto.lookup_requests import Request, request_of
from proto.pulsar_pb2 import BaseCommand, CommandLookupTopicResponse, ServerError
from proxy.common.logs import Logger, get_logger
from proxy.config.types import Config
from proxy.runtime.network.broker_link import NOT_CONNECTED, REASONS_TO_TRY_ANOTHER_BROKER, BrokerLinkFailed

REDIRECTS_MAX = 10

TOO_SLOW = "The broker did not answer in time"
TO_BLAME = "The broker closes the connection upon this request"

TRIES_MAX = 20
"""How often one request is asked: after each lost connection it is one of half as many suspects, of a million at first.
"""


class LookupFailed(Exception):
    """The answer is an error of the proxy's own: Pulsar's code and a text for the client; ``detail`` for the log."""

    def __init__(self, code: int, message: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.message = message


class Lookups:
    """Runs the lookups of one lookup worker, under one configuration."""

    def __init__(self, config: Config, pool: BrokerPool, rules: TargetRules, brokers: Brokers) -> None:
        self._config = config
        self._pool = pool
        self._rules = rules
        self._brokers = brokers
        self._tls = speaks_tls(config.brokers.service_url)
        self._not_open: dict[LookupPrincipal, Endpoint] = {}

    # ---- the short way

    def ask_now(self, request: Request, asker: LookupPrincipal, asked: Asked, now: float) -> BrokerConnection | None:
        """Ask over a connection that is open already, and give it; None where there is none.

        ``asked`` gets the broker's answer, or None where the connection was lost, and tells ``heard`` so.
        """
        broker = self._brokers.first()
        if broker is None:
            return None
        connection = self._pool.open_connection(broker, asker, now)
        if connection is None:
            self._not_open[asker] = broker
            return None
        try:
            connection.ask(request, asked, now)
        except BrokerConnectionLost:
            return None
        return connection

    def heard(self, connection: BrokerConnection, answer: BrokerAnswer | None) -> None:
        """What came of a request the short way says something of the broker; but see lookup.connections.isolated."""
        if answer is not None:
            self._brokers.answered(connection.broker)
        elif connection.loss is None:
            self._brokers.failed(connection.broker, "lost", connection)

    def forget(self, connection: BrokerConnection, asked: Asked) -> None:
        """An answer that did not come in time is not wanted any more."""
        self._brokers.failed(connection.broker, "timeout", connection)
        connection.forget(asked)

    def ready(self, answer: BrokerAnswer, kind: LookupKind, asker: LookupPrincipal, client: str) -> ClientAnswer | None:
        """An answer as its client must see it; None where it is not final. A success is made ready only once."""
        if not self.is_final(answer.command, kind):
            return None
        command = BaseCommand()
        command.CopyFrom(answer.command)
        ready = ClientAnswer(self.finished(command, kind, asker, client))
        if ready.error is None and not _is_redirect(answer.command):
            answer.ready = ready
        return ready

    @staticmethod
    def is_final(answer: BaseCommand, kind: LookupKind) -> bool:
        """Whether nothing has to be asked any more."""
        return kind.response_type != BaseCommand.LOOKUP_RESPONSE or not _is_redirect(answer)

    def finished(self, answer: BaseCommand, kind: LookupKind, asker: LookupPrincipal, client: str) -> BaseCommand:
        """A final answer, as its client must see it."""
        try:
            self._lead_through_proxy(answer)
        except LookupFailed as failed:
            return self._failed(failed, kind, asker, client, "")
        error_code = error_of(answer)
        if error_code is not None:
            _log(kind, asker, client).info("a broker answered a lookup with an error", error=error_name(error_code))
        return answer

    def too_slow(self, command: BaseCommand, kind: LookupKind, asker: LookupPrincipal, client: str) -> BaseCommand:
        """The answer where no broker gave one in time."""
        timeout_ms = self._config.limits.lookup_timeout_ms
        failed = LookupFailed(ServerError.ServiceNotReady, TOO_SLOW, f"no answer within {timeout_ms} ms")
        return self._failed(failed, kind, asker, client, subject_of(command, kind))

    @staticmethod
    def _failed(
        failed: LookupFailed, kind: LookupKind, asker: LookupPrincipal, client: str, resource: str
    ) -> BaseCommand:
        _log(kind, asker, client).warning("a lookup failed", resource=resource, reason=str(failed))
        return failure(kind, 0, failed.code, failed.message)

    # ---- the long way

    async def answer(
        self,
        command: BaseCommand,
        kind: LookupKind,
        asker: LookupPrincipal,
        client: str,
        answer: BaseCommand | None = None,
        *,
        deadline: float,
        trial: Trial | None = None,
    ) -> BaseCommand:
        """The final answer for the client; an error is an answer too.

        ``answer``: what a broker has said already. ``trial``: connections that were lost under the request already.
        """
        trial = trial or Trial()
        try:
            with trio.fail_at(deadline):
                if answer is None:
                    answer = await self._ask_any(command, kind, asker, trial)
                answer = await self._follow(answer, command, kind, asker, trial)
        except trio.TooSlowError:
            return self.too_slow(command, kind, asker, client)
        except LookupFailed as failed:
            return self._failed(failed, kind, asker, client, subject_of(command, kind))
        finally:
            for loss in trial.settled():
                self._brokers.failed(loss.broker, "lost", loss)
            if trial.to_blame:
                self._brokers.request_blamed(kind.name)
        return self.finished(answer, kind, asker, client)

    async def _follow(
        self, answer: BaseCommand, command: BaseCommand, kind: LookupKind, asker: LookupPrincipal, trial: Trial
    ) -> BaseCommand:
        """Follow redirects to the final answer; raises LookupFailed."""
        request = BaseCommand()
        request.CopyFrom(command)
        for _ in range(REDIRECTS_MAX):
            if self.is_final(answer, kind):
                return answer
            response = answer.lookup_topic_response
            request.lookup_topic.authoritative = response.authoritative
            broker = self._redirected_to(self._url(response))
            checked = partial(self._checked, broker)
            named = self._brokers.named(broker) or broker
            answer = await self._ask_until_found(named, checked, request, kind, asker, trial)
        if self.is_final(answer, kind):
            return answer
        raise LookupFailed(
            ServerError.ServiceNotReady,
            "Reached max number of redirections",
            f"more than {REDIRECTS_MAX} redirects for {command.lookup_topic.topic}",
        )

    async def _ask_any(
        self, command: BaseCommand, kind: LookupKind, asker: LookupPrincipal, trial: Trial
    ) -> BaseCommand:
        """Ask the configured brokers, in turn, until one can be asked: first the one to which no connection was open,
        so that there will be one; last those whose connection broke under the request, since they may hang.
        """
        lost = trial.lost_at
        await self._brokers.any_found()
        failed = LookupFailed(ServerError.ServiceNotReady, NOT_CONNECTED, self._brokers.why_none)
        brokers = sorted(self._brokers.in_turn(self._not_open.pop(asker, None)), key=lambda broker: broker is lost)
        waiting = deque(brokers)
        tries_left = TRIES_MAX
        while waiting and tries_left:
            tries_left -= 1
            broker = waiting.popleft()
            try:
                return await self._ask(broker, partial(_own, broker), command, kind, asker, trial)
            except _Lost as error:
                failed = error
                waiting.append(broker)
            except _NextBroker as error:
                failed = error
        raise LookupFailed(failed.code, failed.message, str(failed))

    async def _ask_until_found(  # noqa: PLR0917 -- the request, and what belongs to it
        self,
        broker: HostPort,
        locate: Locate,
        command: BaseCommand,
        kind: LookupKind,
        asker: LookupPrincipal,
        trial: Trial,
    ) -> BaseCommand:
        """Ask the one broker that can answer. A lookup may be asked again, so a connection that broke is replaced."""
        for _ in range(TRIES_MAX - 1):
            try:
                return await self._ask(broker, locate, command, kind, asker, trial)
            except _Lost:
                continue
        return await self._ask(broker, locate, command, kind, asker, trial)

    async def _ask(  # noqa: PLR0917 -- the request, and what belongs to it
        self,
        broker: HostPort,
        locate: Locate,
        command: BaseCommand,
        kind: LookupKind,
        asker: LookupPrincipal,
        trial: Trial,
    ) -> BaseCommand:
        """Ask one broker. Raises LookupFailed; where it helps to ask again, or another one, _Lost or _NextBroker."""
        try:
            if trial.company is None:
                connection = await self._pool.connection(broker, locate, asker)
            else:
                connection = await self._pool.connection_apart(broker, locate, asker, trial.company)
        except BrokerConnectionLost as error:
            raise _Lost(ServerError.ServiceNotReady, NOT_CONNECTED, str(error)) from None
        except BrokerLinkFailed as error:
            if error.reason not in REASONS_TO_TRY_ANOTHER_BROKER:
                raise LookupFailed(error.code, error.message, str(error)) from None
            self._brokers.failed(broker, error.reason, error)
            raise _NextBroker(error.code, error.message, str(error)) from None
        try:
            answer = await connection.request(_request(command, kind))
        except BrokerConnectionLost as error:
            if error.loss is None:
                self._brokers.failed(broker, "lost", connection)
            if trial.lost(broker, error.loss):
                detail = f"{broker} closed a connection on which nothing else was asked"
                raise LookupFailed(ServerError.ServiceNotReady, TO_BLAME, detail) from None
            raise _Lost(ServerError.ServiceNotReady, NOT_CONNECTED, str(error)) from None
        except trio.Cancelled:
            self._brokers.failed(broker, "timeout", connection)
            raise
        self._brokers.answered(broker)
        return answer

    async def _checked(self, broker: HostPort) -> Target:
        """Where a broker is that another one named: only where the rules let us go."""
        try:
            return await self._rules.check(str(broker))
        except TargetDenied as error:
            raise _bad_redirect(error) from None

    def _redirected_to(self, url: str) -> HostPort:
        if speaks_tls(url) is not self._tls:
            raise _bad_redirect(AddressInvalid(f"{url[:300]!r}: see the scheme of brokers.service_url"))
        try:
            broker = parse_service_url(url)[0]
            self._rules.check_port(broker)
        except (AddressInvalid, TargetDenied) as error:
            raise _bad_redirect(error) from None
        self._brokers.names.learn(broker.host)
        return broker

    def _url(self, response: CommandLookupTopicResponse) -> str:
        """Of the two addresses of a broker the one that the proxy dials."""
        return str(response.broker_service_url_tls if self._tls else response.broker_service_url)

    def _lead_through_proxy(self, answer: BaseCommand) -> None:
        """The final answer is the broker's own, but its client comes through the proxy (PIP-1). Raises LookupFailed.

        Both URLs are the one that the proxy dials: a client picks by whether *it* speaks TLS, which says nothing about
        the way from the proxy to the broker.
        """
        response = answer.lookup_topic_response
        if answer.type != BaseCommand.LOOKUP_RESPONSE or response.response != CommandLookupTopicResponse.Connect:
            return
        url = self._url(response)
        if not url:
            kind = "with" if self._tls else "without"
            raise LookupFailed(
                ServerError.ServiceNotReady,
                "The topic's broker cannot be reached by the proxy",
                f"the broker has no address {kind} TLS: see the scheme of brokers.service_url",
            )
        self._brokers.names.learn_url(url)  # its clients ask for it next, as the target of a relay
        response.broker_service_url = response.broker_service_url_tls = url
        response.proxy_through_service_url = True


def _is_redirect(answer: BaseCommand) -> bool:
    lookup = BaseCommand.LOOKUP_RESPONSE
    return answer.type == lookup and answer.lookup_topic_response.response == CommandLookupTopicResponse.Redirect


def _request(command: BaseCommand, kind: LookupKind) -> Request:
    copy = BaseCommand()
    copy.CopyFrom(command)
    return request_of(copy, kind)[0]


async def _own(broker: Endpoint) -> Target:
    """Where a broker of the operator's own is."""
    return Target(broker, broker.addresses)


class _NextBroker(LookupFailed):
    """This broker cannot be asked; another one perhaps."""


class _Lost(_NextBroker):
    """The connection broke under the request; asked once more, the same broker may answer."""


def _bad_redirect(error: Exception) -> LookupFailed:
    text = "The topic's broker cannot be validated"
    return LookupFailed(ServerError.ServiceNotReady, text, f"a broker redirects to {error}")


def _log(kind: LookupKind, asker: LookupPrincipal, client: str) -> Logger:
    return get_logger().bind(client=client, principal=asker.principal, request=kind.name)
