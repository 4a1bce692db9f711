"""A headless Chromium, driven by its DevTools protocol over a pipe: no library, no port, no network.

    with Browser() as browser:
        page = browser.open("file:///tmp/report.html", width=1200, height=900, dark=True)
        png = page.picture()
        page.fetched                                       # what it asked for, itself left out
        page.errors                                        # what its scripts raised

The protocol: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import json
import os
import select
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"
SECONDS = 60                           # that an answer may take
#: Nothing is asked of a network: no updates, no accounts. A profile is new each time.
FLAGS = ("--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
         "--no-default-browser-check", "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--disable-extensions", "--mute-audio", "--disable-dev-shm-usage")


class NoBrowser(RuntimeError):
    """There is no Chromium here, or it does not start."""


def found(path: str | None = None) -> str:
    """Chromium's program: ``path``, or the first of `NAMES` that is installed. Raises NoBrowser."""
    program = shutil.which(path) if path else next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        looked = path or ", ".join(NAMES)
        raise NoBrowser(f"no Chromium found (looked for {looked}); install it, for example 'apt-get install chromium', or "
                        "name its program with --browser")
    return program


class Page:
    """One page that is open. ``errors``: messages of exceptions; ``fetched``: the addresses it asked for beside its own."""

    def __init__(self, browser: Browser, session: str, address: str) -> None:
        self._browser, self._session, self._address = browser, session, address.partition("#")[0]
        self.errors: list[str] = []
        self.fetched: list[str] = []

    def send(self, method: str, **parameters: Any) -> Any:
        """A command of the protocol, and what it returns. Raises RuntimeError where it is refused."""
        return self._browser.send(method, self._session, **parameters)

    def run(self, script: str) -> Any:
        """The value of an expression in the page. Raises RuntimeError for an exception in it."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {_said(answer['exceptionDetails'])}")
        return answer["result"].get("value")

    def hover(self, selector: str) -> None:
        """Move the mouse over the first element of a CSS selector. Raises RuntimeError where there is none."""
        middle = ("(() => {const e = document.querySelector(" + json.dumps(selector) + "); if (!e) return null;"
                  "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
                  "return [r.x + r.width / 2, r.y + r.height / 2]})()")
        at = self.run(middle)
        if at is None:
            raise RuntimeError(f"{selector}: the page has no such element")
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])

    def picture(self, selector: str | None = None, whole: bool = False) -> bytes:
        """A PNG of what the window shows, of the whole page, or of the first element of a CSS selector."""
        clip: dict[str, Any] = {}
        if selector is not None:
            box = self.run("(() => {const e = document.querySelector(" + json.dumps(selector) + "); if (!e) return null;"
                           "const r = e.getBoundingClientRect();"
                           "return [r.x + scrollX, r.y + scrollY, r.width, r.height]})()")
            if box is None:
                raise RuntimeError(f"{selector}: the page has no such element")
            clip = {"clip": dict(zip(("x", "y", "width", "height"), box), scale=1), "captureBeyondViewport": True}
        elif whole:
            found = self.send("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"clip": dict(found, scale=1), "captureBeyondViewport": True}
        return base64.b64decode(self.send("Page.captureScreenshot", format="png", **clip)["data"])

    def noted(self, message: dict[str, Any]) -> None:
        """What the browser said of this page."""
        given = message["params"]
        if message["method"] == "Runtime.exceptionThrown":
            self.errors.append(_said(given["exceptionDetails"]))
        elif message["method"] == "Network.requestWillBeSent":
            address = given["request"]["url"]
            by_itself = address.startswith("data:") or address.endswith("/favicon.ico")         # the browser's own wish
            if address.partition("#")[0] != self._address and not by_itself:
                self.fetched.append(address)


class Browser:
    """A Chromium of its own, ended with the ``with``. Raises NoBrowser where there is none, or it does not start."""

    def __init__(self, program: str | None = None) -> None:
        self._program = found(program)
        self._number, self._rest, self._pages = 0, b"", {}                 # type: int, bytes, dict[str, Page]

    def __enter__(self) -> Browser:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        flags = [*FLAGS, *(("--no-sandbox",) if os.geteuid() == 0 else ()), f"--user-data-dir={self._profile.name}"]
        command = f"exec {shlex.join([self._program, *flags])} 3<&{to_read} 4>&{to_write}"    # it reads 3, writes 4
        self._process = subprocess.Popen(["/bin/bash", "-c", command], pass_fds=(to_read, to_write), start_new_session=True,
                                         stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self.send("Browser.getVersion")
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            self.send("Browser.close")
        except (NoBrowser, RuntimeError):
            pass
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def open(self, address: str, *, width: int = 1200, height: int = 900, scale: float = 1, dark: bool = False) -> Page:
        """A page in a window of its own, loaded, its fonts and images, too. ``dark``: it is told that the reader prefers so.

        Raises RuntimeError where the address cannot be opened.
        """
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, address)
        for domain in ("Page", "Runtime", "Network"):
            page.send(f"{domain}.enable")
        page.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False)
        page.send("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"}])
        answer = page.send("Page.navigate", url=address)
        if answer.get("errorText"):
            raise RuntimeError(f"{address}: {answer['errorText']}")
        page.run("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))"
                 ".then(() => document.fonts.ready).then(() => 0)")
        return page

    def send(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """A command, and its answer; what is said of pages meanwhile is noted with them."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        try:
            os.write(self._to, json.dumps(message).encode() + b"\0")
        except BrokenPipeError:
            raise NoBrowser(f"{self._program} has ended (status {self._process.poll()})") from None
        until = time.monotonic() + SECONDS
        while True:
            answer = self._next(until, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            if answer.get("sessionId") in self._pages and "method" in answer:
                self._pages[answer["sessionId"]].noted(answer)

    def _next(self, until: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], max(0.0, until - time.monotonic()))[0]:
                raise NoBrowser(f"{self._program} did not answer {method} within {SECONDS} s")
            more = os.read(self._from, 1 << 20)
            if not more:
                raise NoBrowser(f"{self._program} has ended (status {self._process.poll()}) before it answered {method}")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


def _said(details: dict[str, Any]) -> str:
    return str(details.get("exception", {}).get("description") or details.get("text"))


def address_of(file: Path) -> str:
    """A file's address."""
    return file.resolve().as_uri()


__all__ = ["Browser", "NoBrowser", "Page", "address_of", "found"]
