"""A headless Chromium that opens one local page, evaluates JavaScript in it and takes screenshots.

It is driven over its debugging pipe (`--remote-debugging-pipe`: JSON, each message ended by a zero byte), so no port is
opened and no library is needed. It exits when the pipe is closed, and so cannot outlive this process.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
ANSWER_S = 120.0
"""Timeout of one answer, long enough for a busy machine."""


class ChromiumError(Exception):
    """A failed command of the browser; the text says which."""


def executable() -> str | None:
    """Return the path of a Chromium; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """The browser's page. Widths and heights are in CSS pixels."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        self.messages: list[str] = []
        """Messages of the page's console, and violations of its policy."""
        self._events: set[str] = set()
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, file: Path, *, width: int, height: int, dark: bool = False) -> None:
        """Load the file in a window of this size, and return after its `load` event."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media="screen", features=[scheme])
        self.resize(width, height)
        self._events.clear()
        self._call("Page.navigate", url=file.resolve().as_uri())
        deadline = time.monotonic() + ANSWER_S
        while "Page.loadEventFired" not in self._events:
            self._receive_message(deadline, f"{file} to be loaded")

    def resize(self, width: int, height: int) -> None:
        """Resize the window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited. Raises ChromiumError."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise ChromiumError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """Return the window as PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def _call(self, method: str, **parameters: object) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, object] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        deadline = time.monotonic() + ANSWER_S
        while True:
            answer = self._receive_message(deadline, method)
            if answer.get("id") == number:
                if "error" in answer:
                    raise ChromiumError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _receive_message(self, deadline: float, what: str) -> dict[str, Any]:
        """Return the next message, after recording events and the page's console messages."""
        while b"\0" not in self._buffer:
            poll = select.poll()
            poll.register(self._answers, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise ChromiumError(f"Chromium did not answer for {ANSWER_S:.0f} s: {what}")
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise ChromiumError(f"Chromium ended: {what}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        method = message.get("method", "")
        self._events.add(method)
        if method in {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}:
            self.messages.append(json.dumps(message["params"]))
        elif method == "Network.requestWillBeSent":
            url = str(message["params"]["request"]["url"])
            if not url.startswith(("file:", "data:", "blob:")):
                self.messages.append(f"the page asked for {url}")
        return message


@contextmanager
def browser() -> Iterator[Page]:
    """Run Chromium with an empty page during the block. Raises ChromiumError."""
    program = executable()
    if program is None:
        raise ChromiumError(f"there is no Chromium (looked for {', '.join(NAMES)})")
    with tempfile.TemporaryDirectory(prefix="ptp-chromium-", ignore_cleanup_errors=True) as profile:
        command = [program, "--remote-debugging-pipe", "--headless", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", "--no-first-run", "--disable-dev-shm-usage"]
        command += ["--disable-background-networking", "--disable-component-update"]
        if os.geteuid() == 0:
            command.append("--no-sandbox")  # Chromium refuses root otherwise; it loads only our own page
        pid, commands, answers = _spawn(command)
        try:
            yield Page(commands, answers)
        finally:
            os.close(commands)
            os.close(answers)
            _end(pid)


def _spawn(command: list[str]) -> tuple[int, int, int]:
    """Start Chromium with the pipe at the descriptors 3 and 4, which it expects."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    # Above 4 first: one of these may be 3 or 4 itself.
    high = [os.dup(one) for one in (theirs_in, theirs_out, null, null)]
    place = [(os.POSIX_SPAWN_DUP2, high[number], target) for number, target in ((0, 3), (1, 4), (2, 1), (3, 2))]
    try:
        pid = os.posix_spawn(command[0], command, os.environ, file_actions=place, setpgroup=0)
    finally:
        for one in (theirs_in, theirs_out, null, *high):
            os.close(one)
    return pid, ours_out, ours_in


def _end(pid: int) -> None:
    """Wait up to 5 seconds for the exit, then kill the process group."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            break
        time.sleep(0.05)
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
