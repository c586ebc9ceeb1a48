"""`import`: a Java proxy's own proxy.conf, secured as its operators do, becomes a cluster that a real client uses."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
import subprocess
import sys
from pathlib import Path

from local.ports import free_port
from local.standalone import Standalone

from .conftest import running
from .lab.certificates import Authority
from .lab.cluster import HOST, ROOT, ProxyCluster
from .lab.programs import Program
from .lab.security import NAMESPACE
from .lab.waiting import BUSY_S


def imported(path: Path, *options: str | Path) -> subprocess.CompletedProcess[str]:
    """What the command says of a file."""
    command = [sys.executable, "-m", "proxy", "import", str(path), *map(str, options)]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)


def refused(result: subprocess.CompletedProcess[str]) -> list[str]:
    """The keys that were not carried over."""
    lines = [line.split(": ") for line in result.stderr.splitlines()]
    return [line[2] for line in lines if line[1] == "not carried over"]


def test_the_distributions_file_lacks_only_the_brokers(pulsar_home: Path) -> None:
    result = imported(pulsar_home / "conf" / "proxy.conf")
    assert result.returncode == 1
    assert refused(result) == ["brokerServiceURL"]
    assert "Needs nothing here" not in result.stdout, "each of its values is the default"


def test_an_imported_configuration_serves_a_client(
    pulsar_home: Path, secured_broker: Standalone, python_client: Program, tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "ours")
    server = authority.server("server")
    tls_port, web_port, web_tls_port = free_port(), free_port(), free_port()
    environment = dict(os.environ)
    cluster = ProxyCluster({}, environment=environment)
    environment["PULSAR_TRIO_PROXY__CLUSTER__RUNTIME_DIR"] = str(cluster.runtime_dir)
    environment["PULSAR_TRIO_PROXY__ADMIN__BIND"] = f"{HOST}:{cluster.admin_port}"  # the imported one may be taken
    conf = tmp_path / "proxy.conf"
    conf.write_text(f"""{(pulsar_home / "conf" / "proxy.conf").read_text()}
bindAddress={HOST}
brokerServiceURL={secured_broker.service_url}
servicePort={cluster.port}
servicePortTls={tls_port}
brokerWebServiceURL={secured_broker.admin_url}
webServicePort={web_port}
webServicePortTls={web_tls_port}
httpReverseProxy.tools.path=/tools
httpReverseProxy.tools.proxyTo={secured_broker.admin_url}/admin/v2
proxyHttpResponseHeadersJson={{"X-Frame-Options": "DENY"}}
tlsCertificateFilePath={server.certificate}
tlsKeyFilePath={server.key}
clusterName=standalone
authenticationEnabled=true
authenticationProviders=org.apache.pulsar.broker.authentication.AuthenticationProviderToken
tokenSecretKey=file://{secured_broker.secret_key}
superUserRoles=admin,proxy
brokerClientAuthenticationPlugin=org.apache.pulsar.client.impl.auth.AuthenticationToken
brokerClientAuthenticationParameters=token:{secured_broker.token("proxy")}
authenticateMetricsEndpoint=false
""")
    cluster.config_path.unlink()
    result = imported(conf, "--output", cluster.config_path, "--secrets-directory", tmp_path / "secrets")
    assert (result.returncode, refused(result)) == (0, []), result.stderr
    assert secured_broker.token("proxy") not in cluster.config_path.read_text() + result.stderr
    topic = f"persistent://{NAMESPACE}/imported"
    with running(cluster):
        for url, options in (
            (cluster.service_url, {}),
            (f"pulsar+ssl://localhost:{tls_port}", {"trust": authority.file}),
        ):
            options["token"] = secured_broker.token("alice")
            found = python_client.succeed("produce_consume", url, topic, count=20, **options)
            assert (found["sent"], found["received"]) == (20, 20)
        denied = python_client.run(
            "attempt", cluster.service_url, topic, token=secured_broker.token("bob"), timeout_s=10
        )
        assert not denied.result["ok"]
        token = {"Authorization": f"Bearer {secured_broker.token('admin')}"}
        context = ssl.create_default_context(cafile=authority.file)
        for connection in (
            http.client.HTTPConnection(HOST, web_port, timeout=BUSY_S),
            http.client.HTTPSConnection("localhost", web_tls_port, timeout=BUSY_S, context=context),
        ):
            with contextlib.closing(connection):
                for path, headers, status in (
                    ("/admin/v2/clusters", token, 200),
                    ("/tools/clusters", token, 200),
                    ("/admin/v2/clusters", {}, 401),
                ):
                    connection.request("GET", path, headers=headers)
                    response = connection.getresponse()
                    body = response.read()
                    assert (response.status, response.getheader("X-Frame-Options")) == (status, "DENY"), (path, body)
                    assert status != 200 or json.loads(body) == ["standalone"]
