"""proxy.forwarder.client.failures and lookup_failures: what a client is sent, and what only the log says."""

from __future__ import annotations

import pytest
from forwarder_fakes import lookup

from proto.client_machine import TRANSITIONS, Action, Event, State
from proto.commands import CommandCorrupt, parse_command
from proto.frames import FrameTooLarge
from proto.lookup_kinds import kind_of
from proto.pulsar_pb2 import BaseCommand, ServerError
from proto.rpc_pb2 import EnvelopeResponse, Status
from proxy.forwarder.client.failures import (
    ConnectionFailure,
    corrupt_failure,
    envelope_unsupported_failure,
    handshake_timeout_failure,
    no_memory_failure,
    relay_start_failure,
)
from proxy.forwarder.client.lookup_failures import (
    NO_LONGER_VALID,
    TOO_MANY,
    code_of_rpc_error,
    envelope_failure,
    failure_frame,
    parse_request,
)
from proxy.forwarder.disconnect_cause import DisconnectCause
from proxy.runtime.rpc.client import RpcCallRefused, RpcConnectionLost


@pytest.mark.parametrize(
    ("failure", "event", "cause", "code"),
    [
        (
            corrupt_failure(FrameTooLarge("5 bytes")),
            Event.CLIENT_CORRUPT,
            DisconnectCause.FRAME_TOO_LARGE,
            ServerError.NotAllowedError,
        ),
        (
            corrupt_failure(CommandCorrupt("no command")),
            Event.CLIENT_CORRUPT,
            DisconnectCause.PROTOCOL_ERROR,
            ServerError.NotAllowedError,
        ),
        (no_memory_failure(), Event.CLIENT_CORRUPT, DisconnectCause.NO_MEMORY, ServerError.ServiceNotReady),
        (
            handshake_timeout_failure(3000, State.AUTHENTICATING),
            Event.HANDSHAKE_TIMEOUT,
            DisconnectCause.HANDSHAKE_TIMEOUT,
            ServerError.ServiceNotReady,
        ),
        (
            relay_start_failure(OSError("for the log")),
            Event.RELAY_START_FAILED,
            DisconnectCause.RELAY_NOT_BEGUN,
            ServerError.ServiceNotReady,
        ),
        (
            envelope_unsupported_failure(),
            Event.ENVELOPE_UNSUPPORTED,
            DisconnectCause.ENVELOPE_UNSUPPORTED,
            ServerError.ServiceNotReady,
        ),
    ],
    ids=["too large", "corrupt", "no memory", "handshake timeout", "relay start", "envelope unsupported"],
)
def test_a_failure_ends_the_connection_with_its_error(
    failure: ConnectionFailure, event: Event, cause: DisconnectCause, code: int
) -> None:
    assert (failure.event, failure.cause, failure.code, failure.delay_s) == (event, cause, code, 0.0)
    assert Action.FAIL in {row[event].action for row in TRANSITIONS.values() if event in row}


def test_the_client_is_not_told_why_its_relay_did_not_start() -> None:
    failure = relay_start_failure(OSError("for the log"))
    assert (failure.message, failure.detail) == ("The proxy cannot relay at the moment", "for the log")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RpcConnectionLost("gone"), ServerError.ServiceNotReady),
        (RpcCallRefused(Status.TOO_MANY_REQUESTS, "busy"), ServerError.TooManyRequests),
        (RpcCallRefused(Status.UNKNOWN_SERVER_ERROR, "?"), ServerError.UnknownError),
        (RpcCallRefused(Status.PRINCIPAL_DESERIALIZATION_FAILURE, "old"), ServerError.ServiceNotReady),
    ],
)
def test_the_code_of_an_envelope_that_got_no_answer(error: RpcConnectionLost | RpcCallRefused, code: int) -> None:
    assert code_of_rpc_error(error) == code


def test_only_a_credential_that_is_no_longer_valid_is_named() -> None:
    assert envelope_failure(EnvelopeResponse.PRINCIPAL_DESERIALIZATION_FAILURE) == (
        ServerError.AuthenticationError,
        NO_LONGER_VALID,
    )
    assert envelope_failure(None)[0] == ServerError.UnknownError


def test_a_request_that_fails_is_answered_under_its_id() -> None:
    command, kind = parse_request(lookup("t", 9).SerializeToString())
    assert kind is kind_of(command)
    frame = failure_frame(command, kind, ServerError.TooManyRequests, TOO_MANY)
    answer = parse_command(frame[8:]).lookup_topic_response
    assert (answer.request_id, answer.error, answer.message) == (9, ServerError.TooManyRequests, TOO_MANY)


def test_a_command_of_another_type_is_not_parsed_as_a_request() -> None:
    with pytest.raises(CommandCorrupt, match="begins as another command"):
        parse_request(BaseCommand(type=BaseCommand.FLOW).SerializeToString())
