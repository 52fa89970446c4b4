"""Scripts without an ``if __name__ == "__main__"`` guard, the REPL and notebooks, under every start method."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from envmanager_tests.start_methods import MARKED_START_METHODS

SUITE = "core portable start-methods faults"

SCRIPT = '''
import gymnasium
import numpy as np
from envmanager import ActionInfo, SubprocessEnvManager

class Fruit:
    """An info whose class lives here, in the main module."""
    def __init__(self, name):
        self.name = name

class Level:
    """An option whose class lives here, and which the environment does not name."""

class MyEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.given = (options or {}).get("level")
        return np.zeros(2, np.float32), {}
    def step(self, action):
        return np.ones(2, np.float32), 1.0, self.given is not None, False, {"fruit": Fruit("pear")}

class Policy:
    def get_action(self, steps):
        return ActionInfo(np.zeros(len(steps), np.int64))

manager = SubprocessEnvManager(MyEnv, 2, start_method=START_METHOD, infos=True)
manager.set_policy("default", Policy())
_ = manager.reset()
total = sum(info.current["default"].reward.sum() for _ in range(5) for info in manager.step("all"))
(fruit, *_) = [info.current["default"].info[0]["fruit"] for info in manager.step("all")]
_ = manager.reset(tasks=[{"level": Level()}] * 5)
while not manager.tasks.done:
    _ = manager.step()

n_played = [result.error for result in manager.tasks.results].count(None)
manager.close()
print("total", total, "fruit", fruit.name, "same class", type(fruit) is Fruit, "tasks", n_played)
'''
EXPECTED = "total 10.0 fruit pear same class True tasks 5"


def script(start_method: str) -> str:
    return SCRIPT.replace("START_METHOD", repr(start_method))


def run(arguments: list[str], **options: Any) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=500, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("start_method", MARKED_START_METHODS)
def test_a_script_without_a_guard_runs_once(start_method: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(script(start_method))
    assert run([str(path)]).splitlines() == [EXPECTED]


POOL = """
import multiprocessing
import pickle
from dataclasses import dataclass
import gymnasium
import numpy as np
from envmanager import SubprocessEnvManager

FACTOR = 3

@dataclass
class Number:
    value: int

def times(number):
    return Number(number.value * FACTOR)

class WithPool(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}
    def step(self, action):
        again = pickle.loads(pickle.dumps(Number(2)))
        with multiprocessing.get_context("fork").Pool(2) as pool:
            total = sum(number.value for number in pool.map(times, [again, Number(5)]))
        return np.zeros(2, np.float32), float(total), False, False, {}

manager = SubprocessEnvManager([WithPool, lambda: WithPool()], 2, n_workers=1, start_method=START_METHOD)
manager.reset()
manager.send([0, 0], manager.recv().env_ids)
print(manager.recv().reward.tolist())
manager.close()
"""


@pytest.mark.parametrize("start_method", MARKED_START_METHODS)
def test_an_environment_may_pickle_functions_and_classes_of_the_script_and_fork_a_pool(
    start_method: str, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(POOL.replace("START_METHOD", repr(start_method)))
    assert run([str(path)]).splitlines() == ["[21.0, 21.0]"]


DECORATED = """
import functools
import gymnasium
import numpy as np
from envmanager import SubprocessEnvManager

@functools.lru_cache(maxsize=5)
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

@functools.singledispatch
def total(value):
    return value

@total.register
def _(value: list):
    return sum(total(each) for each in value)

class Decorated(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(2)

    @functools.cached_property
    def observation_space(self):
        return gymnasium.spaces.Box(0, 9, (5,), np.float32)

    @functools.cache
    def own(self, n):
        return n

    @functools.singledispatchmethod
    def plus_one(self, value):
        return value + 1

    @plus_one.register
    def _(self, value: str):
        return float(value) + 1

    def reset(self, *, seed=None, options=None):
        own, kept = self.own(4), fibonacci.cache_parameters()["maxsize"]
        return np.array([fibonacci(6), total([1, [2, 3]]), own, self.plus_one("1"), kept], np.float32), {}

with SubprocessEnvManager(Decorated) as manager:
    print(manager.reset()[0].current["default"].obs.tolist())
    print(manager.call(lambda env, n: fibonacci(n), 7), manager.call(lambda env: total([1, [1]])))
"""


def test_what_functools_makes_of_functions_of_the_script_works_in_workers(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(DECORATED)
    assert run([str(path)]).splitlines() == ["[[8.0, 6.0, 4.0, 2.0, 5.0]]", "[13] [2]"]


@pytest.mark.parametrize("start_method", MARKED_START_METHODS)
def test_a_module_without_a_guard_runs_once(start_method: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script(start_method))
    assert run(["-m", "train"], cwd=tmp_path).splitlines() == [EXPECTED]


@pytest.mark.sample("python -i")
@pytest.mark.parametrize("start_method", MARKED_START_METHODS)
@pytest.mark.parametrize("arguments", [["-"], ["-i", "-q"]], ids=["stdin", "python -i"])
def test_the_repl_runs_an_env_class_defined_there(start_method: str, arguments: list[str]) -> None:
    # An interactive class body ends at an empty line.
    typed = script(start_method).replace("\nclass", "\n\nclass").replace("\nmanager =", "\n\nmanager =")
    out = run(arguments, input=typed, env={**os.environ, "PYTHONSTARTUP": "", "PYTHON_BASIC_REPL": "1"})
    assert EXPECTED in out


@pytest.mark.parametrize("start_method", MARKED_START_METHODS)
def test_a_notebook_runs_an_env_class_defined_there(start_method: str, tmp_path: Path) -> None:
    path = tmp_path / "notebook.py"
    path.write_text(NOTEBOOK.replace("SOURCE", repr(script(start_method))))
    assert EXPECTED in run([str(path)])


# In a process of its own: a kernel's client leaves sockets and threads to the garbage collector.
NOTEBOOK = """
import warnings
warnings.simplefilter("ignore")
import nbformat
from nbclient import NotebookClient

notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(SOURCE)])
NotebookClient(notebook, timeout=500, kernel_name="python3").execute()
for output in notebook.cells[0].outputs:
    print(output.get("text", output))
"""
