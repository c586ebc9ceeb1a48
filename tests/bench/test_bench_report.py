"""What the benchmark makes of its measurements; the measurements themselves are no tests."""

import os
import socket
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench import contenders, documents
from tests.bench.__main__ import _arguments
from tests.bench.contenders import HAProxy, Java, Ours
from tests.bench.figures import figure, number, ratio
from tests.bench.generator import Broker
from tests.bench.http_contenders import http_contenders
from tests.bench.measuring import Memory, Results, Sample
from tests.bench.processes import cpu_seconds, established, pss_bytes
from tests.bench.report import Report
from tests.bench.rows import FRAMED_ROWS, HTTP_ROWS, ROWS, TLS_ROWS, Target, Tls
from tests.e2e.lab.certificates import Authority

_OPERATORS_ROWS = ("bulk1", "echo32", "tls-echo32")


def _sample(cost: float, rate: float) -> Sample:
    return Sample(rate=rate, cost=cost, generator_cost=1.0, load_busy=0.5, p50_us=100.0, p99_us=200.0)


def test_figure_is_the_median_and_the_range() -> None:
    assert str(figure([3.0, 1.0, 2.0])) == "2.00 (1.00-3.00)"
    assert str(figure([2.0])) == "2.00"
    assert figure([]) is None


def test_ratio_is_taken_round_by_round() -> None:
    found = ratio([1.0, 10.0, 4.0], [2.0, 10.0, 1.0])
    assert found is not None
    assert found.values == (0.5, 1.0, 4.0)
    assert found.median == 1.0
    assert ratio([1.0], []) is None


@pytest.mark.parametrize(("value", "text"), [(0.123, "0.12"), (12.34, "12.3"), (12345.6, "12,346")])
def test_number_has_three_digits_that_count(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("target", "ratio", "verdict"),
    [
        (Target("cost", 1.0, 0.7), 0.7, "aim met"),
        (Target("cost", 1.0, 0.7), 0.9, "met"),
        (Target("cost", 1.0, 0.7), 1.1, "missed"),
        (Target("rate", 1.2, 1.4), 1.3, "met"),
        (Target("rate", 1.2), 1.1, "missed"),
    ],
)
def test_verdict(target: Target, ratio: float, verdict: str) -> None:
    assert target.verdict(ratio) == verdict


def test_report_leaves_out_what_was_not_measured() -> None:
    row = next(row for row in ROWS if row.name == "echo32")
    results = Results()
    for name, cost in (("straight", 0.0), ("ours", 12.0), ("java", 16.0)):
        results.samples["echo32", name] = [_sample(cost, 1000.0)]
    results.memory["ours"] = [Memory(process_bytes=10 << 20, bytes_per_relay=4096.0)]
    text = Report(results, [row], ["ours", "java"]).markdown()
    assert "0.75" in text
    assert "≤ 1, aim 0.7: met" in text
    assert "HAProxy |\n" in text.replace("ours / HAProxy", "HAProxy")
    assert "4.00" in text
    assert "≤ 8: met" in text


def test_relays_that_come_back_are_told_by_the_last_of_them() -> None:
    row = next(row for row in ROWS if row.is_single)
    results = Results()
    for name, seconds, retries in (("straight", 0.5, 0), ("ours", 3.0, 7), ("java", 2.0, 0)):
        came_back = replace(_sample(1.0, 1.0), seconds=seconds, retries=retries, grown_bytes=5 << 20)
        results.samples[row.name, name] = [came_back]
    lines = Report(results, [row], ["ours", "java"]).markdown().splitlines()
    last, failed, grown = (
        [cell.strip() for cell in next(line for line in lines if text in line).split("|")[2:-1]]
        for text in ("the last is back", "failed", "memory")
    )
    assert last == ["0.50", "3.00", "2.00", "1.50"]
    assert failed == ["0.00", "7.00", "0.00", ""]
    assert grown == ["5.00", "5.00", "5.00", ""]


def test_following_frames_is_compared_with_not_following_them() -> None:
    row = FRAMED_ROWS[0]
    results = Results()
    for name, cost in (("ours", 10.0), ("framed", 14.0)):
        results.samples[row.name, name] = [_sample(cost, 1000.0)]
    text = Report(results, [], ["ours", "java"], [row]).markdown()
    assert "1.40" in text
    assert "≤ 1.5: met" in text


def test_tls_has_a_table_of_its_own_that_tells_who_gives_no_usable_ticket() -> None:
    rows = [row for row in TLS_ROWS if row.name in {"tls-connect-rsa", "tls-resume-rsa"}]
    results = Results()
    for name, cost, resumed, cipher in (("ours", 30.0, 0.0, "A"), ("java", 10.0, 0.5, "B"), ("haproxy", 5.0, 1.0, "A")):
        for row in rows:
            sample = replace(_sample(cost, 1000.0), resumed=resumed, cipher=cipher)
            results.samples[row.name, name] = [sample]
    text = Report(results, [], ["ours", "java", "haproxy"], (), rows).markdown()
    full, again = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if ": connect" in line
    )
    assert full[0] == "TLS to clients: connect, 16 at once, RSA"
    assert full[1:] == ["30.0", "10.0", "5.00", "3.00", "6.00", "50% / 50% / 50%"]
    assert again[1:4] == ["30.0; no usable ticket", "10.0; 50% resumed", "5.00; 100% resumed"]
    assert text.endswith("Cipher suites to clients: pulsar-trio-proxy A, Pulsar proxy 4.0.8 B, HAProxy A.")


def test_costs_are_told_as_cpus_for_a_load() -> None:
    results = Results()
    bulk, echo, tls = (next(row for row in (*ROWS, *TLS_ROWS) if row.name == name) for name in _OPERATORS_ROWS)
    for row, ours, java in ((bulk, 1.073741824, 2.147483648), (echo, 20, 10), (tls, 40, 40)):
        results.samples[row.name, "ours"] = [_sample(ours, 1)]
        results.samples[row.name, "java"] = [_sample(java, 1)]
    lines = Report(results, [bulk, echo], ["ours", "java"], tls_rows=[tls])._cpus().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert cells == [
        ["100 MB/s: bulk, 1 connection", "0.10", "0.20", "0.50"],
        ["10,000 a second: echo of 100 B, 32 connections", "0.20", "0.10", "2.00"],
        ["10,000 a second: TLS to clients: echo of 100 B, 32 connections", "0.40", "0.40", "1.00"],
    ]


def test_tls_rows_are_chosen_apart_from_the_others() -> None:
    assert _arguments(["--rows", "echo,connect"]).tls_rows == []
    chosen = _arguments(["--rows", "tls-echo"])
    assert [row.name for row in chosen.tls_rows] == ["tls-echo1", "tls-echo32", "tls-echo500"]
    assert [chosen.rows, chosen.framed_rows, chosen.idle, chosen.shared] == [[], [], False, False]


def test_a_tls_row_tells_the_load_what_handshake_to_make() -> None:
    handshakes = {row.name: row.handshake for row in TLS_ROWS}
    assert handshakes["tls-connect-ecdsa"] == "full"
    assert handshakes["tls-resume-ecdsa"] == "resumed"
    assert handshakes["tls-broker-echo32"] == ""
    assert {str(row.tls) for row in TLS_ROWS} == {"TLS to clients", "TLS to broker", "TLS to clients and broker"}
    assert {row.tls.client for row in TLS_ROWS} == {None, "RSA", "ECDSA"}
    assert Tls() == ROWS[0].tls


@pytest.mark.parametrize("client", [False, True])
@pytest.mark.parametrize("trust", ["", "/authority.pem"])
def test_contenders_have_tls_on_the_sides_that_a_row_names(
    client: bool, trust: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contenders, "pulsar_home", lambda: tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "proxy.conf").write_text("tlsEnabledInProxy=false\n")
    pair = Authority(tmp_path, "bench").server("server") if client else None
    broker = Broker(6650, 0, trust)

    ours = tomllib.loads(Ours(broker, tmp_path, pair)._cluster._config)
    assert ours["listener"][0].get("tls", {}).get("certificate") == (pair and pair.certificate)
    assert ours["brokers"]["service_url"] == f"pulsar{'+ssl' if trust else ''}://127.0.0.1:6650"
    assert ours["brokers"].get("tls", {}).get("trust", "") == trust

    java = Java(broker, tmp_path, pair)
    java.command()
    lines = (java.directory / "proxy.conf").read_text().splitlines()
    keys = dict(line.split("=", 1) for line in lines if line)
    assert (keys["tlsEnabledInProxy"] == "true") == client
    assert keys.get("servicePortTls" if client else "servicePort") == str(java.port)
    assert keys.get("brokerClientTrustCertsFilePath", "") == trust

    haproxy = HAProxy(broker, tmp_path, pair)
    haproxy.command()
    text = (haproxy.directory / "haproxy.cfg").read_text()
    assert ("ssl crt" in text) == client
    assert ("ssl verify none" in text) == bool(trust)


def test_http_has_a_table_of_its_own() -> None:
    results = Results()
    for row in HTTP_ROWS:
        results.samples[row.name, "ours"] = [_sample(30.0, 1.0)]
        results.samples[row.name, "java"] = [_sample(20.0, 1.0)]
    text = Report(results, [], ["ours", "java", "haproxy"], http_rows=HTTP_ROWS).markdown()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[4:]]
    assert [line[4:6] for line in cells] == [["1.50", each] for each in ("≤ 2: met", *["≤ 1.2: missed"] * 2, "")]
    assert cells[0][1:4] == ["30.0", "20.0", "-"]


def test_bodies_of_http_may_be_smaller() -> None:
    rows = _arguments(["--rows", "http", "--http-body", "4"]).http_rows
    assert [row.frame_bytes for row in rows] == [300, 4 << 20, 4 << 20, 300]


@pytest.mark.parametrize("token", [False, True])
def test_contenders_pass_http_on_to_the_brokers_web_port(
    token: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contenders, "pulsar_home", lambda: tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "proxy.conf").write_text("authenticationEnabled=false\n")
    broker = Broker(6650, 0, web_address="127.0.0.1:8080")
    kinds = http_contenders(["ours", "java", "haproxy"], token=token)
    assert [kind.name for kind in kinds] == (["ours", "java"] if token else ["ours", "java", "haproxy"])
    ours, java, *haproxy = (kind(broker, tmp_path) for kind in kinds)
    assert [bool(one.token) for one in (ours, java)] == [token, token]

    assert isinstance(ours, Ours)
    config = tomllib.loads(ours._cluster._config)
    assert config["brokers"] == {"service_url": "pulsar://127.0.0.1:6650", "web_service_url": "http://127.0.0.1:8080"}
    assert config["http_listener"] == [{"bind": f"127.0.0.1:{ours.port}"}]
    assert config.get("authentication", {}).get("enabled", False) == token

    assert isinstance(java, Java)
    java.command()
    lines = (java.directory / "proxy.conf").read_text().splitlines()
    keys = dict(line.split("=", 1) for line in lines if line)
    assert keys["webServicePort"] == str(java.port) != keys["servicePort"]
    assert keys["brokerWebServiceURL"] == "http://127.0.0.1:8080"
    assert (keys["authenticationEnabled"] == "true") == token

    for one in haproxy:
        assert isinstance(one, HAProxy)
        one.command()
        text = (one.directory / "haproxy.cfg").read_text()
        assert "mode http\n" in text
        assert "server broker 127.0.0.1:8080\n" in text


def test_connections_that_clients_share() -> None:
    results = Results(broker_connections={"ours": 1, "java": 1000})
    lines = Report(results, [], ["ours", "java"]).markdown().splitlines()
    assert [cell.strip() for cell in lines[-1].split("|")[1:3]] == ["1", "1,000"]


def test_connections_of_a_server_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert established(port) == 0
        with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            assert established(port) == 2


def test_only_text_between_the_markers_is_replaced() -> None:
    page = documents.PAGE.read_text()
    once = documents.replaced(page, "new")
    assert "\n\nnew\n\n" in once
    assert documents.replaced(once, "new") == once
    with pytest.raises(ValueError, match="lacks"):
        documents.replaced("no markers", "new")


def test_this_process_uses_cpu_and_memory() -> None:
    before = cpu_seconds(os.getpid())
    while cpu_seconds(os.getpid()) < before + 0.01:
        pass
    assert pss_bytes(os.getpid()) > 1 << 20
