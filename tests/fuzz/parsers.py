"""The parsers, each in a module of its own: only the one that is fuzzed is imported, and instrumented."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

PARSERS = {
    "frames": "Pulsar's frames (proto.frames)",
    "proxy_protocol": "headers of the PROXY protocol (proto.proxy_protocol)",
    "rpc_frames": "frames between the cluster's processes (proto.rpc_frames)",
    "relay_frames": "boundaries and types of frames in a relay (proto.relay_frames, proto.command_heads)",
    "commands": "BaseCommand, its type by its first bytes, and refusals (proto.commands, proto.command_heads)",
    "connect": "CONNECT and the target in it (proto.connect_rules, proto.addresses)",
    "lookup_requests": "requests of lookup mode (proto.lookup_requests, proto.request_rules)",
    "tokens": "JSON Web Tokens (auth.jwt_rules)",
    "scram": "SCRAM's messages (auth.providers.scram)",
    "remote_write": "bodies of remote write (analytics.remote_write)",
    "content_type": "Content-Type and Content-Encoding of remote write (analytics.remote_write.negotiation)",
}
"""Name, which is the module's, and what it parses."""


class Parser(NamedTuple):
    check: Callable[[bytes], None]
    seeds: Sequence[bytes]


def load(name: str) -> Parser:
    """Import a parser's module."""
    module = importlib.import_module(f"tests.fuzz.{name}")
    return Parser(module.check, module.SEEDS)
