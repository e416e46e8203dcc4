"""Drives a headless Chromium over a pipe by the DevTools protocol; no package beyond the standard library.

With `--remote-debugging-pipe` the browser reads messages from its file descriptor 3 and writes to 4; each message
is JSON followed by a NUL byte (chromium: content/browser/devtools/devtools_pipe_handler.cc).
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# The browser's own calls (updates, safe browsing) are off; page requests are what a test judges.
FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-extensions",
    ),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
)


def find() -> str | None:
    """Path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page.

    Args:
        program: path of the browser.
        profile: an empty folder for its profile.

    Attributes:
        requests: URL of every request of the page.
        complaints: exceptions, console errors and log errors of the page (a refused resource is one).
    """

    def __init__(self, program: str, profile: Path) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._buffer = b""
        self._count = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._seen: set[str] = set()
        self._session = ""
        from_here, self._write = os.pipe()
        self._read, to_here = os.pipe()
        command = f'exec "$@" 3<&{from_here} 4>&{to_here}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(from_here, to_here),
        )
        os.close(from_here)
        os.close(to_here)
        try:
            targets = self._call("Target.getTargets", browser=True)["targetInfos"]
            page = next(t["targetId"] for t in targets if t["type"] == "page")
            attached = self._call("Target.attachToTarget", browser=True, targetId=page, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self._call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the browser, which it does by itself when its pipe closes; after 10 s it is killed."""
        os.close(self._write)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)

    def open(self, path: Path) -> None:
        """Loads a file and waits until its load event."""
        self.requests.clear()
        self.complaints.clear()
        self._seen.discard("Page.loadEventFired")
        self._call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self._seen:
            self._receive(30)

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression (JSON types); a promise is awaited."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"]["exception"].get("description", expression))
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 20) -> None:
        """Polls until a JavaScript expression is true."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{expression} stayed false for {seconds} s; the page said {self.complaints}"
                )
            time.sleep(0.05)

    def emulate(self, width: int, height: int = 900, scheme: str = "light") -> None:
        """Sets the size of the window and the colour scheme."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", media="", features=features)

    def click(self, element: str) -> None:
        """Presses and releases the mouse in the middle of an element, given as a JavaScript expression."""
        x, y = self.evaluate(
            f"(() => {{ const e = {element}; e.scrollIntoView({{block: 'center', inline: 'center'}});"
            " const r = e.getBoundingClientRect(); return [r.left + r.width / 2, r.top + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def write(self, text: str) -> None:
        """Types a text where the focus is."""
        self._call("Input.insertText", text=text)

    def _call(self, method: str, browser: bool = False, **params: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if not browser:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while self._count not in self._answers:
            self._receive(60)
        answer = self._answers.pop(self._count)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _receive(self, seconds: float) -> None:
        if not select.select([self._read], [], [], seconds)[0]:
            raise TimeoutError(f"the browser was silent for {seconds} s")
        if not (chunk := os.read(self._read, 1 << 20)):
            raise RuntimeError("the browser ended")
        *whole, self._buffer = (self._buffer + chunk).split(b"\0")
        for message in map(json.loads, whole):
            if "method" in message:
                self._note(message["method"], message["params"])
            else:
                self._answers[message["id"]] = message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        self._seen.add(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert", "warning"):
            self.complaints.append(
                " ".join(str(a.get("value", a.get("description"))) for a in params["args"])
            )
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
