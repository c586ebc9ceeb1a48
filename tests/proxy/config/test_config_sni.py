"""proxy.config.sni: the port of a broker that is dialled where a client's TLS is passed through."""

from typing import Any

import msgspec
import pytest

from proxy.config.sni import routes_sni, tls_port
from proxy.config.types import Brokers, Config


@pytest.mark.parametrize(
    ("brokers", "port", "dialled"),
    [
        ({"service_url": "pulsar+ssl://b:7651"}, 7651, 7651),
        ({"service_url": "pulsar+ssl+srv://b", "port_pairs": [[7651, 1]]}, 7651, 7651),
        ({"service_url": "pulsar://b"}, 6650, 6651),
        ({"service_url": "pulsar://b:7650,c:8650", "port_pairs": [[7650, 7651], [8650, 8651]]}, 8650, 8651),
        ({"service_url": "pulsar+srv://b", "port_pairs": [[7650, 7651]]}, 7650, 7651),
        ({"service_url": "pulsar://b:7650"}, 7650, None),
        ({"service_url": "pulsar://b:6651"}, 6651, None),  # the second of a pair is no plain one
    ],
)
def test_the_port_with_tls(brokers: dict[str, Any], port: int, dialled: int | None) -> None:
    assert tls_port(msgspec.convert(brokers, Brokers), port) == dialled


def test_one_listener_is_enough() -> None:
    listeners: list[dict[str, Any]] = [{}, {"routing": "sni"}]
    assert routes_sni(msgspec.convert({"listener": listeners}, Config))
    assert not routes_sni(msgspec.convert({"listener": listeners[:1]}, Config))
