"""A real Chromium, driven over its DevTools protocol: enough to open a page, press on it, and look at it."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--remote-debugging-address=127.0.0.1",
)


def find_chromium() -> str | None:
    """Return the browser's path, None where there is none."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class Browser:
    """One page of one fresh browser.

    Attributes:
        requests: Addresses that the page asked for, the page itself among them.
        errors: What the page wrote to its console as an error, and uncaught exceptions.
    """

    def __init__(self, profile: Path) -> None:
        binary = find_chromium()
        assert binary is not None
        command = [binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port = _wait_for(profile / "DevToolsActivePort").splitlines()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=20) as answer:
            page = next(one for one in json.load(answer) if one["type"] == "page")
        self._stack = ExitStack()
        self._socket = self._stack.enter_context(connect(page["webSocketDebuggerUrl"], max_size=None))
        self._numbers = itertools.count(1)
        self.requests: list[str] = []
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._process.terminate()
        self._process.wait(timeout=20)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=120))
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])
            self._note(message)

    def look(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """Set the size of the screen and the colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, page: Path) -> None:
        """Load a file and wait until its script has run."""
        self.call("Page.navigate", url=page.absolute().as_uri())
        self.wait("document.documentElement?.dataset.ready === 'yes'")

    def value(self, script: str) -> Any:
        """Return what an expression gives in the page, a promise's result when it gives one."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str, limit_s: float = 60.0) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if self.value(script):
                return
            time.sleep(0.05)
        raise AssertionError(f"never true: {script}; errors: {self.errors}")

    def draw_all(self) -> None:
        """Scroll through the page, so that every chart is drawn."""
        for _ in range(200):
            if self.value("[...document.querySelectorAll('.chart')].every((c) => c.childElementCount)"):
                break
            self.value(
                "scrollBy(0, innerHeight * 0.8), scrollY + innerHeight >= document.body.scrollHeight && scrollTo(0, 0)"
            )
            time.sleep(0.1)
        self.value("scrollTo(0, 0)")
        self.value("new Promise((done) => setTimeout(done, 500))")

    def screenshot(self, target: Path, *, full: bool = True) -> None:
        """Write a PNG of the page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        extra = {"captureBeyondViewport": True, "clip": {**size, "scale": 1}} if full else {}
        answer = self.call("Page.captureScreenshot", format="png", **extra)
        target.write_bytes(base64.b64decode(answer["data"]))

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event["method"] == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(str(params["args"]))
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(params["entry"]))


def _wait_for(path: Path) -> str:
    for _ in range(600):
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.05)
    raise AssertionError("chromium did not start")
