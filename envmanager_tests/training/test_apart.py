"""A trainer in a process of its own keeps the balance, hands over its weights, and tells when it fails."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

SUITE = "training portable"

torch = pytest.importorskip("torch")

from envmanager import ConfigError, SimpleEnvManager, UsageError
from envmanager.cli.app import run_command_line
from envmanager.hosts import descriptors
from envmanager.hosts.wire import MESSAGE, MESSAGE_MARK, Channel
from envmanager.options import TRANSPORTS
from envmanager.processes import starting
from envmanager.processes.starting import start
from envmanager.testing.fault_checks import is_gone, returns_within, until
from envmanager.training import learner_process
from envmanager.training.algorithms.dqn import DQN, DQNOptions
from envmanager.training.algorithms.ppo import PPO
from envmanager.training.algorithms.trainers import check_tables, make_trainer
from envmanager.training.controller import TrainerController
from envmanager.training.learner_process import LearnerFailed, LearnerProcess, tell
from envmanager.training.runs import checkpoints
from envmanager.training.runs.checkpoints import Checkpoint, TrainingState
from envmanager_tests.faults.scripts import announce, hold_the_gil, program
from envmanager_tests.in_a_thread import lines_of, while_held_at
from envmanager_tests.interrupting import interrupted
from envmanager_tests.start_methods import loses

OPTIONS = DQNOptions(capacity=1000, learning_starts=50, train_every=10, batch=16, hidden=(8,))


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")),
]


def make(spec: Any, device: str = "cpu") -> Any:
    return lambda: DQN("default", spec, OPTIONS, device=device)


@pytest.fixture
def manager() -> Iterator[Any]:
    with SimpleEnvManager("CartPole-v1", 2, seed=0) as manager:
        yield manager


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_updates_keep_up_with_steps_and_the_policy_has_the_weights_that_were_learned(
    manager: Any, transport: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVMANAGER_TRANSPORT", transport)
    with LearnerProcess(make(manager.behavior_specs["default"], device), max_ahead=40) as trainer:
        before = {name: tensor.clone() for name, tensor in trainer._model.state_dict().items()}
        TrainerController(manager, {"default": trainer}).train(1000)
        arrays, facts = trainer.state()  # everything that was sent before is dealt with
        most = 1 + (1000 - 50) // 10
        assert most - 5 <= facts["version"] <= most, "updates do not run ahead of the steps"
        assert facts["n_steps"] == 1000
        assert trainer.version >= (1000 - 40 - 50) // 10 - 1
        trainer.pause()
        for name, tensor in trainer._model.state_dict().items():
            assert tensor.device.type == device
            np.testing.assert_array_equal(tensor.cpu().numpy(), arrays[f"model.{name}"])
        assert any(not torch.equal(tensor, before[name]) for name, tensor in trainer._model.state_dict().items())


def test_it_is_started_although_the_helper_ends_meanwhile(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends_once(*_: Any) -> None:
        monkeypatch.undo()
        raise starting.HelperGone

    monkeypatch.setattr(starting.Helper, "wait_for", ends_once)
    with LearnerProcess(make(manager.behavior_specs["default"])) as trainer:
        trainer.pause()


@pytest.mark.load
@pytest.mark.parametrize("device", DEVICES)
def test_it_is_restored_on_both_sides(manager: Any, device: str) -> None:
    def make_one() -> LearnerProcess:
        return LearnerProcess(make(manager.behavior_specs["default"], device), max_ahead=80)

    with make_one() as trainer:
        TrainerController(manager, {"default": trainer}).train(310)
        arrays, facts = trainer.state()
        acting = {name: tensor.clone() for name, tensor in trainer._model.state_dict().items()}
    assert 0 < trainer.version < facts["version"], "the policy acts with older weights than the newest"
    with make_one() as again:
        again.restore(arrays, facts)
        assert again.version == again.policy.version == trainer.version
        for name, tensor in again._model.state_dict().items():
            assert torch.equal(tensor, acting[name])
        arrays_again, facts_again = again.state()
        assert facts_again == facts
        assert arrays_again.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(arrays_again[name], array)


@pytest.mark.load
def test_two_trainings_with_the_same_seed_act_with_equal_weights_all_the_way(manager: Any) -> None:
    spec = manager.behavior_specs["default"]

    def weights() -> list[tuple[int, float]]:
        found = []
        with SimpleEnvManager("CartPole-v1", 2, seed=0) as own, LearnerProcess(make(spec), max_ahead=40) as trainer:
            controller = TrainerController(own, {"default": trainer})
            for n_steps in range(100, 600, 7):
                controller.train(n_steps)
                found.append((trainer.version, trainer._model.state_dict()["last.0.weight"].sum().item()))
        return found

    first = weights()
    assert first == weights()
    assert len({version for version, _ in first}) > 10


def test_a_learner_that_dies_while_it_is_restored_says_so_and_not_that_the_checkpoint_does_not_fit(
    manager: Any,
) -> None:
    spec = manager.behavior_specs["default"]
    with LearnerProcess(make(spec)) as trainer:
        checkpoint = Checkpoint(training=TrainingState(n_steps=0), trainers={"default": trainer.state()})
        os.kill(trainer._process.pid, signal.SIGKILL)
        with pytest.raises(LearnerFailed, match=r"has ended \(SIGKILL\)"):
            checkpoints.restore(trainer, spec, checkpoint, Path("here"), "")


class Fails(DQN):
    def update(self, progress: float) -> dict[str, float]:
        raise ArithmeticError("no more")


def test_what_the_learner_raises_is_raised_here_with_its_traceback(manager: Any) -> None:
    spec = manager.behavior_specs["default"]
    with LearnerProcess(lambda: Fails("default", spec, OPTIONS, device="cpu")) as trainer:
        controller = TrainerController(manager, {"default": trainer})
        with pytest.raises(LearnerFailed, match="ArithmeticError: no more"):
            controller.train(100_000)


@pytest.mark.load
def test_a_learner_that_was_killed_is_told_and_nothing_hangs(manager: Any) -> None:
    with LearnerProcess(make(manager.behavior_specs["default"]), max_ahead=20) as trainer:
        controller = TrainerController(manager, {"default": trainer})
        controller.train(100)
        os.kill(trainer._process.pid, signal.SIGKILL)
        until(lambda: is_gone(trainer._process.pid))
        with pytest.raises(LearnerFailed, match=r"has ended \(SIGKILL\)"):
            controller.train(100_000)


@pytest.mark.load
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # PyTorch's threads; the child only closes
def test_closed_in_a_forked_process_it_goes_on_and_closed_twice_it_leaves_no_process(manager: Any) -> None:
    trainer = LearnerProcess(make(manager.behavior_specs["default"]))
    pid = trainer._process.pid
    child = os.fork()
    if child == 0:
        trainer.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    trainer.pause()
    assert not is_gone(pid)
    trainer.close()
    trainer.close()
    assert is_gone(pid)


@pytest.mark.load
def test_one_that_is_stopped_with_all_its_pipe_full_is_closed_by_force(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_process, "_CLOSE_S", 0.5)
    with LearnerProcess(make(manager.behavior_specs["default"]), max_ahead=1_000_000) as trainer:
        trainer.pause()  # it is there
        os.kill(trainer._process.pid, signal.SIGSTOP)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(trainer._channel.fd, bytes(1 << 16))
    assert is_gone(trainer._process.pid)


@pytest.mark.load
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # PyTorch's threads; the child only asks
def test_a_forked_process_cannot_use_it(manager: Any) -> None:
    with LearnerProcess(make(manager.behavior_specs["default"])) as trainer:
        child = os.fork()
        if child == 0:
            try:
                trainer.pause()
            except UsageError:
                os._exit(3)
            os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        trainer.pause()


@pytest.mark.load
def test_the_learner_of_a_forgotten_one_ends(manager: Any) -> None:
    trainer = LearnerProcess(make(manager.behavior_specs["default"]))
    pid = trainer._process.pid
    del trainer
    gc.collect()
    assert is_gone(pid)


# A learner that does not respond.


def test_a_learner_that_is_stopped_is_killed_after_the_timeout_and_a_warning_comes_before(
    manager: Any, caplog: pytest.LogCaptureFixture
) -> None:
    spec = manager.behavior_specs["default"]
    with LearnerProcess(make(spec), max_ahead=20, learner_timeout_s=1.0) as trainer:
        controller = TrainerController(manager, {"default": trainer})
        controller.train(100)
        pid = trainer._process.pid
        os.kill(pid, signal.SIGSTOP)
        with (
            returns_within(1.0),
            pytest.raises(LearnerFailed, match=r"for 1 s and was killed; its process was stopped .*learner_timeout_s"),
        ):
            controller.train(100_000)
        assert {record.levelno for record in caplog.records} == {logging.WARNING}
        assert set(caplog.messages) == {  # on a busy machine it may have been late before
            "the learner of 'default' has not responded for 0.5 s; after 0.5 s more it is killed (learner_timeout_s)."
        }
        until(lambda: is_gone(pid))
        for call in (trainer.pause, trainer.state, trainer.is_ready):
            with pytest.raises(LearnerFailed, match="was killed; its process was stopped"):
                call()


@pytest.mark.load
def test_a_learner_that_is_stopped_does_not_keep_the_others(manager: Any) -> None:
    spec = manager.behavior_specs["default"]
    with LearnerProcess(make(spec), learner_timeout_s=0.5) as stopped, LearnerProcess(make(spec)) as other:
        for trainer in (stopped, other):
            trainer.pause()
        os.kill(stopped._process.pid, signal.SIGSTOP)
        with pytest.raises(LearnerFailed, match="stopped"):
            stopped.pause()
        other.pause()
        pids = [trainer._process.pid for trainer in (stopped, other)]
    assert all(map(is_gone, pids))


class Fake:
    """The learner's end of a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._received = connection.makefile("rb")

    def tell(self, what: str, payload: Any = None) -> None:
        tell(self.connection, what, payload)

    def next(self) -> Any:
        return pickle.load(self._received)

    def close(self) -> None:
        self._received.close()
        self.connection.close()


Respond = Callable[[Fake], None]


def idle(_: Any) -> None:
    time.sleep(600)


@pytest.fixture
def faked(manager: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LearnerProcess]]:
    """Makes trainers whose learner is a function in a thread, which gets the learner's end of the socket."""
    monkeypatch.setattr(learner_process, "_CLOSE_S", 0.1)
    monkeypatch.setattr(learner_process, "_START_S", 0.1)
    monkeypatch.setattr(
        learner_process, "_start", lambda *_: (start("spawn", "idle", f"{__name__}:idle", ()), channel, [])
    )
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    channel = Channel()
    channel.open(descriptors.register(ours.detach()), descriptors.CLOSED)
    learner = Fake(theirs)
    threads: list[threading.Thread] = []

    def make_faked(respond: Respond = lambda _: None, **options: Any) -> LearnerProcess:
        threads.append(threading.Thread(target=respond, args=(learner,)))
        threads[0].start()
        return LearnerProcess(make(manager.behavior_specs["default"]), **options)

    yield make_faked
    for thread in threads:
        thread.join()
    learner.close()


@pytest.mark.parametrize("what", ["pause", "state", "restore", "add", "more than the pipe holds"])
def test_a_learner_that_never_starts_is_killed_whatever_it_is_waited_for(
    faked: Callable[..., LearnerProcess], manager: Any, what: str
) -> None:
    with faked(learner_timeout_s=0.1, max_ahead=10) as trainer:
        calls: dict[str, Callable[[], Any]] = {
            "pause": trainer.pause,
            "state": trainer.state,
            "restore": lambda: trainer.restore({}, {}),
            "add": lambda: TrainerController(manager, {"default": trainer}).train(1000),
            "more than the pipe holds": lambda: trainer.update(bytes(1 << 22)),  # type: ignore[arg-type]
        }
        with pytest.raises(LearnerFailed, match=r"has been starting for 0\.1 s and was killed"):
            calls[what]()
        pid = trainer._process.pid
    assert is_gone(pid)


def test_a_learner_that_takes_longer_in_all_and_gives_signs_of_life_is_waited_for(
    faked: Callable[..., LearnerProcess],
) -> None:
    def respond(learner: Fake) -> None:
        _, (number, _) = learner.next()
        for n_learned in range(10):
            learner.tell("alive", n_learned)
            threading.Event().wait(0.1)  # an update
        learner.tell("answer", (number, None))

    with faked(respond, learner_timeout_s=0.8) as trainer:
        trainer.pause()


def test_without_a_limit_it_is_waited_for(
    faked: Callable[..., LearnerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    def respond(learner: Fake) -> None:
        _, (number, _) = learner.next()
        threading.Event().wait(0.3)
        learner.tell("answer", (number, None))

    with faked(respond, learner_timeout_s=math.inf) as trainer:
        trainer.pause()


def test_a_wait_can_be_interrupted_and_the_late_answer_is_not_taken_for_the_next_one(
    faked: Callable[..., LearnerProcess],
) -> None:
    def respond(learner: Fake) -> None:
        what, (first, _) = learner.next()
        os.kill(os.getpid(), signal.SIGINT)
        second_what, (second, _) = learner.next()
        assert (what, second_what) == ("pause", "state")
        for number, answer in ((first, "late"), (second, ({}, {"version": 7}))):
            learner.tell("answer", (number, answer))

    with faked(respond, learner_timeout_s=60) as trainer:
        with pytest.raises(KeyboardInterrupt):
            trainer.pause()
        assert trainer._ask("state") == ({}, {"version": 7})


def test_one_that_is_killed_in_the_middle_of_a_message_has_ended(faked: Callable[..., LearnerProcess]) -> None:
    def respond(learner: Fake) -> None:
        learner.next()
        learner.connection.sendall(MESSAGE.pack(0, 0, 0, MESSAGE_MARK, 0, 100, 0, 0) + b"half of it")
        trainer._process.signal(signal.SIGKILL)
        learner.close()

    with faked(respond) as trainer, pytest.raises(LearnerFailed, match=r"has ended \(SIGKILL\)"):
        trainer.state()


def test_a_learner_that_sends_what_is_no_message_is_killed(faked: Callable[..., LearnerProcess]) -> None:
    def respond(learner: Fake) -> None:
        learner.next()
        learner.connection.sendall(b"a line that some library prints to a descriptor that is not its own\n")

    with faked(respond) as trainer:
        with pytest.raises(LearnerFailed, match="sent bytes that are no message and was killed"):
            trainer.state()
        until(lambda: is_gone(trainer._process.pid))


LARGE = bytes(1 << 22)
"""More than a socket holds."""


def test_a_wait_can_be_interrupted_in_the_middle_of_a_message_which_arrives_all_the_same(
    faked: Callable[..., LearnerProcess],
) -> None:
    was_interrupted = threading.Event()

    def respond(learner: Fake) -> None:
        learner.connection.recv(1, socket.MSG_PEEK)  # a part of the message is here
        os.kill(os.getpid(), signal.SIGINT)
        was_interrupted.wait(60)
        assert learner.next() == ("progress", LARGE)
        what, (number, _) = learner.next()
        learner.tell("answer", (number, what))

    with faked(respond, learner_timeout_s=60) as trainer:
        with pytest.raises(KeyboardInterrupt):
            trainer.update(LARGE)  # type: ignore[arg-type]
        was_interrupted.set()
        assert trainer._ask("state") == "state"


def test_large_messages_both_ways_at_once_arrive(faked: Callable[..., LearnerProcess]) -> None:
    def respond(learner: Fake) -> None:
        learner.tell("turned", (1, {"loss": LARGE}))
        assert learner.next() == ("progress", LARGE)
        what, (number, _) = learner.next()
        learner.tell("answer", (number, what))

    with faked(respond, learner_timeout_s=60) as trainer:
        trainer.update(LARGE)  # type: ignore[arg-type]
        assert trainer._ask("state") == "state"
        assert trainer._turned == (1, {"loss": LARGE})


def test_an_interrupt_anywhere_in_a_call_tears_no_message_and_sends_none_twice(
    faked: Callable[..., LearnerProcess],
) -> None:
    received: list[Any] = []

    def respond(learner: Fake) -> None:
        while (message := learner.next())[0] != "close":
            received.append(message)
            learner.tell("turned", (len(received), {}))

    with faked(respond, learner_timeout_s=60) as trainer:

        def talk() -> None:
            trainer._send("progress", nth)  # update would be interrupted in PyTorch too, within no_grad
            trainer.is_ready()

        nth = 1
        while interrupted(talk, nth):
            nth += 1
        until(lambda: not trainer.is_ready() and trainer._turned == (len(received), {}))
    assert nth > 10
    sent = [number for _, number in received]
    assert sent == sorted(set(sent)), "one was sent twice"
    assert sent[-1] == nth


@pytest.mark.parametrize("line", lines_of(LearnerProcess._exchange))
def test_a_close_in_another_thread_ends_a_wait(faked: Callable[..., LearnerProcess], line: int) -> None:
    trainer = faked(learner_timeout_s=0.5)  # for lines that are reached only then

    def wait() -> None:
        with contextlib.suppress(LearnerFailed):
            trainer.pause()

    with while_held_at(line, LearnerProcess._exchange, wait, trainer.close):
        pass


def test_what_it_raised_is_told_even_if_there_is_no_room_for_what_it_is_sent(
    faked: Callable[..., LearnerProcess],
) -> None:
    def respond(learner: Fake) -> None:
        learner.tell("learned", 1)
        learner.tell("failed", "ArithmeticError: no more")
        learner.close()

    def go_on() -> None:
        while True:
            trainer.update(bytes(1 << 22))  # type: ignore[arg-type]
            trainer.is_ready()

    with faked(respond) as trainer:
        with pytest.raises(LearnerFailed, match="ArithmeticError: no more"):
            go_on()
        with pytest.raises(LearnerFailed, match="ArithmeticError: no more"):
            trainer.pause()


def test_after_close_it_says_so(faked: Callable[..., LearnerProcess]) -> None:
    trainer = faked()
    trainer.close()
    with pytest.raises(LearnerFailed, match="the learner of 'default' was closed"):
        trainer.pause()


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, True, "long"])
def test_a_timeout_that_is_none_is_refused(timeout_s: Any) -> None:
    with pytest.raises(ConfigError, match=r"trainers\.default\.learner_timeout_s (should|must) be a number"):
        check_tables({"default": {"kind": "dqn", "apart": 100, "learner_timeout_s": timeout_s}})


def test_the_timeout_may_stay_in_the_table_of_a_trainer_that_learns_here() -> None:
    check_tables(
        {"default": {"kind": "dqn", "learner_timeout_s": 90}, "other": {"kind": "ppo", "learner_timeout_s": 9}}
    )


CONFIG = """
[manager]
kind = "simple"
env = "CartPole-v1"
n_envs = 2
wait = "all"
[training]
steps = 100000
evaluation_episodes = 0
[trainers.default]
kind = "dqn"
hidden = [8]
learning_starts = 20
capacity = 1000
"""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--set", "training.checkpoint_every=100"], "Go on with --resume from its last checkpoint, which is "),
        ([], "It had written no checkpoint: training.checkpoint_every says how often it writes one."),
    ],
    ids=["with a checkpoint", "without"],
)
def test_a_training_that_fails_says_what_there_is_to_go_on_from(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    said: str,
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)
    update = DQN.update

    def fail(self: DQN, progress: float) -> dict[str, float]:
        if self.version == 50:
            raise LearnerFailed("the learner of 'default' has ended (SIGKILL).")
        return update(self, progress)

    monkeypatch.setattr(DQN, "update", fail)
    assert run_command_line(["train", str(config), "--dir", str(tmp_path / "run"), "--plain", *options]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "Error: the learner of 'default' has ended (SIGKILL)."
    assert second.startswith(said)


# The end of the trainer.


class Deaf(DQN):
    """Its update does not end, and no Python code of its process runs meanwhile."""

    def update(self, progress: float) -> dict[str, float]:
        announce("updating", os.getpid())
        hold_the_gil()
        return {}


class Stops(DQN):
    """Its update stops the process."""

    def update(self, progress: float) -> dict[str, float]:
        announce("updating", os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)
        return {}


def train_beside_a_fork(kind: str) -> None:
    """Train with such a learner, beside a data loader, which has copies of what the trainer had."""
    cls = {"deaf": Deaf, "stopped": Stops}[kind]
    with SimpleEnvManager("CartPole-v1", 2, seed=0) as manager:
        spec = manager.behavior_specs["default"]
        with LearnerProcess(lambda: cls("default", spec, OPTIONS, device="cpu"), max_ahead=1000) as trainer:
            loader = os.fork()
            if loader == 0:
                time.sleep(600)
                os._exit(0)
            announce("loader", loader)
            TrainerController(manager, {"default": trainer}).train(10**7)


def start_a_learner_that_imports_for_long() -> None:
    """Start a learner, and die before it has imported what it needs."""
    with SimpleEnvManager("CartPole-v1", 2) as manager:
        trainer = LearnerProcess(make(manager.behavior_specs["default"]))
        announce("started", trainer._process.pid)
        time.sleep(600)


@pytest.mark.parametrize("kind", [pytest.param("deaf", marks=loses), pytest.param("stopped", marks=pytest.mark.load)])
def test_the_learner_is_gone_when_its_trainer_is_killed_whatever_it_is_doing_and_whoever_was_forked(kind: str) -> None:
    with program(train_beside_a_fork, kind) as trainer:
        ((loader,),) = trainer.announced("loader")
        ((learner,),) = trainer.announced("updating")

        trainer.kill()

        with returns_within(0):
            until(lambda: is_gone(int(learner)))
        assert not is_gone(int(loader))


@pytest.mark.load
def test_the_learner_is_gone_when_its_trainer_is_killed_while_it_starts() -> None:
    with program(start_a_learner_that_imports_for_long) as trainer:
        trainer.announced("started")
        trainer.kill()
        trainer.until_all_gone()


SCRIPT = """
import signal
from envmanager import SimpleEnvManager
from envmanager.training.learner_process import LearnerProcess
from envmanager.training.controller import TrainerController
from envmanager.training.algorithms.dqn import DQN, DQNOptions

signals = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: signals.append(number))

class MyDQN(DQN):
    pass

with SimpleEnvManager("CartPole-v1", 2, seed=0) as manager:
    spec = manager.behavior_specs["default"]
    options = DQNOptions(learning_starts=50, batch=16, hidden=(8,))
    with LearnerProcess(lambda: MyDQN("default", spec, options, device="cpu"), max_ahead=40) as trainer:
        controller = TrainerController(manager, {"default": trainer})
        controller.train(200)
        print("at it", flush=True)
        while len(signals) < 2:
            controller.step()
        controller.train(controller.n_steps + 200)
        trainer.pause()
        print("learned from all", trainer.version > 0)
"""


def test_a_script_needs_no_guard_and_signals_to_its_group_leave_the_learner_to_its_trainer(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "at it\n"
        os.killpg(script.pid, signal.SIGINT)
        os.killpg(script.pid, signal.SIGTERM)
        assert script.stdout.read() == "learned from all True\n"
    assert script.returncode == 0


def test_a_trainer_without_a_model_cannot_learn_apart() -> None:
    with pytest.raises(UsageError, match="has no `model`"):
        LearnerProcess(lambda: object())  # type: ignore[arg-type,return-value]


def test_one_that_needs_steps_of_its_present_policy_cannot_learn_apart(manager: Any) -> None:
    spec = manager.behavior_specs["default"]
    with pytest.raises(UsageError, match=r"PPO cannot learn in a process of its own.*max_policy_lag is 1"):
        LearnerProcess(lambda: PPO("default", spec, device="cpu"))


def test_a_config_that_has_ppo_learn_apart_is_refused_before_there_is_an_environment() -> None:
    with pytest.raises(ConfigError, match=r"trainers\.default\.apart: PPO cannot"):
        check_tables({"default": {"kind": "ppo", "apart": 100}})


def test_one_that_is_frozen_in_the_config_learns_apart_once_it_is_not(manager: Any) -> None:
    table = {"kind": "dqn", "frozen": True, "apart": 50, "learning_starts": 10, "hidden": [8]}
    with make_trainer("default", manager.behavior_specs["default"], table, seed=0, device="cpu") as trainer:
        assert isinstance(trainer, LearnerProcess)
        assert trainer.frozen


def test_the_policy_here_explores_as_it_should_after_so_many_steps(manager: Any) -> None:
    options = attrs.evolve(OPTIONS, exploration_steps=200, final_epsilon=0.1)
    spec = manager.behavior_specs["default"]
    with LearnerProcess(lambda: DQN("default", spec, options, device="cpu"), max_ahead=40) as trainer:
        policy: Any = trainer.policy
        assert policy.epsilon == 1.0
        TrainerController(manager, {"default": trainer}).train(100)
        assert policy.epsilon == pytest.approx(0.55)
        TrainerController(manager, {"default": trainer}).train(300)
        assert policy.epsilon == pytest.approx(0.1)
