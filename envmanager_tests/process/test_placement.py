"""``kind="auto"`` and ``n_workers="auto"``, with real workers.

What a probe finds depends on the machine, so figures are given in its place, and a probe of half a second is only taken
where the test is about it; `load/` takes what it finds.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import attrs
import gymnasium
import numpy as np
import pytest

from envmanager import (
    EnvManagerError,
    EnvRaised,
    RandomPolicy,
    SubprocessEnvManager,
    WorkerDied,
    WorkerTimedOut,
    make_manager,
)
from envmanager.environment import EnvContext
from envmanager.placing import pair, probing
from envmanager.placing.placement import Probe
from envmanager.simple_env_manager import SimpleEnvManager
from envmanager.system.machine import count_cores

COMMAND = str(Path(sys.executable).with_name("envmanager"))
N_ENVS = 3 * count_cores()


class Noop(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.pid = os.getpid()

    def reset(self, *, seed=None, options=None):
        return np.zeros(4, np.float32), {}

    def step(self, action):
        return np.zeros(4, np.float32), 0.0, False, False, {}


class Raising(Noop):
    def step(self, action):
        raise ValueError("the robot fell over")


class Dying(Noop):
    def step(self, action):
        os._exit(3)


class Hanging(Noop):
    def step(self, action):
        time.sleep(1000)


CHEAP = {"wall_s": 0.5e-6, "cpu_s": 0.5e-6, "unevenness": 0.0}
COMPUTING = {"wall_s": 0.02, "cpu_s": 0.02, "unevenness": 0.0}
SLEEPING = {"wall_s": 0.02, "cpu_s": 0.0002, "unevenness": 0.0}


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has each probe from then on find these figures. With ``tries`` it is taken all the same, in a worker."""
    take = probing.measure

    def find(figures: dict[str, float], *, tries: bool = False) -> None:
        def found(*asked: Any) -> Probe:
            probe = take(*asked) if tries else Probe(wall_s=0.0, cpu_s=0.0, obs_bytes=16)
            return attrs.evolve(probe, message_s=50e-6, **figures)

        monkeypatch.setattr(probing, "measure", found)

    return find


def test_cheap_environments_run_in_this_process_after_a_probe_outside_it(finds):
    finds(CHEAP, tries=True)
    pids = []

    def make():
        pids.append(os.getpid())
        return Noop()

    with make_manager({"kind": "auto", "n_envs": 2}, make) as manager:
        manager.reset()

        assert isinstance(manager, SimpleEnvManager)
        assert pids == [os.getpid()] * 2, "the probe's own was made in another process"
        assert "in this process" in manager.stats().placement


def test_environments_that_compute_get_a_worker_per_core(finds):
    finds(COMPUTING)
    with make_manager({"kind": "auto", "n_envs": N_ENVS}, Noop) as manager:
        assert manager.n_workers == count_cores()
        assert manager.stats().placement.startswith(f"{N_ENVS} environments in {count_cores()} worker")


def test_environments_that_sleep_get_a_worker_each(finds):
    finds(SLEEPING, tries=True)
    with make_manager({"kind": "auto", "n_envs": 5}, Noop) as manager:
        manager.reset()

        assert manager.n_workers == 5
        assert "one each" in manager.stats().placement
        assert len(set(manager.get_attr("pid"))) == 5


def test_the_number_of_workers_alone_can_be_left_open(finds):
    finds(SLEEPING)
    with SubprocessEnvManager(Noop, n_envs=4, n_workers="auto") as sleeping:
        assert sleeping.n_workers == 4
    finds(CHEAP)
    with SubprocessEnvManager(Noop, n_envs=4, n_workers="auto") as cheap:
        assert cheap.n_workers < 4
        assert os.getpid() not in cheap.get_attr("pid")


LIKE_CARTPOLE = {"wall_s": 7e-6, "cpu_s": 7e-6, "unevenness": 0.0}


@pytest.mark.skipif(count_cores() < 2, reason="there is nothing to share")
@pytest.mark.parametrize("config", [{"kind": "auto"}, {"kind": "subprocess"}], ids=["auto", "subprocess"])
def test_some_environments_run_in_this_process_if_that_was_left_open(config, finds):
    finds(LIKE_CARTPOLE)
    with make_manager({**config, "n_envs": 64, "local_envs": "auto"}, Noop) as manager:
        manager.reset()
        local = [worker for worker in manager.stats().workers if worker.pid is None]
        n_local = sum(pid == os.getpid() for pid in manager.get_attr("pid"))

        assert [len(worker.env_ids) for worker in local] == [n_local]
        assert 0 < n_local < 64
        assert manager.stats().placement.startswith(f"{n_local} in this process and ")


def test_none_run_in_this_process_where_that_saves_nothing(finds):
    finds(SLEEPING)
    with SubprocessEnvManager(Noop, n_envs=3, local_envs="auto") as manager:
        assert all(worker.pid is not None for worker in manager.stats().workers)


def test_one_environment_in_a_worker_needs_no_probe():
    with SubprocessEnvManager(Noop, n_envs=1, n_workers="auto") as manager:
        assert "only one" in manager.stats().placement


def test_a_given_number_of_workers_is_kept(finds):
    finds(SLEEPING)
    with make_manager({"kind": "auto", "n_envs": 4, "n_workers": 2}, Noop) as manager:
        assert manager.n_workers == 2


def test_what_else_was_chosen_is_kept(finds):
    finds(SLEEPING)
    config = {"kind": "auto", "n_envs": 2, "wait": "all", "timeouts": {"call_s": 0.2}, "infos": True}

    with make_manager(config, Noop) as manager:
        assert isinstance(manager, SubprocessEnvManager)
        manager.set_policy("default", RandomPolicy(manager.behavior_specs["default"]))
        assert manager.reset()[0].current["default"].info == [{}]
        assert len(manager.step()) == 2
        with pytest.raises(WorkerTimedOut, match=r"0\.2 s"):
            manager.call(lambda env: time.sleep(1000))


def test_a_placement_by_hand_is_not_explained():
    with make_manager({"kind": "simple", "n_envs": 2}, Noop) as manager:
        assert manager.stats().placement == ""


def test_the_choice_is_told_to_the_logger(caplog):
    with caplog.at_level(logging.INFO, "envmanager"), make_manager({"kind": "auto", "n_envs": 2}, Noop) as manager:
        told = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]

        assert manager.stats().placement in told


def broken():
    raise ImportError("no module of that name")


def exiting():
    os._exit(3)


@pytest.mark.parametrize(
    ("env", "error", "phase"),
    [(broken, EnvRaised, "start"), (exiting, WorkerDied, "start"), (Raising, EnvRaised, "step")],
    ids=["constructor raises", "constructor exits", "step raises"],
)
def test_an_environment_that_cannot_be_made_or_raises_is_no_question_of_placement(env, error, phase):
    with pytest.raises(error) as caught:
        make_manager({"kind": "auto", "n_envs": 2}, env)

    assert caught.value.phase == phase


def test_exceptions_that_count_as_faults_leave_the_choice_to_isolation():
    config = {"kind": "auto", "n_envs": 2, "restarts": {"on_exception": "restart"}}
    with make_manager(config, Raising) as manager:
        assert "(the robot fell over)" in manager.stats().placement


def refusal(env: type, **options: Any) -> str:
    with pytest.raises(EnvManagerError) as caught:
        make_manager({"n_envs": 4, **options}, env)
    return str(caught.value)


# Several in one process.


class Emulator(Noop):
    """An environment of which a process can hold one: a second one changes ``n_open``."""

    n_open = 0

    def __init__(self):
        super().__init__()
        Emulator.n_open += 1
        self.on_open()

    def on_open(self):
        if Emulator.n_open > 1:
            raise RuntimeError("one emulator per process\nor none")

    def close(self):
        Emulator.n_open -= 1


class HangsBesideAnother(Emulator):
    def on_open(self): ...

    def step(self, action):
        if Emulator.n_open > 1:
            threading.Event().wait()
        return super().step(action)


class HangsWhenMadeTwice(Emulator):
    def on_open(self):
        if Emulator.n_open > 1:
            threading.Event().wait()


class CrashesBesideAnother(HangsBesideAnother):
    def reset(self, *, seed=None, options=None):
        if Emulator.n_open > 1:
            os.abort()
        return super().reset(seed=seed)


class SharesItsGenerator(Noop):
    """An environment whose class has the generator that each reset seeds, as one that seeds NumPy's own has."""

    def reset(self, *, seed=None, options=None):
        SharesItsGenerator.generator = np.random.default_rng(seed)
        return super().reset(seed=seed)

    def step(self, action):
        return self.generator.random(4, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize(
    ("env", "what"),
    [
        (Emulator, "one raised RuntimeError: one emulator per process"),
        (HangsBesideAnother, "there was no response within 0."),
        (HangsWhenMadeTwice, "there was no response within 0."),
        (CrashesBesideAnother, "it ended (SIGABRT)"),
        (SharesItsGenerator, "the first returned something else than alone, for the same seed and actions"),
    ],
)
def test_environments_of_which_a_process_can_hold_one_get_a_worker_each(env, what, finds, monkeypatch):
    finds(CHEAP)
    if "no response" in what:
        monkeypatch.setattr(pair, "LEAST_S", 0.5)
        monkeypatch.setattr(pair, "TIMES", 0)
    with make_manager({"kind": "auto", "n_envs": 3, "local_envs": "auto"}, env) as manager:
        manager.reset()
        placement = manager.stats().placement

        assert manager.n_workers == 3
        assert placement.startswith(
            f"3 environments in 3 workers, one each, because a process can hold one: with two in it, {what}"
        )
        assert "\n" not in placement


class Unseeded(Noop):
    def step(self, action):
        return np.frombuffer(os.urandom(4), np.uint8) / np.float32(255), 0.0, False, False, {}


class TakesNoSeed(Noop):
    def reset(self):
        return np.zeros(4, np.float32), {}


class HarderWithEachReset(Noop):
    level = 0

    def reset(self, *, seed=None, options=None):
        self.level += 1
        return np.full(4, self.level // 2 % 2, np.float32), {}


class RaisesInClose(Noop):
    def close(self):
        raise OSError("the port is busy")


@pytest.mark.parametrize("env", [Unseeded, TakesNoSeed, HarderWithEachReset, RaisesInClose])
def test_environments_that_do_not_disturb_each_other_share_a_process(env, finds):
    finds(CHEAP, tries=True)
    with make_manager({"kind": "auto", "n_envs": 3}, env) as manager:
        assert isinstance(manager, SimpleEnvManager)


def test_a_short_time_for_calls_and_for_closing_does_not_end_the_trial_of_two(finds):
    finds(CHEAP, tries=True)
    config = {"kind": "auto", "n_envs": 3, "timeouts": {"call_s": 0.01, "close_s": 0.01}}
    with make_manager(config, Slow) as manager:
        assert isinstance(manager, SimpleEnvManager), manager.stats().placement


def test_two_are_not_tried_where_each_gets_a_worker_anyway(finds):
    finds(SLEEPING)
    with make_manager({"kind": "auto", "n_envs": 3}, Emulator) as manager:
        assert "one each, because a step takes 20 ms" in manager.stats().placement


def test_a_number_of_workers_that_is_too_small_is_kept_and_the_placement_and_the_error_say_so(finds, caplog):
    finds(CHEAP)
    with caplog.at_level(logging.INFO, "envmanager"):
        error = refusal(Emulator, kind="auto", n_workers=2)

    assert "4 environments in 2 workers, as chosen by hand, although a process can hold one" in caplog.text
    assert "give each a worker of its own" in error


@pytest.fixture
def emulators_closed() -> Iterator[None]:
    """Counts the emulators of this process anew after a test, because one that raises when it is made is not closed."""
    yield
    Emulator.n_open = 0


@pytest.mark.parametrize(
    ("env", "options"),
    [
        (Emulator, {"kind": "simple"}),
        (Emulator, {"kind": "subprocess", "n_workers": 1}),
        (Emulator, {"kind": "subprocess", "local_envs": 2}),
        (HangsWhenMadeTwice, {"kind": "subprocess", "n_workers": 3, "timeouts": {"start_s": 1}}),
    ],
)
def test_an_error_at_start_with_several_in_a_process_says_how_to_give_each_its_own(env, options, emulators_closed):
    assert "n_workers=n_envs" in refusal(env, **options)


@pytest.mark.parametrize("options", [{"kind": "simple"}, {"kind": "subprocess", "n_workers": 1}])
def test_an_error_of_the_first_has_another_reason(options):
    assert "n_workers=n_envs" not in refusal(broken, **options)


# Closing.


class ExitsInClose(Noop):
    def close(self):
        os._exit(0)


class AbortsInClose(Noop):
    def close(self):
        os.abort()


class HangsInClose(Noop):
    def close(self):
        threading.Event().wait()


class AbortsWhenDeleted(Noop):
    def __del__(self):
        os.abort()


@pytest.mark.parametrize(
    ("env", "how"),
    [
        (ExitsInClose, "EXIT(0)"),
        (AbortsInClose, "SIGABRT"),
        (AbortsWhenDeleted, "SIGABRT"),
        (HangsInClose, "no response within 0.5 s"),
    ],
)
def test_an_environment_whose_close_ends_its_process_does_not_run_in_the_trainers(env, how, finds):
    finds(CHEAP, tries=True)
    timeouts = {"close_s": 0.5}
    with make_manager({"kind": "auto", "n_envs": 2, "local_envs": "auto", "timeouts": timeouts}, env) as manager:
        assert f"one each, because an environment failed in close() when it was tried ({how})" in str(manager.placement)


class CallsSysExitInClose(Noop):
    closed: ClassVar[list[int]] = []

    def close(self):
        self.closed.append(os.getpid())
        sys.exit(3)


def test_a_sys_exit_in_close_is_logged_and_neither_the_others_nor_the_trainer_are_ended(finds, caplog):
    finds(CHEAP, tries=True)
    with make_manager({"kind": "auto", "n_envs": 3}, CallsSysExitInClose) as manager:
        assert isinstance(manager, SimpleEnvManager)

    assert CallsSysExitInClose.closed == [os.getpid()] * 3
    assert "SystemExit: 3" in caplog.text


class DyingAfterFive(Noop):
    n_steps = 0

    def step(self, action):
        self.n_steps += 1
        if self.n_steps > 5:
            os._exit(3)
        return super().step(action)


class DyingInReset(Noop):
    def reset(self, *, seed=None, options=None):
        os._exit(3)


class Rarely(Noop):
    n_steps = 0

    def step(self, action):
        self.n_steps += 1
        if self.n_steps == 300:
            os._exit(3)
        return super().step(action)


@pytest.mark.parametrize(
    ("env", "when"),
    [
        (Dying, "in step 1 when it was tried (EXIT(3))"),
        (DyingAfterFive, "in one of the steps 5 to 8 when it was tried (EXIT(3))"),
        (DyingInReset, "in the reset when it was tried (EXIT(3))"),
        (Hanging, "in step 1 when it was tried (no response within 0.6 s)"),
    ],
)
def test_an_environment_that_ends_its_probe_gets_a_worker_each(env, when):
    timeouts = {"step_s": 0.1, "close_s": 1}
    with make_manager({"kind": "auto", "n_envs": 3, "local_envs": "auto", "timeouts": timeouts}, env) as manager:
        assert manager.n_workers == 3
        assert manager.stats().placement == (
            f"3 environments in 3 workers, one each, because an environment failed {when}: each can be replaced alone"
        )


def test_an_environment_that_dies_once_in_hundreds_of_steps_is_placed_and_steps_on():
    restarts = {"max_restarts": 1000, "backoff_s": 0}
    with make_manager({"kind": "auto", "n_envs": 2, "restarts": restarts}, Rarely) as manager:
        manager.set_policy("default", RandomPolicy(manager.behavior_specs["default"]))
        manager.reset()
        while not manager.stats().restarts or manager.stats().env_steps < 1000:
            manager.step()
        stats = manager.stats()

    assert (manager.n_workers, len(stats.workers)) == (2, 2)
    assert "because an environment failed in " in stats.placement
    assert stats.random_policy
    assert "kind: simple" not in stats.verdict


def test_the_probe_keeps_its_logs_apart(tmp_path, finds):
    finds(SLEEPING, tries=True)

    def chatty(context: EnvContext):
        print("made in", context.log_dir, flush=True)
        return Noop()

    with SubprocessEnvManager(chatty, n_envs=2, n_workers="auto", log_dir=tmp_path):
        pass

    assert (tmp_path / "probe" / "worker-0-0.log").read_text() == f"made in {tmp_path / 'probe'}\n"
    assert (tmp_path / "worker-1-0.log").read_text() == f"made in {tmp_path}\n"


def test_a_run_of_the_command_says_what_was_chosen(tmp_path):
    words = [COMMAND, "run", "--env", "CartPole-v1", "--n-envs", "2", "--n-workers", "auto", "--steps", "50", "--plain"]
    done = subprocess.run([*words, "--out", "out.json"], cwd=tmp_path, capture_output=True, text=True, timeout=500)

    placement = json.loads((tmp_path / "out.json").read_text())["placement"]
    assert done.returncode == 0, done.stderr
    assert placement.startswith("2 environments in ")
    assert done.stdout.splitlines()[1] == placement
    assert done.stdout.count(placement) == 1


# Vectors.


class Slow(Noop):
    """An environment of which the vectorised form steps all at once in the time of one."""

    def step(self, action):
        time.sleep(0.002)
        return super().step(action)


class SlowVector(gymnasium.vector.VectorEnv):
    """A vector in SAME_STEP mode that sleeps once for all its rows."""

    def __init__(self, n_rows, n_numbers=4):
        self.num_envs = n_rows
        self.single_observation_space = gymnasium.spaces.Box(0, 1, (n_numbers,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
        self.obs = np.zeros((n_rows, n_numbers), np.float32)

    def reset(self, *, seed=None, options=None):
        return self.obs, {}

    def step(self, actions):
        time.sleep(0.002)
        zeros = np.zeros(self.num_envs)
        return self.obs, zeros, zeros > 0, zeros > 0, {}


def slow_vector(context: EnvContext, **arguments):
    return SlowVector(context.n_envs, **arguments)


def eight(context: EnvContext):
    return SlowVector(8)


def other_spaces(**_):
    return SlowVector(4, n_numbers=5)


def broken(**_):
    raise RuntimeError("no licence")


def with_form(single, vector):
    """An id of the single environment that has ``vector`` as its vectorised form."""
    env_id = f"{single.__name__}-{vector.__name__}-v0"
    gymnasium.register(env_id, entry_point=single, vector_entry_point=vector)
    return env_id


def slow_rows(num_envs, **_):
    return SlowVector(num_envs)


def test_the_vectorised_form_is_taken_where_it_is_faster():
    with make_manager({"kind": "auto", "n_envs": 8, "n_workers": 1, "env": with_form(Slow, slow_rows)}) as manager:
        assert "; in their vectorised form, in which a step of all takes" in manager.stats().placement
        manager.reset()
        assert len(manager.recv()) == 8
        assert manager.get_attr("num_envs") == [8] * 8  # each row's is the vector


@pytest.mark.parametrize(
    ("single", "vector", "why"),
    [
        (Slow, other_spaces, "which has other observations or actions"),
        (Noop, slow_rows, "in which a step of all takes"),
        (Slow, broken, "which failed when it was tried: worker 0 raised RuntimeError at start: no licence"),
    ],
)
def test_else_the_single_environments_stay_and_the_placement_says_why(single, vector, why):
    with make_manager({"kind": "auto", "n_envs": 4, "n_workers": 1, "env": with_form(single, vector)}) as manager:
        assert f"; not in their vectorised form, {why}" in manager.stats().placement
        manager.reset()
        assert manager.get_attr("pid")


def test_a_vectorised_form_that_begins_episodes_late_is_not_taken():
    with make_manager({"kind": "auto", "n_envs": 2, "env": "CartPole-v1"}) as manager:
        assert "; not in their vectorised form, which begins episodes a step late" in manager.stats().placement


def test_a_vector_is_probed_with_all_its_rows(finds):
    finds({"wall_s": 1e-6, "cpu_s": 1e-6, "fixed_s": 2e-3}, tries=True)
    with make_manager({"kind": "auto", "n_envs": 8, "env": slow_vector}) as manager:
        assert isinstance(manager, SimpleEnvManager)  # workers would sleep just as long
        assert "8 environments in this process, because a step of a vector of 8 takes" in manager.stats().placement


def test_a_vector_of_a_fixed_size_gives_the_number_of_workers():
    with make_manager({"kind": "auto", "n_envs": 16, "env": eight}) as manager:
        assert isinstance(manager, SubprocessEnvManager)
        manager.reset()
        assert len(manager.recv(wait="all")) == 16
        assert manager.stats().placement.startswith("16 environments in 2 workers")


def test_no_vector_of_a_fixed_size_is_split_between_the_trainer_and_a_worker(monkeypatch, finds):
    monkeypatch.setattr(probing, "count_cores", lambda: 8)
    finds({"wall_s": 1e-3, "cpu_s": 1e-3}, tries=True)
    with SubprocessEnvManager(eight, 16, n_workers="auto", local_envs="auto") as manager:
        manager.reset()
        assert len(manager.recv(wait="all")) == 16
        assert manager.n_workers == 2
