"""Drive headless Chromium over a pipe by the DevTools protocol, without a driver package."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_PATIENCE = 60.0  # seconds until an answer must have come
_OPTIONS = "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-dev-shm-usage".split()
# Chromium reads commands from descriptor 3 and writes to 4.
_ON_FIXED_PIPES = """
import os, sys
spare = [int(fd) for fd in sys.argv[1:3]]
while min(spare) < 5:
    spare = [os.dup(fd) for fd in spare]
os.dup2(spare[0], 3)
os.dup2(spare[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


class BrowserError(AssertionError):
    """The browser did not answer, or a script in the page failed."""


class Page:
    """A page of the browser. ``problems``: errors and warnings of the console, failed requests, uncaught exceptions.
    ``requests``: the addresses that were requested.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session = ""
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.loaded = False
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command, and return its result. Events that come before are noted."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + _PATIENCE
        while True:
            answer = self._receive(end)
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], max(0.0, end - time.monotonic()))[0]:
                raise BrowserError("the browser does not answer")
            part = os.read(self._from, 1 << 16)
            if not part:
                raise BrowserError("the browser ended")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note_event(message.get("method", ""), message.get("params", {}))
        return message

    def _note_event(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str([arg.get("value", arg.get("description")) for arg in params["args"]]))
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loaded = True

    def show(
        self, path: Path, width: int = 1280, height: int = 900, *, dark: bool = False, phone: bool = False
    ) -> None:
        """Load the file ``path`` in a window of this size."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.loaded = False
        self.send("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + _PATIENCE
        while not self.loaded:
            self._receive(end)

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise BrowserError(str(found["exceptionDetails"].get("exception", found["exceptionDetails"])))
        return found["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        """Press and release a key."""
        code = {"Enter": 13, "Tab": 9}.get(key, 0)
        extra: dict[str, Any] = {"windowsVirtualKeyCode": code} if code else {}
        shown = text or ("\r" if key == "Enter" else "")
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **({"text": shown} if shown else {}), **extra)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, **extra)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag the mouse from one point of the window to another."""
        for kind, (x, y) in (("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)):
            buttons = 0 if kind == "mouseReleased" else 1
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=buttons, clickCount=1)

    def save_screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a picture of the window, or of the ``whole`` page, to a PNG file."""
        taken = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def open_browser(folder: Path) -> Iterator[Page]:
    """Start Chromium with its files in ``folder``, give a page, and end Chromium."""
    assert CHROMIUM is not None, "no Chromium"
    child_in, to_browser = os.pipe()
    from_browser, child_out = os.pipe()
    command = [CHROMIUM, *_OPTIONS, f"--user-data-dir={folder / 'browser'}", "--remote-debugging-pipe"]
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _ON_FIXED_PIPES, str(child_in), str(child_out), *command],
            pass_fds=(child_in, child_out),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    os.close(child_in)
    os.close(child_out)
    try:
        yield Page(to_browser, from_browser)
    finally:
        os.close(to_browser)
        os.close(from_browser)
        process.terminate()
        process.wait(timeout=30)
