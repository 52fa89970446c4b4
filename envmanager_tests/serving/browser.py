"""A headless Chromium, driven over its debugging protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_OPEN_S = 60.0


class Page:
    """One page of a browser."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)

    def ask(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(timeout=_OPEN_S))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, whose promise is awaited."""
        result = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_until(self, condition: str, within_s: float = _OPEN_S) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + within_s
        poll = f"""new Promise(done => {{
            const look = () => ({condition}) ? done(true) : setTimeout(look, 50);
            look();
            setTimeout(() => done(false), 2000);
        }})"""
        while not self.evaluate(poll):
            assert time.monotonic() < deadline, f"never: {condition}; the page shows\n{self.text()}"

    def text(self) -> str:
        shown: str = self.evaluate("document.body.innerText")
        return shown

    def screenshot(self, path: str) -> None:
        height = self.evaluate("document.documentElement.scrollHeight")
        width = self.evaluate("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.ask("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        Path(path).write_bytes(base64.b64decode(shot["data"]))


class Browser:
    """A context in which a headless Chromium runs."""

    def __enter__(self) -> Browser:
        assert CHROMIUM is not None
        self._exit = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            command = [
                CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run",
                "--disable-dev-shm-usage", "--disable-background-networking", f"--user-data-dir={folder}",
                "about:blank",
            ]  # fmt: skip
            process = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
            stack.callback(process.terminate)
            assert process.stderr is not None
            line = next(line for line in process.stderr if "DevTools listening on" in line)
            self._address = line.rpartition(" ")[2].strip().removeprefix("ws://").partition("/")[0]
            self._exit = stack.pop_all()
        return self

    def open(self, url: str, *, width: int = 1280, dark: bool = False) -> Page:
        """A new page, which loads ``url``."""
        request = urllib.request.Request(f"http://{self._address}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(request, timeout=_OPEN_S) as answer:
            address = json.load(answer)["webSocketDebuggerUrl"]
        page = Page(self._exit.enter_context(connect(address, max_size=None)))
        page.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        page.ask(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        page.ask("Page.enable")
        page.ask("Page.navigate", url=url)
        page.wait_until("location.href !== 'about:blank' && document.readyState === 'complete'")
        return page

    def __exit__(self, *_: object) -> None:
        self._exit.close()
