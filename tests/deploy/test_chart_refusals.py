"""Combinations of values that the chart refuses, by key and words; realistic ones beside each border are rendered."""

import bisect
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proto.addresses import AddressInvalid, parse_broker_url
from proxy.config.cgroups import ContainerLimits
from proxy.config.memory import fit_to_container
from proxy.config.types import MIB, Config
from tests.deploy.chart import CHART, VALUES, Manifests, Refused, deep_merge, helm_template, needs_tools

pytestmark = needs_tools

TLS: dict[str, Any] = {"tls": {"enabled": True, "existingSecret": "tls"}}
BOTH: dict[str, Any] = {"tls": {"enabled": True, "existingSecret": "tls", "keepPlain": True}}
SNI: dict[str, Any] = {"sni": {"enabled": True}}
HTTP: dict[str, Any] = {"http": {"enabled": True}}
SNI_LISTENER = {"bind": "[::]:7004", "routing": "sni"}
TLS_LISTENER = {"bind": "[::]:7002", "tls": {"certificate": "c", "key": "k"}}


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """Several values as one."""
    whole: dict[str, Any] = {}
    for part in parts:
        whole = deep_merge(whole, part)
    return whole


def certificate(**values: Any) -> dict[str, Any]:
    return {"tls": {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "ca"}, **values}}}


def autoscaling(**values: Any) -> dict[str, Any]:
    return {"autoscaling": {"enabled": True, **values}}


def service(kind: str, **values: Any) -> dict[str, Any]:
    return {"service": {"type": kind, **values}}


def brokers(url: str) -> dict[str, Any]:
    return {"config": {"brokers": {"service_url": url}}}


def own_http() -> dict[str, Any]:
    return {"config": {"brokers": {"web_service_url": "http://b:8080"}, "http_listener": [{"bind": "[::]:8081"}]}}


def memory(limit: Any, **config: Any) -> dict[str, Any]:
    return {"resources": {"requests": {"memory": "1Mi"}, "limits": {"memory": limit}}, "config": config}


def receiver(**values: Any) -> dict[str, Any]:
    return {"analytics": {"receiver": {"enabled": True, **values}}}


def monitor(kind: str, **values: Any) -> dict[str, Any]:
    return {kind: {"enabled": True, **values}}


def budget(replicas: int, **values: Any) -> dict[str, Any]:
    return {"replicaCount": replicas, "pdb": {"maxUnavailable": "", **values}}


INGRESS: dict[str, Any] = {"ingress": {"enabled": True, "paths": ["/status"]}}
PROXY_TOKEN: dict[str, Any] = {"auth": {"proxyToken": {"enabled": True, "secret": {"name": "t"}}}}
OIDC: dict[str, Any] = {"config": {"authentication": {"enabled": True, "tls": {}}}}
SIDECAR: dict[str, Any] = {"extraContainers": [{"name": "c", "image": "i"}]}
SYSCTL = "net.ipv4.ip_unprivileged_port_start"
WITHOUT = "has no effect unless"

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    # TLS
    ({"tls": {"existingSecret": "tls"}}, "tls.existingSecret", f"{WITHOUT} tls.enabled is true"),
    ({"tls": {"clientCa": {"secret": "ca"}}}, "tls.clientCa.secret", f"{WITHOUT} tls.enabled is true"),
    ({"tls": {"requireClientCertificate": True}}, "tls.requireClientCertificate", f"{WITHOUT} tls.enabled"),
    ({"tls": {"keepPlain": True}}, "tls.keepPlain", f"{WITHOUT} tls.enabled"),
    ({"tls": {"certManager": {"enabled": True}}}, "tls.certManager.enabled", f"{WITHOUT} tls.enabled is true"),
    ({"tls": {"certManager": {"dnsNames": ["a"]}}}, "tls.certManager.dnsNames", f"{WITHOUT} tls.enabled is true"),
    (merged(TLS, {"tls": {"certManager": {"dnsNames": ["a"]}}}), "tls.certManager.dnsNames", "certManager.enabled is"),
    (merged(TLS, {"tls": {"clientCa": {"key": "x"}}}), "tls.clientCa.key", "tls.clientCa.secret is set"),
    ({"tls": {"certificates": ["a"]}}, "tls.certificates", f"{WITHOUT} tls.enabled is true"),
    ({"tls": {"ciphers": "HIGH"}}, "tls.ciphers", f"{WITHOUT} tls.enabled is true"),
    (merged(TLS, {"tls": {"ciphers": "HIGH", "minimumVersion": "1.3"}}), "tls.ciphers", "tls.minimumVersion is 1.2"),
    (merged(TLS, {"tls": {"sessionTickets": True}}), "tls.sessionTickets", "set tls.minimumVersion to 1.3"),
    (
        merged(TLS, {"tls": {"sessionTickets": True, "minimumVersion": "1.3", "clientCa": {"secret": "ca"}}}),
        "tls.sessionTickets",
        "leave out tls.clientCa.secret",
    ),
    (merged(TLS, {"tls": {"clientCrl": {"secret": "crl"}}}), "tls.clientCrl.secret", "tls.clientCa.secret is set"),
    (merged(TLS, {"tls": {"clientCrl": {"key": "x"}}}), "tls.clientCrl.key", "tls.clientCrl.secret is set"),
    ({"tls": {"enabled": True}}, "tls.enabled", "no certificate; set tls.existingSecret or tls.certManager.enabled"),
    (merged(TLS, certificate()), "tls.existingSecret and tls.certManager.enabled", "only one of them"),
    (merged(TLS, {"tls": {"requireClientCertificate": True}}), "tls.requireClientCertificate", "tls.clientCa.secret"),
    (certificate(issuerRef={"name": ""}), "tls.certManager.issuerRef.name", "name the Issuer"),
    (certificate(serviceNames=False), "tls.certManager.serviceNames", "tls.certManager.dnsNames"),
    (certificate(duration="720h"), "tls.certManager.renewBefore", "720h is not less than tls.certManager.duration"),
    (certificate(duration="24h", renewBefore="1440m"), "tls.certManager.renewBefore", "1440m is not less"),
    (certificate(duration="59m", renewBefore="5m"), "tls.certManager.duration", "set 1h or more"),
    (certificate(renewBefore="299s"), "tls.certManager.renewBefore", "set 5m or more"),
    (merged(TLS, {"config": {"listener": [TLS_LISTENER]}}), "tls.enabled", "listeners of your own"),
    (
        {"brokerTls": {"ca": {"secret": "ca"}}},
        "brokerTls.ca.secret",
        "config.brokers.service_url begins with pulsar+ssl",
    ),
    ({"brokerTls": {"certificateSecret": "c"}}, "brokerTls.certificateSecret", "begins with pulsar+ssl"),
    (merged(brokers("pulsar+ssl://b"), {"brokerTls": {"ca": {"key": "x"}}}), "brokerTls.ca.key", "ca.secret is set"),
    # authentication
    ({"auth": {"token": {"enabled": True}}}, "auth.token.enabled", "auth.pulsarRelease"),
    ({"auth": {"proxyToken": {"enabled": True}}}, "auth.proxyToken.enabled", "auth.pulsarRelease"),
    (
        {"auth": {"pulsarRelease": "pulsar"}, "config": {"brokers": {"service_url": "pulsar://b:6650"}}},
        "auth.pulsarRelease",
        "auth.token or auth.proxyToken is enabled",
    ),
    (
        {"brokers": {"pulsarRelease": "pulsar"}, "config": {"brokers": {"service_url": "pulsar://b:6650"}}},
        "brokers.pulsarRelease",
        "config.brokers.service_url is not set",
    ),
    ({"auth": {"token": {"algorithm": "symmetric"}}}, "auth.token.algorithm", "auth.token.enabled is true"),
    (PROXY_TOKEN, "auth.proxyToken.enabled", "auth.proxyToken.withoutClientAuthentication: true"),
    (
        merged(PROXY_TOKEN, OIDC, {"auth": {"proxyToken": {"role": "x"}}}),
        "auth.proxyToken.role",
        "secret.name is empty",
    ),
    (
        merged(PROXY_TOKEN, OIDC, {"auth": {"proxyToken": {"withoutClientAuthentication": True}}}),
        "auth.proxyToken.withoutClientAuthentication",
        "clients need no authentication",
    ),
    ({"adminToken": {"key": "x"}}, "adminToken.key", "adminToken.secret is set"),
    (INGRESS, "ingress.enabled", "set adminToken.secret"),
    (merged(INGRESS, {"adminToken": {"secret": "a"}, "ingress": {"paths": []}}), "ingress.enabled", "ingress.paths"),
    ({"ingress": {"hostname": "proxy.example.org"}}, "ingress.hostname", "ingress.enabled is true"),
    # the configuration
    (brokers("http://pulsar-broker:8080"), "config.brokers.service_url", "does not begin with pulsar://"),
    (brokers("pulsar-broker:6650"), "config.brokers.service_url", "does not begin with pulsar://"),
    (brokers("pulsar://"), "config.brokers.service_url", "names no host"),
    (brokers("pulsar://a:6650,:6650"), "config.brokers.service_url", "names no host"),
    (brokers("pulsar://b:0"), "config.brokers.service_url", "no valid port"),
    (brokers("pulsar://b:6650/tenant"), "config.brokers.service_url", "no valid port"),
    (brokers("pulsar://b/tenant"), "config.brokers.service_url", "more than hosts and ports"),
    (brokers("pulsar+srv://b:6650"), "config.brokers.service_url", "SRV records"),
    (
        {"config": {"brokers": {"credentials": {"method": "token", "token": "t"}}}},
        "config.brokers.credentials.token",
        "auth.proxyToken.secret",
    ),
    ({"config": {"admin": {"bind": "127.0.0.1:8080"}}}, "config.admin.bind", "loopback"),
    ({"config": {"admin": {"bind": "[::1]:8080"}}}, "config.admin.bind", "loopback"),
    ({"config": {"cluster": {"runtime_dir": "/var/lib/proxy"}}}, "config.cluster.runtime_dir", "read-only"),
    ({"terminationGracePeriodSeconds": 54}, "terminationGracePeriodSeconds", "is too short"),
    # ports
    ({"ports": {"admin": 6650}}, "ports.pulsar", "port 6650 is that of ports.admin"),
    (merged(BOTH, {"ports": {"pulsarssl": 6650}}), "ports.pulsarssl", "port 6650 is that of ports.pulsar"),
    ({"config": {"listener": [{"bind": "[::]:7000"}] * 2}}, "config.listener", "port 7000"),
    ({"config": {"listener": []}}, "config.listener", "is empty"),
    ({"ports": {"admin": 80}}, "ports.admin", "may not bind port 80"),
    ({"ports": {"pulsar": 1023}}, "ports.pulsar", "may not bind port 1023"),
    (merged(TLS, {"ports": {"pulsarssl": 443}}), "ports.pulsarssl", "service.ports may be lower"),
    ({"config": {"admin": {"bind": "0.0.0.0:80"}}}, "config.admin.bind", SYSCTL),
    ({"config": {"listener": [{"bind": "[::]:443"}]}}, "config.listener", SYSCTL),
    (
        {"ports": {"admin": 80}, "securityContext": {"capabilities": {"add": ["NET_BIND_SERVICE"]}}},
        "ports.admin",
        "may not bind port 80",  # a capability of a user that is not root ends with exec
    ),
    (
        {"ports": {"admin": 80}, "podSecurityContext": {"sysctls": [{"name": SYSCTL, "value": "81"}]}},
        "ports.admin",
        "use 81 or more",
    ),
    ({"ports": {"pulsarssl": 7000}}, "ports.pulsarssl", "tls.enabled is true"),
    (merged(TLS, {"ports": {"pulsar": 7000}}), "ports.pulsar", "tls.keepPlain is true"),
    ({"ports": {"pulsar": 7000}, "config": {"listener": [{}]}}, "ports.pulsar", "config.listener is not set"),
    ({"ports": {"admin": 9000}, "config": {"admin": {"bind": "[::]:8080"}}}, "ports.admin", "config.admin.bind is not"),
    (
        {"ports": {"pulsarssl": 7000}, "config": {"listener": [TLS_LISTENER]}},
        "ports.pulsarssl",
        "config.listener is not set",
    ),
    (
        {"bindAddress": "[::]", "config": {"listener": [{}], "admin": {"bind": "[::]:8080"}}},
        "bindAddress",
        "config.listener or config.admin.bind is not set",
    ),
    ({"ports": {"names": {"pulsarssl": "x"}}}, "ports.names.pulsarssl", "a listener has TLS"),
    # a listener with routing by SNI
    (merged(SNI, {"config": {"listener": [SNI_LISTENER]}}), "sni.enabled", "listeners of your own"),
    ({"proxyProtocol": {"mode": "required"}}, "proxyProtocol.mode", "name the networks"),
    ({"proxyProtocol": {"sources": ["10.0.0.0/8"]}}, "proxyProtocol.sources", "mode is optional or required"),
    (
        {"proxyProtocol": {"mode": "required", "sources": ["10.0.0.0/8"]}, "config": {"listener": [SNI_LISTENER]}},
        "proxyProtocol.mode",
        "listeners of your own",
    ),
    (merged(SNI, {"ports": {"pulsarsni": 6650}}), "ports.pulsarsni", "port 6650 is that of ports.pulsar"),
    ({"ports": {"pulsarsni": 7000}}, "ports.pulsarsni", "sni.enabled is true"),
    (
        {"ports": {"pulsarsni": 7000}, "config": {"listener": [SNI_LISTENER]}},
        "ports.pulsarsni",
        "config.listener is not set",
    ),
    ({"ports": {"names": {"pulsarsni": "x"}}}, "ports.names.pulsarsni", "a listener has routing sni"),
    ({"service": {"ports": {"pulsarsni": 7000}}}, "service.ports.pulsarsni", "a listener has routing sni"),
    (service("NodePort", nodePorts={"pulsarsni": 30652}), "service.nodePorts.pulsarsni", "a listener has routing sni"),
    (
        merged(service("NodePort", nodePorts={"pulsarssl": 30651}), SNI),
        "service.nodePorts.pulsarssl",
        "a listener has TLS",
    ),
    (
        {"config": {"listener": [SNI_LISTENER]}, "test": {"tokenSecret": "client"}},
        "test.tokenSecret",
        "a listener has another routing than sni",
    ),
    (
        {"config": {"listener": [SNI_LISTENER, {"bind": "[::]:6650"}]}, "test": {"caSecret": "ca"}},
        "test.caSecret",
        "the first listener has TLS",
    ),
    (merged(TLS, {"ports": {"names": {"pulsar": "x"}}}), "ports.names.pulsar", "a listener is plain"),
    (merged(TLS, {"service": {"ports": {"pulsar": 7000}}}), "service.ports.pulsar", "a listener is plain"),
    ({"service": {"ports": {"pulsarssl": 7000}}}, "service.ports.pulsarssl", "a listener has TLS"),
    (merged(TLS, service("NodePort", nodePorts={"pulsar": 30650})), "service.nodePorts.pulsar", "a listener is plain"),
    (service("ClusterIP", nodePorts={"pulsar": 30650}), "service.nodePorts.pulsar", "service.type is NodePort"),
    (
        merged(BOTH, service("NodePort", nodePorts={"pulsar": 30650, "pulsarssl": 30650})),
        "service.nodePorts",
        "30650 is the port of two listeners",
    ),
    (service("NodePort", nodePorts={"pulsarssl": 30651}), "service.nodePorts.pulsarssl", "a listener has TLS"),
    (merged(BOTH, {"service": {"ports": {"pulsarssl": 6650}}}), "service.ports", "6650 is the port of two listeners"),
    (service("ClusterIP", externalTrafficPolicy="Local"), "service.externalTrafficPolicy", "service.type is NodePort"),
    (service("NodePort", loadBalancerIP="192.0.2.7"), "service.loadBalancerIP", "service.type is LoadBalancer"),
    (service("NodePort", loadBalancerClass="x"), "service.loadBalancerClass", "service.type is LoadBalancer"),
    (
        service("ClusterIP", loadBalancerSourceRanges=["10.0.0.0/8"]),
        "service.loadBalancerSourceRanges",
        "service.type is LoadBalancer",
    ),
    (service("LoadBalancer", clusterIP="None"), "service.clusterIP", "is not for service.type LoadBalancer"),
    # HTTP
    (merged(HTTP, {"config": {"http_listener": [{}]}}), "http.enabled", "listeners of your own"),
    (merged(HTTP, {"http": {"ingress": {"enabled": True}}}), "http.ingress.hostname", "name the host"),
    (merged(HTTP, brokers("pulsar://b:6650")), "config.brokers.web_service_url", "write http://HOST:PORT"),
    (merged(HTTP, {"http": {"plain": True}}), "http.plain", "tls.enabled is true"),
    (merged(HTTP, TLS, {"http": {"plain": True, "existingSecret": "s"}}), "http.existingSecret", "http.plain is false"),
    (merged(HTTP, {"http": {"paths": ["/"]}}), "http.paths", "http.ingress.enabled is true, or gateway.httpRoutes"),
    (merged(HTTP, {"ports": {"http": 8080}}), "ports.http", "port 8080 is that of ports.admin"),
    (merged(HTTP, {"ports": {"http": 80}}), "ports.http", "may not bind port 80"),
    ({"http": {"existingSecret": "s"}}, "http.existingSecret", "http.enabled is true"),
    ({"ports": {"http": 8082}}, "ports.http", "http.enabled is true"),
    ({"service": {"ports": {"http": 80}}}, "service.ports.http", "there is a listener for HTTP"),
    (
        merged(HTTP, service("NodePort", nodePorts={"http": 30080})),
        "service.nodePorts.http",
        "inClientsService is true",
    ),
    ({"networkPolicy": {"http": [{"podSelector": {}}]}}, "networkPolicy.http", "there is a listener for HTTP"),
    *(
        (merged(own_http(), {"http": {key: value}}), f"http.{key}", "http.enabled is true")
        for key, value in {"plain": True, "existingSecret": "s"}.items()
    ),
    (merged(own_http(), {"ports": {"http": 8082}}), "ports.http", "config.http_listener is not set"),
    ({"gateway": {"annotations": {"a": "b"}}}, "gateway.annotations", "gateway.httpRoutes"),
    ({"gateway": {"versions": {"tcpRoute": "v1alpha2"}}}, "gateway.versions.tcpRoute", "gateway.tcpRoutes is set"),
    # images
    ({"image": {"repository": "registry:5000/proxy:1.0"}}, "image.repository", "put it into image.tag"),
    ({"image": {"repository": f"proxy@sha256:{'0' * 64}"}}, "image.repository", "image.digest"),
    (merged(receiver(), {"analytics": {"image": {"repository": "a:1"}}}), "analytics.image.repository", "image.tag"),
    ({"image": {"tag": "1.0", "digest": f"sha256:{'0' * 64}"}}, "image.tag", "image.digest is empty"),
    # resources
    (memory("100Mi"), "resources.limits.memory", "100Mi is too small; this configuration needs at least"),
    (memory("1Gi", cluster={"forwarders": 48}), "resources.limits.memory", "lower config.cluster.forwarders"),
    (memory(400_000_000, limits={"max_connections": 20_000}), "resources.limits.memory", "is too small"),
    (
        {"resources": {"requests": {"memory": "2Gi"}}},
        "resources.requests.memory",
        "is more than resources.limits.memory",
    ),
    (
        {"resources": {"requests": {"cpu": 1}, "limits": {"cpu": "900m"}}},
        "resources.requests.cpu",
        "is more than resources.limits.cpu (900m)",
    ),
    (
        receiver(resources={"requests": {"memory": "1025Mi"}}),
        "analytics.receiver.resources.requests.memory",
        "raise the limit",
    ),
    # pods
    ({"dnsPolicy": "None"}, "dnsPolicy", "set dnsConfig.nameservers"),
    ({"minReadySeconds": 600}, "progressDeadlineSeconds", "is not more than minReadySeconds"),
    (
        {"updateStrategy": {"rollingUpdate": {"maxSurge": "0%"}}},
        "updateStrategy.rollingUpdate.maxSurge",
        "no pod could be replaced",
    ),
    (
        {"updateStrategy": {"type": "Recreate", "rollingUpdate": {"maxSurge": 2}}},
        "updateStrategy.rollingUpdate.maxSurge",
        "updateStrategy.type is RollingUpdate",
    ),
    ({"probes": {"liveness": {"successThreshold": 2}}}, "probes.liveness.successThreshold", "only 1"),
    (
        {"probes": {"readiness": {"terminationGracePeriodSeconds": 9}}},
        "probes.readiness.terminationGracePeriodSeconds",
        "leave it out",
    ),
    (
        {"probes": {"startup": {"enabled": False, "initialDelaySeconds": 9}}},
        "probes.startup.initialDelaySeconds",
        "probes.startup.enabled is true",
    ),
    ({"extraVolumes": [{"name": "tmp", "emptyDir": {}}]}, "extraVolumes", "the volume tmp is there already"),
    ({"extraVolumeMounts": [{"name": "v", "mountPath": "/v"}]}, "extraVolumeMounts", "no volume v; add it"),
    ({"podLabels": {"app.kubernetes.io/name": "x"}}, "podLabels", "the chart's own"),
    ({"commonLabels": {"app.kubernetes.io/version": "x"}}, "commonLabels", "the chart's own"),
    (
        {"serviceAccount": {"create": False, "annotations": {"a": "b"}}},
        "serviceAccount.annotations",
        "serviceAccount.create is true",
    ),
    # numbers of pods
    (autoscaling(minReplicas=9), "autoscaling.minReplicas", "is more than autoscaling.maxReplicas (6)"),
    (autoscaling(cpu={"targetUtilization": 0}), "autoscaling.enabled", "there is no metric"),
    (
        merged(autoscaling(), {"resources": {"requests": {"cpu": None}}}),
        "autoscaling.cpu.targetUtilization",
        "resources has none",
    ),
    (merged(autoscaling(), SIDECAR), "autoscaling.cpu.targetUtilization", "extraContainers[0].resources has none"),
    (merged(autoscaling(), {"replicaCount": 4}), "replicaCount", "autoscaling.enabled and keda.enabled are false"),
    ({"autoscaling": {"maxReplicas": 9}}, "autoscaling.maxReplicas", "autoscaling.enabled is true"),
    (autoscaling(connections={"metric": "m"}), "autoscaling.connections.metric", "targetAverage is set"),
    ({"pdb": {"maxUnavailable": 0}}, "pdb.maxUnavailable", "blocks the drain of every node"),
    ({"pdb": {"maxUnavailable": "0%"}}, "pdb.maxUnavailable", "blocks the drain of every node"),
    ({"pdb": {"maxUnavailable": ""}}, "pdb.enabled", "set pdb.maxUnavailable or pdb.minAvailable"),
    ({"pdb": {"minAvailable": 1}}, "pdb.minAvailable", "set pdb.maxUnavailable to"),
    (budget(3, minAvailable=3), "pdb.minAvailable", "3 of 3 pods"),
    (budget(3, minAvailable="100%"), "pdb.minAvailable", "100% of 3 pods"),
    (budget(3, minAvailable="67%"), "pdb.minAvailable", "blocks the drain"),  # Kubernetes rounds up
    (budget(1, minAvailable=1), "pdb.minAvailable", "1 of 1 pods"),
    (
        merged(autoscaling(), {"pdb": {"maxUnavailable": "", "minAvailable": 2}}),
        "pdb.minAvailable",
        "autoscaling.minReplicas",
    ),
    # who reaches them, monitoring
    (
        {"networkPolicy": {"enabled": False, "clients": [{"podSelector": {}}]}},
        "networkPolicy.clients",
        "networkPolicy.enabled is true",
    ),
    (
        {"networkPolicy": {"egressMode": "open", "egress": [{"ports": [{"port": 443}]}]}},
        "networkPolicy.egress",
        "networkPolicy.egressMode is configured",
    ),
    (
        monitor("serviceMonitor", interval="9s"),
        "serviceMonitor.scrapeTimeout",
        "10s is more than serviceMonitor.interval",
    ),
    (monitor("podMonitor", scrapeTimeout="15001ms"), "podMonitor.scrapeTimeout", "is more than podMonitor.interval"),
    (monitor("podMonitor", scrapeTimeout="1m"), "podMonitor.scrapeTimeout", "is more than podMonitor.interval"),
    ({"serviceMonitor": {"interval": "1m"}}, "serviceMonitor.interval", "serviceMonitor.enabled is true"),
    (
        merged(monitor("serviceMonitor"), monitor("podMonitor")),
        "serviceMonitor.enabled and podMonitor.enabled",
        "scraped twice",
    ),
    ({"prometheusRule": {"compatibility": True}}, "prometheusRule.compatibility", "prometheusRule.enabled is true"),
    # the test and the analytics
    ({"test": {"enabled": False, "host": "x"}}, "test.host", "test.enabled is true"),
    ({"test": {"tokenKey": "x"}}, "test.tokenKey", "test.tokenSecret is set"),
    ({"test": {"http": False}}, "test.http", "there is a listener for HTTP"),
    ({"test": {"caSecret": "ca"}}, "test.caSecret", "the first listener has TLS"),
    ({"test": {"clientCertificateSecret": "c"}}, "test.clientCertificateSecret", "the first listener has TLS"),
    ({"test": {"caKey": "x"}}, "test.caKey", "the first listener has TLS"),
    (merged({"config": {"listener": [TLS_LISTENER]}}, {"test": {"caKey": "x"}}), "test.caKey", "test.caSecret is set"),
    ({"analytics": {"rollup": {"enabled": True}}}, "analytics.rollup.enabled", "set analytics.receiver.enabled"),
    ({"analytics": {"image": {"tag": "1"}}}, "analytics.image.tag", "analytics.receiver.enabled is true"),
    (
        merged(receiver(), {"analytics": {"image": {"tag": "1", "digest": f"sha256:{'0' * 64}"}}}),
        "analytics.image.tag",
        "analytics.image.digest is empty",
    ),
    (
        receiver(terminationGracePeriodSeconds=34),
        "analytics.receiver.terminationGracePeriodSeconds",
        "34 is too short; limits.drain_timeout_ms and 5 s for the rest need 35",
    ),
    *(
        (
            receiver(persistence={"existingClaim": "mine", key: other}),
            f"analytics.receiver.persistence.{key}",
            "existingClaim is empty",
        )
        for key, other in {"size": "1Gi", "storageClassName": "x", "accessModes": ["ReadWriteMany"]}.items()
    ),
    (
        merged(receiver(peers=[]), {"networkPolicy": {"enabled": False}}),
        "analytics.receiver.peers",
        "networkPolicy.enabled is true",
    ),
    *(
        (
            merged(receiver(serviceMonitor=True), {"serviceMonitor": {key: [{"action": "keep"}]}}),
            f"serviceMonitor.{key}",
            "serviceMonitor.enabled is true",
        )
        for key in ("relabelings", "metricRelabelings")
    ),
]


@pytest.mark.parametrize(("values", "key", "words"), REFUSED)
def test_a_combination_without_sense_is_refused(values: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(Refused) as refused:
        helm_template(values)
    _, _, message = str(refused.value).partition("): ")
    assert message.startswith(f"{key}: ")
    assert words in message
    assert "; " in message, "it does not say what to do"


BESIDE: list[dict[str, Any]] = [
    merged(TLS, {"tls": {"clientCa": {"secret": "ca", "key": "x"}, "requireClientCertificate": True}}),
    certificate(duration="24h", renewBefore="8h"),
    certificate(duration="1h", renewBefore="5m", serviceNames=False, dnsNames=["proxy.example.org"]),
    certificate(duration="2h", renewBefore="119m59s"),
    merged(brokers("pulsar+ssl://b:6651"), {"brokerTls": {"ca": {"secret": "ca", "key": "x"}}}),
    {"auth": {"pulsarRelease": "pulsar", "token": {"enabled": True, "keySecret": {"key": "x"}}}},
    merged(PROXY_TOKEN, {"auth": {"proxyToken": {"withoutClientAuthentication": True}}}),
    merged(PROXY_TOKEN, OIDC),
    merged(INGRESS, {"adminToken": {"secret": "a"}}),
    {"adminToken": {"secret": "a", "key": "x"}},
    {"terminationGracePeriodSeconds": 55},
    {"ports": {"admin": 1024, "pulsar": 1025}},
    {"ports": {"admin": 80}, "podSecurityContext": {"sysctls": [{"name": SYSCTL, "value": "80"}]}},
    {"ports": {"admin": 80}, "podSecurityContext": {"runAsUser": 0, "runAsNonRoot": False}},
    {"ports": {"admin": 80}, "securityContext": {"runAsUser": 0, "runAsNonRoot": False}},
    merged(TLS, {"service": {"ports": {"pulsarssl": 443}}}),
    merged(BOTH, service("NodePort", nodePorts={"pulsar": 30650, "pulsarssl": 30651})),
    service("NodePort", nodePorts={"pulsar": 30650}, externalTrafficPolicy="Cluster"),
    merged(SNI, service("NodePort", nodePorts={"pulsarsni": 30652}), {"ports": {"names": {"pulsarsni": "x"}}}),
    {"config": {"listener": [SNI_LISTENER]}, "service": {"ports": {"pulsarsni": 443}}},
    service("LoadBalancer", loadBalancerIP="192.0.2.7", loadBalancerSourceRanges=["10.0.0.0/8"]),
    service("ClusterIP", clusterIP="None"),
    merged(own_http(), {"http": {"paths": ["/"], "ingress": {"enabled": True, "hostname": "a.example.org"}}}),
    {"image": {"repository": "registry:5000/team/proxy", "tag": "1.0"}},
    {"image": {"repository": "registry:5000/team/proxy", "digest": f"sha256:{'0' * 64}"}},
    {"resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1000m", "memory": "1024Mi"}}},
    {"resources": {"requests": {"memory": "1.5G"}, "limits": {"memory": 1_500_000_000}}},
    {"resources": {"requests": {"memory": "1e9"}, "limits": {"memory": "1G"}}},
    {"resources": {"requests": None, "limits": None}},
    {"resources": None, "podSecurityContext": None, "securityContext": None, "dnsConfig": None},
    {"pdb": {"maxUnavailable": None, "minAvailable": 2}},
    {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["192.0.2.1"]}},
    {"minReadySeconds": 599},
    {"updateStrategy": {"rollingUpdate": {"maxSurge": "25%"}}},
    {"updateStrategy": {"type": "Recreate"}},
    {"commonLabels": {"team": "messaging"}, "podLabels": {"app.kubernetes.io/version": "x"}},
    {"serviceAccount": {"create": False, "name": "mine"}},
    autoscaling(minReplicas=6),
    merged(autoscaling(), {"resources": {"requests": {"cpu": None}, "limits": {"cpu": 1}}}),
    merged(autoscaling(cpu={"targetUtilization": 0}, connections={"targetAverage": 2000, "metric": "m"}), SIDECAR),
    {"pdb": {"maxUnavailable": "1%"}},  # Kubernetes rounds up
    budget(3, minAvailable=2),
    budget(3, minAvailable="66%"),
    {"replicaCount": 1},
    budget(0, minAvailable=1),  # nothing runs that a drain would have to end
    merged(autoscaling(minReplicas=3), {"pdb": {"maxUnavailable": "", "minAvailable": 2}}),
    monitor("serviceMonitor", interval="10s"),
    monitor("podMonitor", interval="1m", scrapeTimeout="60000ms"),
    merged(receiver(serviceMonitor=True), {"serviceMonitor": {"labels": {"a": "b"}, "interval": "1m"}}),
    merged(TLS, {"test": {"caSecret": "ca", "caKey": "x", "clientCertificateSecret": "c"}}),
    receiver(persistence={"existingClaim": "mine"}),
    {"config": {"authentication": {"enabled": False, "token": {"role_claim": "role"}}}},
]


@pytest.mark.parametrize("values", BESIDE)
def test_values_beside_a_border_are_rendered(values: dict[str, Any]) -> None:
    helm_template(values)


def test_values_equal_to_the_defaults_are_no_contradiction() -> None:
    """A full copy of values.yaml is a usual beginning."""
    assert helm_template(VALUES) == helm_template({})


def test_the_defaults_in_the_chart_are_those_of_the_values() -> None:
    assert json.loads((CHART / "files/values.json").read_text()) == VALUES, "run `make generate`"


# ---- messages of the program itself


@pytest.mark.parametrize(
    "url",
    [
        "pulsar://b", "pulsar://b:6650", "pulsar+ssl://b", "pulsar://a:1,b:65535", "pulsar://a, b:6650/", "pulsar://a,b",
        "pulsar://[2001:db8::1]:6650", "pulsar+ssl://[2001:db8::1],b", "pulsar+srv://b", "pulsar+ssl+srv://b/",
        "pulsar://b/", "", "b", "b:6650", "http://b", "https://b:8443", "pulsar:b", "pulsar+tls://b", "PULSAR://b",
        "pulsar://", "pulsar:///", "pulsar://,", "pulsar://a,", "pulsar://:6650", "pulsar://b:", "pulsar://b:0",
        "pulsar://b:65536", "pulsar://b:x", "pulsar://b:6650/x", "pulsar://b/x", "pulsar://u@b:6650", "pulsar://b?x",
        "pulsar+srv://a,b", "pulsar+srv://b:6650", "pulsar+ssl+srv://", "pulsar://2001:db8::1", "pulsar://a b",
        "pulsar://[2001:db8::1]:0", "pulsar://a://b",
    ],
)  # fmt: skip
def test_the_service_url_is_checked_as_the_program_does(url: str) -> None:
    try:
        parse_broker_url(url)
    except AddressInvalid:
        with pytest.raises(Refused):
            helm_template(brokers(url))
    else:
        helm_template(brokers(url))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"config": {"cluster": {"forwarders": 7, "lookup_workers": 2, "auth_workers": 3}}},
        {"config": {"cluster": {"forwarders": 0}}},
        {"config": {"relay": {"crash_safe": False}}},
        {"config": {"limits": {"max_connections": 20_000}}},
        {"config": {"limits": {"max_connections": 50}}},
        {"config": {"limits": {"max_unauthenticated_connections": 2_000}}},
        {"config": {"limits": {"max_topic_lists_bytes": 30_000_001, "max_lookup_bytes": 30 * MIB}}},
        {"config": {"limits": {"max_topic_lists_bytes": 1_000_000}}},
        {"config": {"limits": {"max_command_bytes": MIB, "max_broker_frame_bytes": 9_000_001}}},
        {"config": {"limits": {"max_connections": 5_000}}, **TLS},
        {
            "config": {
                "limits": {"max_connections": 5_000},
                "listener": [TLS_LISTENER, {**TLS_LISTENER, "bind": "[::]:7003"}],
            }
        },
        {"config": {"limits": {"max_connections": 5_000}, "brokers": {"service_url": "pulsar+ssl://b"}}, **BOTH},
        HTTP,
        {"config": {"cluster": {"http_workers": 3}, "http": {"max_requests": 7, "max_replay_bytes": 70 * MIB}}, **HTTP},
        {"config": {"http": {"max_connections": 5_000}}, **HTTP, **TLS},
        {"config": {"cluster": {"http_workers": 3}, "http": {"max_connections": 5_000}}},
    ],
)
def test_the_least_memory_is_what_the_program_needs(values: dict[str, Any]) -> None:
    """The chart takes every limit that the program takes, and none that is clearly smaller.

    How many connections may be unauthenticated depends on how the program shares out the rest; the chart assumes the
    least.
    """

    def limited(number: int) -> dict[str, Any]:
        return deep_merge(values, {"resources": {"requests": {"memory": "1Mi"}, "limits": {"memory": str(number)}}})

    tree = Manifests(helm_template(limited(1 << 40))).configuration
    config, given = msgspec.convert(tree, Config), {f"limits.{key}" for key in tree.get("limits", {})}

    def is_enough(number: int) -> bool:
        return not fit_to_container(config, given, ContainerLimits(None, number)).shortage

    least = bisect.bisect_left(range(1 << 40), True, key=is_enough)
    open_bytes = 0 if config.limits.max_unauthenticated_connections else 8 * config.limits.max_command_bytes
    helm_template(limited(least))
    with pytest.raises(Refused, match=r"resources\.limits\.memory: .* is too small"):
        helm_template(limited(least - open_bytes - 1))


# ---- names


LONG = "platform-messaging-production-europe-west"
"""41 characters: with the chart's name behind it, the beginning alone would be the name."""


def names(release: str, **values: Any) -> list[tuple[str, str]]:
    """Kind and name of all objects of a release."""
    everything = merged(receiver(serviceMonitor=True), {"analytics": {"rollup": {"enabled": True}}}, values)
    everything = merged(everything, {"grafanaDashboard": {"enabled": True}, "serviceMonitor": {"enabled": True}})
    return [(one["kind"], one["metadata"]["name"]) for one in Manifests(helm_template(everything, release=release)).all]


@pytest.mark.parametrize("release", [f"{LONG}-1", f"{LONG}-2", "a" * 53])
def test_names_of_a_long_release_fit(release: str) -> None:
    """63: a label's value and a DNS label; 52: a CronJob adds 11; a StatefulSet's revision adds 11 as a label."""
    for kind, name in names(release):
        assert len(name) <= (52 if kind in {"CronJob", "StatefulSet"} else 63), name
        assert not name.startswith("-")
        assert "--" not in name


def test_long_releases_with_the_same_beginning_have_names_of_their_own() -> None:
    assert not set(names(f"{LONG}-1")) & set(names(f"{LONG}-2"))
    overrides = [f"{LONG}-for-the-{team}-team" for team in ("first", "second")]
    assert not set(names("r", fullnameOverride=overrides[0])) & set(names("r", fullnameOverride=overrides[1]))


def test_names_of_at_most_40_characters_stay() -> None:
    assert ("Deployment", "r-pulsar-trio-proxy") in names("r")
    assert ("Deployment", f"{'a' * 22}-pulsar-trio-proxy") in names("a" * 22)
    assert ("Deployment", "pulsar-trio-proxy-2") in names("pulsar-trio-proxy-2")
    assert ("Deployment", "a" * 40) in names("r", fullnameOverride="a" * 40)


def test_rows_of_values_without_effect_name_values() -> None:
    rows = rows_of(CHART / "templates/_values_without_effect.tpl")
    assert len(rows) > 40
    for row in rows:
        node: Any = VALUES
        for key in row.split("."):
            assert key in node, row
            node = node[key]


def rows_of(path: Path) -> list[str]:
    """The paths of the table; a template's own lines begin with braces."""
    lines = path.read_text().splitlines()
    return [line.partition(":")[0] for line in lines if line[:1].isalpha() and ": " in line]
