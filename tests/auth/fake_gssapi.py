"""A stand-in for the package `gssapi`: tokens are readable, no KDC is needed, and everything can go wrong on demand.

A ticket is ``ticket for <service> of <client>``; what the server has signed begins with ``server:``, the client's with
``client:``.
"""

from __future__ import annotations

import enum
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

OURS = ("auth.gss", "auth.providers.sasl", "auth.broker_sasl")
"""The modules that hold the library, and are imported again with a fake one."""


class GSSError(Exception):
    """As the real one: numbers, and the library's words."""

    def __init__(self, words: str = "mechanism's words", min_code: int = 0) -> None:
        super().__init__(words)
        self.min_code = min_code


class InvalidTokenError(GSSError):
    pass


class Flag(enum.IntFlag):
    delegate_to_peer = 1
    mutual_authentication = 2
    replay_detection = 4
    out_of_sequence_detection = 8
    integrity = 32


class FakeKerberos:
    """The realm, the library, and what shall happen. ``calls``: what the library was asked for, and by which thread."""

    def __init__(self) -> None:
        self.proof: bytes | None = None
        self.complete = True
        self.lifetime_s: float = 3600
        self.name_shown: str | None = None
        self.calls: list[tuple[str, int]] = []
        self.credentials: list[Any] = []
        self.contexts: list[Any] = []
        self.on: dict[str, Callable[[], object]] = {}
        """Call → what happens first: an exception, a wait."""

    def did(self, call: str) -> None:
        self.calls.append((call, threading.get_ident()))
        if call in self.on:
            self.on[call]()

    def failing(self, call: str, error: Exception) -> None:
        def fail() -> None:
            raise error

        self.on[call] = fail

    def module(self) -> ModuleType:
        """What `import gssapi` gives."""
        fake = self

        class Credentials:
            def __init__(self, **options: Any) -> None:
                self.__dict__ |= options
                fake.did("credentials")
                fake.credentials.append(self)
                if self.usage == "accept":
                    file = self.store["keytab"].removeprefix("FILE:")
                    if self.name.text not in Path(file).read_text().split():
                        raise GSSError(f"No key table entry found for {self.name.text}")

        class SecurityContext:
            def __init__(self, **options: Any) -> None:
                self.__dict__ |= options
                self.client = ""
                self.failed_in_silence = False
                fake.contexts.append(self)

            def step(self, token: bytes | None) -> bytes | None:
                fake.did("step")
                if self.usage == "initiate":
                    return f"ticket for {self.name.text} of {self.creds.name.text}".encode()
                begin = f"ticket for {self.creds.name.text} of "
                if token is not None and token.startswith(b"silent"):
                    self.failed_in_silence = True
                    return b"error token"
                if token is None or not token.decode().startswith(begin):
                    raise InvalidTokenError("Invalid token was supplied")
                self.client = token.decode().removeprefix(begin)
                return fake.proof

            @property
            def complete(self) -> bool:
                if self.failed_in_silence:
                    raise GSSError("kept back")
                return fake.complete

            @property
            def initiator_name(self) -> str:
                fake.did("initiator_name")
                return fake.name_shown or self.client

            @property
            def lifetime(self) -> float:
                fake.did("lifetime")
                return fake.lifetime_s

            def _sides(self) -> tuple[bytes, bytes]:
                return (b"server:", b"client:") if self.usage == "accept" else (b"client:", b"server:")

            def wrap(self, message: bytes, encrypt: bool) -> Any:
                fake.did("wrap")
                assert not encrypt
                return SimpleNamespace(message=self._sides()[0] + message)

            def unwrap(self, message: bytes) -> Any:
                fake.did("unwrap")
                peer = self._sides()[1]
                if not message.startswith(peer):
                    raise GSSError("A token had an invalid signature")
                return SimpleNamespace(message=message.removeprefix(peer))

        made: Any = ModuleType("gssapi")
        made.Credentials, made.SecurityContext, made.RequirementFlag = Credentials, SecurityContext, Flag
        made.Name = lambda text, kind: SimpleNamespace(text=text, kind=kind)
        made.NameType = SimpleNamespace(kerberos_principal="kerberos_principal")
        made.MechType = SimpleNamespace(kerberos="kerberos")
        made.raw = SimpleNamespace(
            misc=SimpleNamespace(GSSError=GSSError), exceptions=SimpleNamespace(InvalidTokenError=InvalidTokenError)
        )
        return made


@contextmanager
def library(module: ModuleType | None) -> Iterator[None]:
    """While it lasts, `import gssapi` gives this (None: fails), and our modules are imported again."""
    names = ("gssapi", *OURS)
    kept = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.modules["gssapi"] = module  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(kept)
        for name in OURS:  # a package keeps its modules under their names, too
            package_name, _, module_name = name.rpartition(".")
            package = sys.modules.get(package_name)
            if name in kept:
                setattr(package, module_name, kept[name])
            elif hasattr(package, module_name):
                delattr(package, module_name)
