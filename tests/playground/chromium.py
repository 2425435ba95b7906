"""Chromium without a window, spoken to through its debugging pipe: no driver, no library, no network.

The DevTools protocol is JSON, each message ended by a zero byte; the browser reads from its file descriptor 3 and
writes to 4.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-quic", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe", "--force-device-scale-factor=1",
)  # fmt: skip
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Puts the ends of two pipes where the browser looks for them, then becomes it.
LAUNCH = """
import os, sys
for end, source in zip((3, 4), [os.dup(int(number)) for number in sys.argv[1:3]]):
    os.dup2(source, end)
    os.set_inheritable(end, True)
os.execv(sys.argv[3], sys.argv[3:])
"""


def executable() -> str | None:
    """Where Chromium is, if it is anywhere."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A page in a browser of its own."""

    def __init__(self, profile: Path):
        """Start the browser.

        Args:
            profile: an empty folder for it.
        """
        program = executable()
        assert program is not None
        out_read, out_write = os.pipe()
        in_read, in_write = os.pipe()
        command = [sys.executable, "-c", LAUNCH, str(in_read), str(out_write)]
        command += [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            command, pass_fds=(in_read, out_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(in_read)
        os.close(out_write)
        self._out, self._in = in_write, out_read
        self._number, self._buffer = 0, b""
        self.complaints: list[str] = []  # errors and warnings of the console, and what was thrown
        self.requests: list[str] = []
        target = self._browser("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._browser("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command to the page."""
        return self._send({"method": method, "params": parameters, "sessionId": self._session})

    def _browser(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._send({"method": method, "params": parameters})

    def _send(self, message: dict[str, Any], seconds: float = 60.0) -> dict[str, Any]:
        self._number += 1
        os.write(self._out, json.dumps({"id": self._number, **message}).encode() + b"\0")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            answer = self._receive(end)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._hear(answer)
        raise TimeoutError(message["method"])

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            chunk = os.read(self._in, 2**20) if ready else b""
            if not chunk:
                raise TimeoutError("The browser says nothing.")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _hear(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"])[:600])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(parameters["args"])[:600])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(json.dumps(parameters["entry"])[:600])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def size(self, width: int, height: int, dark: bool = False, mobile: bool = False) -> None:
        """The window, and what the reader's system prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        """Go there."""
        self.call("Page.navigate", url=address)

    def js(self, expression: str) -> Any:
        """The value of an expression; a promise is waited for."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, expression: str, seconds: float = 60.0) -> Any:
        """Wait for an expression to be true."""
        end = time.monotonic() + seconds
        while not (value := self.js(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"{expression}; status: {self.js('document.body.innerText')[-300:]}")
            time.sleep(0.05)
        return value

    def drag(self, places: list[tuple[float, float]]) -> None:
        """Press the pointer at the first place, move it through the others, and let go."""
        for i, (x, y) in enumerate(places):
            kind = "mouseMoved" if i else "mousePressed"
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)
        x, y = places[-1]
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=x, y=y, button="left", clickCount=1)

    def key(self, key: str, code: int) -> None:
        """Press and release a key."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self, path: Path, full: bool = True) -> None:
        """The page as a PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End the browser."""
        os.close(self._out)
        os.close(self._in)
        self.process.terminate()
        self.process.wait(20)
