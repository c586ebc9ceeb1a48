"""proxy.config.http and what else the configuration has for the HTTP reverse proxy."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from config_files import Files

from proto.roles import Role
from proxy.common.files import SYSTEM_AUTHORITIES
from proxy.config.cgroups import ContainerLimits
from proxy.config.changes import new_binds
from proxy.config.files import files_of_role
from proxy.config.http import http_warnings, http_worker_count, replay_bytes_total, uses_broker_tls
from proxy.config.memory import fit_to_container
from proxy.config.trial import broker_files
from proxy.config.types import MIB, Config
from proxy.supervisor.startup.open_files import open_files_needed, supervisor_reserve

WEB = '[brokers]\nweb_service_url = "http://broker:8080"\n'
LISTENER = "[[http_listener]]\n"


def test_the_defaults_need_only_the_brokers_url(files: Files) -> None:
    config = files.load(WEB + LISTENER)
    assert [listener.bind for listener in config.http_listener] == ["0.0.0.0:8081"]
    assert http_worker_count(config) == 1
    assert files.load(LISTENER, BROKERS__WEB_SERVICE_URL="https://a:1,b").brokers.web_service_url
    assert http_worker_count(files.load("[cluster]\nhttp_workers = 3")) == 0, "without a listener there are none"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (LISTENER, "brokers.web_service_url"),
        (WEB + LISTENER + 'bind = "nowhere"', "http_listener[0].bind"),
        (WEB + LISTENER + 'allowed_networks = ["x"]', "http_listener[0].allowed_networks"),
        (WEB + LISTENER + 'denied_networks = ["10.0.0.1/8"]', "http_listener[0].denied_networks"),
        (WEB + LISTENER + 'proxy_protocol_sources = ["10.0.0.1/8"]', "http_listener[0].proxy_protocol_sources"),
        (WEB + LISTENER + 'proxy_protocol_sources = ["10.0.0.0/8"]', "http_listener[0].proxy_protocol_sources"),
        (WEB + LISTENER + 'proxy_protocol = "required"', "http_listener[0].proxy_protocol_sources"),
        (WEB + LISTENER + 'bind = "127.0.0.1:8080"', "admin.bind"),
        (WEB + LISTENER + 'bind = "0.0.0.0:6650"', "http_listener[0].bind"),
        (WEB + LISTENER + LISTENER, "http_listener[1].bind"),
        (WEB + LISTENER * 33, "http_listener"),
        ('[brokers]\nweb_service_url = "pulsar://broker"', "brokers.web_service_url"),
        ('[brokers]\nweb_service_url = "http://broker/path"', "brokers.web_service_url"),
        ('[brokers]\nweb_service_url = "http://user@broker"', "brokers.web_service_url"),
        ('[http]\nfunction_worker_url = "broker:8080"', "http.function_worker_url"),
        ('[http]\nwebsocket_url = "ws://broker:8080"', "http.websocket_url"),
        ('[[http.routes]]\npath = "/a"\nurl = "x"', "http.routes[0].url"),
        ('[[http.routes]]\npath = "/a"\nurl = "http://x/a/../b"', "http.routes[0].url"),
        ('[[http.routes]]\npath = "/a"\nurl = "http://x//b"', "http.routes[0].url"),
        ('[[http.routes]]\npath = "/a"\nurl = "http://x/b?c"', "http.routes[0].url"),
        ('[[http.routes]]\npath = "/a"\nurl = "http://x/%61"', "http.routes[0].url"),
        ('[[http.routes]]\npath = "a"\nurl = "http://x"', "http.routes[0].path"),
        ('[[http.routes]]\npath = "/a/../admin"\nurl = "http://x"', "http.routes[0].path"),
        ('[[http.routes]]\npath = "/a//b"\nurl = "http://x"', "http.routes[0].path"),
        ('[[http.routes]]\npath = "/%61"\nurl = "http://x"', "http.routes[0].path"),
        ('[[http.routes]]\npath = "/a\\nb"\nurl = "http://x"', "http.routes[0].path"),
        (
            '[[http.routes]]\npath = "/a"\nurl = "http://x"\n[[http.routes]]\npath = "/a/"\nurl = "http://y"',
            "http.routes[1].path",
        ),
        ('[http.response_headers]\n"X Y" = "z"', "http.response_headers"),
        ('[http.response_headers]\nX-A = "a\\r\\nSet-Cookie: b"', "http.response_headers.X-A"),
        ('[http.response_headers]\nX-A = ""', "http.response_headers.X-A"),
        ('[http.response_headers]\nContent-Length = "0"', "http.response_headers.Content-Length"),
        ('[http.response_headers]\nTRANSFER-ENCODING = "chunked"', "http.response_headers.TRANSFER-ENCODING"),
        ("[http]\nmax_connections = 10001", "http.max_connections"),
        ("[http]\nmax_head_bytes = 10", "http.max_head_bytes"),
    ],
)
def test_mistakes_are_named(files: Files, text: str, key: str) -> None:
    assert key in files.error(text)


def test_tls_of_its_listeners_has_the_checks_of_all_listeners(files: Files, tmp_path: Any) -> None:
    file = tmp_path / "pem"
    file.write_text("x")
    tls = f'{WEB}{LISTENER}[http_listener.tls]\ncertificate = "{file}"\nkey = "{file}"\n'
    table = "http_listener[0].tls"
    assert f"{table}.require_client_certificate" in files.error(tls + "require_client_certificate = true")
    assert f"{table}.client_crl" in files.error(tls + f'client_crl = "{file}"')
    assert f"{table}.client_ca" in files.error(tls + 'client_ca = "/nowhere"')
    assert f"{table}.ciphers" in files.error(tls + 'ciphers = "x"\nminimum_version = "1.3"')
    assert f"{table}.session_tickets" in files.error(tls + 'session_tickets = true\nminimum_version = "1.3"')
    by_certificate = "[authentication]\nenabled = true\n[authentication.tls]\n"
    assert "authentication.tls" in files.error(tls + by_certificate)
    assert files.load(tls + f'client_ca = "{file}"\n' + by_certificate).authentication.tls is not None


def test_brokers_tls_may_be_for_http_alone(files: Files) -> None:
    tls = "[brokers.tls]\nverify_hostname = false\n"
    assert "brokers.tls" in files.error(WEB + tls)
    config = files.load('[brokers]\nweb_service_url = "https://broker"\n' + tls)
    assert uses_broker_tls(config)


def test_files(files: Files, tmp_path: Any) -> None:
    """Security: no worker gets another role's keys."""
    for name in ("trust", "certificate", "key", "admin"):
        (tmp_path / name).write_text("x")
    config = files.load(
        f'[brokers]\nweb_service_url = "https://broker"\n[brokers.tls]\ntrust = "{tmp_path}/trust"\n'
        f'{LISTENER}[http_listener.tls]\ncertificate = "{tmp_path}/certificate"\nkey = "{tmp_path}/key"\n'
        f'[admin]\ntoken_file = "{tmp_path}/admin"\n'
    )
    own = {f"{tmp_path}/{name}" for name in ("trust", "certificate", "key")}
    assert files_of_role(Role.HTTP, config) == {"/etc/resolv.conf", "/etc/hosts", *own}
    for role in (Role.FORWARDER, Role.LOOKUP, Role.AUTH, Role.ADMIN):
        assert not files_of_role(role, config) & own
    assert broker_files(config) == (f"{tmp_path}/trust",), "tried before they are taken over"
    plain = files.load(WEB + LISTENER)
    assert SYSTEM_AUTHORITIES not in files_of_role(Role.HTTP, plain)
    system = files.load(WEB + LISTENER + '[[http.routes]]\npath = "/x"\nurl = "https://x/y/"')
    assert SYSTEM_AUTHORITIES in files_of_role(Role.HTTP, system)


@pytest.mark.parametrize("url", ["brokers.web_service_url", "http.function_worker_url"])
def test_who_is_not_authenticated_gets_nothing_by_the_proxys_certificate(files: Files, tmp_path: Any, url: str) -> None:
    (tmp_path / "pem").write_text("x")
    urls = {"brokers.web_service_url": "http://broker", "http.function_worker_url": "http://worker"}
    urls |= {url: urls[url].replace("http", "https")}
    text = f"""
        http.function_worker_url = "{urls["http.function_worker_url"]}"
        brokers.web_service_url = "{urls["brokers.web_service_url"]}"
        brokers.tls = {{ certificate = "{tmp_path}/pem", key = "{tmp_path}/pem" }}
    """
    refused = files.error(text + LISTENER)
    assert refused.startswith("http.allow_unauthenticated: ")
    assert url in refused
    assert files.load(text), "without a listener nobody comes"
    assert files.load("http.allow_unauthenticated = true" + text + LISTENER)
    token = f'authentication = {{ enabled = true, token = {{ public_key = "{tmp_path}/pem" }} }}'
    assert files.load(token + text + LISTENER)
    assert files.load(text.replace("https:", "http:").replace("brokers.tls", "#") + LISTENER)


def test_a_listener_that_lets_no_client_in_is_named() -> None:
    def warnings(authentication: dict[str, Any], *tls: dict[str, str] | None) -> list[str]:
        certified = {"certificate": "c", "key": "k"}
        listeners = [{} if one is None else {"tls": certified | one} for one in tls or (None,)]
        tables = {"authentication": {"enabled": True} | authentication, "http_listener": listeners}
        return list(http_warnings(msgspec.convert(tables, Config)))

    several_rounds = {"scram": {"file": "f"}, "plugins": {"own": {}}}
    (warning,) = warnings(several_rounds)
    assert warning.startswith("http_listener[0]: no client can authenticate there by SCRAM-SHA-256, SCRAM-SHA-512, own")
    for one in ({"token": {}}, {"basic": {"file": "f"}}, {"anonymous_role": "guest"}, {"enabled": False}):
        assert warnings(several_rounds | one) == []
    (of_one,) = warnings({"tls": {}}, {"client_ca": "a"}, {})
    assert of_one.startswith("http_listener[1]: no client can authenticate there by tls;")
    assert len(warnings({"tls": {}}, None)) == 1


def test_what_an_upgrade_binds(files: Files) -> None:
    old = files.load(WEB + LISTENER)
    new = files.load(WEB + LISTENER + 'bind = "0.0.0.0:9999"')
    assert new_binds(old, new) == [("http_listener[0].bind", "0.0.0.0:9999")]
    moved = files.load('[[listener]]\nbind = "0.0.0.0:8081"')
    assert new_binds(old, moved) == [("listener[0].bind", "0.0.0.0:8081")], "a socket stays with its kind"


def needed(config: Config) -> int:
    return fit_to_container(config, (), ContainerLimits()).needed_bytes


def test_its_memory_is_part_of_the_containers(files: Files) -> None:
    without, with_it = files.load(WEB), files.load(WEB + LISTENER)
    many = files.load(WEB + LISTENER + "[http]\nmax_connections = 4096")
    assert needed(without) + 20 * MIB + replay_bytes_total(with_it) < needed(with_it) < needed(many)
    large = files.load(WEB + LISTENER + "[http]\nmax_replay_bytes = 1000000000")
    assert replay_bytes_total(large) == 1_000_000_000
    small = fit_to_container(large, (), ContainerLimits(memory_bytes=512 * MIB))
    assert "lower cluster.http_workers" in small.shortage


def test_its_open_files_are_part_of_the_limit(files: Files) -> None:
    limits = "[limits]\nmax_connections = 100\n[cluster]\nforwarders = 1\n"
    http = "[http]\nmax_connections = 10000\nmax_requests = 10000\n"
    without, with_it = files.load(limits + http + WEB), files.load(limits + http + WEB + LISTENER)
    assert open_files_needed(with_it) >= 30_000 > open_files_needed(without)
    assert supervisor_reserve(with_it, 1) > supervisor_reserve(without, 1)
