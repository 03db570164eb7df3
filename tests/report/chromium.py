"""Headless Chromium, driven through its DevTools protocol over two pipes."""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
EXECUTABLE = next(filter(None, map(shutil.which, NAMES)), None)
NO_CHROMIUM = "needs Chromium (Debian and Ubuntu: apt-get install chromium)"
TIMEOUT = 60.0
READY = "document.body && document.body.dataset.ready === 'yes'"  # of a report
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions",
    "--disable-sync", "--mute-audio", "--hide-scrollbars", "--remote-debugging-pipe",
    "--force-color-profile=srgb",
)  # fmt: skip


class Chromium:
    """A browser with one page.

    Attributes:
        requests: URLs that the page has requested
        messages: exceptions, errors of the console and violations of the page's policy
    """

    def __init__(self, profile: Path, *, width: int = 1280, height: int = 900):
        self.requests: list[str] = []
        self.messages: list[str] = []
        assert EXECUTABLE is not None
        to_browser, self._write_end = os.pipe()
        self._read_end, from_browser = os.pipe()
        self._number, self._received, self._session = 0, b"", ""
        self._log = profile / "chromium.log"
        # Of a socket, whose path has at most 107 bytes, and of files that a killed browser leaves.
        self._temporary = tempfile.mkdtemp()
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        command = [EXECUTABLE, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", *command],
                pass_fds=(to_browser, from_browser), stderr=log,
                env=os.environ | {"TMPDIR": self._temporary},
            )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        pages = self.send("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._process.kill()
        self._process.wait()
        os.close(self._write_end)
        os.close(self._read_end)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write_end, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + TIMEOUT
        while True:
            answer = self._receive(end)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def open(self, url: str, condition: str = READY) -> None:
        """Open a page and wait until its script is ready."""
        self.send("Page.navigate", url=url)
        self.wait_for(f"location.href === {json.dumps(url)} && ({condition})")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + TIMEOUT
        while not self.value(f"Boolean({condition})"):
            assert time.monotonic() < end, f"not within {TIMEOUT} s: {condition}; {self.messages}"
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """Return the value of an expression, or of the promise that it returns."""
        found = self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Move, press or release the mouse ("Moved", "Pressed", "Released")."""
        button = {} if kind == "Moved" else {"button": "left", "clickCount": 1}
        self.send("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **button)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag the mouse with the left button."""
        self.mouse("Moved", *start)
        self.mouse("Pressed", *start)
        for part in (0.3, 0.6, 1.0):
            point = [a + part * (b - a) for a, b in zip(start, end, strict=True)]
            held = {"button": "left", "buttons": 1}
            self.send("Input.dispatchMouseEvent", type="mouseMoved", x=point[0], y=point[1], **held)
        self.mouse("Released", *end)

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read_end], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium did not answer within {TIMEOUT} s"
            part = os.read(self._read_end, 2**20)
            assert part, f"Chromium has ended: {self._log.read_text()[-2000:]}"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        """Record what an event says about requests and errors."""
        method, details = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"][:200])
        elif method == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(details["exceptionDetails"])[:2000])
        elif method == "Log.entryAdded":
            self.messages.append(details["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and details["type"] in ("error", "assert"):
            self.messages.append(json.dumps(details["args"])[:2000])
