"""Drives a headless Chromium or Chrome through its debugging pipe, without a driver, a package or a network.

Messages of the DevTools protocol are JSON, each ended by a zero byte. The browser reads them from file descriptor 3 and
writes them to file descriptor 4.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Names of the browser on PATH, and its arguments.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",  # a container has no user namespaces; only this repository's own page is opened
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
    "--window-size=1280,900",
)
# How long an answer may take.
PATIENCE_S = 60.0


class BrowserError(Exception):
    """The browser is absent, died or did not answer in time, or the page's script threw an exception."""


def find() -> str:
    """The path of the browser. Raises BrowserError if none is installed."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    raise BrowserError("no chromium or google-chrome: 'make browser' installs Debian's chromium")


class Page:
    """One tab. ``faults``: texts of console errors, exceptions and failed requests. ``requests``: the URLs of all
    attempted requests."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest = b""
        self._count = 0
        self._session: str | None = None
        self._loaded = False
        self.faults: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        self.call("Network.emulateNetworkConditions", **offline)

    def open(self, url: str) -> None:
        """Loads a page and waits until it is complete."""
        self._loaded = False
        answer = self.call("Page.navigate", url=url)
        if "errorText" in answer:
            raise BrowserError(f"{url}: {answer['errorText']}")
        deadline = time.monotonic() + PATIENCE_S
        while not self._loaded:
            self._handle(self._read(deadline))

    def run(self, script: str) -> Any:
        """Evaluates an expression and returns its value, or what it resolves to if it is a promise."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def settle(self) -> None:
        """Waits for two frames, so that events are handled and their effects are drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def point(self, x: float, y: float, click: bool = False) -> None:
        """Moves the mouse to a point in CSS pixels of the window, and clicks there if asked to."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command of the protocol and returns the result of its answer."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while (answer := self._read(deadline)).get("id") != self._count:
            self._handle(answer)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self, deadline: float) -> dict[str, Any]:
        """The next message, read before ``deadline``, a time of ``time.monotonic``. Raises BrowserError."""
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise BrowserError(f"the browser said nothing for {PATIENCE_S:.0f} s")
            part = os.read(self._from, 1 << 20)
            if not part:
                raise BrowserError("the browser ended")
            self._rest += part
        message, self._rest = self._rest.split(b"\0", 1)
        message_fields: dict[str, Any] = json.loads(message)
        return message_fields

    def _handle(self, event: dict[str, Any]) -> None:
        """Notes what an event says of the page."""
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Network.loadingFailed":
            self.faults.append(f"request failed: {parameters['errorText']} {parameters.get('blockedReason', '')}")
        elif method == "Runtime.exceptionThrown":
            self.faults.append(f"exception: {parameters['exceptionDetails']}")
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.faults.append(f"console: {parameters['args']}")
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.faults.append(f"log: {parameters['entry']['text']} {parameters['entry'].get('url', '')}")


@contextmanager
def page() -> Iterator[Page]:
    """A tab of a new browser with a new profile. Both are removed afterwards."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        log = Path(profile) / "browser.log"
        # bash maps the pipes to descriptors 3 and 4, whatever their numbers are here.
        script = f'exec "$0" "$@" 3<&{to_read} 4>&{from_write}'
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", script, find(), *FLAGS, f"--user-data-dir={profile}/user", "about:blank"],
                pass_fds=(to_read, from_write),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        os.close(to_read)
        os.close(from_write)
        try:
            yield Page(to_write, from_read)
        except BrowserError as error:
            error.add_note(log.read_text(errors="replace")[-2000:])
            raise
        finally:
            os.close(to_write)  # the browser ends when its pipe is closed
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(from_read)


def open_page(tab: Page, path: Path) -> None:
    """Loads a file anew, and forgets the faults and requests of earlier pages."""
    tab.faults.clear()
    tab.requests.clear()
    # An empty page comes first, since a change of the fragment alone would load nothing.
    tab.open("about:blank")
    tab.open(path.as_uri())
    tab.settle()


def scroll_to(tab: Page, selector: str) -> tuple[float, float]:
    """Scrolls the first element that a selector finds into view; returns its middle."""
    point = tab.run(
        f"(() => {{ const node = document.querySelector({selector!r}); node.scrollIntoView({{block: 'center'}});"
        "const box = node.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    return point[0], point[1]
