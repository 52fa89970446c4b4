"""What every test is wrapped in: the leak guard."""

from __future__ import annotations

import gc
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import hypothesis
import pytest

from envmanager.system.interrupts import defer_interrupts
from envmanager.testing.leaks import Traces, adopt_orphans, settle
from envmanager_tests.preloading import preload
from envmanager_tests.suites import is_in, suites_of

hypothesis.settings.register_profile("busy machine", deadline=None)
hypothesis.settings.load_profile("busy machine")

PRELOADED = (
    "pytest",
    "pytest_mock",
    "hypothesis",
    "envmanager.subprocess_env_manager",
    "envmanager.testing.contract",
    "envmanager.testing.fault_contract",
    "envmanager.adapters.gymnasium",
    "envmanager.adapters.pettingzoo",
    "envmanager.adapters.dm_env",
    "ale_py",
    "pettingzoo",
    "envmanager_tests.awaiting",
    "envmanager_tests.contract.kernel_contract",
    "envmanager_tests.envs",
    "envmanager_tests.faults.process_faults",
    "envmanager_tests.faults.scripts",
    "envmanager_tests.interop.envs",
    "envmanager_tests.interrupting",
    "envmanager_tests.start_methods",
)
"""What workers find in the helper: an environment of a test comes with its module, and that with all of this."""

LONGEST = ("test_under_chaos", "test_the_site_builds")
"""Parts of the names of the tests that take longest."""


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts us in the background has us ignore Ctrl-C, and what we start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Tests run side by side: PyTorch's threads, which spin for one another, would take ten times the processor time.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # else onnxruntime keeps files open, and a connection
    adopt_orphans()
    if sys.platform == "linux":
        # These stay until the program ends, so they are there before the first test looks.
        resource_tracker.ensure_running()
        preload("envmanager.processes.child", *PRELOADED)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite", action="append", default=[], help="run the tests of this suite; may be given again")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = config.getoption("--suite")
    is_other = asked and collection_path.match("test_*.py") and suites_of(collection_path).isdisjoint(asked)
    return True if is_other else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of other suites. The longest tests come first, so that nothing waits for them at the end."""
    for item in items:
        sample = item.get_closest_marker("sample")
        applies = sample and (sample.kwargs.get("everywhere") or item.get_closest_marker("start_methods"))
        if applies and not any(re.search(each, item.name) for each in sample.args):
            item.add_marker("thorough")
    if suites := frozenset(config.getoption("--suite")):
        config.hook.pytest_deselected(items=[item for item in items if not is_in(item, suites)])
        items[:] = [item for item in items if is_in(item, suites)]
    items.sort(key=lambda item: not any(name in item.name for name in LONGEST))


@pytest.fixture(autouse=True)
def leak_guard() -> Iterator[None]:
    """No process, descriptor, thread, shared memory or open manager outlives a test."""
    before = Traces.now()
    yield
    left = settle(before)
    assert not left, f"left behind: {left}"
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        gc.collect()
        with defer_interrupts():  # where a thread closed the last manager, or nobody, the handler goes with this
            pass
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "left behind: an open manager"


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """A function that writes a module into ``tmp_path``, which is on the path; after the test it is forgotten."""
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        written.append(name)

    yield write
    for name in written:
        sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def fonts_are_open() -> None:
    """Matplotlib keeps the files of its fonts open, which the leak guard must not take for a leak of ours."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    figure.suptitle("µ")
    figure.add_subplot().set_title("µ")
    figure.savefig(io.BytesIO())
