"""A headless Chromium that tests drive by its own protocol, over pipes: real pointer, keys, themes and windows.

The protocol's messages: https://chromedevtools.github.io/devtools-protocol. No package is needed for it.
"""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from tempfile import TemporaryDirectory
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
TIMEOUT_S = 60.0  # of an answer: the machine may be busy
DESKTOP, PHONE = (1280, 900), (390, 844)  # CSS pixels
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs the program chromium (Debian, Ubuntu: apt-get install chromium)"
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--remote-debugging-pipe", "--no-first-run", "--disable-extensions", "--force-color-profile=srgb"),
)


class Browser:
    """One page. Errors in its console and exceptions of its scripts are in `errors`."""

    def __init__(self, read: int, write: int):
        self.errors: list[str] = []
        self._read, self._write = read, write
        self._number = 0
        self._rest = b""
        self._session: str | None = None
        (target,) = (one for one in self._ask("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self._ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def open(self, address: str) -> None:
        """Returns when the page is loaded."""
        self._ask("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript, awaited."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until it is true."""
        end = time.monotonic() + TIMEOUT_S
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.02)

    def window(self, size: tuple[int, int]) -> None:
        width, height = size
        mobile = size == PHONE
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def prefer(self, theme: str) -> None:
        """The theme of the reader's system: light or dark."""
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def point_at(self, selector: str) -> None:
        """Move the pointer to the middle of an element."""
        x, y = self.value(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const b = e.getBoundingClientRect(); "
            f"return [b.x + b.width / 2, b.y + b.height / 2]; }})(document.querySelector({json.dumps(selector)}))"
        )
        self._ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        self.point_at(selector)
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self._ask("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=KEYS[name])

    def fill(self, selector: str, text: str) -> None:
        """Put text into a field in place of its content, as a person types it."""
        self.value(f"(e => {{ e.focus(); e.select && e.select(); }})(document.querySelector({json.dumps(selector)}))")
        self._ask("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        """A picture of the window."""
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"]))

    @property
    def overflow(self) -> int:
        """CSS pixels by which the page is wider than its window."""
        return int(self.value("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    @property
    def loaded_ms(self) -> float:
        """From the start of navigation to the end of loading."""
        return float(self.value("performance.getEntriesByType('navigation')[0].loadEventEnd"))

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        for answer in self._answers():
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self._note(answer)
        raise AssertionError("the browser has gone")

    def _answers(self) -> Iterator[dict[str, Any]]:
        end = time.monotonic() + TIMEOUT_S
        while True:
            whole, found, rest = self._rest.partition(b"\0")
            if found:
                self._rest = rest
                yield json.loads(whole)
                continue
            assert select([self._read], [], [], max(0.0, end - time.monotonic()))[0], "the browser does not answer"
            more = os.read(self._read, 2**20)
            if not more:
                return
            self._rest += more

    def _note(self, event: dict[str, Any]) -> None:
        what = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(what["exceptionDetails"]))
        elif event.get("method") == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning", "assert"):
            self.errors.append(str(what["args"]))
        elif event.get("method") == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")


KEYS = {"Tab": 9, "Escape": 27, "Enter": 13}


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a window of a desktop, which ends with the block."""
    to_it, write = os.pipe()
    read, from_it = os.pipe()
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        words = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder}", "about:blank"]

        def wire() -> None:
            """The browser reads from 3 and writes to 4."""
            beyond = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (to_it, from_it)]
            for number, one in enumerate(beyond, 3):
                os.dup2(one, number)

        nothing = subprocess.DEVNULL
        process = subprocess.Popen(words, close_fds=False, preexec_fn=wire, stdout=nothing, stderr=nothing)
        os.close(to_it)
        os.close(from_it)
        try:
            page = Browser(read, write)
            page.window(DESKTOP)
            yield page
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(read)
            os.close(write)


def with_pictures(save: Callable[[Path], None], name: str) -> None:
    """Renew a picture of the documents, where GALVATRON_PICTURES is set."""
    if os.environ.get("GALVATRON_PICTURES"):
        save(Path(__file__).parents[2] / "docs" / "images" / name)
