"""The four requests of lookup mode: what goes to the broker, and what comes back to the client."""

import pytest
from pulsar_bytes import command, decoded, decoded_command, field, fields, varint

from proto.commands import CommandCorrupt, parse_command
from proto.lookup_kinds import (
    KINDS,
    client_request_id,
    error_of,
    failure_answer,
    kind_of,
    response_request_id,
    set_response_request_id,
    shorten_answer,
    subject_of,
)
from proto.lookup_requests import LookupRequest, request_from_command
from proto.pulsar_pb2 import BaseCommand

LOOKUP, METADATA, TOPICS, SCHEMA = 23, 21, 32, 34
ERROR = 14
OURS, CLIENTS = 2**28 + 4711, 7
OUR_NUMBER = varint(OURS)

PROPERTY = fields((1, "key"), (2, "value"))

# Type → field of the request id; the fields that are a client's word on identity; and all that must pass.
REQUESTS: dict[int, tuple[int, list[int], list[tuple[int, int | bytes | str]]]] = {
    LOOKUP: (
        2,
        [4, 5, 6],
        [(1, "persistent://t/n/topic"), (3, 1), (7, "listener"), (8, PROPERTY), (8, PROPERTY), (20, "new")],
    ),
    METADATA: (2, [3, 4, 5], [(1, "persistent://t/n/topic"), (6, 0), (20, "new")]),
    TOPICS: (1, [], [(2, "t/n"), (3, 2), (4, "t/n/.*"), (5, "hash"), (20, "new")]),
    SCHEMA: (1, [], [(2, "persistent://t/n/topic"), (3, b"\x00\x01"), (20, "new")]),
}
ANSWERS = {LOOKUP: 24, METADATA: 22, TOPICS: 33, SCHEMA: 35}
ANSWER_ID_FIELD = {LOOKUP: 4, METADATA: 2, TOPICS: 1, SCHEMA: 1}
NAMES = {
    LOOKUP: "lookup",
    METADATA: "partitions_metadata",
    TOPICS: "get_topics_of_namespace",
    SCHEMA: "get_schema",
}


def request(kind: int, *, identities: bool = True) -> bytes:
    id_field, identity_fields, rest = REQUESTS[kind]
    chosen = [(number, "client's choice") for number in identity_fields] if identities else []
    return command(kind, fields((id_field, CLIENTS), *chosen, *rest))


def parsed(data: bytes) -> BaseCommand:
    return parse_command(data)


def sent_on(original: BaseCommand, number: bytes = OUR_NUMBER) -> bytes:
    """A request on its way to a broker."""
    frame = asked(original).frame_with_id(number)
    return frame[8:]


def asked(original: BaseCommand) -> LookupRequest:
    copy = BaseCommand()
    copy.CopyFrom(original)
    return request_from_command(copy, kind_of(copy))[0]


@pytest.mark.conforms("kip-590.2")
def test_the_four_kinds_and_no_other() -> None:
    assert {kind: described.name for kind, described in KINDS.items()} == NAMES


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("identities", [True, False])
def test_a_request_goes_on_with_our_id_and_without_the_clients_identities(kind: int, identities: bool) -> None:
    id_field, _, rest = REQUESTS[kind]
    original = parsed(request(kind, identities=identities))
    rewritten = sent_on(original)
    found = dict(decoded(rewritten))
    assert found.pop(1) == kind
    body = found.pop(kind)
    assert found == {}
    assert isinstance(body, bytes)
    assert decoded(body) == decoded(fields((id_field, OURS), *rest))
    assert b"client's choice" not in rewritten


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_query_is_independent_of_the_request_id_and_the_claimed_identity(kind: int) -> None:
    """So requests of two clients for the same are answered together."""
    id_field, identity_fields, rest = REQUESTS[kind]
    first = parsed(request(kind))
    second = parsed(command(kind, fields(*((number, "another") for number in identity_fields), *rest, (id_field, 99))))
    assert asked(first) == asked(second)
    assert client_request_id(asked(first).to_command(), kind_of(first)) == 0


@pytest.mark.parametrize("kind", REQUESTS)
def test_whatever_else_a_request_says_is_another_question(kind: int) -> None:
    id_field, _, rest = REQUESTS[kind]
    found = set()
    for left_out in range(len(rest) + 1):
        original = parsed(command(kind, fields((id_field, CLIENTS), *rest[:left_out], *rest[left_out + 1 :])))
        found.add(asked(original))
    assert len(found) == len({*rest}) + 1


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_may_be_numbered_again(kind: int) -> None:
    """A redirect or a lost connection asks once more, under another id."""
    original = parsed(request(kind))
    first = sent_on(original)
    assert sent_on(original, varint(OURS + 1)) != first
    assert sent_on(original) == first
    again = parsed(first)
    assert asked(again) == asked(original)


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_field_beside_the_message_passes_too(kind: int) -> None:
    original = parsed(request(kind) + field(200, "of the future"))
    assert (200, b"of the future") in decoded(sent_on(original))


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("request_id", [0, 2**64 - 1])
def test_request_ids_at_their_bounds(kind: int, request_id: int) -> None:
    original = parsed(command(kind, fields((REQUESTS[kind][0], request_id))))
    assert client_request_id(original, kind_of(original)) == request_id
    assert request_from_command(original, kind_of(original))[1] == varint(request_id)


@pytest.mark.parametrize("kind", REQUESTS)
def test_the_subject_of_a_request_is_its_topic_or_its_namespace(kind: int) -> None:
    original = parsed(request(kind))
    assert subject_of(original, kind_of(original)) == ("t/n" if kind == TOPICS else "persistent://t/n/topic")
    empty = parsed(command(kind, fields((REQUESTS[kind][0], CLIENTS))))
    assert subject_of(empty, kind_of(empty)) == ""


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_without_its_message(kind: int) -> None:
    with pytest.raises(CommandCorrupt, match=f"^{NAMES[kind]} without its message$"):
        kind_of(parsed(command(kind, None)))


@pytest.mark.parametrize("kind", [0, 4, 18, 22, 24, 64])
def test_a_command_that_is_no_request_of_lookup_mode_has_no_kind(kind: int) -> None:
    with pytest.raises(KeyError):
        kind_of(parsed(command(kind) if kind else b""))


# ---- answers


@pytest.mark.parametrize("kind", REQUESTS)
def test_an_answer_goes_back_under_the_clients_id_and_else_unchanged(kind: int) -> None:
    id_field = ANSWER_ID_FIELD[kind]
    others = [(number, f"field {number}") for number in (30, 31)]
    answer = parsed(command(ANSWERS[kind], fields((id_field, OURS), *others)) + field(200, "new"))
    assert response_request_id(answer) == OURS
    set_response_request_id(answer, CLIENTS)
    assert response_request_id(answer) == CLIENTS
    expected = command(ANSWERS[kind], fields((id_field, CLIENTS), *others)) + field(200, "new")
    assert answer.SerializeToString() == expected


def test_a_brokers_error_is_an_answer_to_any_request() -> None:
    answer = parsed(command(ERROR, fields((1, OURS), (2, 4), (3, "no"))))
    assert response_request_id(answer) == OURS
    set_response_request_id(answer, CLIENTS)
    assert decoded_command(answer.SerializeToString()) == (ERROR, {1: CLIENTS, 2: 4, 3: b"no"})


@pytest.mark.parametrize("kind", sorted(set(BaseCommand.Type.values()) - {ERROR, *ANSWERS.values()}))
def test_a_command_that_is_no_answer_has_no_request_id(kind: int) -> None:
    assert response_request_id(BaseCommand(type=kind)) is None


# ---- failures, as clients understand them


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # response 3 = Failed 2; its error 6 and message 7
        (LOOKUP, (24, {3: 2, 4: CLIENTS, 6: 14, 7: b"text"})),
        # response 3 = Failed 1; its error 4 and message 5
        (METADATA, (22, {2: CLIENTS, 3: 1, 4: 14, 5: b"text"})),
        # a topic list has no room for an error
        (TOPICS, (14, {1: CLIENTS, 2: 14, 3: b"text"})),
        (SCHEMA, (35, {1: CLIENTS, 2: 14, 3: b"text"})),
    ],
)
def test_a_failure(kind: int, expected: tuple[int, dict[int, int | bytes]]) -> None:
    answer = failure_answer(KINDS[kind], CLIENTS, 14, "text")
    assert decoded_command(answer.SerializeToString()) == expected
    assert error_of(answer) == 14
    assert response_request_id(answer) == CLIENTS


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("code", [0, 6, 4711])
def test_every_code_survives_a_failure(kind: int, code: int) -> None:
    answer = parsed(failure_answer(KINDS[kind], 0, code, "").SerializeToString())
    assert error_of(answer) == code


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("code", [None, 6, 4711])
def test_an_answer_in_short_keeps_its_id_and_its_code(kind: int, code: int | None) -> None:
    answer = parsed(command(ANSWERS[kind], fields((ANSWER_ID_FIELD[kind], CLIENTS))))
    if code is not None:
        answer = failure_answer(KINDS[kind], CLIENTS, code, "x" * 100_000)
    short = shorten_answer(answer, KINDS[kind])
    assert response_request_id(short) == CLIENTS
    assert error_of(short) == (0 if code is None else code)
    assert short.ByteSize() < 100


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_success_has_no_error(kind: int) -> None:
    response_field = {LOOKUP: [(3, 1)], METADATA: [(3, 0), (1, 4)], TOPICS: [(2, "topic")], SCHEMA: [(5, b"v")]}[kind]
    assert error_of(parsed(command(ANSWERS[kind], fields((ANSWER_ID_FIELD[kind], 1), *response_field)))) is None


def test_a_redirect_is_no_error() -> None:
    assert error_of(parsed(command(24, fields((3, 0), (4, 1), (6, 3))))) is None


def test_a_failure_without_a_code_is_an_unknown_error() -> None:
    assert error_of(parsed(command(24, fields((3, 2), (4, 1))))) == 0
    assert error_of(parsed(command(22, fields((3, 1), (2, 1))))) == 0
    assert error_of(parsed(command(ERROR, fields((1, 1))))) == 0
