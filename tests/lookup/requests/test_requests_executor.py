"""lookup.requests.executor: what a client's request becomes, from the first broker asked to the one answer that
goes out."""

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing
from lookup_fakes import (
    CONNECT,
    FAILED,
    REDIRECT,
    Answer,
    FakeAuth,
    FakeBroker,
    Network,
    Script,
    asked,
    connect_to,
    gather,
    lookup,
    lookup_response,
    make_config,
    redirect_to,
)
from prometheus_client import CollectorRegistry

from lookup.brokers.directory import BrokerDirectory
from lookup.connections.broker_connection import BrokerConnection, BrokerConnectionLost
from lookup.connections.pool import BrokerPool
from lookup.connections.principals import LookupPrincipals
from lookup.metrics import BrokerMetrics
from lookup.requests.executor import FATAL_REQUEST_TEXT, REDIRECTS_MAX, LookupExecutor
from lookup.targets.rules import TargetRules
from proto import commands
from proto.addresses import HostPort
from proto.lookup_answers import BrokerAnswer
from proto.lookup_kinds import client_request_id, kind_of, set_response_request_id
from proto.pulsar_pb2 import BaseCommand, ServerError
from proxy.runtime.dns.resolver import Resolver
from proxy.runtime.loop.tasks import seconds
from proxy.runtime.network.broker_link import BrokerLinkFactory
from proxy.runtime.network.dialing import Dialer


class Setup:
    """Lookups under one configuration, over a fake network."""

    def __init__(self, network: Network, nursery: trio.Nursery, **tables: dict[str, Any]) -> None:
        brokers = {"service_url": "pulsar://b0:6650", "allowed_addresses": ["10.0.0.0/8"], **tables.get("brokers", {})}
        tables["brokers"] = brokers
        config = make_config(**tables)
        self.network = network
        dialer = Dialer(config.brokers)
        dialer._tls = None  # the fake network speaks none, whatever the URL says
        self.askers = LookupPrincipals()
        self.timeout_s = seconds(config.limits.lookup_timeout_ms)

        def resolver() -> Resolver:
            return Resolver(nursery, timeout_s=5, ttl_max_s=300)

        self.brokers = BrokerDirectory(config, dialer, resolver(), BrokerMetrics(CollectorRegistry()))
        nursery.start_soon(self.brokers.discovery.run)
        self.pool = BrokerPool(config, dialer, FakeAuth(), nursery)  # type: ignore[arg-type]
        self.lookups = LookupExecutor(
            config, self.pool, TargetRules(config.brokers, resolver(), self.brokers), self.brokers
        )

    def broker(self, number: int, script: Script | None = None) -> FakeBroker:
        return self.network.add(f"b{number}", f"10.0.0.{number + 1}", FakeBroker(script))

    async def answer(self, command: BaseCommand | None = None, principal: str = "alice") -> BaseCommand:
        """What the scheduler gets back, on the slow path."""
        kind = kind_of(command or lookup())
        request_id = client_request_id(command or lookup(), kind)
        deadline = trio.current_time() + self.timeout_s
        asker = self.askers.get_principal(principal)
        answer = await self.lookups.execute_lookup(
            asked(command).to_command(), kind, asker, "192.0.2.7:4000", deadline=deadline
        )
        set_response_request_id(answer, request_id)
        return answer

    async def failure(self, command: BaseCommand | None = None) -> tuple[int, str]:
        response = (await self.answer(command)).lookup_topic_response
        assert response.response == FAILED
        assert response.request_id == 7
        return response.error, response.message


Make = Callable[..., Setup]


@pytest.fixture
def make(network: Network, nursery: trio.Nursery) -> Make:
    return lambda **tables: Setup(network, nursery, **tables)


# ---- the final answer


@pytest.mark.conforms("pip-1.2", "pip-1.5", "pip-1.6", "pip-1.18")
async def test_the_answer_comes_under_the_clients_id_and_through_the_proxy(make: Make) -> None:
    setup = make()
    setup.broker(0, connect_to("pulsar://b5:6650", broker_service_url_tls="pulsar+ssl://b5:6651", authoritative=True))
    answer = await setup.answer(lookup(request_id=2**63 + 5))
    response = answer.lookup_topic_response
    assert answer.type == BaseCommand.LOOKUP_RESPONSE
    assert response.request_id == 2**63 + 5
    assert response.response == CONNECT
    assert response.proxy_through_service_url
    # A client picks by whether it speaks TLS to the proxy; the URL must be the one that the proxy dials.
    assert response.broker_service_url == response.broker_service_url_tls == "pulsar://b5:6650"
    assert response.authoritative
    assert setup.brokers.names.is_known("b5"), "as the target that the client asks for next"


async def test_a_broker_with_tls_only_cannot_be_reached(make: Make) -> None:
    setup = make()
    setup.broker(0, lambda request: lookup_response(request, CONNECT, broker_service_url_tls="pulsar+ssl://b5:6651"))
    code, message = await setup.failure()
    assert code == ServerError.ServiceNotReady
    assert "cannot be reached" in message


async def test_with_tls_the_address_with_tls_counts(make: Make) -> None:
    setup = make(brokers={"service_url": "pulsar+ssl://b0:6650"})
    setup.broker(0, connect_to("pulsar://b5:6650", broker_service_url_tls="pulsar+ssl://b5:6651"))
    response = (await setup.answer()).lookup_topic_response
    assert response.broker_service_url == response.broker_service_url_tls == "pulsar+ssl://b5:6651"


async def test_with_tls_a_broker_without_cannot_be_reached(make: Make) -> None:
    """Security: nothing that was to be encrypted goes out in the clear because a broker says so."""
    setup = make(brokers={"service_url": "pulsar+ssl://b0:6650"})
    setup.broker(0, connect_to("pulsar://b5:6650"))
    code, message = await setup.failure()
    assert code == ServerError.ServiceNotReady
    assert "cannot be reached" in message


async def test_unknown_fields_of_request_and_answer_pass(make: Make) -> None:
    request = BaseCommand.FromString(lookup().SerializeToString())
    property_of_a_newer_client = b"\x42\x05\x0a\x01k\x12\x00"  # field 8, properties
    request.lookup_topic.MergeFromString(property_of_a_newer_client)

    def script(seen: BaseCommand) -> BaseCommand:
        answer = lookup_response(seen, CONNECT, "pulsar://b5:6650")
        answer.lookup_topic_response.MergeFromString(b"\xfa\x01\x03new")  # field 31
        return answer

    setup = make()
    broker = setup.broker(0, script)
    answer = await setup.answer(request)
    assert property_of_a_newer_client in broker.requests[0][1].SerializeToString()
    assert b"\xfa\x01\x03new" in answer.SerializeToString()


async def test_the_principal_goes_with_the_connection(make: Make) -> None:
    setup = make()
    broker = setup.broker(0, connect_to("pulsar://b0:6650"))
    await setup.answer(lookup(original_principal="admin"), principal="alice")
    [(principal, request)] = broker.requests
    assert principal == "alice"
    assert not request.lookup_topic.HasField("original_principal")


# ---- redirects


async def test_a_name_in_a_redirect_is_known_as_a_brokers(make: Make) -> None:
    setup = make()
    setup.broker(0, redirect_to("pulsar://b1:6650", authoritative=True))
    setup.broker(1, connect_to("pulsar://b2:6650"))
    await setup.answer()
    assert [setup.brokers.names.is_known(name) for name in ("b1", "b2", "b3")] == [True, True, False]


@pytest.mark.conforms("pip-1.19")
async def test_a_redirect_is_followed_inside(make: Make) -> None:
    setup = make()
    setup.broker(0, redirect_to("pulsar://b1:6650", authoritative=True))
    second = setup.broker(1, connect_to("pulsar://b1:6650"))
    answer = await setup.answer(lookup("topic", advertised_listener_name="inside"))
    assert answer.lookup_topic_response.response == CONNECT
    seen = second.requests[0][1].lookup_topic
    assert (seen.topic, seen.authoritative, seen.advertised_listener_name) == ("topic", True, "inside")
    assert second.requests[0][0] == "alice", "asked for the same principal"


@pytest.mark.parametrize("authoritative", [True, False])
async def test_the_authoritative_flag_is_each_answers_own(make: Make, authoritative: bool) -> None:
    setup = make()
    setup.broker(0, redirect_to("pulsar://b1:6650", authoritative=not authoritative))
    setup.broker(1, redirect_to("pulsar://b2:6650", authoritative=authoritative))
    last = setup.broker(2, connect_to("pulsar://b2:6650"))
    await setup.answer(lookup())
    assert last.requests[0][1].lookup_topic.authoritative is authoritative


def chain(setup: Setup, redirects: int, last: Script) -> list[FakeBroker]:
    """BrokerDirectory that redirect from one to the next, so many times."""
    brokers = [setup.broker(number, redirect_to(f"pulsar://b{number + 1}:6650")) for number in range(redirects)]
    return [*brokers, setup.broker(redirects, last)]


async def test_as_many_redirects_as_allowed(make: Make) -> None:
    setup = make()
    assert REDIRECTS_MAX == 10
    brokers = chain(setup, REDIRECTS_MAX, connect_to("pulsar://end:6650"))
    assert (await setup.answer()).lookup_topic_response.broker_service_url == "pulsar://end:6650"
    assert [len(broker.requests) for broker in brokers] == [1] * 11


async def test_a_failure_at_the_last_redirect_passes(make: Make) -> None:
    setup = make()
    chain(
        setup,
        REDIRECTS_MAX,
        lambda request: lookup_response(request, FAILED, error=ServerError.TopicNotFound, message="gone"),
    )
    assert await setup.failure() == (ServerError.TopicNotFound, "gone")


@pytest.mark.conforms("pip-1.19")
async def test_a_redirect_beyond_the_maximum_fails_the_lookup(make: Make) -> None:
    setup = make()
    brokers = chain(setup, REDIRECTS_MAX + 1, connect_to("pulsar://end:6650"))
    assert await setup.failure() == (ServerError.ServiceNotReady, "Reached max number of redirections")
    assert brokers[-1].requests == []


async def test_brokers_that_redirect_to_each_other(make: Make) -> None:
    setup = make()
    brokers = [setup.broker(0, redirect_to("pulsar://b1:6650")), setup.broker(1, redirect_to("pulsar://b0:6650"))]
    assert (await setup.failure())[1] == "Reached max number of redirections"
    assert sum(len(broker.requests) for broker in brokers) == REDIRECTS_MAX + 1


@pytest.mark.conforms("pip-1.19")
@pytest.mark.parametrize(
    ("url", "brokers"),
    [
        ("pulsar://b1:22", {}),
        ("pulsar://b1:6650", {"allowed_addresses": []}),
        ("pulsar://b1:6650", {"allowed_addresses": [], "allowed_hosts": ["b2"]}),
        ("pulsar://b1:6650", {"allowed_hosts": ["b0"]}),
        ("pulsar://b1:6650", {"allowed_addresses": ["10.0.0.1"]}),
        ("pulsar://169.254.169.254:6650", {"allowed_addresses": ["10.0.0.0/8"]}),
        ("http://b1:6650", {}),
        ("b1:6650", {}),
        ("", {}),
    ],
)
async def test_a_redirect_to_where_the_rules_do_not_allow(make: Make, url: str, brokers: dict[str, Any]) -> None:
    """Security: a broker (or who can write its metadata) must not lead the proxy elsewhere."""
    setup = make(brokers=brokers)
    setup.broker(0, redirect_to(url))
    other = setup.broker(1, connect_to("pulsar://b1:6650"))
    assert await setup.failure() == (ServerError.ServiceNotReady, "The topic's broker cannot be validated")
    assert other.connects == []
    assert {address for address, _ in setup.network.dialled} == {"10.0.0.1"}


async def test_the_port_in_a_redirect_is_of_the_scheme_that_is_there(make: Make) -> None:
    """A client may mean the other port of a broker; a broker says which one it means."""
    setup = make()
    setup.broker(0, redirect_to("pulsar://b1:6651"))
    setup.broker(1, connect_to("pulsar://b1:6651"))
    await setup.answer()
    assert setup.network.dialled == [("10.0.0.1", 6650), ("10.0.0.2", 6651)]


async def test_with_tls_the_redirect_with_tls_is_followed(make: Make) -> None:
    setup = make(brokers={"service_url": "pulsar+ssl://b0:6650"})
    setup.broker(0, redirect_to("pulsar://b2:6650", broker_service_url_tls="pulsar+ssl://b1:6650"))
    setup.broker(1, connect_to("", broker_service_url_tls="pulsar+ssl://b1:6650"))
    response = (await setup.answer()).lookup_topic_response
    assert response.broker_service_url == "pulsar+ssl://b1:6650"
    assert {address for address, _ in setup.network.dialled} == {"10.0.0.1", "10.0.0.2"}


@pytest.mark.parametrize(
    ("service_url", "redirect"),
    [
        ("pulsar://b0:6650", redirect_to("pulsar+ssl://b1:6650")),
        ("pulsar+ssl://b0:6650", redirect_to("", broker_service_url_tls="pulsar://b1:6650")),
    ],
)
async def test_a_redirect_of_the_other_scheme(make: Make, service_url: str, redirect: Script) -> None:
    setup = make(brokers={"service_url": service_url})
    setup.broker(0, redirect)
    other = setup.broker(1, connect_to("pulsar://b1:6650"))
    assert await setup.failure() == (ServerError.ServiceNotReady, "The topic's broker cannot be validated")
    assert other.connects == []


async def test_a_redirect_to_a_brokers_address_is_dialled_under_the_operators_name(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Security: who shares an address with a broker (behind SNI) is told apart by the name, which a captured broker, or
    who can write its metadata, would choose."""
    setup = make(brokers={"service_url": "pulsar://b0,b1", "allowed_addresses": []})
    for number in range(2):
        setup.broker(number, redirect_to("pulsar://evil:6650"))
    setup.network.names["evil"] = [["10.0.0.2"]]
    names = []
    opened = BrokerLinkFactory.open_link

    async def noted(self: Any, broker: HostPort, addresses: Any, *others: Any) -> Any:
        names.append((str(broker), addresses))
        return await opened(self, broker, addresses, *others)

    monkeypatch.setattr(BrokerLinkFactory, "open_link", noted)
    await setup.failure()
    assert set(names) <= {("b0:6650", ("10.0.0.1",)), ("b1:6650", ("10.0.0.2",))}
    assert ("b1:6650", ("10.0.0.2",)) in names
    assert "evil" in setup.network.resolved


async def test_a_redirect_dials_only_the_addresses_that_were_checked(make: Make) -> None:
    setup = make(brokers={"allowed_addresses": ["10.0.0.0/8"]})
    setup.broker(0, redirect_to("pulsar://b1:6650"))
    setup.broker(1, connect_to("pulsar://b1:6650"))
    setup.network.names["b1"] = [["127.0.0.1", "10.0.0.2"], ["127.0.0.1"]]
    await setup.answer()
    assert setup.network.dialled == [("10.0.0.1", 6650), ("10.0.0.2", 6650)]


async def test_a_redirect_to_an_unknown_host(make: Make) -> None:
    setup = make()
    setup.broker(0, redirect_to("pulsar://nowhere:6650"))
    assert (await setup.failure())[0] == ServerError.ServiceNotReady


async def test_a_redirect_to_a_broker_that_is_down(make: Make) -> None:
    setup = make()
    setup.broker(0, redirect_to("pulsar://10.0.0.99:6650"))
    assert await setup.failure() == (ServerError.ServiceNotReady, "The proxy cannot connect to the broker")


async def test_an_error_instead_of_an_answer_at_a_redirect(make: Make) -> None:
    setup = make()
    setup.broker(0, redirect_to("pulsar://b1:6650"))
    setup.broker(
        1, lambda request: BaseCommand.FromString(commands.error(request.lookup_topic.request_id, 4, "no")[8:])
    )
    answer = await setup.answer()
    assert (answer.type, answer.error.request_id, answer.error.error) == (BaseCommand.ERROR, 7, 4)


# ---- brokers' answers


@pytest.mark.conforms("kip-590.19")
@pytest.mark.parametrize("code", [ServerError.MetadataError, ServerError.AuthorizationError, 14, 25, 99])
async def test_a_brokers_error_passes_with_code_and_text(make: Make, code: int) -> None:
    setup = make()
    setup.broker(0, lambda request: lookup_response(request, FAILED, error=code, message="the broker's own words"))
    assert await setup.failure() == (code, "the broker's own words")


async def test_an_error_command_passes_under_the_clients_id(make: Make) -> None:
    setup = make()
    setup.broker(
        0, lambda request: BaseCommand.FromString(commands.error(request.lookup_topic.request_id, 4, "no")[8:])
    )
    answer = await setup.answer()
    assert (answer.type, answer.error.request_id, answer.error.message) == (BaseCommand.ERROR, 7, "no")


async def test_a_broker_that_refuses_the_connection_is_quoted(make: Make) -> None:
    setup = make()
    setup.broker(0).greeting = commands.error(commands.NO_REQUEST_ID, ServerError.AuthorizationError, "Invalid roles.")
    assert await setup.failure() == (ServerError.AuthorizationError, "Invalid roles.")


async def test_the_proxys_own_bad_credentials_are_not_the_clients(make: Make) -> None:
    setup = make()
    setup.broker(0).greeting = commands.error(commands.NO_REQUEST_ID, ServerError.AuthenticationError, "bad token")
    code, message = await setup.failure()
    assert code == ServerError.ServiceNotReady
    assert "bad token" not in message


def untouched(request: BaseCommand, answer: BaseCommand) -> tuple[BaseCommand, Script]:
    """A request, and a script that answers it with our id in it."""
    kind = kind_of(request)

    def script(seen: BaseCommand) -> Answer:
        copy = BaseCommand()
        copy.CopyFrom(answer)
        field = "error" if copy.type == BaseCommand.ERROR else kind.response_field
        getattr(copy, field).request_id = getattr(seen, kind.request_field).request_id
        return copy

    return request, script


_METADATA = BaseCommand(
    type=BaseCommand.PARTITIONED_METADATA, partition_metadata={"topic": "t", "request_id": 7, "original_principal": "x"}
)
_TOPICS = BaseCommand(
    type=BaseCommand.GET_TOPICS_OF_NAMESPACE, get_topics_of_namespace={"namespace": "t/n", "request_id": 7}
)
_SCHEMA = BaseCommand(type=BaseCommand.GET_SCHEMA, get_schema={"topic": "t", "request_id": 7})


@pytest.mark.conforms("pip-1.18")
@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (
            _METADATA,
            BaseCommand(
                type=BaseCommand.PARTITIONED_METADATA_RESPONSE,
                partition_metadata_response={"partitions": 5, "request_id": 7, "response": 0},
            ),
        ),
        (
            _METADATA,
            BaseCommand(
                type=BaseCommand.PARTITIONED_METADATA_RESPONSE,
                partition_metadata_response={"request_id": 7, "response": 1, "error": 4, "message": "m"},
            ),
        ),
        (
            _TOPICS,
            BaseCommand(
                type=BaseCommand.GET_TOPICS_OF_NAMESPACE_RESPONSE, get_topics_of_namespace_response={"request_id": 7}
            ),
        ),
        (_TOPICS, BaseCommand(type=BaseCommand.ERROR, error={"request_id": 7, "error": 4, "message": "m"})),
        (_SCHEMA, BaseCommand(type=BaseCommand.GET_SCHEMA_RESPONSE, get_schema_response={"request_id": 7})),
        (
            _SCHEMA,
            BaseCommand(
                type=BaseCommand.GET_SCHEMA_RESPONSE,
                get_schema_response={"request_id": 7, "error_code": 11, "error_message": "m"},
            ),
        ),
    ],
)
async def test_the_other_requests_pass_through(make: Make, request_: BaseCommand, answer: BaseCommand) -> None:
    answer.MergeFromString(b"\xfa\x3f\x03new")  # a field newer than this proxy
    request, script = untouched(request_, answer)
    setup = make()
    broker = setup.broker(0, script)
    assert (await setup.answer(request)).SerializeToString(deterministic=True) == answer.SerializeToString(
        deterministic=True
    )
    seen = getattr(broker.requests[0][1], kind_of(request).request_field)
    assert "original_principal" not in {field.name for field, _ in seen.ListFields()}


# ---- brokers that fail


async def test_the_second_broker_is_asked_where_the_first_is_down(make: Make) -> None:
    setup = make(brokers={"service_url": "pulsar://b0,b1"})
    setup.network.names["b0"] = [["10.0.0.1"]]
    second = setup.broker(1, connect_to("pulsar://b1:6650"))
    for _ in range(2):
        assert (await setup.answer()).lookup_topic_response.response == CONNECT
    assert len(second.requests) == 2


async def test_brokers_take_turns(make: Make) -> None:
    setup = make(brokers={"service_url": "pulsar://b0,b1"})
    brokers = [setup.broker(number, connect_to("pulsar://b0:6650")) for number in range(2)]
    for _ in range(4):
        await setup.answer()
    assert [len(broker.requests) for broker in brokers] == [2, 2]


async def test_names_that_others_chose_do_not_share_a_resolver_with_the_operators(make: Make) -> None:
    """Security: names that take long must not keep configured brokers unresolved."""
    setup = make()
    setup.broker(0, redirect_to("pulsar://b1:6650"))
    setup.broker(1, connect_to("pulsar://b1:6650"))
    await setup.answer()
    assert not setup.network.resolvers["b0"] & setup.network.resolvers["b1"]


async def test_a_name_that_does_not_resolve_is_passed_over(make: Make) -> None:
    setup = make(brokers={"service_url": "pulsar://nowhere,b1"})
    setup.broker(1, connect_to("pulsar://b1:6650"))
    assert (await setup.answer()).lookup_topic_response.response == CONNECT


async def test_a_broker_that_breaks_off_its_handshake_is_passed_over(make: Make) -> None:
    setup = make(brokers={"service_url": "pulsar://b0,b1"})
    setup.broker(0).greeting = b"\xff\xff\xff\xff"
    setup.broker(1, connect_to("pulsar://b1:6650"))
    assert (await setup.answer()).lookup_topic_response.response == CONNECT


async def test_a_broker_that_never_greets_is_passed_over(make: Make, autojump_clock: trio.testing.MockClock) -> None:
    setup = make(brokers={"service_url": "pulsar://b0,b1", "handshake_timeout_ms": 3000})
    setup.broker(0).greeting = None
    setup.broker(1, connect_to("pulsar://b1:6650"))
    assert (await setup.answer()).lookup_topic_response.response == CONNECT


async def test_many_lookups_at_once_pass_over_a_silent_broker(
    make: Make, autojump_clock: trio.testing.MockClock
) -> None:
    setup = make(brokers={"service_url": "pulsar://b0,b1", "connect_timeout_ms": 5000})
    setup.network.names["b0"] = [["10.0.0.1"]]
    setup.network.silent.add("10.0.0.1")
    setup.broker(1, connect_to("pulsar://b1:6650"))
    answers = await gather(*[setup.answer] * 20)
    assert {answer.lookup_topic_response.response for answer in answers} == {CONNECT}


async def test_all_brokers_down(make: Make) -> None:
    setup = make(brokers={"service_url": "pulsar://10.0.0.8,nowhere"})
    assert await setup.failure() == (ServerError.ServiceNotReady, "The proxy cannot connect to the broker")


async def test_a_connection_lost_under_a_lookup_is_replaced_once(make: Make) -> None:
    setup = make()
    broker = setup.broker(0, connect_to("pulsar://b0:6650"))
    broker.hang_up_after_requests = 1
    assert (await setup.answer()).lookup_topic_response.response == CONNECT
    assert len(broker.requests) == 2
    assert len(broker.connects) == 2


async def test_a_broker_that_hangs_up_leaves_the_lookup_to_another(make: Make) -> None:
    setup = make(brokers={"service_url": "pulsar://b0,b1"})
    first = setup.broker(0)
    first.hang_up_after_requests = 100
    setup.broker(1, connect_to("pulsar://b1:6650"))
    for _ in range(2):
        assert (await setup.answer()).lookup_topic_response.response == CONNECT
    assert len(first.requests) == 1


async def test_a_request_upon_which_two_brokers_hang_up_is_asked_no_more(make: Make) -> None:
    """Security: a connection may have been lost for a reason that is over, so there is a second one, for it alone."""
    setup = make(brokers={"service_url": "pulsar://b0,b1,b2"})
    brokers = [setup.broker(number, connect_to("pulsar://b1:6650")) for number in range(3)]
    for broker in brokers:
        broker.hang_up_after_requests = 1
    assert await setup.failure() == (ServerError.ServiceNotReady, FATAL_REQUEST_TEXT)
    assert sorted(len(broker.requests) for broker in brokers) == [0, 1, 1]


async def test_a_redirects_broker_that_hangs_up_is_asked_once_more(make: Make) -> None:
    """No other can answer."""
    setup = make()
    setup.broker(0, redirect_to("pulsar://b1:6650"))
    second = setup.broker(1, connect_to("pulsar://b1:6650"))
    second.hang_up_after_requests = 1
    assert (await setup.answer()).lookup_topic_response.response == CONNECT
    second.hang_up_after_requests = 100
    asked = len(second.requests)
    assert (await setup.failure())[0] == ServerError.ServiceNotReady
    assert len(second.requests) == asked + 2


async def test_a_broker_that_always_hangs_up_and_no_other(make: Make) -> None:
    setup = make()
    setup.broker(0).hang_up_after_requests = 100
    assert await setup.failure() == (ServerError.ServiceNotReady, FATAL_REQUEST_TEXT)


async def test_the_deadline(make: Make, autojump_clock: trio.testing.MockClock) -> None:
    setup = make(limits={"lookup_timeout_ms": 2500})
    broker = setup.broker(0)
    started = trio.current_time()
    assert await setup.failure() == (ServerError.ServiceNotReady, "The broker did not answer in time")
    assert trio.current_time() - started == pytest.approx(2.5)
    assert len(broker.requests) == 1
    assert broker.open == 1, "others use the connection still"


async def test_the_deadline_holds_for_all_redirects_together(
    make: Make, autojump_clock: trio.testing.MockClock
) -> None:
    setup = make(limits={"lookup_timeout_ms": 2500})
    setup.network.dial_delay_s = 1.0
    chain(setup, 5, connect_to("pulsar://end:6650"))
    assert (await setup.failure())[1] == "The broker did not answer in time"
    assert trio.current_time() == pytest.approx(2.5)


async def test_pool_full_is_too_many_requests(make: Make, nursery: trio.Nursery) -> None:
    setup = make(brokers={"pooled_connections_max": 1})
    setup.broker(0)
    nursery.start_soon(setup.answer, lookup(), "bob")
    await trio.testing.wait_all_tasks_blocked()
    answer = await setup.answer(principal="alice")
    assert answer.lookup_topic_response.error == ServerError.TooManyRequests


@pytest.mark.parametrize("request_", [_METADATA, _TOPICS, _SCHEMA])
async def test_failures_have_the_requests_own_form(make: Make, request_: BaseCommand) -> None:
    setup = make(brokers={"service_url": "pulsar://10.0.0.8"})
    answer = await setup.answer(request_)
    if request_.type == BaseCommand.PARTITIONED_METADATA:
        body = answer.partition_metadata_response
        assert (body.request_id, body.response, body.error) == (7, 1, ServerError.ServiceNotReady)
    elif request_.type == BaseCommand.GET_SCHEMA:
        schema = answer.get_schema_response
        assert (schema.request_id, schema.error_code) == (7, ServerError.ServiceNotReady)
    else:
        assert (answer.error.request_id, answer.error.error) == (7, ServerError.ServiceNotReady)


async def test_a_redirect_with_failure_code_is_no_redirect(make: Make) -> None:
    setup = make()
    setup.broker(0, lambda request: lookup_response(request, FAILED, "pulsar://b1:6650", error=1, message="m"))
    other = setup.broker(1)
    assert await setup.failure() == (1, "m")
    assert other.connects == []
    assert REDIRECT == 0, "an answer without the field is a redirect, to nowhere, and so an error"


# ---- the short way


class Short:
    """One request asked the short way."""

    def __init__(self, setup: Setup, command: BaseCommand | None = None) -> None:
        self.heard: list[BaseCommand | None] = []
        self.brokers: list[str] = []
        self._lookups = setup.lookups
        self.proxy_id = b""
        self.connection = setup.lookups.send_on_open_connection(
            asked(command), setup.askers.get_principal("alice"), self, trio.current_time()
        )

    def on_broker_answer(self, answer: BrokerAnswer | None) -> None:
        assert self.connection is not None
        self._lookups.record_fast_path_outcome(self.connection, answer)
        self.heard.append(None if answer is None else answer.command)
        self.brokers.append(self.connection.broker.host)


async def test_where_no_connection_is_open_there_is_no_short_way(make: Make) -> None:
    setup = make()
    broker = setup.broker(0, connect_to("pulsar://b0:6650"))
    short = Short(setup)
    assert short.connection is None
    await trio.testing.wait_all_tasks_blocked()
    assert Short(setup).connection is None, "although the broker is known now"
    assert (short.heard, broker.connects) == ([], [])


async def test_over_an_open_connection_the_brokers_answer_comes_as_it_is(make: Make) -> None:
    setup = make()
    broker = setup.broker(0, connect_to("pulsar://b0:6650"))
    await setup.answer()
    short = Short(setup)
    assert short.connection is not None
    assert short.heard == []
    await trio.testing.wait_all_tasks_blocked()
    [answer] = short.heard
    assert answer is not None
    assert not answer.lookup_topic_response.proxy_through_service_url, "not finished yet"
    assert len(broker.connects) == 1


async def test_a_connection_that_is_lost_is_told_as_no_answer(make: Make) -> None:
    setup = make()
    broker = setup.broker(0, connect_to("pulsar://b0:6650"))
    await setup.answer()
    broker.hang_up_after_requests = 1
    short = Short(setup)
    await trio.testing.wait_all_tasks_blocked()
    assert (short.heard, short.brokers) == ([None], ["b0"])
    assert Short(setup).connection is None


async def test_a_connection_that_takes_no_more_is_no_way(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make()
    setup.broker(0, connect_to("pulsar://b0:6650"))
    await setup.answer()

    def full(*_: object) -> int:
        raise BrokerConnectionLost("it does not take requests")

    monkeypatch.setattr(BrokerConnection, "send_request", full)
    assert Short(setup).connection is None


async def test_the_answer_to_an_abandoned_request_is_dropped(make: Make) -> None:
    setup = make()
    setup.broker(0, connect_to("pulsar://b0:6650"))
    await setup.answer()
    short = Short(setup)
    assert short.connection is not None
    setup.lookups.abandon_request(short.connection, short)
    await trio.testing.wait_all_tasks_blocked()
    assert short.heard == []


@pytest.mark.parametrize(
    ("answer", "final"),
    [
        (lookup_response(lookup(), CONNECT, "pulsar://b0:6650"), True),
        (lookup_response(lookup(), FAILED, error=4), True),
        (lookup_response(lookup(), REDIRECT, "pulsar://b1:6650"), False),
        (BaseCommand(type=BaseCommand.ERROR, error={"request_id": 7, "error": 4, "message": "no"}), True),
    ],
)
def test_only_a_redirect_is_not_final(answer: BaseCommand, final: bool) -> None:
    assert LookupExecutor.is_final_answer(answer, kind_of(lookup())) is final


@pytest.mark.parametrize("command", [_METADATA, _TOPICS, _SCHEMA])
def test_of_other_requests_every_answer_is_final(command: BaseCommand) -> None:
    assert LookupExecutor.is_final_answer(BaseCommand(type=kind_of(command).response_type), kind_of(command))


async def test_a_success_is_made_ready_once_and_the_brokers_word_stays_as_it_was(make: Make) -> None:
    lookups = make().lookups
    answer = BrokerAnswer(lookup_response(lookup(), CONNECT, "pulsar://b5:6650"))
    kind, asker = kind_of(lookup()), LookupPrincipals().get_principal("alice")
    ready = lookups.prepare_answer(answer, kind, asker, "192.0.2.7:4000")
    assert ready is not None
    assert answer.client_answer is ready
    assert answer.command == lookup_response(lookup(), CONNECT, "pulsar://b5:6650")
    body = BaseCommand.FromString(ready.frame_for(b"\x09")[8:]).lookup_topic_response
    assert (body.request_id, body.proxy_through_service_url) == (9, True)
    assert body.broker_service_url == body.broker_service_url_tls == "pulsar://b5:6650"


@pytest.mark.parametrize(
    ("answer", "request_", "final"),
    [
        (lookup_response(lookup(), FAILED, error=4), lookup(), True),
        (lookup_response(lookup(), CONNECT), lookup(), True),  # without a URL: the proxy's own error
        (BaseCommand(type=BaseCommand.ERROR, error={"request_id": 7, "error": 4, "message": "no"}), lookup(), True),
        (lookup_response(lookup(), REDIRECT, "pulsar://b1:6650"), lookup(), False),
        (lookup_response(lookup(), REDIRECT, "pulsar://b1:6650"), _METADATA, True),
    ],
)
async def test_errors_and_redirects_are_not_cached_as_client_answers(
    make: Make, answer: BaseCommand, request_: BaseCommand, final: bool
) -> None:
    broker_answer = BrokerAnswer(answer)
    ready = make().lookups.prepare_answer(
        broker_answer, kind_of(request_), LookupPrincipals().get_principal("alice"), "192.0.2.7:4000"
    )
    assert (ready is not None) is final
    assert broker_answer.client_answer is None


async def test_a_redirect_from_the_fast_path_is_followed_without_asking_again(make: Make) -> None:
    setup = make()
    first = setup.broker(0, redirect_to("pulsar://b1:6650", authoritative=True))
    second = setup.broker(1, connect_to("pulsar://b1:6650"))
    command = lookup("topic", request_id=0, advertised_listener_name="inside")
    answer = await setup.lookups.execute_lookup(
        command,
        kind_of(command),
        setup.askers.get_principal("alice"),
        "192.0.2.7:4000",
        lookup_response(command, REDIRECT, "pulsar://b1:6650", authoritative=True),
        deadline=trio.current_time() + 10,
    )
    assert answer.lookup_topic_response.response == CONNECT
    assert first.requests == []
    seen = second.requests[0][1].lookup_topic
    assert (seen.topic, seen.authoritative, seen.advertised_listener_name) == ("topic", True, "inside")
    assert not command.lookup_topic.authoritative, "the question itself stays as it was"


async def test_no_time_is_left_for_the_long_way(make: Make) -> None:
    setup = make()
    setup.broker(0, connect_to("pulsar://b0:6650"))
    command = lookup()
    deadline = trio.current_time() - 1
    answer = await setup.lookups.execute_lookup(
        command, kind_of(command), setup.askers.get_principal("alice"), "192.0.2.7:4000", deadline=deadline
    )
    assert answer.lookup_topic_response.error == ServerError.ServiceNotReady


async def test_a_broker_that_freezes_under_a_lookup_leaves_time_for_another(
    make: Make, autojump_clock: trio.testing.MockClock
) -> None:
    setup = make(brokers={"service_url": "pulsar://b0,b1"}, limits={"lookup_timeout_ms": 10_000})
    brokers = [setup.broker(number, connect_to("pulsar://b9:6650")) for number in range(2)]
    for _ in range(4):
        await setup.answer()
    brokers[0].freeze()
    started = trio.current_time()
    answers = await gather(*[setup.answer] * 4)
    assert {answer.lookup_topic_response.response for answer in answers} == {CONNECT}
    assert trio.current_time() - started < 10
