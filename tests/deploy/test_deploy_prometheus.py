"""Rules and scrape configuration: promtool takes them, and each alert fires when it should, and not else."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.metric_names import ROOT, unknown_labels, unknown_metrics

PROMETHEUS = ROOT / "deploy" / "prometheus"
ALERTS = (PROMETHEUS / "alerts.yml").read_text()
RECORDING = (PROMETHEUS / "recording-rules.yml").read_text()
DOCS = (ROOT / "docs" / "monitoring.md").read_text()
RECORDED = set(re.findall(r"- record: (\S+)", RECORDING))
SEVERITIES = {"critical", "warning"}

C = 'cluster="c"'
RECEIVER = 'instance="r:9292",job="pulsar-proxy-analytics-receiver"'
_RECEIVER = "pulsar_proxy_analytics_receiver_"


@dataclass(frozen=True)
class Case:
    """One minute between values. `firing`: at so many minutes after which it fires, and was quiet at `pending`.

    `quiet`: with these series it does not fire at that moment.
    """

    firing: dict[str, str]
    at: int
    pending: int | None
    quiet: list[dict[str, str]] = field(default_factory=list)


def rate(name: str, per_minute: float, start: float = 0) -> dict[str, str]:
    """A counter that grows all the time."""
    return {name: f"{start}+{per_minute}x60"}


def steady(name: str, value: float) -> dict[str, str]:
    return {name: f"{value}x60"}


def lookups(slow_per_minute: float) -> dict[str, str]:
    """100 lookups a minute, so many of them between 1 and 2.5 s."""
    series = f'pulsar_proxy_lookup_seconds_bucket{{{C},request="lookup",le='
    return (
        rate(f'{series}"1.0"}}', 100 - slow_per_minute) | rate(f'{series}"2.5"}}', 100) | rate(f'{series}"+Inf"}}', 100)
    )


def answers(error: str, failed: float, good: float = 100) -> dict[str, str]:
    series = f'pulsar_proxy_lookup_answers_total{{{C},request="lookup",error='
    return rate(f'{series}"none"}}', good) | (rate(f'{series}"{error}"}}', failed) if failed else {})


def http_requests(status: str, per_minute: float) -> dict[str, str]:
    return rate(f'pulsar_proxy_http_requests_total{{{C},route="brokers",method="GET",status="{status}"}}', per_minute)


def authentications(failed: float, good: float | None) -> dict[str, str]:
    found = rate(f'pulsar_authentication_failures_total{{{C},auth_method="token",reason="expired"}}', failed)
    return found | (
        rate(f'pulsar_authentication_success_total{{{C},auth_method="token"}}', good) if good is not None else {}
    )


def again(metric: str, bad: float, good: float | None) -> dict[str, str]:
    found = rate(f"pulsar_proxy_{metric}{{{C}}}", bad)
    return found | (rate(f"pulsar_proxy_reauthentication_success_total{{{C}}}", good) if good is not None else {})


def broker(metric: str, value: float, name: str = "b1", worker: str = "0", instance: str = "p1") -> dict[str, str]:
    where = f'{C},instance="{instance}",role="lookup",worker="{worker}"'
    return steady(f'pulsar_proxy_{metric}{{{where},broker="{name}"}}', value)


FAILED = "reauthentication_failure_total"
KILLED = "expired_connections_killed_total"
DAY_M = 24 * 60
OWN_TOKEN_ENDS = f'pulsar_proxy_broker_credentials_expire_timestamp_seconds{{{C},role="auth",worker="0"}}'


def own_token(*minutes: int) -> dict[str, str]:
    """A token that ends at so many minutes; each is replaced by the next one after 12 hours."""
    return {OWN_TOKEN_ENDS: " ".join(f"{60 * end}x{DAY_M // 2 - 1}" for end in minutes)}


CERTIFICATE, CRL = "listener[0].tls.certificate", "listener[0].tls.client_crl"


def ends(key: str, *days: float) -> dict[str, str]:
    """A certificate or CRL that ends at so many days; each is replaced by the next one after 12 hours."""
    series = f'pulsar_proxy_certificate_expiry_timestamp_seconds{{{C},role="forwarder",worker="0",key="{key}"}}'
    last = days[-1:] * 3
    return {series: " ".join(f"{end * 60 * DAY_M:.0f}x{DAY_M // 2 - 1}" for end in (*days, *last))}


def reload(value: float, worker: str = "0") -> dict[str, str]:
    return steady(f'pulsar_proxy_file_last_reload_successful{{{C},instance="p",worker="{worker}",key="k"}}', value)


CASES = {
    "PulsarProxyAllBrokersDown": Case(
        broker("broker_up", 0) | broker("broker_up", 0, "b2"), 2, 0,
        [broker("broker_up", 0) | broker("broker_up", 1, "b2"), {}],
    ),
    "PulsarProxyBrokerDown": Case(
        broker("broker_up", 0) | broker("broker_up", 1, "b2"), 6, 4,
        [broker("broker_up", 1), broker("broker_up", 0) | broker("broker_up", 1, worker="1")],
    ),
    "PulsarProxyBrokerSetAside": Case(broker("broker_set_aside", 1), 11, 9, [broker("broker_set_aside", 0)]),
    "PulsarProxyCredentialsRefused": Case(
        broker("broker_credentials_accepted", 0) | broker("broker_credentials_accepted", 1, "b2"), 3, 1,
        [broker("broker_credentials_accepted", 1), {},
         broker("broker_credentials_accepted", 0) | broker("broker_credentials_accepted", 1, worker="1")],
    ),
    "PulsarProxyRelaysNotOpened": Case(
        rate(f'pulsar_proxy_broker_connection_failures_total{{{C},reason="timeout"}}', 12), 13, 9,
        [rate(f'pulsar_proxy_broker_connection_failures_total{{{C},reason="timeout"}}', 5)],
    ),
    "PulsarProxyBrokerNamesNotResolved": Case(
        rate(f'pulsar_proxy_dns_failures_total{{{C},names="brokers"}}', 1), 13, 9,
        [rate(f'pulsar_proxy_dns_failures_total{{{C},names="targets"}}', 100)],
    ),
    "PulsarProxyBrokerCredentialsEndSoon": Case(
        own_token(*[7 * DAY_M] * 4), DAY_M + 8, DAY_M - 2,
        [own_token(*[9 * DAY_M] * 4), own_token(*(DAY_M + 60 * hours for hours in (1, 12, 24, 36)))],
    ),
    "PulsarProxyBrokerCredentialsEnded": Case(
        own_token(30), 31, 28, [own_token(40), own_token(30) | {OWN_TOKEN_ENDS: "1800x20 5400x100"}],
    ),
    "PulsarProxyBrokerReauthenticationsFail": Case(
        rate(f'pulsar_proxy_broker_reauthentication_failure_total{{{C},reason="no_credentials"}}', 0.5), 8, None,
        [steady(f'pulsar_proxy_broker_reauthentication_failure_total{{{C},reason="lost_rounds"}}', 3)],
    ),
    "PulsarProxyNoMetrics": Case({}, 6, 4, [steady(f'pulsar_proxy_build_info{{{C},version="1"}}', 1)]),
    "PulsarProxyScrapeFails": Case(
        steady('up{job="pulsar-proxy",instance="p"}', 0), 4, 2,
        [steady('up{job="pulsar-proxy",instance="p"}', 1), steady('up{job="another",instance="p"}', 0),
         steady('up{job="proxy",instance="p"}', 0)],
    ),
    "PulsarProxyWorkersRestart": Case(
        rate(f'pulsar_proxy_worker_restarts_total{{{C},of="auth"}}', 0.25), 20, None,
        [rate(f'pulsar_proxy_worker_restarts_total{{{C},of="auth"}}', 0.1)],
    ),
    "PulsarProxyConfigReloadFailed": Case(
        steady(f'pulsar_proxy_config_last_reload_successful{{{C},instance="p"}}', 0)
        | steady(f'pulsar_proxy_config_last_reload_successful{{{C},instance="q"}}', 1), 6, 4,
        [steady(f'pulsar_proxy_config_last_reload_successful{{{C},instance="p"}}', 1)],
    ),
    "PulsarProxyBrokerFilesHeld": Case(
        steady(f'pulsar_proxy_broker_files_held{{{C},instance="p"}}', 1)
        | steady(f'pulsar_proxy_broker_files_held{{{C},instance="q"}}', 0), 6, 4,
        [steady(f'pulsar_proxy_broker_files_held{{{C},instance="p"}}', 0)],
    ),
    "PulsarProxyFileReloadFailed": Case(
        reload(0, worker="0") | reload(1, worker="1"), 6, 4, [reload(1), {}],
    ),
    "PulsarProxyCertificateExpiresSoon": Case(
        ends(CERTIFICATE, 30), DAY_M + 68, DAY_M - 4,
        [ends(CERTIFICATE, 31.1), ends(CERTIFICATE, 20, 40), ends(CERTIFICATE, 3, 3.5, 4, 4.5), ends(CRL, 6),
         ends(CRL, 1, 1.5, 2)],
    ),
    "PulsarProxyCertificateExpires": Case(
        ends(CERTIFICATE, 7), DAY_M + 8, DAY_M - 4,
        [ends(CERTIFICATE, 8.1), ends(CERTIFICATE, 3, 3.5, 4, 4.5), ends(CRL, 2), ends(CRL, 0.5, 1.5, 2.5)],
    ),
    "PulsarProxyDefect": Case(
        rate(f'pulsar_proxy_ended_connections_total{{{C},cause="defect"}}', 0.1), 20, None,
        [steady(f'pulsar_proxy_ended_connections_total{{{C},cause="defect"}}', 3),
         rate(f'pulsar_proxy_ended_connections_total{{{C},cause="client_closed"}}', 100)],
    ),
    "PulsarProxyConnectionsRejected": Case(
        rate(f'pulsar_proxy_rejected_connections_total{{{C},reason="max_connections"}}', 1), 8, 4,
        [steady(f'pulsar_proxy_rejected_connections_total{{{C},reason="max_connections"}}', 9)],
    ),
    "PulsarProxyLookupsSlow": Case(lookups(5), 13, 9, [lookups(0.5)]),
    "PulsarProxyLookupsFail": Case(
        answers("ServiceNotReady", 10), 8, 4,
        [answers("TopicNotFound", 90), answers("ServiceNotReady", 4), answers("ServiceNotReady", 0)],
    ),
    "PulsarProxyHttpFails": Case(
        http_requests("5xx", 10) | http_requests("2xx", 90), 18, 8,
        [http_requests("4xx", 50) | http_requests("2xx", 50), http_requests("5xx", 4) | http_requests("2xx", 96)],
    ),
    "PulsarProxyLookupsRejected": Case(
        {name: f"{by}x60" for name, by in (
            (f"pulsar_proxy_rejected_lookup_requests_total{{{C}}}", "0+0"),
            (f"pulsar_proxy_rejected_partitions_metadata_requests_total{{{C}}}", "0+0"),
            (f"pulsar_proxy_rejected_get_topics_of_namespace_requests_total{{{C}}}", "0+3"),
            (f"pulsar_proxy_rejected_get_schema_requests_total{{{C}}}", "0+0"),
        )}, 8, 4,
        [{f"pulsar_proxy_rejected_{kind}_requests_total{{{C}}}": "5x60"
          for kind in ("lookup", "partitions_metadata", "get_topics_of_namespace", "get_schema")}],
    ),
    "PulsarProxyAuthenticationFailureSurge": Case(
        authentications(60, 100), 8, 4,
        [authentications(60, 300), authentications(20, 20)],
    ),
    "PulsarProxyReauthenticationsFail": Case(
        again(FAILED, 6, 30), 22, None, [again(FAILED, 6, 100), again(FAILED, 1, 1)]
    ),
    "PulsarProxyExpiredSessionsKilledSurge": Case(
        again(KILLED, 6, 30), 22, None, [again(KILLED, 6, 100), again(KILLED, 1, 1)]
    ),
    "PulsarProxyReceiverScrapeFails": Case(steady(f"up{{{RECEIVER}}}", 0), 6, 4, [steady(f"up{{{RECEIVER}}}", 1)]),
    "PulsarProxyReceiverNotReady": Case(
        steady(f"{_RECEIVER}ready{{{RECEIVER}}}", 0), 6, 4, [steady(f"{_RECEIVER}ready{{{RECEIVER}}}", 1)]
    ),
    "PulsarProxyReceiverDiskFillsUp": Case(
        {f"{_RECEIVER}spool_disk_free_bytes{{{RECEIVER}}}": "60e9-0.5e9x60"}, 30, 9,
        [steady(f"{_RECEIVER}spool_disk_free_bytes{{{RECEIVER}}}", 5e9)],
    ),
    "PulsarProxyIngestLags": Case(
        steady(f"{_RECEIVER}spool_unconsumed_segments{{{RECEIVER}}}", 9), 31, 29,
        [steady(f"{_RECEIVER}spool_unconsumed_segments{{{RECEIVER}}}", 8)],
    ),
    "PulsarProxyReceiverLosesSamples": Case(
        rate(f'{_RECEIVER}rejected_requests_total{{{RECEIVER},reason="faulty"}}', 1), 13, 9,
        [rate(f'{_RECEIVER}rejected_requests_total{{{RECEIVER},reason="slow"}}', 100)],
    ),
    "PulsarProxySpoolDamaged": Case(
        steady(f"{_RECEIVER}spool_damages{{{RECEIVER}}}", 1), 1, None,
        [steady(f"{_RECEIVER}spool_damages{{{RECEIVER}}}", 0)],
    ),
}  # fmt: skip
MORE_FIRING = {
    "PulsarProxyAuthenticationFailureSurge": (authentications(60, None), 8),  # no client succeeds: no such series
    "PulsarProxyScrapeFails": (
        steady('up{job="proxy",app_kubernetes_io_name="pulsar-trio-proxy"}', 0),
        4,
    ),  # the chart's
    "PulsarProxyCertificateExpires": (ends(CRL, 0.01), 21),  # at once, however often it is replaced otherwise
    "PulsarProxyCertificateExpiresSoon": (ends(CRL, 1.4), 12 * 60 + 68),
    "PulsarProxyReauthenticationsFail": (again(FAILED, 6, None), 22),
    "PulsarProxyExpiredSessionsKilledSurge": (again(KILLED, 6, None), 22),
    "PulsarProxyCredentialsRefused": (  # one instance has a stale file
        broker("broker_credentials_accepted", 1) | broker("broker_credentials_accepted", 0, instance="p2"),
        3,
    ),
    "PulsarProxyReceiverDiskFillsUp": (steady(f"{_RECEIVER}spool_disk_free_bytes{{{RECEIVER}}}", 1e9), 12),
}


def blocks() -> dict[str, str]:
    """Each alert's text."""
    parts = re.split(r"\n +- alert: ", ALERTS)[1:]
    return {part.partition("\n")[0]: part for part in parts}


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rule_test(name: str, series: dict[str, str], asked: list[tuple[str, int, list[Any]]]) -> dict[str, Any]:
    """One group of promtool's `test rules`: expressions at minutes, and what they must give."""
    return {
        "interval": "1m",
        "name": name,
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [
            {"expr": expression, "eval_time": f"{minute}m", "exp_samples": expected}
            for expression, minute, expected in asked
        ],
    }


def run_rule_tests(tmp_path: Path, groups: list[dict[str, Any]], *more: str) -> None:
    """Evaluate all rules each minute; in a test of a day every 4 minutes, since the evaluations are what takes long."""
    rules = [str(PROMETHEUS / name) for name in ("recording-rules.yml", "alerts.yml", *more)]
    files = []
    for interval, has_days in (("1m", False), ("4m", True)):
        tests = [group for group in groups if takes_a_day(group) == has_days]
        files.append(tmp_path / f"{interval}.json")
        files[-1].write_text(json.dumps({"rule_files": rules, "evaluation_interval": interval, "tests": tests}))
    promtool("test", "rules", *files)


def takes_a_day(group: dict[str, Any]) -> bool:
    return any(int(one["eval_time"].removesuffix("m")) > DAY_M for one in group["promql_expr_test"])


def fires(alert: str, minute: int, *, expected: bool) -> tuple[str, int, list[Any]]:
    expression = f'count(ALERTS{{alertname="{alert}",alertstate="firing",severity=~".+"}}) > bool 0'
    return expression, minute, [{"labels": "{}", "value": 1}] if expected else []


def test_every_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    groups = []
    for alert, case in CASES.items():
        asked = [fires(alert, case.at, expected=True)]
        if case.pending is not None:
            asked.append(fires(alert, case.pending, expected=False))
        groups.append(rule_test(alert, case.firing, asked))
    groups += [
        rule_test(alert, series, [fires(alert, at, expected=True)]) for alert, (series, at) in MORE_FIRING.items()
    ]
    run_rule_tests(tmp_path, groups)


def test_refused_credentials_name_the_instance(tmp_path: Path) -> None:
    """The one with a stale credentials file, of several before the same broker."""
    alert = "PulsarProxyCredentialsRefused"
    accepted = "broker_credentials_accepted"
    series = broker(accepted, 1) | broker(accepted, 0, instance="p2") | broker(accepted, 1, "b2", instance="p2")
    labels = f'alertname="{alert}",alertstate="firing",{C},instance="p2",broker="b1",severity="critical"'
    firing = [{"labels": f"ALERTS{{{labels}}}", "value": 1}]
    run_rule_tests(tmp_path, [rule_test(alert, series, [(f'ALERTS{{alertname="{alert}"}}', 3, firing)])])
    (summary,) = re.findall(r"^ +summary: (.+)$", blocks()[alert], re.MULTILINE)
    assert {"{{ $labels.broker }}", "{{ $labels.instance }}"} <= set(re.findall(r"{{ \S+ }}", summary))


def test_no_alert_fires_when_it_should_not(tmp_path: Path) -> None:
    groups = [
        rule_test(f"{alert} {number}", series, [fires(alert, case.at, expected=False)])
        for alert, case in CASES.items()
        for number, series in enumerate(case.quiet)
    ]
    assert len(groups) >= len(CASES)
    run_rule_tests(tmp_path, groups)


def test_every_alert_has_cases_that_fire_and_that_do_not() -> None:
    assert set(CASES) == set(blocks())
    assert all(case.quiet for case in CASES.values())
    for alert, text in blocks().items():
        (waits,) = re.findall(r"^ +for: (\d+)m$", text, re.MULTILINE)
        assert (CASES[alert].pending is not None) or int(waits) <= 5


def test_alerts_have_what_an_operator_needs() -> None:
    for alert, text in blocks().items():
        (severity,) = re.findall(r"^ +severity: (\S+)$", text, re.MULTILINE)
        assert severity in SEVERITIES
        for annotation in ("summary", "description"):
            assert re.search(rf"^ +{annotation}: ['\"].+['\"]$", text, re.MULTILINE), (alert, annotation)
        (page, anchor) = re.findall(r"^ +runbook: (\S+)#(\S+)$", text, re.MULTILINE)[0]
        assert page == "docs/monitoring.md"
        assert anchor in {heading.lower() for heading in re.findall(r"^### (\w+)$", DOCS, re.MULTILINE)}


def test_the_docs_name_no_alert_that_is_gone() -> None:
    assert set(re.findall(r"^### (Pulsar\w+)$", DOCS, re.MULTILINE)) == set(blocks())


def test_every_recorded_rule_is_in_the_docs() -> None:
    assert {name for name in RECORDED if f"`{name}`" not in DOCS} == set()


@pytest.mark.conforms("kip-368.26")
@pytest.mark.parametrize("text", [ALERTS, RECORDING], ids=["alerts", "recording"])
def test_every_metric_and_label_of_the_rules_exists(text: str) -> None:
    expressions = re.findall(r"expr: (?:\|\n((?: {10}.*\n)+)|(.+))", text)
    assert len(expressions) == text.count("expr:")
    for expression in ("".join(pair) for pair in expressions):
        assert not unknown_metrics(expression, RECORDED)
        assert not unknown_labels(expression)


WHY = 'method="token",reason="client_cannot"'
OBSERVED = 'listener="0.0.0.0:6650",method="token",reason="expired"'
KIP_368_COUNTERS = {
    "reauthentication_success": ',method="token"',
    "reauthentication_failure": ',method="token"',
    "authentication_no_reauth": f",{WHY}",
    "expired_connections_killed": "",
    "expired_connections_observed": f",{OBSERVED}",
}
KIP_368 = (
    "successful-reauthentication-rate",
    "successful-reauthentication-total",
    "failed-reauthentication-rate",
    "failed-reauthentication-total",
    "successful-authentication-no-reauth-rate",
    "successful-authentication-no-reauth-total",
    "reauthentication-latency-avg",
    "reauthentication-latency-max",
    "expired-connections-killed-count",
)


@pytest.mark.conforms("kip-368.26")
def test_every_name_of_kip_368_has_a_recording_rule() -> None:
    metrics = (ROOT / "docs/metrics.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| `[^|]+` \| `([a-z0-9_:]+)` \|$", metrics, re.MULTILINE))
    assert set(rows) == set(KIP_368)
    assert set(rows.values()) <= set(RECORDED)


@pytest.mark.conforms("kip-368.29", "kip-368.33")
def test_recorded_rates_and_quantiles(tmp_path: Path) -> None:
    labels = f'{C},role="forwarder",direction="to_broker"'
    series = (
        rate(f'pulsar_proxy_binary_bytes_total{{{labels},worker="0"}}', 600)
        | rate(f'pulsar_proxy_binary_bytes_total{{{labels},worker="1"}}', 60)
        | lookups(50)
        | answers("ServiceNotReady", 25, good=75)
        | rate(f"pulsar_proxy_reauthentication_seconds_sum{{{C}}}", 30)
        | rate(f"pulsar_proxy_reauthentication_seconds_count{{{C}}}", 60)
        | rate(f'pulsar_proxy_broker_reauthentication_seconds_sum{{{C},role="lookup"}}', 15)
        | rate(f'pulsar_proxy_broker_reauthentication_seconds_count{{{C},role="lookup"}}', 60)
    )
    for worker, (growth, longest_s) in enumerate(((60, 0.25), (30, 4))):
        where = f'{C},role="forwarder",worker="{worker}"'
        for name, more in KIP_368_COUNTERS.items():
            series |= rate(f"pulsar_proxy_{name}_total{{{where}{more}}}", growth)
        series |= steady(f"pulsar_proxy_reauthentication_max_seconds{{{where}}}", longest_s)
    expected = {
        "cluster_direction:pulsar_proxy_binary_bytes:rate5m": ('direction="to_broker"', 11),
        "cluster_request:pulsar_proxy_lookup_seconds:p50_rate5m": ('request="lookup"', 1.0),
        "cluster_request:pulsar_proxy_lookup_seconds:p99_rate5m": ('request="lookup"', 1 + 1.5 * 49 / 50),
        "cluster:pulsar_proxy_lookup_failures:ratio_rate5m": ("", 0.25),
        "cluster:pulsar_proxy_reauthentication_seconds:avg_rate5m": ("", 0.5),
        "cluster:pulsar_proxy_reauthentication_max_seconds:max": ("", 4),
        "cluster_role:pulsar_proxy_broker_reauthentication_seconds:avg_rate5m": ('role="lookup"', 0.25),
        "cluster_method:pulsar_proxy_reauthentication_success:rate5m": ('method="token"', 1.5),
        "cluster_method:pulsar_proxy_reauthentication_success:sum": ('method="token"', 20 * 90),
        "cluster_method:pulsar_proxy_reauthentication_failure:rate5m": ('method="token"', 1.5),
        "cluster_method:pulsar_proxy_reauthentication_failure:sum": ('method="token"', 20 * 90),
        "cluster_method_reason:pulsar_proxy_authentication_no_reauth:rate5m": (WHY, 1.5),
        "cluster_method_reason:pulsar_proxy_authentication_no_reauth:sum": (WHY, 20 * 90),
        "cluster:pulsar_proxy_expired_connections_killed:rate5m": ("", 1.5),
        "cluster:pulsar_proxy_expired_connections_killed:sum": ("", 20 * 90),
        "cluster_listener_method_reason:pulsar_proxy_expired_connections_observed:rate5m": (OBSERVED, 1.5),
    }
    asked = []
    for name, (more, value) in expected.items():
        own = ",".join(label for label in (C, more) if label)
        # promtool compares doubles exactly
        asked.append((f"round({name}, 0.0001)", 20, [{"labels": f"{{{own}}}", "value": round(value, 4)}]))
    run_rule_tests(tmp_path, [rule_test("recorded", series, asked)])


PODS = ("proxy-0", "proxy-1")
OTHERS_DASHBOARD = {
    "pulsar_proxy_active_connections": ("", "forwarder"),
    "pulsar_proxy_new_connections_total": ("30s", "forwarder"),
    "pulsar_proxy_rejected_connections_total": ("30s", "forwarder"),
    "pulsar_proxy_binary_ops_total": ("1m", "forwarder"),
    "pulsar_proxy_lookup_requests_total": ("1m", "lookup"),
    "pulsar_proxy_partitions_metadata_requests_total": ("1m", "lookup"),
    "pulsar_proxy_get_topics_of_namespace_requests_total": ("1m", "lookup"),
    "pulsar_proxy_rejected_lookup_requests_total": ("1m", "lookup"),
    "pulsar_proxy_rejected_partitions_metadata_requests_total": ("1m", "lookup"),
    "pulsar_proxy_rejected_get_topics_of_namespace_requests_total": ("1m", "lookup"),
}
"""What apache/pulsar-helm-chart's dashboard for the proxy asks for (lhotari/pulsar-grafana-dashboards@2776980,
pulsar/proxy.json; all but Jetty's requests): each summed by pod, as a rate over so long. From which role it comes here.
"""


def pod_labels(pod: str, role: str, worker: int = 0) -> str:
    where = f'job="proxy",instance="{pod}:8080",kubernetes_pod_name="{pod}"'
    return f'{C},{where},role="{role}",worker="{worker}"'


def test_the_dashboard_for_pulsars_own_proxy_shows_data(tmp_path: Path) -> None:
    assert not unknown_metrics(" ".join(OTHERS_DASHBOARD)), "we expose what it asks for"
    series: dict[str, str] = {}
    for pod in PODS:
        series |= steady(f"process_start_time_seconds{{{pod_labels(pod, 'supervisor')}}}", 1700000000)
        series |= steady(f"process_start_time_seconds{{{pod_labels(pod, 'forwarder')}}}", 1700000001)
        for name, (window, role) in OTHERS_DASHBOARD.items():
            for worker in (0, 1):
                key = f"{name}{{{pod_labels(pod, role, worker)}}}"
                series |= {key: "0+30x240"} if window else {key: "7x240"}
    series = {key: values.replace("x60", "x240") for key, values in series.items()}
    python = 'runtime="pulsar-trio-proxy (Python, no JVM)"'
    pods = [
        {
            "labels": f'jvm_info{{{C},instance="{pod}:8080",job="proxy",kubernetes_pod_name="{pod}",{python}}}',
            "value": 1,
        }
        for pod in PODS
    ]
    asked: list[tuple[str, int, list[Any]]] = [('jvm_info{job="proxy"}', 20, pods)]
    chosen = f'{{job=~"proxy", kubernetes_pod_name=~"{"|".join(PODS)}"}}'
    for name, (window, _role) in OTHERS_DASHBOARD.items():
        inside = f"rate({name}{chosen}[{window}])" if window else f"{name}{chosen}"
        value = 4 if window else 14
        expected = [{"labels": f'{{kubernetes_pod_name="{pod}"}}', "value": value} for pod in PODS]
        asked.append((f"sum({inside}) by (kubernetes_pod_name)", 20, expected))
    group = rule_test("another's dashboard", series, asked) | {"interval": "15s"}
    run_rule_tests(tmp_path, [group], "compatibility-rules.yml")


def test_the_scrape_configuration_and_its_rules_are_valid(tmp_path: Path) -> None:
    for file in PROMETHEUS.glob("*.yml"):
        shutil.copy(file, tmp_path)
    (tmp_path / "receiver-token").write_text("a token of sixteen bytes")
    said = promtool("check", "config", tmp_path / "prometheus.yml")
    assert "2 rule files found" in said
    assert said.count("SUCCESS") >= 3


def test_the_alerts_name_the_scrape_configurations_jobs() -> None:
    jobs = set(re.findall(r"job_name: (\S+)", (PROMETHEUS / "prometheus.yml").read_text()))
    named = set(
        re.findall(
            r'job="([^"]+)"', ALERTS + (ROOT / "deploy" / "grafana" / "pulsar-proxy.json").read_text().replace("\\", "")
        )
    )
    assert named <= jobs | {"proxy"}  # the chart's monitors call it so
