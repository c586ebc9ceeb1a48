"""The table of what idle clients need."""

from tests.bench.contenders import Java
from tests.bench.idle_clients import table


def test_the_table_has_ours_and_javas() -> None:
    cores = {("plain", "ours"): [0.1], ("plain", Java.label): [0.2], ("TLS", "ours"): [0.3], ("TLS", Java.label): [0.2]}
    assert table(cores).splitlines()[2:] == [
        "| plain | 0.10 | 0.20 | 0.50 |",
        "| TLS to clients | 0.30 | 0.20 | 1.50 |",
    ]
