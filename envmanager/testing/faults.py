"""Environments that fail at a chosen moment, to test how a manager or trainer handles the failure.

::

    SubprocessEnvManager(faulty(Die(3), after=5, only_env=0), n_envs=3)                 # env 0 exits in its sixth step
    SubprocessEnvManager(faulty(Segfault(), only_generation=0), n_envs=3)               # only until the first restart
    SubprocessEnvManager(faulty([IgnoreSigterm(), HoldGil()], at="reset"), n_envs=3)    # two faults in a row

A fault is a :class:`Fault`, such as ``Die``. The arguments of :class:`FaultyEnvironment` say when and where the fault
strikes. Before and after the fault the environment behaves like an EchoEnvironment, so that a mix-up of environments,
steps or actions can be detected.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np

from envmanager.data.steps import AgentSteps, Steps
from envmanager.data.trees import Tree
from envmanager.environment import EnvContext
from envmanager.testing.fakes import EchoEnvironment, Fault

_kept: list[Any] = []
"""Objects that faults leak in the process on purpose: memory, descriptors, threads, child processes."""


_SIGNALS = ("SIGINT", "SIGTERM", "SIGCHLD", "SIGALRM")


# Raising.


class TwoArgumentError(Exception):
    """An error that can be pickled but not unpickled: unpickling passes one argument to a class that needs two."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class LockedError(Exception):
    """An error that cannot be pickled, because it holds a lock. Its message cannot be used as a format string."""

    def __init__(self) -> None:
        super().__init__("locked %s %d")
        self.lock = threading.Lock()


@attrs.frozen
class RaiseNew(Fault):
    """A fault that raises ``make_error()``. The error is made in the worker, so it need not be picklable."""

    make_error: Callable[[], BaseException]

    def strike(self) -> None:
        raise self.make_error()


class Recurse(Fault):
    """A fault that recurses infinitely, which raises a RecursionError with a long traceback."""

    def strike(self) -> None:
        self.strike()


# Faults that make the process unresponsive, as Sleep does.


@attrs.frozen
class HoldGil(Fault):
    """A fault that sleeps in native code with the GIL held, so that no other Python thread or signal handler runs."""

    seconds: float = 600

    def strike(self) -> None:
        if sys.platform == "win32":
            ctypes.PyDLL("kernel32").Sleep(int(self.seconds * 1000))
        else:
            ctypes.PyDLL(None).sleep(int(self.seconds))


class IgnoreSigterm(Fault):
    """A fault that makes the environment's process ignore SIGTERM."""

    def strike(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Stop(Fault):
    """A fault that stops the environment's process with SIGSTOP. The process stays alive, but no thread runs."""

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


# Faults that end the process, as Die does.


class Segfault(Fault):
    """A fault that reads from address 0. This is a real segmentation fault, which faulthandler can report."""

    def strike(self) -> None:
        ctypes.string_at(0)


# Resources.


@attrs.frozen
class ExhaustMemory(Fault):
    """A fault that limits memory to current use plus ``spare_bytes``, then exceeds the limit to raise MemoryError."""

    spare_bytes: int = 64 << 20

    def strike(self) -> None:
        import resource  # Windows lacks this module

        in_use = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (in_use + self.spare_bytes, hard))
        bytearray(2 * self.spare_bytes)


@attrs.frozen
class Leak(Fault):
    """A fault that leaks ``n_bytes`` of memory and ``n_descriptors`` open files."""

    n_bytes: int = 1 << 20
    n_descriptors: int = 1

    def strike(self) -> None:
        _kept.append(bytearray(self.n_bytes))
        _kept.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(self.n_descriptors))


# Input and output.


@attrs.frozen
class Print(Fault):
    """A fault that writes ``text`` to stdout and to stderr, ``times`` times."""

    text: str
    times: int = 1

    def strike(self) -> None:
        for fd in (1, 2):
            left = memoryview(self.text.encode() * self.times)
            while left:
                left = left[os.write(fd, left) :]


class CloseOutput(Fault):
    """A fault that closes stdout and stderr, so that the next files to be opened get descriptors 1 and 2."""

    def strike(self) -> None:
        os.close(1)
        os.close(2)


class ReadInput(Fault):
    """A fault that reads stdin until end of file."""

    def strike(self) -> None:
        while os.read(0, 1 << 16):
            pass


# State of the whole process.


def surroundings() -> dict[str, Any]:
    """Return process-wide state that an environment may change, as picklable values that can be compared."""
    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    return {
        "cwd": os.getcwd(),
        "environ": dict(os.environ),
        "handlers": [str(signal.getsignal(number)) for number in numbers],
        "threads": threading.active_count(),
        "random": random.getstate(),
        "numpy random": str(np.random.get_state()),
    }


class Meddle(Fault):
    """A fault that changes all of the state that ``surroundings`` returns."""

    def strike(self) -> None:
        for name in _SIGNALS:
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), lambda *_: None)
        os.chdir("/")
        os.environ["ENVMANAGER_MEDDLED"] = "yes"
        thread = threading.Thread(target=threading.Event().wait, daemon=True)
        thread.start()
        _kept.append(thread)
        random.seed(0)
        np.random.seed(0)


class StartSimulator(Fault):
    """A fault that starts, and never reaps, a child process that sleeps for ten minutes and ignores SIGTERM."""

    def strike(self) -> None:
        _kept.append(subprocess.Popen(["/bin/sh", "-c", "trap '' TERM; exec sleep 600"]))


@attrs.frozen
class SendSignal(Fault):
    """A fault that sends the signal ``number`` to process ``pid``. SIGINT to the trainer simulates Ctrl-C."""

    pid: int
    number: int = signal.SIGINT

    def strike(self) -> None:
        os.kill(self.pid, self.number)


# Data.


@attrs.frozen
class Change(Fault):
    """A fault that replaces ``steps``, the result of the call, with ``change(steps)``."""

    change: Callable[[AgentSteps], Any]

    def spoil(self, steps: AgentSteps, earlier: AgentSteps | None) -> Any:
        return self.change(steps)


class ReuseArrays(Fault):
    """A fault that returns the same arrays, with new contents, in every step. Use it with ``times=sys.maxsize``."""

    def spoil(self, steps: AgentSteps, earlier: AgentSteps | None) -> AgentSteps:
        if earlier is None:
            return steps
        for name in ("obs", "reward", "terminated", "truncated"):
            getattr(earlier, name)[...] = getattr(steps, name)
        earlier.final_obs = steps.final_obs
        return earlier


def inform(make_info: Callable[[], Mapping[str, Any]]) -> Change:
    """Return a fault that sets the info of each row of a step to ``make_info()``."""
    return Change(lambda steps: attrs.evolve(steps, info=[dict(make_info()) for _ in range(len(steps))]))


At = Literal["start", "reset", "step", "call", "close"]


class FaultyEnvironment(EchoEnvironment):
    """An EchoEnvironment in which ``fault``, or a sequence of faults, strikes.

    ``at`` selects the call: the constructor ("start"), ``reset``, ``step``, ``close``, or ``misbehave`` (for "call").
    The first ``after`` calls succeed, the next ``times`` calls fail, and later calls succeed again. Each new object
    counts its calls from 0. ``only_env`` and ``only_generation`` limit the fault to one env_id and one generation. With
    ``only_generation=0`` a restart repairs the environment. Each step sleeps ``sleep_s`` seconds, so that the healthy
    environments do not keep all cores busy while one hangs.

    The attribute ``context`` is the EnvContext, and ``seeds`` lists the seed of each reset.
    """

    def __init__(
        self,
        context: EnvContext,
        fault: Fault | Sequence[Fault],
        *,
        at: At = "step",
        after: int = 0,
        times: int = 1,
        only_env: int | None = None,
        only_generation: int | None = None,
        episode_length: int = 7,
        sleep_s: float = 0.001,
    ) -> None:
        super().__init__(context, episode_length=episode_length, sleep_s=sleep_s)
        self.context = context
        self.seeds: list[int | None] = []
        is_meant = only_env in (None, context.env_id) and only_generation in (None, context.generation)
        self._faults = tuple(fault) if isinstance(fault, Sequence) else (fault,)
        self._at = at if is_meant else None
        self._strikes = range(after, after + min(times, sys.maxsize - after))
        self._n_calls = 0
        self._earlier: AgentSteps | None = None
        self._strike("start")

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        self.seeds.append(seeds[0])
        strikes = self._strike("reset")
        return self._spoiled(super().reset(seeds=seeds, options=options), strikes)

    def step(self, actions: Mapping[str, Tree]) -> Steps:
        strikes = self._strike("step")
        return self._spoiled(super().step(actions), strikes)

    def close(self) -> None:
        self._strike("close")

    def misbehave(self) -> str:
        """Run the faults that are due for ``at="call"``. Return "fine" unless one of them raises an error."""
        self._strike("call")
        return "fine"

    def surroundings(self) -> dict[str, Any]:
        """Return the result of the function ``surroundings``, called in the worker."""
        return surroundings()

    def _strike(self, at: str) -> bool:
        """Run the faults if they are due in this call of kind ``at``. Return whether they ran."""
        if at != self._at:
            return False
        self._n_calls += 1
        if self._n_calls - 1 not in self._strikes:
            return False
        for fault in self._faults:
            fault.strike()
        return True

    def _spoiled(self, results: Steps, strikes: bool) -> Steps:
        if not strikes:
            return results
        steps: Any = results["default"]
        for fault in self._faults:
            steps = fault.spoil(steps, self._earlier)
        self._earlier = steps
        return {"default": steps}


def faulty(fault: Fault | Sequence[Fault], **when: Any) -> Callable[[EnvContext], FaultyEnvironment]:
    """Return a factory that passes ``fault`` and the keyword arguments in ``when`` to FaultyEnvironment."""
    return functools.partial(FaultyEnvironment, fault=fault, **when)
