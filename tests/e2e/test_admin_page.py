"""The page at the admin port, as headless Chromium shows it: hostile names, narrow and wide, light and dark, live."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import trio

from proto.rpc_pb2 import Reasons
from proxy.admin.application import AdminApplication
from proxy.admin.scrape import CollectedMetrics
from proxy.common.http_server import HttpServer
from proxy.runtime.observability.metrics import new_registry

from .lab.browser import CHROMIUM, Page, browser_page
from .lab.cluster import HOST
from .test_relays_survive import scene

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

TOKEN = "the-token"
ATTACK = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
LONG = "x" * 128


def overview(made: int) -> dict[str, Any]:
    """What the supervisor tells: as much as it may, of principals and brokers that attack the page."""
    names = [ATTACK, LONG, *(f"tenant-{number:02}-service" for number in range(18)), "other"]
    return {
        "at_unix_s": 1_800_000_000.0,
        "cluster": "production-eu-1",
        "version": "0.9.0",
        "generation": 3,
        "python": "3.13.9",
        "openssl": ATTACK,
        "ready": True,
        "not_ready_because": [],
        "notes": [f"clients by tls: {ATTACK}"],
        "leaving": False,
        "draining": False,
        "replacing_workers": False,
        "authentication": True,
        "listeners": ["pulsar+ssl://0.0.0.0:6651"],
        "service_url": "pulsar://broker.example.com:6650",
        "workers": [
            {"role": role, "worker": number, "state": "running", "pid": 4000 + number, "restarts": number}
            | {"uptime_seconds": 93_784.5, "connections": 5_000 + made}
            for role, many in (("auth", 2), ("lookup", 2), ("forwarder", 4), ("admin", 1))
            for number in range(many)
        ],
        "brokers": [
            {"broker": f"pulsar-broker-{number}.pulsar-broker-headless.pulsar.svc.cluster.local:6650", "asked": 2}
            | {"reachable": number and 2, "detail": ATTACK}
            for number in range(6)
        ],
        "brokers_known": 6,
        "brokers_reachable": 5,
        "has_rates": True,
        "principals": [
            {"principal": name, "connections": 900 - 7 * rank, "to_client": 61_000_000 // (1 + rank)}
            | {"to_broker": 25_000_000 // (1 + rank) + 300_000 * (made % 3)}
            for rank, name in enumerate(names)
        ],
        "sessions": {
            "expired_and_idle": 2,
            "ending_within_60_s": 12,
            "soonest": [
                {"client": "[2001:db8::1]:50123", "principal": ATTACK, "seconds_left": 1.5 * n} for n in range(9)
            ],
        },
        "certificates": [
            {"key": f"listener[{number}].tls.certificate", "ends_at_unix_s": 1_800_000_000 + days * 86_400}
            | {"within_30_days": days < 30, "has_ended": days < 0}
            for number, days in enumerate((-2, 12, 200))
        ],
        "certificates_known": 3,
        "events": [
            {
                "at": "2026-11-29T17:30:00.123456Z",
                "level": level,
                "event": "a worker ended",
                "details": f"who: {ATTACK}",
            }
            for level in ("info", "warning", "error")
        ],
    }


class Server:
    """The admin port's own server and application on a port of this process, with a supervisor of the test's."""

    def __init__(self, *, asks_for_token: bool) -> None:
        self.asks_for_token = asks_for_token
        self.made = 0
        self.url = ""
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._started = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._run,))

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        self._token.run_sync_soon(self._scope.cancel)
        self._thread.join()

    async def _run(self) -> None:
        [listener] = await trio.open_tcp_listeners(0, host=HOST)
        application = AdminApplication(self, self._is_allowed, lambda _host: True, new_registry())
        self.url = f"http://{HOST}:{listener.socket.getsockname()[1]}/"
        self._token = trio.lowlevel.current_trio_token()
        self._started.set()
        with self._scope:
            async with listener:
                await HttpServer(application.handle_request).serve(listener)

    async def _is_allowed(self, authorization: list[bytes]) -> bool:
        await trio.lowlevel.checkpoint()
        return not self.asks_for_token or authorization == [f"Bearer {TOKEN}".encode()]

    async def overview(self) -> str:
        await trio.lowlevel.checkpoint()
        self.made += 1
        return json.dumps(overview(self.made))

    async def metrics(self) -> CollectedMetrics:
        raise AssertionError

    def is_responsive(self) -> bool:
        return True

    async def readiness(self) -> Reasons:
        raise AssertionError

    async def status(self) -> str:
        raise AssertionError


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser_page() as page:
        yield page


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(asks_for_token=False) as server:
        yield server


def is_live(page: Page) -> None:
    page.wait_for("document.getElementById('live').textContent === 'live' && !document.getElementById('main').hidden")


def loaded(page: Page) -> list[str]:
    """Return the addresses of all that the page has loaded."""
    return page.run("performance.getEntriesByType('resource').map((one) => one.name)")  # type: ignore[no-any-return]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1000, 1920])
def test_it_fits_and_is_live(page: Page, server: Server, width: int, scheme: str, tmp_path: Path) -> None:
    page.resize(width, 900, scheme=scheme)
    page.call("Page.navigate", url=server.url)
    is_live(page)
    page.wait_for("document.querySelector('polyline').getAttribute('points').split(' ').length > 2")
    page.save_picture(Path(os.environ.get("PAGE_PICTURES", tmp_path)) / f"page-{width}-{scheme}.png")
    assert page.run("document.documentElement.scrollWidth") <= width, "no horizontal scrolling"
    cards = "[...document.querySelectorAll('section, #tiles > div')]"
    too_wide = page.run(f"{cards}.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.innerText)")
    assert not too_wide, "nothing sticks out of its card"
    connections = page.run("document.querySelector('#tiles dd').textContent")
    page.wait_for(f"document.querySelector('#tiles dd').textContent !== {json.dumps(connections)}")


def test_names_are_text(page: Page, server: Server) -> None:
    """Security: a client chooses its principal, and a broker's answer names brokers."""
    page.complaints.clear()
    page.call("Page.navigate", url=server.url)
    is_live(page)
    assert page.run("document.querySelector('#principals tbody th').textContent") == ATTACK
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.run("document.querySelectorAll('script').length") == 1
    assert page.run("document.title").startswith("production-eu-1")
    assert not [one for one in page.complaints if server.url in one and "favicon" not in one]
    assert {one.removeprefix(server.url) for one in loaded(page)} <= {"page.css", "page.js", "events"}


@pytest.mark.parametrize(
    "attack",
    [
        "document.body.insertAdjacentHTML('beforeend', '<img src=x>')",
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.taken = 1'}))",
        "eval('window.taken = 1')",
    ],
)
def test_the_policy_stops_what_the_script_would_let_through(page: Page, server: Server, attack: str) -> None:
    """Security: even if a name became markup, nothing of it would run."""
    page.call("Page.navigate", url=server.url)
    is_live(page)
    script = f"(() => {{ try {{ {attack} }} catch (error) {{ return String(error); }} }})()"
    page.run(script, allowUnsafeEvalBlockedByCSP=False)
    assert page.run("document.querySelectorAll('img').length + (window.taken || 0)") == 0


def test_the_token_is_asked_for_and_kept_for_the_tab(page: Page) -> None:
    with Server(asks_for_token=True) as server:
        page.call("Page.navigate", url=server.url)
        page.wait_for("!document.getElementById('login').hidden")
        assert server.made == 0
        assert page.run("document.getElementById('main').hidden")
        type_in = "document.getElementById('token').value = {}; document.getElementById('login').requestSubmit()"
        page.run(type_in.format(json.dumps("wrong")))
        page.wait_for("document.getElementById('live').textContent === 'the token is not accepted'")
        page.run(type_in.format(json.dumps(TOKEN)))
        is_live(page)
        assert TOKEN not in page.run("location.href + document.cookie + JSON.stringify(localStorage)")
        page.call("Page.reload")
        is_live(page)
        page.run("sessionStorage.clear()")


def test_it_comes_back_by_itself(page: Page) -> None:
    with Server(asks_for_token=False) as server:
        page.call("Page.navigate", url=server.url)
        is_live(page)
        page.run("reading.abort()")
        page.wait_for("document.getElementById('live').textContent === 'paused'")
        is_live(page)


# ---- of a whole cluster


RELAYS = 120


def test_a_clusters_page_shows_its_relays(page: Page) -> None:
    """All processes, files and calls of a real cluster; its events, too."""
    with scene() as it, it.crowd() as crowd:
        crowd.open(RELAYS)
        page.call("Page.navigate", url=f"http://{HOST}:{it.cluster.admin_port}/")
        is_live(page)
        row = "[...document.querySelectorAll('#principals tbody tr')].map((r) => [...r.cells].map((c) => c.innerText))"
        page.wait_for(f'JSON.stringify(({row}).map((one) => one.slice(0, 2))) === \'[["anonymous","{RELAYS}"]]\'')
        crowd.exchange()
        page.wait_for(f"({row})[0][2].endsWith('B/s') && ({row})[0][2] !== '0 B/s'")
        crowd.close_all()
        page.wait_for("document.getElementById('principals').caption.textContent === 'No connections.'")
        assert it.cluster.command("reload").returncode == 0
        page.wait_for("document.getElementById('events').innerText.includes('the configuration was reloaded')")
