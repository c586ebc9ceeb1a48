"""The dashboard: it parses, its expressions are PromQL, and every metric and label in them exists."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.metric_names import ROOT, documented, unknown_labels, unknown_metrics

DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "pulsar-proxy.json").read_text())
NOT_SHOWN = {
    "pulsar_proxy_unready",
    "process_open_fds",
    "process_max_fds",
    "process_start_time_seconds",
    "process_virtual_memory_bytes",
    "pulsar_proxy_build_info",
    "pulsar_proxy_confined",
    "pulsar_proxy_denied_credentials",
    "pulsar_proxy_config_last_reload_successful",
    "pulsar_proxy_config_last_reload_success_timestamp_seconds",
    "pulsar_proxy_admin_requests_total",
    "pulsar_proxy_dropped_metrics_total",
    "pulsar_proxy_invalid_lookup_requests_total",
    "pulsar_proxy_fatal_lookup_requests_total",
    "pulsar_proxy_broker_checks_original_credentials",
    "pulsar_proxy_broker_files_held",
    "pulsar_proxy_kernel_tls_available",
    "pulsar_proxy_tls_resumed_sessions_total",
    "pulsar_proxy_audit_dropped_events_total",
    "pulsar_proxy_audit_lost_bytes_total",
    "pulsar_proxy_quota_refusals_total",
    "pulsar_proxy_unit_store_lost_relays",
    "pulsar_proxy_paced_pauses_total",
    "pulsar_proxy_paced_pause_seconds_total",
    *(f"pulsar_proxy_principal_{what}_created" for what in ("bytes", "messages", "sessions")),
}
"""Documented metrics that no panel shows."""


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def variables() -> dict[str, dict[str, Any]]:
    return {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}


def without_variables(expression: str) -> str:
    return expression.replace("$__rate_interval", "5m").replace("$cluster", ".*").replace("$worker", ".*")


def test_grafana_can_read_it() -> None:
    assert DASHBOARD["schemaVersion"] >= 38  # Grafana 10.1
    assert DASHBOARD["uid"]
    assert DASHBOARD["title"]
    assert set(variables()) == {"datasource", "cluster", "worker"}
    assert variables()["datasource"]["type"] == "datasource"
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers) > 40


def test_every_panel_asks_the_chosen_data_source() -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels():
        assert panel["datasource"] == chosen
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert {target["refId"] for target in panel["targets"]} == {"A", "B", "C", "D", "E"}.intersection(
            target["refId"] for target in panel["targets"]
        )
        assert all(target["datasource"] == chosen and target["legendFormat"] for target in panel["targets"])
    assert all(variables()[name]["datasource"] == chosen for name in ("cluster", "worker"))


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        cells = {(grid["x"] + x, grid["y"] + y) for x in range(grid["w"]) for y in range(grid["h"])}
        assert not cells & taken, panel["title"]
        assert grid["x"] + grid["w"] <= 24
        taken |= cells


def test_every_expression_is_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel_{number}", "expr": without_variables(expression)}
        for number, (_, expression) in enumerate(expressions())
    ]
    assert "$" not in json.dumps(rules)
    file = tmp_path / "rules.json"  # JSON is YAML, too
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert f"{len(rules)} rules found" in done.stdout


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_every_metric_and_label_exists(title: str, expression: str) -> None:
    assert not unknown_metrics(expression), title
    assert not unknown_labels(expression), title
    if "analytics_receiver" not in expression and "process_" not in expression:
        assert 'cluster=~"$cluster"' in expression, title


@pytest.mark.parametrize("name", ["cluster", "worker"])
def test_the_variables_ask_for_metrics_that_exist(name: str) -> None:
    query = variables()[name]["query"]["query"]
    assert re.fullmatch(rf"label_values\(.+, {name}\)", query)
    assert not unknown_metrics(query)


@pytest.mark.parametrize(
    ("chosen", "shown"),
    [
        ("0", ["0", "0-leaving-4711"]),
        ("(1|10)", ["1", "1-leaving-7", "10"]),  # as Grafana writes several for Prometheus
        (".*", ["0", "0-leaving-4711", "1", "1-leaving-7", "10"]),
    ],
)
def test_a_forwarder_is_shown_with_its_replaced_processes_that_are_leaving(chosen: str, shown: list[str]) -> None:
    """Their relays are that forwarder's; a choice of `0` that hid them would show a drop that there is none of."""
    workers = ["0", "0-leaving-4711", "1", "1-leaving-7", "10"]
    matchers = {matcher for _, text in expressions() for matcher in re.findall(r'worker=~"([^"]*\$worker[^"]*)"', text)}
    assert sum("$worker" in text for _, text in expressions()) > 20
    assert all(text.count("$worker") == text.count('worker=~"$worker') for _, text in expressions())
    for matcher in matchers:
        pattern = matcher.replace("$worker", chosen)
        assert [worker for worker in workers if re.fullmatch(pattern, worker)] == shown
    query = variables()["worker"]["query"]["query"]
    (excluded,) = re.findall(r'worker!~"([^"]+)"', query)
    assert [worker for worker in workers if not re.fullmatch(excluded, worker)] == ["0", "1", "10"]
    assert variables()["worker"]["definition"] == query


def test_every_documented_metric_is_shown() -> None:
    text = " ".join(expression for _, expression in expressions())
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in documented()[0]}
    assert {name for name in names if name not in text} == NOT_SHOWN


def test_a_misspelt_name_is_found() -> None:
    assert unknown_metrics("rate(pulsar_proxy_binary_byte_total[5m])") == {"pulsar_proxy_binary_byte_total"}
    assert unknown_metrics("pulsar_proxy_lookup_seconds") == {
        "pulsar_proxy_lookup_seconds"
    }  # needs _bucket and the like
    assert unknown_labels('sum by (cluster, directon) (x{clutser="a"})') == {"directon", "clutser"}
    assert not unknown_metrics("rate(pulsar_proxy_rejected_get_schema_requests_total[5m])")
