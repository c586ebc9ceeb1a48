"""lookup.brokers.port_pairs: which ports belong to one broker, by the operator's word and by brokers' own."""

from __future__ import annotations

import pytest
from lookup_fakes import make_config

from lookup.brokers.port_pairs import LEARNED_MAX, PortPairs
from proto.addresses import HostPort


def pairs_for(url: str, before: PortPairs | None = None) -> PortPairs:
    return PortPairs(make_config(brokers={"service_url": url}).brokers, before)


def test_ports_learned_of_a_broker_precede_those_configured_for_all() -> None:
    pairs = pairs_for("pulsar://b0")
    pairs.learn_urls("pulsar://b0:7650", "pulsar+ssl://b0:6651")
    assert pairs.port_to_dial(HostPort("b0", 6651)) == 7650
    assert pairs.port_to_dial(HostPort("b1", 6651)) == 6650


def test_a_brokers_last_word_counts() -> None:
    pairs = pairs_for("pulsar://b0")
    for port in (6650, 7650):
        pairs.learn_urls(f"pulsar://b0:{port}", "pulsar+ssl://B0.:9651")
    assert pairs.port_to_dial(HostPort("b0", 9651)) == 7650


@pytest.mark.parametrize(
    ("dialled", "other"),
    [
        ("", "pulsar+ssl://b0:9651"),
        ("nonsense", "pulsar+ssl://b0:9651"),
        ("pulsar://b0:0", "pulsar+ssl://b0:9651"),
        ("pulsar://b0:6650,b0:6660", "pulsar+ssl://b0:9651"),
        ("pulsar://b0:6650", "pulsar+ssl://b0:9651,b0:9652"),
        ("pulsar://b0:6650", "http://b0:9651"),
        ("pulsar+srv://b0", "pulsar+ssl://b0:9651"),
    ],
)
def test_a_url_that_is_not_that_of_a_single_broker_teaches_no_port_pair(dialled: str, other: str) -> None:
    pairs = pairs_for("pulsar://b0")
    pairs.learn_urls(dialled, other)
    assert pairs.port_to_dial(HostPort("b0", 9651)) is None


def test_learned_ports_are_bounded() -> None:
    pairs = pairs_for("pulsar://b0")
    for number in range(LEARNED_MAX):
        pairs.learn_urls(f"pulsar://n{number}:7650", "")
    pairs.learn_urls("pulsar://n0:7650", "")
    pairs.learn_urls("pulsar://new:7650", "")
    known = [pairs.port_to_dial(HostPort(name, 7650)) for name in ("n0", "n1", "n2", "new")]
    assert known == [7650, None, 7650, 7650]
    assert len(pairs._learned) == LEARNED_MAX


def test_a_reload_forgets_nothing_but_where_tls_has_changed() -> None:
    pairs = pairs_for("pulsar://b0")
    pairs.learn_urls("pulsar://b0:6650", "pulsar+ssl://b0:9651")
    assert pairs_for("pulsar://b1", pairs).port_to_dial(HostPort("b0", 9651)) == 6650
    assert pairs_for("pulsar+ssl://b0", pairs).port_to_dial(HostPort("b0", 9651)) is None
