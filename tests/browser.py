"""A headless Chromium, controlled over a pipe. A test sees what a person would see of a page, and what the
page fetched."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest

CHROMIUM = next(
    filter(
        None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"))
    ),
    None,
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed (Debian: chromium-headless-shell, or chromium)"
)
PATIENCE_S = 60.0
_SCROLLING = """[...document.body.querySelectorAll("*")].filter(part =>
    part.scrollWidth > part.clientWidth && getComputedStyle(part).overflowX == "auto").length"""


@dataclass
class Seen:
    """A loaded page. ``asked``: the addresses of everything that it fetched. ``complaints``: the messages
    of the browser's console. ``inner_px``, ``content_px``: the widths of the window and of its content.
    ``scrolling``: how many elements have more content than room."""

    title: str
    text: str
    inner_px: int
    content_px: int
    scrolling: int
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


class Browser:
    """A browser for one test. ``profile``: an empty folder of its own."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        its_in, self._out = os.pipe()
        self._in, its_out = os.pipe()
        # the file descriptors at which Chromium expects its pipe
        hands = f'exec 3<&{its_in} 4>&{its_out}; exec "$@"'
        self._process = subprocess.Popen(
            [
                "/bin/bash", "-c", hands, "browser", CHROMIUM,
                "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                "--no-first-run", "--disable-background-networking", "--disable-component-update",
                f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank",
            ],
            pass_fds=(its_in, its_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": str(profile), "TMPDIR": str(profile)},
        )  # fmt: skip
        os.close(its_in)
        os.close(its_out)
        self._unread = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session: str | None = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    _session = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)  # Chromium ends when its pipe is closed
        try:
            self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._in)

    def look(self, url: str, width: int, *, dark: bool = False, picture: Path | None = None) -> Seen:
        """Load a page in a window of this width, and take a picture of the whole page."""
        self._events.clear()
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=url)
        self._until("Page.loadEventFired")
        size = self._value("[innerWidth, document.documentElement.scrollWidth, document.title]")
        text = self._value("document.body.innerText")
        scrolling = self._value(_SCROLLING)
        if picture is not None:
            data = self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
            picture.write_bytes(base64.b64decode(data))
        return Seen(size[2], text, size[0], size[1], scrolling, self._asked(), self._complaints())

    def _value(self, script: str) -> Any:
        return self._call("Runtime.evaluate", expression=script, returnByValue=True)["result"]["value"]

    def _asked(self) -> list[str]:
        sent = [e["params"] for e in self._events if e["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]

    def _complaints(self) -> list[str]:
        logged = [e["params"]["entry"]["text"] for e in self._events if e["method"] == "Log.entryAdded"]
        methods = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return logged + [json.dumps(e["params"]) for e in self._events if e["method"] in methods]

    # ------------------------------------------------------------ the pipe

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        request: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            request["sessionId"] = self._session
        os.write(self._out, json.dumps(request).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def _until(self, method: str) -> None:
        while not any(e["method"] == method for e in self._events):
            self._read()

    def _read(self) -> dict[str, Any]:
        """Return the next message. Events among the messages are kept."""
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._unread:
            left_s = max(0.0, deadline - time.monotonic())
            assert select.select([self._in], [], [], left_s)[0], "the browser says nothing"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self._events.append(message)
        return message
