"""How a trainer on a cluster ends: killed, interrupted, in order; and the commands that use one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from envmanager import SubprocessEnvManager, UsageError, make_manager
from envmanager.testing import EchoEnvironment
from envmanager.testing.fault_checks import until
from envmanager.testing.leaks import SOON_S
from envmanager_tests.ray_cluster.conftest import actors

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

TRAINER = """
import sys
import numpy as np
from envmanager import Timeouts, Wait
from envmanager.ray_cluster.manager import RayEnvManager
from envmanager.testing import EchoEnvironment, Sleep
from envmanager.testing.faults import HoldGil, faulty

hangs = faulty([HoldGil() if sys.argv[1] == "holds the GIL" else Sleep(600)], after=5, only_env=1)
factory = EchoEnvironment if sys.argv[1] == "steps" else hangs
with RayEnvManager(factory, 4, timeouts=Timeouts(close_s=2.0)) as manager:
    manager.reset()
    batch = manager.recv(Wait.all())
    try:
        for number in range(10**9):
            manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
            batch = manager.recv()
            if number == 50:
                print("playing", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
print("closed", flush=True)
"""


COMMAND = "import sys; from envmanager.cli import main; sys.exit(main())"


@contextmanager
def trainer(cluster: Any, what: str) -> Iterator[subprocess.Popen[str]]:
    """A trainer of four actors, in the middle of its steps."""
    program = subprocess.Popen(
        [sys.executable, "-c", TRAINER, what],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert program.stdout is not None
    try:
        for line in program.stdout:
            if line.startswith("playing"):
                break
        assert len(actors()) == 4
        yield program
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


@pytest.mark.parametrize("what", ["steps", "sleeps", "holds the GIL"])
def test_ten_seconds_after_a_trainer_was_killed_no_actor_is_left(cluster: Any, what: str) -> None:
    with trainer(cluster, what) as program:
        program.kill()
        program.wait()
        until(lambda: not actors(), within_s=10.0)


@pytest.mark.parametrize("what", ["steps", "sleeps"])
def test_a_ctrl_c_interrupts_the_trainer_and_its_end_closes_the_actors(cluster: Any, what: str) -> None:
    with trainer(cluster, what) as program:
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does
        assert program.stdout is not None
        said = program.stdout.read()
        assert program.wait(SOON_S) == 0
        assert ("interrupted" in said, "closed" in said) == (True, True)
        until(lambda: not actors(), within_s=10.0)


def test_a_fork_of_the_trainer_leaves_its_actors_alone(cluster: Any) -> None:
    with make_manager({"kind": "ray", "n_envs": 2}, EchoEnvironment) as manager:
        manager.reset()
        child = os.fork()
        if child == 0:
            manager.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert manager.get_attr("label") == ["env 0", "env 1"]


@pytest.mark.parametrize("option", [{"zero_copy": True}, {"start_method": "spawn"}, {"local_envs": 1}])
def test_what_means_nothing_on_a_cluster_is_refused(cluster: Any, option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="means nothing to the manager kind 'ray'"):
        make_manager({"kind": "ray", "n_envs": 2, **option}, EchoEnvironment)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"n_workers": 2, "envs_per_worker": 2}, "say the same in two ways"),
        ({"cluster": {"address": "auto"}, "address": "auto"}, "are both given"),
        ({"address": "ray://10.0.0.1:10001"}, "Ray's client"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(cluster: Any, options: dict[str, Any], complaint: str) -> None:
    from envmanager.ray_cluster.manager import RayEnvManager

    with pytest.raises(UsageError, match=complaint):
        RayEnvManager(EchoEnvironment, 4, **options)


def test_only_the_kind_changes_between_a_machine_and_a_cluster(cluster: Any) -> None:
    config: dict[str, Any] = {"kind": "ray", "env": "CartPole-v1", "n_envs": 4, "n_workers": 2, "seed": 3}
    seen = []
    for kind in ("ray", "subprocess"):
        with make_manager({**config, "kind": kind}) as manager:
            manager.reset()
            seen.append(manager.recv("all").obs.tolist())
            assert manager.n_workers == 2
    assert seen[0] == seen[1]
    assert isinstance(manager, SubprocessEnvManager)


def test_the_command_runs_on_the_cluster(cluster: Any, tmp_path: Any) -> None:
    config = tmp_path / "run.yaml"  # JSON is YAML
    config.write_text(json.dumps({"manager": {"env": "CartPole-v1", "n_envs": 8, "cluster": {"envs_per_worker": 4}}}))
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "run", str(config), "--manager", "ray", "--steps", "400"],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "manager ray" in done.stdout + done.stderr
    until(lambda: not actors(), within_s=10.0)


SENDS_A_FOLDER = """
import sys
from envmanager.ray_cluster.manager import RayEnvManager

def make():
    import only_there
    return only_there.make()

for _ in range(2):  # the second time the program is a driver already
    with RayEnvManager(make, 1, runtime_env={"working_dir": sys.argv[1]}) as manager:
        print(manager.get_attr("label"))
"""


def test_a_folder_of_the_trainers_machine_is_sent_along(cluster: Any, tmp_path: Any) -> None:
    (tmp_path / "only_there.py").write_text(
        "from envmanager.testing import EchoEnvironment\nfrom envmanager import EnvContext\n"
        "def make():\n    return EchoEnvironment(EnvContext(0, 0))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", SENDS_A_FOLDER, str(tmp_path)],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("['env 0']") == 2


SIGTERM = """
import signal, sys
from envmanager.ray_cluster.manager import RayEnvManager
from envmanager.testing import EchoEnvironment

class Asked(BaseException): ...

def handler(number, frame):
    raise Asked

if sys.argv[1] == "own handler":
    signal.signal(signal.SIGTERM, handler)
try:
    with RayEnvManager(EchoEnvironment, 1) as manager:
        manager.reset()
        print("ready", flush=True)
        signal.pause()
except Asked:
    print("asked to end", flush=True)
"""


@pytest.mark.parametrize(("what", "said"), [("own handler", "asked to end"), ("none", "")])
def test_a_trainers_own_handler_of_sigterm_stays_in_place(cluster: Any, what: str, said: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SIGTERM, what],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        for line in program.stdout:
            if line.startswith("ready"):
                break
        program.terminate()
        assert program.stdout.read().strip() == said
        program.wait(SOON_S)
    until(lambda: not actors(), within_s=10.0)


def test_the_command_explains_how_many_actors_it_takes(cluster: Any) -> None:
    options = ["--manager", "ray", "--workers", "auto", "--n-envs", "8", "--steps", "200", "--explain"]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "run", "--env", "CartPole-v1", *options],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "chosen" in done.stdout
