"""proxy.admin.page: the page's files and the stream of snapshots."""

from __future__ import annotations

import json
import re

import pytest
import trio
import trio.testing

from proxy.admin.page import EVENTS_PATH, HEADERS, INTERVAL_S, PAGE_FILES, VIEWERS_MAX, LivePage
from proxy.admin.service import OVERVIEW_KEPT_S, CoalescingCache
from proxy.common.http_server import HttpRequest
from proxy.runtime.rpc.errors import RpcConnectionLost

ASKED = HttpRequest("GET", EVENTS_PATH, [b"Bearer t"], "10.0.0.1")
STATIC_LINES_MAX = 350


class Setup:
    def __init__(self) -> None:
        self.made = 0
        self.fails = False
        self.token = b"Bearer t"
        self.live = LivePage(CoalescingCache(self._overview, OVERVIEW_KEPT_S).current, self._is_allowed)
        self.events: list[list[bytes]] = []

    async def _overview(self) -> str:
        await trio.lowlevel.checkpoint()
        if self.fails:
            raise RpcConnectionLost("gone")
        self.made += 1
        return json.dumps({"made": self.made})

    async def _is_allowed(self, authorization: list[bytes]) -> bool:
        await trio.lowlevel.checkpoint()
        return authorization == [self.token]

    async def view(self, nursery: trio.Nursery) -> int:
        """Begin a viewer; return the status."""
        response = await self.live.response(ASKED)
        if response.stream is not None:
            got: list[bytes] = []
            self.events.append(got)

            async def send(part: bytes) -> None:
                await trio.lowlevel.checkpoint()
                got.append(part)

            nursery.start_soon(response.stream, send)
            await trio.testing.wait_all_tasks_blocked()
        return response.status


@pytest.fixture
def setup() -> Setup:
    return Setup()


async def test_snapshots_are_made_once_for_all_viewers_and_only_while_there_are_any(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    for _ in range(3):
        assert await setup.view(nursery) == 200
    assert setup.made == 1
    assert setup.events == [[b'event: snapshot\ndata: {"made": 1}\n\n']] * 3
    await trio.sleep(5 * INTERVAL_S)
    assert setup.made <= 6
    assert all(len(one) in {5, 6} for one in setup.events)
    nursery.cancel_scope.cancel()
    with trio.CancelScope(shield=True):
        await trio.sleep(10 * INTERVAL_S)
    assert setup.made <= 7


async def test_viewers_are_bounded(setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    """Security: any client that reaches the port can ask."""
    answers = [await setup.view(nursery) for _ in range(VIEWERS_MAX + 2)]
    assert answers == [200] * VIEWERS_MAX + [503] * 2
    assert setup.live.viewers == VIEWERS_MAX
    nursery.cancel_scope.cancel()
    with trio.CancelScope(shield=True):
        await trio.sleep(1)
    assert setup.live.viewers == 0


async def test_viewers_that_ask_at_the_same_moment_are_bounded(setup: Setup, nursery: trio.Nursery) -> None:
    """Security."""
    responses = [await setup.live.response(ASKED) for _ in range(VIEWERS_MAX + 3)]

    async def send(_part: bytes) -> None:
        await trio.sleep_forever()

    for response in responses:
        assert response.stream is not None
        nursery.start_soon(response.stream, send)
    await trio.testing.wait_all_tasks_blocked()
    assert setup.live.viewers == VIEWERS_MAX
    nursery.cancel_scope.cancel()


async def test_another_token_ends_the_streams_of_the_old_one(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Security: a token that leaked is changed."""
    await setup.view(nursery)
    setup.token = b"Bearer new"
    await trio.sleep(2 * INTERVAL_S)
    assert setup.live.viewers == 0
    assert len(setup.events[0]) == 1


async def test_a_supervisor_that_does_not_answer(
    setup: Setup, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    setup.fails = True
    await setup.view(nursery)
    setup.fails = False
    await trio.sleep(INTERVAL_S + 0.1)
    assert [event.split(b"\n")[0] for event in setup.events[0]] == [b"event: failure", b"event: snapshot"]
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("site", "status"), [(b"", 200), (b"none", 200), (b"same-origin", 200), (b"same-site", 403), (b"cross-site", 403)]
)
async def test_another_sites_page_takes_no_place(setup: Setup, site: bytes, status: int) -> None:
    """Security: it could not read the answer, but keep operators out."""
    request = HttpRequest("GET", EVENTS_PATH, [b"Bearer t"], "10.0.0.1", fetch_site=site)
    response = await setup.live.response(request)
    assert (response.status, response.stream is None) == (status, status == 403)


async def test_the_headers(setup: Setup) -> None:
    """Security: nothing from elsewhere runs in the page, and no other page shows it in a frame."""
    said = dict(HEADERS)
    policy = said["Content-Security-Policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"} < set(policy)
    assert {"frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'"} < set(policy)
    assert "unsafe" not in said["Content-Security-Policy"]
    assert (said["X-Content-Type-Options"], said["Referrer-Policy"], said["Cache-Control"]) == (
        *("nosniff", "no-referrer"),
        "no-store",
    )
    assert all(response.headers == HEADERS for response in [*PAGE_FILES.values(), await setup.live.response(ASKED)])


def test_the_files_need_nothing_from_elsewhere() -> None:
    text = "\n".join(response.body.decode() for response in PAGE_FILES.values())
    assert set(re.findall(r"""(?:src|href)="([^"]+)\"""", text)) == {"/page.css", "/page.js", "/status"}
    assert not re.search(r"https?://|@import|url\(", text)
    assert len(text.splitlines()) <= STATIC_LINES_MAX


def test_no_data_becomes_markup() -> None:
    """Security: principals and brokers' names are chosen by others."""
    script = PAGE_FILES["/page.js"].body.decode()
    words = ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(", "DOMParser")
    assert not [word for word in words if word in script]
    page = PAGE_FILES["/"].body.decode()
    assert "style=" not in page
    assert not re.search(r"\son\w+=", page)
