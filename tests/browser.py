"""A headless Chromium, spoken to in the DevTools protocol over a pipe; nothing has to be installed
but the browser itself.
"""

from __future__ import annotations

import base64
import fcntl
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

import pytest

DEADLINE_S = 30.0
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_OPTIONS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run"),
    *("--hide-scrollbars", "--mute-audio", "--disable-extensions", "--force-color-profile=srgb"),
)
# The browser reads commands from descriptor 3 and writes to 4.
_LAUNCHER = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37}
_KEYS |= {"ArrowRight": 39}


def find_browser() -> str:
    """Return the path of a Chromium; skip the test where there is none."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip(f"no browser is installed here: none of {', '.join(_NAMES)} is found")
    return found


class Browser:
    """A running browser."""

    def __init__(self, folder: Path) -> None:
        """Start one that keeps its files in `folder`."""
        path = find_browser()
        to_browser, self._commands = _pipe()
        self._answers, from_browser = _pipe()
        command = [sys.executable, "-c", _LAUNCHER, str(to_browser), str(from_browser), path]
        self._log = (folder / "browser.log").open("wb")
        self._process = subprocess.Popen(
            [*command, *_OPTIONS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=self._log,
            stderr=self._log,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._next_id = 0
        self.events: list[dict[str, Any]] = []
        """What no command was answered with, in order."""

    def close(self) -> None:
        """End it, and wait for that."""
        try:
            self.send("Browser.close")
            self._process.wait(DEADLINE_S)
        except (OSError, RuntimeError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        for descriptor in (self._commands, self._answers):
            os.close(descriptor)
        self._log.close()

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Give a command and return its result."""
        self._next_id += 1
        message: dict[str, Any] = {"id": self._next_id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            answer = self._read(deadline_s)
            if answer.get("id") == self._next_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                found: dict[str, Any] = answer.get("result", {})
                return found
            self.events.append(answer)

    def wait_for_event(self, session: str, method: str) -> None:
        """Return when a page has told an event; those before it are kept."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not any(
            event.get("sessionId") == session and event["method"] == method for event in self.events
        ):
            self.events.append(self._read(deadline_s))

    def _read(self, deadline_s: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            wait_s = max(deadline_s - time.monotonic(), 0.0)
            if not select.select([self._answers], [], [], wait_s)[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._answers, 2**20)
            if not data:
                raise OSError("the browser has ended")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    @contextmanager
    def page(
        self, url: str, *, width: int = 1000, height: int = 800, dark: bool = False
    ) -> Iterator[Page]:
        """Open a page; what it complained about until it is closed fails the test."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log"):
            page.send(f"{domain}.enable")
        page.resize(width, height)
        page.set_dark(dark)
        page.send("Page.navigate", url=url)
        self.wait_for_event(session, "Page.loadEventFired")
        yield page
        errors = page.errors()
        self.send("Target.closeTarget", targetId=target)
        assert errors == []


class Page:
    """One page of a browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **params)

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def set_dark(self, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def errors(self) -> list[str]:
        """Return what the page has complained about: errors, refusals and whatever it threw."""
        self.js("0")  # whatever comes with the answer has been read
        told = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            what = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                told.append(json.dumps(what["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and what["entry"]["level"] != "verbose":
                told.append(json.dumps(what["entry"]))
            elif event["method"] == "Runtime.consoleAPICalled" and what["type"] != "debug":
                told.append(json.dumps(what["args"]))
        return told

    def forget_errors(self) -> None:
        """Go on as if nothing had been complained about."""
        self.js("0")
        self._browser.events.clear()

    def js(self, expression: str) -> Any:
        """Return the value of an expression."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Return the value of an expression once it is true."""
        code = (
            "new Promise((done) => { const look = () => { const found = "
            f"({expression}); if (found) done(found); else setTimeout(look, 20); }}; look(); }})"
        )
        answer = self.send(
            "Runtime.evaluate",
            expression=code,
            awaitPromise=True,
            returnByValue=True,
            timeout=DEADLINE_S * 1000,
        )
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        found = self.js(f"document.querySelector({json.dumps(selector)}).innerText")
        return str(found)

    def place(self, selector: str) -> tuple[float, float]:
        """Return the middle of an element's first box, which is scrolled into view first."""
        code = (
            f"(() => {{ const found = document.querySelector({json.dumps(selector)}); "
            "found.scrollIntoView({block: 'center'}); const r = found.getClientRects()[0]; "
            "return [r.left + r.width / 2, r.top + r.height / 2]; })()"
        )
        x, y = self.js(code)
        return x, y

    def hover(self, selector: str) -> None:
        x, y = self.place(selector)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        x, y = self.place(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        facts: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        if key == "Enter":
            facts["text"] = "\r"
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, **facts)

    def screenshot(self, path: Path, *, height: int | None = None) -> None:
        """Write what is seen, or the page's first `height` pixels."""
        clip: dict[str, Any] = {}
        if height is not None:
            width = self.js("document.documentElement.clientWidth")
            clip = {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}
        data = self.send("Page.captureScreenshot", captureBeyondViewport=True, **clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def scrolls_sideways(self) -> bool:
        """Whether something is wider than the page."""
        wider = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        return bool(self.js(wider))

    def poor_contrasts(self) -> list[Any]:
        """Return texts whose contrast with what is behind them is less than WCAG's 4.5 to 1."""
        found: list[Any] = self.js(_CONTRASTS)
        return found


def _pipe() -> tuple[int, int]:
    """Return a pipe whose descriptors are none of those that the browser's get."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]


_CONTRASTS = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parts = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = parts(getComputedStyle(at).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((c) => c.nodeType === 3 && c.textContent.trim());
    if (!own || !node.checkVisibility() || node.disabled || node.matches("script, style")) continue;
    const pair = [light(parts(getComputedStyle(node).color)), light(behind(node))];
    const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    const text = node.textContent.slice(0, 30);
    if (ratio < 4.5) poor.push([node.tagName, node.className, text, ratio]);
  }
  return poor.slice(0, 10);
})()
"""
