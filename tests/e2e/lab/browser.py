"""Headless Chromium, driven by its DevTools protocol over a pair of pipes: no driver and no library is needed."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)


class BrowserError(Exception):
    """The browser refuses a command, or a script in it has failed."""


class Page:
    """One page. ``complaints``: what the browser has said of it, such as violations of its policy."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to_browser = to_browser
        self._messages = self._read(from_browser)
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    @staticmethod
    def _read(descriptor: int) -> Iterator[dict[str, Any]]:
        kept = b""
        while data := os.read(descriptor, 1 << 16):
            *whole, kept = (kept + data).split(b"\0")
            yield from map(json.loads, whole)

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        call = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._to_browser, json.dumps(call).encode() + b"\0")
        for message in self._messages:
            if message.get("id") == number:
                if "error" in message:
                    raise BrowserError(message["error"])
                return message["result"]  # type: ignore[no-any-return]
            if message.get("method") in {"Log.entryAdded", "Runtime.exceptionThrown"}:
                self.complaints.append(json.dumps(message["params"]))
        raise BrowserError("the browser has ended")

    def run(self, script: str, **options: object) -> Any:
        """Return the value of an expression in the page, also of a promise."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, **options)
        if "exceptionDetails" in result:
            raise BrowserError(result["exceptionDetails"])
        return result["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Return once an expression is true; it is looked at whenever the page changes."""
        self.run(
            "new Promise((done) => { const look = () => { let is = false; try { is = Boolean("
            f"{condition}); }} catch {{ }} if (is) done(); else setTimeout(look, 20); }}; look(); }})"
        )

    def resize(self, width: int, height: int, *, scheme: str) -> None:
        """Show the page in another size and colour scheme (light, dark)."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def save_picture(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))


@contextmanager
def browser_page() -> Iterator[Page]:
    """Run Chromium with one page."""
    read_commands, to_browser = os.pipe()
    from_browser, write_answers = os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        options = " ".join((*_OPTIONS, f"--user-data-dir={profile}"))
        process = subprocess.Popen(
            ["bash", "-c", f"exec {CHROMIUM} {options} 3<&{read_commands} 4>&{write_answers}"],
            pass_fds=(read_commands, write_answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        try:
            yield Page(to_browser, from_browser)
        finally:
            process.terminate()
            process.wait()
            os.close(to_browser)
            os.close(from_browser)
