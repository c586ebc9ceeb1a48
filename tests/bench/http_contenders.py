"""The contenders as reverse proxies of HTTP: in front of the scripted broker's web port, with or without tokens."""

import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from local.ports import free_port
from local.tokens import make_token

from tests.bench.contenders import TOKEN_LIFETIME_S, Contender, HAProxy, Java, Ours
from tests.bench.generator import Broker
from tests.e2e.lab.certificates import Pair


class HttpOurs(Ours):
    """The cluster with an [[http_listener]]: one HTTP worker, its access log on, as is the default."""

    def __init__(self, broker: Broker, directory: Path, certificate: Pair | None = None, more_config: str = "") -> None:
        port = free_port()
        super().__init__(broker, directory, certificate, more_config, port)
        self.port = port


class HttpJava(Java):
    """Pulsar's own proxy by its web port."""

    def __init__(self, broker: Broker, directory: Path, certificate: Pair | None = None) -> None:
        super().__init__(broker, directory, certificate)
        service_port = free_port(avoid=(self.port,))
        self.more_settings = {
            "servicePort": str(service_port),
            "webServicePort": str(self.port),
            "brokerWebServiceURL": f"http://{broker.web_address}",
        }


class HttpHAProxy(HAProxy):
    """HAProxy, which takes HTTP apart here."""

    config = HAProxy.config.replace("mode tcp\n    option splice-auto", "mode http\n    option forwardfor")

    def __init__(self, broker: Broker, directory: Path, certificate: Pair | None = None) -> None:
        super().__init__(replace(broker, port=int(broker.web_address.rpartition(":")[2])), directory, certificate)


class TokenOurs(HttpOurs):
    """The same with tokens: each request is authenticated."""

    _CONFIG = """
[authentication]
enabled = true

[authentication.token]
secret_key = "{key}"
"""

    def __init__(self, broker: Broker, directory: Path, certificate: Pair | None = None) -> None:
        key, self.token = _key_and_token(directory)
        super().__init__(broker, directory, certificate, self._CONFIG.format(key=key))


class TokenJava(HttpJava):
    """The same with tokens."""

    def __init__(self, broker: Broker, directory: Path, certificate: Pair | None = None) -> None:
        super().__init__(broker, directory, certificate)
        key, self.token = _key_and_token(directory)
        self.more_settings = {
            **self.more_settings,
            "authenticationEnabled": "true",
            "authenticationProviders": "org.apache.pulsar.broker.authentication.AuthenticationProviderToken",
            "tokenSecretKey": f"file://{key}",
        }


def http_contenders(names: Sequence[str], *, token: bool) -> list[type[Contender]]:
    """Return the contenders of these names. HAProxy knows nothing of Pulsar's tokens."""
    kinds: tuple[type[Contender], ...] = (TokenOurs, TokenJava) if token else (HttpOurs, HttpJava, HttpHAProxy)
    return [kind for kind in kinds if kind.name in names]


def _key_and_token(directory: Path) -> tuple[Path, str]:
    secret = secrets.token_bytes(32)
    key = Path(tempfile.mkdtemp(prefix="key-", dir=directory)) / "secret.key"
    key.write_bytes(secret)
    return key, make_token(secret, "bench", TOKEN_LIFETIME_S)
