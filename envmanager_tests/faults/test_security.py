"""Cases 49, 51 and 53: no listening socket, no name for the shared memory, no secret where others can read it."""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import signal
import stat
import subprocess
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

from envmanager import (
    EnvContext,
    EnvManagerError,
    ManagerOptions,
    RestartPolicy,
    SubprocessEnvManager,
    Timeouts,
    Wait,
    make_manager,
)
from envmanager.processes.boot import THREAD_CAPS
from envmanager.testing import Die, FakeEnvironment, Raise, Sleep, Step
from envmanager.testing.leaks import Traces, settle
from envmanager_tests.faults import scripts
from envmanager_tests.faults.scripts import NO_RESTARTS, Zeros, living, pids_of, program, until
from envmanager_tests.start_methods import MARKED_START_METHODS, MEMORY

pytestmark = pytest.mark.usefixtures("nothing_is_left")
every_start_method = pytest.mark.parametrize("start_method", MARKED_START_METHODS)


# Case 49.


@every_start_method
def test_case_49_nobody_listens(start_method: str) -> None:
    with program(scripts.train_and_list_listeners, start_method) as trainer:
        ((before,), (during,), (after,)) = (trainer.announced(what) for what in ("before", "during", "after"))
        assert before == during == after == []
        trainer.announced("listening")
        trainer.go_on()
        assert (trainer.ended(), trainer.errors()) == (0, "")
        trainer.until_all_gone()


# Case 51.


@every_start_method
def test_case_51_shared_memory_has_no_name(start_method: Any) -> None:
    before = Traces.now()
    with SubprocessEnvManager(FakeEnvironment, 2, start_method=start_method, zero_copy=True) as manager:
        manager.set_policy("default", Zeros())
        manager.reset()
        manager.step(Wait.all())
        assert "shared memory" not in settle(before, within_s=0)
        for pid in [os.getpid(), *pids_of(manager)]:
            maps = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if MEMORY in line]
            assert maps
            assert all(line.endswith("(deleted)") for line in maps)
            shared = shared_memory_of(pid)
            assert shared
            assert all(os.stat(path).st_nlink == 0 for path in shared)
            assert {stat.S_IMODE(os.stat(path).st_mode) for path in shared} == {0o600}


def shared_memory_of(pid: int) -> list[str]:
    paths = [f"/proc/{pid}/fd/{entry}" for entry in os.listdir(f"/proc/{pid}/fd")]
    return [path for path in paths if os.path.exists(path) and MEMORY in os.readlink(path)]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user to try")
def test_case_51_another_user_cannot_open_the_shared_memory() -> None:
    with SubprocessEnvManager(FakeEnvironment, 1) as manager:
        manager.reset()
        for pid in [os.getpid(), *pids_of(manager)]:
            for path in shared_memory_of(pid):
                assert can_open(path, user=0)
                assert not can_open(path, user=65534)


def can_open(path: str, user: int) -> bool:
    done = subprocess.run(
        ["/bin/sh", "-c", f": < {path}"], user=user, group=user, extra_groups=[], cwd="/", capture_output=True
    )
    return done.returncode == 0


# Case 53.


@pytest.fixture
def secret() -> str:
    return f"secret-{secrets.token_hex(8)}"


class Crowd(FakeEnvironment):
    """Tells what it knows of its environment variables."""

    def variables(self) -> dict[str, str]:
        return dict(os.environ)

    def simulator(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid


@every_start_method
def test_case_53_with_worker_env_workers_and_what_they_start_know_no_other_variable(
    start_method: Any, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", secret)
    worker_env = {"PATH": os.environ["PATH"], "ONLY": "this"}
    with SubprocessEnvManager(Crowd, 2, start_method=start_method, worker_env=worker_env) as manager:
        for variables in manager.call("variables"):
            assert variables.keys() - THREAD_CAPS == worker_env.keys()
            assert secret not in variables.values()
        for simulator in manager.call("simulator"):
            assert until(lambda path=f"/proc/{simulator}": runs_sleep(path), "the simulator runs")  # type: ignore[misc]
            assert secret.encode() not in Path(f"/proc/{simulator}/environ").read_bytes()


def runs_sleep(process: str) -> bool:
    return b"sleep" in Path(f"{process}/cmdline").read_bytes()


@every_start_method
def test_case_53_no_secret_is_on_a_command_line(
    start_method: Any, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", secret)

    def make() -> FakeEnvironment:
        assert secret  # the factory holds it too
        return FakeEnvironment()

    for worker_env in (None, {"PASSWORD": secret}):
        with SubprocessEnvManager(make, 2, start_method=start_method, worker_env=worker_env) as manager:
            manager.reset()
            commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in living()}
            assert set(pids_of(manager)) <= commands.keys()
            assert not [pid for pid, command in commands.items() if secret in command]


def everything_about(error: BaseException) -> str:
    """All that a log, a person or another process may get to see of an error."""
    parts = [repr(error), str(error), *traceback.format_exception(type(error), error, error.__traceback__)]
    if isinstance(error, EnvManagerError):
        parts += [repr(vars(error)), repr(pickle.dumps(error))]
    return "\n".join(parts)


def fails_at_the_start(context: EnvContext) -> FakeEnvironment:
    if context.env_id == 1:
        raise ValueError("no")
    return FakeEnvironment()


FAILURES: dict[str, Any] = {
    "raised": lambda: FakeEnvironment([Step(), Raise(ValueError("no"))]),
    "died": lambda: FakeEnvironment([Step(), Die(3)]),
    "crashed": lambda: FakeEnvironment([Step(), Die(signal_number=signal.SIGSEGV)]),
    "timed out": lambda: FakeEnvironment([Step(), Sleep(600)]),
    "failed at the start": fails_at_the_start,
    "cannot be pickled": threading.Lock().acquire,
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("restarts", [NO_RESTARTS, RestartPolicy(max_restarts=1, backoff_s=0)], ids=["no", "1"])
def test_case_53_no_secret_is_in_reprs_errors_events_or_logs(
    failure: str,
    restarts: RestartPolicy,
    secret: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("API_TOKEN", secret)
    said: list[Any] = []
    for worker_env in (None, {"PASSWORD": secret}):
        options: Any = {"worker_env": worker_env, "restarts": restarts, "timeouts": Timeouts(step_s=0.3, close_s=1.0)}
        try:
            with SubprocessEnvManager(FAILURES[failure], 2, **options) as manager:
                said += [manager, vars(manager).get("_options"), manager.stats()]
                manager.set_policy("default", Zeros())
                manager.reset()
                for _ in range(20):
                    manager.step(Wait.all())
        except EnvManagerError as error:
            said.append(everything_about(error))
            said += [*manager.events] if failure not in ("failed at the start", "cannot be pickled") else []
        else:
            pytest.fail("nothing failed")
    written = capfd.readouterr()
    said += [*(record.getMessage() for record in caplog.records), caplog.text, written.out, written.err]
    texts = [*map(str, said), *map(repr, said)]

    assert not [text for text in texts if secret in text]


@pytest.mark.parametrize(
    "config",
    [
        {"worker_env": {"PASSWORD": "SECRET"}, "n_env": 2},
        {"worker_env": {"PASSWORD": ["SECRET"]}},
        {"worker_env": {"PASSWORD": None, "OTHER": "SECRET"}},
        {"worker_env": ["SECRET"]},
        {"worker_env": {1: "SECRET"}},
        {"worker_env": {"PASSWORD": "SECRET"}, "n_workers": 5},
        {"worker_env": {"PASSWORD": "SECRET"}, "env": "no_such_module:env"},
    ],
    ids=str,
)
def test_case_53_a_config_that_is_refused_does_not_show_its_secrets(config: dict[str, Any], secret: str) -> None:
    def put_in(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: put_in(each) for key, each in value.items()}
        if isinstance(value, list):
            return [put_in(each) for each in value]
        return secret if value == "SECRET" else value

    with pytest.raises(EnvManagerError) as raised:
        make_manager({"kind": "subprocess", "env": "CartPole-v1", **put_in(config)})
    assert secret not in everything_about(raised.value)


def test_case_53_options_do_not_show_the_values_of_worker_env(secret: str) -> None:
    options = ManagerOptions(worker_env={"PASSWORD": secret}, n_envs=3)
    assert secret not in repr(options)
    assert "n_envs=3" in repr(options)


@every_start_method
def test_case_53_what_workers_write_can_be_read_by_the_user_alone(start_method: Any, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with SubprocessEnvManager(FakeEnvironment, 2, start_method=start_method, log_dir=str(tmp_path / "logs")):
            logs = list((tmp_path / "logs").iterdir())
            assert len(logs) == 2
            assert {stat.S_IMODE(path.stat().st_mode) for path in logs} == {0o600}
    finally:
        os.umask(before)
