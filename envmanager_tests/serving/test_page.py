"""The page in a browser: it opens, goes on, outlives a worker that is killed, and shows nothing without the token."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from envmanager import RestartPolicy, SimpleEnvManager, SubprocessEnvManager
from envmanager.testing import FakeEnvironment, Sleep, Step
from envmanager_tests.serving.asking import start, succeeding

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


def test_behaviors_and_figures_may_be_called_like_what_every_object_has(browser):
    names = ("constructor", "toString", "__proto__")
    with SimpleEnvManager(lambda: Named(names)) as manager:
        server = start(manager)
        server.figures |= {"constructor": {"loss": 0.5}, "__proto__": {"toString": 2.0}}
        for _ in range(40):
            manager.step()
        page = browser.open(server.url, width=400)
        page.wait_until("document.querySelectorAll('#figures tr').length === 3")

        assert page.evaluate("document.querySelector('#figures').innerText.replace(/\\s+/g, ' ').trim()") == (
            "behavior constructor __proto__ loss 0.5 – toString – 2"
        )
        for name in names:
            page.wait_until(f"document.getElementById('tiles').innerText.includes('return, {name}')")
        page.wait_until("document.querySelectorAll('#return .u-series').length === 4")  # the time, and one each
        assert page.evaluate("document.getElementById('state').textContent") == "live"
        assert page.evaluate("document.querySelector('#figures').getBoundingClientRect().right <= innerWidth")


class Named(FakeEnvironment):
    """An environment in which agents of several behaviors act; their episodes take three steps."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__([Step(1.0), Step(1.0), Step(1.0, terminated=True)])
        self.names = names

    @property
    def behavior_specs(self) -> Any:
        (spec,) = super().behavior_specs.values()
        return dict.fromkeys(self.names, spec)

    def reset(self, **given: Any) -> Any:
        return self._shared(super().reset(**given))

    def step(self, actions: Any) -> Any:
        return self._shared(super().step({"default": actions[self.names[0]]}))

    def _shared(self, steps: Any) -> Any:
        return {
            name: attrs.evolve(steps["default"], agent_id=steps["default"].agent_id + at)
            for at, name in enumerate(self.names)
        }


def test_measures_memory_and_what_else_the_trainer_tells_are_shown(browser):
    with SubprocessEnvManager(succeeding, n_envs=2, measures=["is_success"]) as manager:
        server = start(manager)
        server.facts["goal"] = "1,000 of 5,000 <b>"
        for _ in range(40):
            manager.step()
        page = browser.open(server.url, width=400)
        page.wait_until("document.getElementById('tiles').innerText.includes('is_success')")

        tiles = page.evaluate("[...document.querySelectorAll('#tiles div')].map(each => each.innerText)")
        told = dict(reversed(each.split("\n")) for each in tiles)
        assert 0.4 < float(told["is_success"]) < 0.6
        assert page.evaluate("document.getElementById('facts').innerText") == "goal: 1,000 of 5,000 <b>"
        assert told["memory of workers"].endswith("iB")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
