"""Execution of a client's lookup: ask a broker, follow its redirects, return only the final answer.

PIP-1: "If the downstream broker replies with a redirection, the proxy will have to handle that internally and only
reply to client once it has the final response."
"""

import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from lookup.brokers.directory import BrokerDirectory
from lookup.brokers.discovery import Endpoint
from lookup.connections.broker_connection import AnswerReceiver, BrokerConnection, BrokerConnectionLost
from lookup.connections.losses import LossHistory
from lookup.connections.pool import BrokerPool
from lookup.connections.principals import LookupPrincipal
from lookup.errors import LookupWorkerError
from lookup.targets.rules import LocateBroker, Target, TargetRules
from proto.addresses import AddressInvalid, HostPort, parse_service_url, speaks_tls
from proto.commands import error_name
from proto.lookup_answers import BrokerAnswer, ClientAnswer
from proto.lookup_kinds import LookupKind, error_of, failure_answer, subject_of
from proto.lookup_requests import LookupRequest, request_from_command
from proto.pulsar_pb2 import BaseCommand, CommandLookupTopicResponse, ServerError
from proxy.common.logs import Logger, get_logger
from proxy.config.types import Config
from proxy.runtime.network.broker_link import NOT_CONNECTED, REASONS_TO_TRY_ANOTHER_BROKER, BrokerLinkFailed
from proxy.runtime.network.dial_rules import TargetDenied

REDIRECTS_MAX = 10

TIMEOUT_TEXT = "The broker did not answer in time"
FATAL_REQUEST_TEXT = "The broker closes the connection upon this request"

TRIES_MAX = 20
"""How often one request is asked: after each lost connection it is one of half as many suspects, of a million at first.
"""

_AskBroker = Callable[[HostPort, LocateBroker, BaseCommand], Awaitable[BaseCommand]]
"""LookupExecutor._ask_broker for one request."""


class LookupFailed(LookupWorkerError):
    """A lookup that ends with an error of the proxy's own: Pulsar's code, a text for the client, ``detail`` for the
    log.
    """

    def __init__(self, code: int, message: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.message = message


class LookupExecutor:
    """Executor of the lookups of one lookup worker, under one configuration."""

    def __init__(self, config: Config, pool: BrokerPool, rules: TargetRules, brokers: BrokerDirectory) -> None:
        self._config = config
        self._pool = pool
        self._rules = rules
        self._brokers = brokers
        self._tls = speaks_tls(config.brokers.service_url)
        self._unconnected: dict[LookupPrincipal, Endpoint] = {}

    # ---- the fast path

    def send_on_open_connection(
        self, request: LookupRequest, principal: LookupPrincipal, receiver: AnswerReceiver, now: float
    ) -> BrokerConnection | None:
        """Send a request over an open connection, and return that connection; return None where there is none.

        ``receiver`` gets the broker's answer, or None where the connection was lost; its owner reports that to
        ``record_fast_path_outcome``.
        """
        broker = self._brokers.next_broker()
        if broker is None:
            return None
        connection = self._pool.get_open_connection(broker, principal, now)
        if connection is None:
            self._unconnected[principal] = broker
            return None
        try:
            connection.send_request(request, receiver, now)
        except BrokerConnectionLost:
            return None
        return connection

    def record_fast_path_outcome(self, connection: BrokerConnection, answer: BrokerAnswer | None) -> None:
        """Record what a fast-path request says of its broker's health: an answer, or a loss without suspects."""
        if answer is not None:
            self._brokers.record_answer(connection.broker)
        elif connection.loss is None:
            self._brokers.record_failure(connection.broker, "lost", connection)

    def abandon_request(self, connection: BrokerConnection, receiver: AnswerReceiver) -> None:
        """Give up a request whose answer did not come in time; it counts against the broker."""
        self._brokers.record_failure(connection.broker, "timeout", connection)
        connection.forget_request(receiver)

    def prepare_answer(
        self, answer: BrokerAnswer, kind: LookupKind, principal: LookupPrincipal, client: str
    ) -> ClientAnswer | None:
        """Return a broker's answer as its client must see it, or None where it is not final.

        A success is prepared once and kept in ``answer`` for the next client.
        """
        if not self.is_final_answer(answer.command, kind):
            return None
        command = BaseCommand()
        command.CopyFrom(answer.command)
        ready = ClientAnswer(self.finish_answer(command, kind, principal, client))
        if ready.error is None and not _is_redirect(answer.command):
            answer.client_answer = ready
        return ready

    @staticmethod
    def is_final_answer(answer: BaseCommand, kind: LookupKind) -> bool:
        """Return True if no other broker has to be asked."""
        return kind.response_type != BaseCommand.LOOKUP_RESPONSE or not _is_redirect(answer)

    def finish_answer(
        self, answer: BaseCommand, kind: LookupKind, principal: LookupPrincipal, client: str
    ) -> BaseCommand:
        """Return a final answer as its client must see it; it may become an error."""
        try:
            self._rewrite_for_proxy(answer)
        except LookupFailed as failed:
            return self._failure_answer(failed, kind, principal, client, "")
        error_code = error_of(answer)
        if error_code is not None:
            _bound_logger(kind, principal, client).info(
                "a broker answered a lookup with an error", error=error_name(error_code)
            )
        return answer

    def timeout_answer(
        self, command: BaseCommand, kind: LookupKind, principal: LookupPrincipal, client: str
    ) -> BaseCommand:
        """Return the answer for a lookup that no broker answered in time."""
        timeout_ms = self._config.limits.lookup_timeout_ms
        failed = LookupFailed(ServerError.ServiceNotReady, TIMEOUT_TEXT, f"no answer within {timeout_ms} ms")
        return self._failure_answer(failed, kind, principal, client, subject_of(command, kind))

    @staticmethod
    def _failure_answer(
        failed: LookupFailed, kind: LookupKind, principal: LookupPrincipal, client: str, resource: str
    ) -> BaseCommand:
        _bound_logger(kind, principal, client).warning("a lookup failed", resource=resource, reason=str(failed))
        return failure_answer(kind, 0, failed.code, failed.message)

    # ---- the slow path

    async def execute_lookup(
        self,
        command: BaseCommand,
        kind: LookupKind,
        principal: LookupPrincipal,
        client: str,
        answer: BaseCommand | None = None,
        *,
        deadline: float,
        losses: LossHistory | None = None,
    ) -> BaseCommand:
        """Return the final answer for the client; an error is an answer too.

        ``answer``: a broker's answer so far, None where no broker has been asked. ``losses``: the connections that were
        lost under the request before.
        """
        losses = losses or LossHistory()
        try:
            with trio.fail_at(deadline):
                ask = partial(self._ask_broker, kind, principal, losses)
                if answer is None:
                    answer = await self._ask_configured_brokers(ask, command, principal, losses)
                answer = await self._follow_redirects(ask, answer, command, kind)
        except trio.TooSlowError:
            return self.timeout_answer(command, kind, principal, client)
        except LookupFailed as failed:
            return self._failure_answer(failed, kind, principal, client, subject_of(command, kind))
        finally:
            for loss in losses.settle_losses():
                self._brokers.record_failure(loss.broker, "lost", loss)
            if losses.is_to_blame:
                self._brokers.count_fatal_request(kind.name)
        return self.finish_answer(answer, kind, principal, client)

    async def _follow_redirects(
        self, ask: _AskBroker, answer: BaseCommand, command: BaseCommand, kind: LookupKind
    ) -> BaseCommand:
        """Follow redirects to the final answer; raises LookupFailed."""
        request = BaseCommand()
        request.CopyFrom(command)
        for _ in range(REDIRECTS_MAX):
            if self.is_final_answer(answer, kind):
                return answer
            response = answer.lookup_topic_response
            request.lookup_topic.authoritative = response.authoritative
            broker = self._parse_redirect(self._broker_url(response, tls=self._tls))
            checked = partial(self._locate_redirect, broker)
            named = self._brokers.broker_named(broker) or broker
            answer = await _ask_named_broker(ask, named, checked, request)
        if self.is_final_answer(answer, kind):
            return answer
        raise LookupFailed(
            ServerError.ServiceNotReady,
            "Reached max number of redirections",
            f"more than {REDIRECTS_MAX} redirects for {command.lookup_topic.topic}",
        )

    async def _ask_configured_brokers(
        self, ask: _AskBroker, command: BaseCommand, principal: LookupPrincipal, losses: LossHistory
    ) -> BaseCommand:
        """Ask the configured brokers in order, until one can be asked. Raises LookupFailed.

        First comes the one to which no connection was open, so that there will be one; last those whose connection
        broke under the request, since they may hang.
        """
        lost = losses.last_lost_at
        await self._brokers.discovery.wait_until_any_found()
        failed = LookupFailed(ServerError.ServiceNotReady, NOT_CONNECTED, self._brokers.none_known_reason)
        brokers = sorted(
            self._brokers.brokers_in_order(self._unconnected.pop(principal, None)), key=lambda broker: broker is lost
        )
        waiting = deque(brokers)
        tries_left = TRIES_MAX
        while waiting and tries_left:
            tries_left -= 1
            broker = waiting.popleft()
            try:
                return await ask(broker, partial(_locate_configured, broker), command)
            except _ConnectionLost as error:
                failed = error
                waiting.append(broker)
            except _NextBroker as error:
                failed = error
        raise LookupFailed(failed.code, failed.message, str(failed))

    async def _ask_broker(  # noqa: PLR0917 -- the request, and what belongs to it
        self,
        kind: LookupKind,
        principal: LookupPrincipal,
        losses: LossHistory,
        broker: HostPort,
        locate: LocateBroker,
        command: BaseCommand,
    ) -> BaseCommand:
        """Ask one broker.

        Raises LookupFailed; _ConnectionLost where it helps to ask again; _NextBroker where another broker may help.
        """
        try:
            if losses.suspect_group is None:
                connection = await self._pool.get_connection(broker, locate, principal)
            else:
                connection = await self._pool.get_isolated_connection(broker, locate, principal, losses.suspect_group)
        except BrokerConnectionLost as error:
            raise _ConnectionLost(ServerError.ServiceNotReady, NOT_CONNECTED, str(error)) from None
        except BrokerLinkFailed as error:
            if error.reason not in REASONS_TO_TRY_ANOTHER_BROKER:
                raise LookupFailed(error.code, error.message, str(error)) from None
            self._brokers.record_failure(broker, error.reason, error)
            raise _NextBroker(error.code, error.message, str(error)) from None
        try:
            answer = await connection.request_answer(_request_from(command, kind))
        except BrokerConnectionLost as error:
            if error.loss is None:
                self._brokers.record_failure(broker, "lost", connection)
            if losses.record_loss(broker, error.loss):
                detail = f"{broker} closed a connection on which nothing else was asked"
                raise LookupFailed(ServerError.ServiceNotReady, FATAL_REQUEST_TEXT, detail) from None
            raise _ConnectionLost(ServerError.ServiceNotReady, NOT_CONNECTED, str(error)) from None
        except trio.Cancelled:
            self._brokers.record_failure(broker, "timeout", connection)
            raise
        self._brokers.record_answer(broker)
        return answer

    async def _locate_redirect(self, broker: HostPort) -> Target:
        """Return where a broker is that another broker named, if the rules allow it. Raises LookupFailed."""
        try:
            return await self._rules.check_broker(broker)
        except TargetDenied as error:
            raise _invalid_redirect(error) from None

    def _parse_redirect(self, url: str) -> HostPort:
        if speaks_tls(url) is not self._tls:
            raise _invalid_redirect(AddressInvalid(f"{url[:300]!r}: see the scheme of brokers.service_url"))
        try:
            broker = parse_service_url(url)[0]
            self._rules.check_port(broker)
        except (AddressInvalid, TargetDenied) as error:
            raise _invalid_redirect(error) from None
        self._brokers.names.learn_name(broker.host)
        return broker

    @staticmethod
    def _broker_url(response: CommandLookupTopicResponse, *, tls: bool) -> str:
        """Return one of a broker's two URLs; the proxy dials that of ``brokers.service_url``'s kind."""
        return str(response.broker_service_url_tls if tls else response.broker_service_url)

    def _rewrite_for_proxy(self, answer: BaseCommand) -> None:
        """Rewrite a final answer so that the client comes through the proxy (PIP-1). Raises LookupFailed.

        Both URLs become the one that the proxy dials: a client picks by whether *it* speaks TLS, which says nothing
        about the way from the proxy to the broker.
        """
        response = answer.lookup_topic_response
        if answer.type != BaseCommand.LOOKUP_RESPONSE or response.response != CommandLookupTopicResponse.Connect:
            return
        url = self._broker_url(response, tls=self._tls)
        if not url:
            kind = "with" if self._tls else "without"
            raise LookupFailed(
                ServerError.ServiceNotReady,
                "The topic's broker cannot be reached by the proxy",
                f"the broker has no address {kind} TLS: see the scheme of brokers.service_url",
            )
        self._brokers.names.learn_url(url)  # its clients ask for it next, as the target of a relay
        self._brokers.port_pairs.learn_urls(url, self._broker_url(response, tls=not self._tls))
        response.broker_service_url = response.broker_service_url_tls = url
        response.proxy_through_service_url = True


async def _ask_named_broker(
    ask: _AskBroker, broker: HostPort, locate: LocateBroker, command: BaseCommand
) -> BaseCommand:
    """Ask the one broker that can answer. A lookup may be sent twice, so a connection that broke is replaced."""
    for _ in range(TRIES_MAX - 1):
        with contextlib.suppress(_ConnectionLost):
            return await ask(broker, locate, command)
    return await ask(broker, locate, command)


def _is_redirect(answer: BaseCommand) -> bool:
    lookup = BaseCommand.LOOKUP_RESPONSE
    return answer.type == lookup and answer.lookup_topic_response.response == CommandLookupTopicResponse.Redirect


def _request_from(command: BaseCommand, kind: LookupKind) -> LookupRequest:
    copy = BaseCommand()
    copy.CopyFrom(command)
    return request_from_command(copy, kind)[0]


async def _locate_configured(broker: Endpoint) -> Target:
    """Return where a configured broker is."""
    return Target(broker, broker.addresses)


class _NextBroker(LookupFailed):
    """Failure of this broker; another one may answer."""


class _ConnectionLost(_NextBroker):
    """Loss of the connection under the request; the same broker may answer a second attempt."""


def _invalid_redirect(error: Exception) -> LookupFailed:
    text = "The topic's broker cannot be validated"
    return LookupFailed(ServerError.ServiceNotReady, text, f"a broker redirects to {error}")


def _bound_logger(kind: LookupKind, principal: LookupPrincipal, client: str) -> Logger:
    return get_logger().bind(client=client, principal=principal.name, request=kind.name)
