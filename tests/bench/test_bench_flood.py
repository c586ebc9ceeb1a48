"""The table of what relays wait in a flood of handshakes."""

from tests.bench.flood import FLOODS, Sample, table


def test_the_table_has_the_factor_of_each_round() -> None:
    none, many, one = FLOODS
    samples = {
        ("ours", "TLS", none): [Sample(100, 200, cpu=0.05), Sample(100, 400, cpu=0.05)],
        ("ours", "TLS", many): [Sample(100, 400, 990, 0, 0.5), Sample(100, 1200, 1010, 0, 0.7)],
        ("ours", "TLS", one): [Sample(100, 200, 1000, 0, 0.6), Sample(100, 400, 1000, 0, 0.6)],
    }
    lines = table(samples).splitlines()[2:]
    assert lines[0].endswith("| 0.05 | 100 | 300 (200-400) | - |")
    assert lines[1].endswith("| 1,000 (990-1,010) | 0.60 (0.50-0.70) | 100 | 800 (400-1,200) | 2.50 (2.00-3.00) |")
    assert lines[2].endswith("| 1.00 |")
