"""A session that was begun by SCRAM (RFC 5802): to renew it takes the rounds of the mechanism again."""

from __future__ import annotations

from typing import Any

from proto.pulsar_pb2 import BaseCommand

from .cluster import ProxyCluster
from .scram import ScramDialogue
from .sessions import Session, auth_response

USES = 10
"""So many stand before each answer of the client, and as many behind it."""


class ScramSession(Session):
    """One connection of a user with a password; see Session for the rest."""

    def __init__(
        self, cluster: ProxyCluster, user: str, password: str, topic: str, *, mechanism: str, **options: Any
    ) -> None:
        super().__init__(cluster, "", topic, **options)
        self.method = mechanism
        self._user, self._password = user, password

    def _authenticate(self, **fields: Any) -> Any:
        return self.dialogue().authenticate(**fields)

    def dialogue(self, user: str = "", password: str = "", mechanism: str = "") -> ScramDialogue:
        """New rounds, which have not begun; as another one, if that is said."""
        return ScramDialogue(self, user or self._user, password or self._password, mechanism or self.method)

    def renew(self, dialogue: ScramDialogue) -> None:
        """All rounds again, while the session is used; its uses are all answered in the end, in order."""
        self._respond_amid(dialogue.first())
        dialogue.see_first(self._next_challenge())
        self._respond_amid(dialogue.final())
        dialogue.see_last_word(self._next_challenge())
        self._respond_amid(b"")
        self.assert_all_answered()

    def _respond_amid(self, data: bytes) -> None:
        """In one write, so that others' bytes stand before and behind it on the wire."""
        uses = [self.next_use() for _ in range(2 * USES)]
        self.send_bytes(b"".join([*uses[:USES], auth_response(data, self.method), *uses[USES:]]))

    def _next_challenge(self) -> Any:
        """What comes before it are answers to uses."""
        while (command := self.receive()).type != BaseCommand.AUTH_CHALLENGE:
            self.assert_answers(command)
        return command
