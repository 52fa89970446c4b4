"""The page in a browser: it opens, goes on, outlives a worker that is killed, and shows nothing without the token."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from envmanager import RestartPolicy, SubprocessEnvManager
from envmanager.testing import FakeEnvironment, Sleep, Step
from envmanager_tests.serving.asking import start

pytest.importorskip("websockets", reason="the browser is driven over a web socket")
from envmanager_tests.serving.browser import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")

N_STEPS = "Number([...document.querySelectorAll('#tiles div')].find(each => each.lastChild.textContent === 'env steps')\
.firstChild.textContent.replaceAll(',', ''))"


def slow(_: Any) -> FakeEnvironment:
    return FakeEnvironment([Sleep(0.005), Step(1.0), Step(1.0, terminated=True)])


@pytest.fixture
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


class Stepping:
    """A context in which a thread takes steps."""

    def __init__(self, manager: SubprocessEnvManager) -> None:
        self._manager, self._over = manager, threading.Event()
        self._thread = threading.Thread(target=self._step)

    def _step(self) -> None:
        while not self._over.is_set():
            self._manager.step()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def n_coloured(canvas: str) -> str:
    """The number of pixels that are drawn on a canvas."""
    return f"""(() => {{
        const canvas = document.querySelector("{canvas}");
        if (!canvas) return 0;
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return data.filter((value, at) => at % 4 === 3 && value).length;
    }})()"""


def test_the_page_opens_goes_on_outlives_a_killed_worker_and_tells_the_end(browser):
    with SubprocessEnvManager(slow, n_envs=3, restarts=RestartPolicy(backoff_s=0)) as manager:
        server = start(manager)
        with Stepping(manager):
            page = browser.open(server.url)
            page.wait_until(f"document.getElementById('tiles').children.length && {N_STEPS} > 100")
            before = page.evaluate(N_STEPS)
            page.wait_until(f"{N_STEPS} > {before} + 200")
            for canvas in ("#timeline", "#rate canvas", "#return canvas"):
                page.wait_until(f"{n_coloured(canvas)} > 500")

            os.kill(manager.stats().workers[1].pid, signal.SIGKILL)
            page.wait_until("document.querySelector('#events').innerText.includes('SIGKILL')")
            assert "Restarted" in page.text()
            before = page.evaluate(N_STEPS)
            page.wait_until(f"{N_STEPS} > {before} + 200")
            assert "live" in page.text()
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        manager.close()
        page.wait_until("document.getElementById('state').textContent.includes('no answer')")
        assert page.evaluate(N_STEPS) > before  # the last numbers stay


def test_nothing_is_shown_without_the_token(browser):
    with SubprocessEnvManager(slow, n_envs=1) as manager:
        server = start(manager)
        for url in (server.url.partition("?")[0], server.url + "x"):
            page = browser.open(url)
            assert "token is missing" in page.text()
            assert page.evaluate("document.querySelector('canvas')") is None


def test_texts_of_environments_are_no_markup(browser):
    odd = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
    with SubprocessEnvManager(slow, n_envs=1) as manager:
        server = start(manager)
        server.figures[odd] = {odd: 1.0}
        page = browser.open(server.url, width=400)
        page.wait_until("document.getElementById('figures').innerText.includes('<img')")
        assert page.evaluate("document.title") == "envmanager"
        assert page.evaluate("document.querySelector('#figures img, #figures script')") is None
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
