"""The namespace of the security tests: alice may use it, bob may not."""

from __future__ import annotations

from local.standalone import Standalone
from local.tokens import make_token

NAMESPACE = "secured/shared"


def grant(broker: Standalone) -> None:
    """Create the namespace and alice's grant."""
    admin = broker.admin()
    admin.create_tenant("secured")
    admin.create_namespace(NAMESPACE)
    admin.grant_namespace(NAMESPACE, "alice")


def bad_tokens(broker: Standalone) -> dict[str, str]:
    """Tokens that must be denied, by what is wrong with them."""
    key = broker.secret_key.read_bytes()
    return {
        "signed with another key": make_token(b"x" * 32, "alice"),
        "expired": make_token(key, "alice", -60),
        "not a token": "garbage",
        "empty": "",
    }
