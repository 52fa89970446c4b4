"""Environments that go wrong, at the moment you choose: to see what your manager or trainer makes of it.

::

    SubprocessEnvManager(faulty(Die(3), after=5, only_env=0), n_envs=3)                 # env 0 exits in its sixth step
    SubprocessEnvManager(faulty(Segfault(), only_generation=0), n_envs=3)               # heals with the first restart
    SubprocessEnvManager(faulty([IgnoreSigterm(), HoldGil()], at="reset"), n_envs=3)    # one thing after the other

What goes wrong is a :class:`Fault`, or one of ``Sleep``, ``Raise`` and ``Die``; when and where it does is for
:class:`FaultyEnvironment` to say.

The rule: until then, and afterwards if there is one, it is an EchoEnvironment, so that a mix-up of environments, steps
or actions shows.
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
from envmanager.testing.fakes import Die, EchoEnvironment, Raise, Sleep, _perform

_kept: list[Any] = []
"""What faults leave behind in their process on purpose: memory, descriptors, threads, child processes."""


class Fault:
    """Something that goes wrong. It strikes before a call does its work, or spoils what the call returns."""

    def strike(self) -> None:
        """Go wrong before the call does its work."""

    def spoil(self, steps: AgentSteps, earlier: AgentSteps | None) -> Any:
        """What the call returns in place of ``steps``; ``earlier`` is what it returned the last time."""
        return steps


# Raising.


class TwoArgumentError(Exception):
    """It can be pickled, but unpickling calls it with one argument."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class LockedError(Exception):
    """It holds a lock, so it cannot be pickled. Its text has percent signs, which a careless logger trips over."""

    def __init__(self) -> None:
        super().__init__("locked %s %d")
        self.lock = threading.Lock()


@attrs.frozen
class RaiseNew(Fault):
    """Raise what ``make_error()`` makes: for exceptions that cannot travel in a factory, as ``Raise(error)`` would."""

    make_error: Callable[[], BaseException]

    def strike(self) -> None:
        raise self.make_error()


@attrs.frozen
class Recurse(Fault):
    """Recurse without end: a RecursionError with a long traceback."""

    def strike(self) -> None:
        self.strike()


# Not responding, besides Sleep.


@attrs.frozen
class HoldGil(Fault):
    """Sleep in native code without giving up the GIL: no other thread runs, no Python signal handler either."""

    seconds: float = 600

    def strike(self) -> None:
        ctypes.PyDLL(None).sleep(int(self.seconds))


@attrs.frozen
class IgnoreSigterm(Fault):
    """Ignore SIGTERM from now on."""

    def strike(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


@attrs.frozen
class Stop(Fault):
    """Be stopped by SIGSTOP: alive, but no thread runs."""

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


# Dying, besides Die.


@attrs.frozen
class Segfault(Fault):
    """Read from address 0: a real segmentation fault, which faulthandler sees."""

    def strike(self) -> None:
        ctypes.string_at(0)


# Resources.


@attrs.frozen
class ExhaustMemory(Fault):
    """A MemoryError: the address space may grow by ``spare_bytes`` from now on, and more is asked for."""

    spare_bytes: int = 64 << 20

    def strike(self) -> None:
        import resource  # Windows has none

        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (in_use + self.spare_bytes, hard))
        bytearray(2 * self.spare_bytes)


@attrs.frozen
class Leak(Fault):
    """Keep memory and descriptors and never give them back."""

    n_bytes: int = 1 << 20
    n_descriptors: int = 1

    def strike(self) -> None:
        _kept.append(bytearray(self.n_bytes))
        _kept.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(self.n_descriptors))


# Input and output.


@attrs.frozen
class Print(Fault):
    """Write ``text`` to stdout and to stderr, ``times`` times."""

    text: str
    times: int = 1

    def strike(self) -> None:
        for fd in (1, 2):
            left = memoryview(self.text.encode() * self.times)
            while left:
                left = left[os.write(fd, left) :]


@attrs.frozen
class CloseOutput(Fault):
    """Close stdout and stderr: the next descriptors opened get their numbers."""

    def strike(self) -> None:
        os.close(1)
        os.close(2)


@attrs.frozen
class ReadInput(Fault):
    """Read stdin to its end."""

    def strike(self) -> None:
        while os.read(0, 1 << 16):
            pass


# What belongs to the whole process.


def surroundings() -> dict[str, Any]:
    """What an environment may change for all of its process, as values that can be compared and sent."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM)
    return {
        "cwd": os.getcwd(),
        "environ": dict(os.environ),
        "handlers": [str(signal.getsignal(number)) for number in numbers],
        "threads": threading.active_count(),
        "random": random.getstate(),
        "numpy random": str(np.random.get_state()),
    }


@attrs.frozen
class Meddle(Fault):
    """Change everything that ``surroundings`` looks at."""

    def strike(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM):
            signal.signal(number, lambda *_: None)
        os.chdir("/")
        os.environ["ENVMANAGER_MEDDLED"] = "yes"
        thread = threading.Thread(target=threading.Event().wait, daemon=True)
        thread.start()
        _kept.append(thread)
        random.seed(0)
        np.random.seed(0)


@attrs.frozen
class StartSimulator(Fault):
    """Start a child process that sleeps, ignores SIGTERM, and is never waited for."""

    def strike(self) -> None:
        _kept.append(subprocess.Popen(["/bin/sh", "-c", "trap '' TERM; exec sleep 600"]))


@attrs.frozen
class SendSignal(Fault):
    """Send a signal to another process: with the trainer's ``pid``, a Ctrl-C at just this moment."""

    pid: int
    number: int = signal.SIGINT

    def strike(self) -> None:
        os.kill(self.pid, self.number)


# Data.


@attrs.frozen
class Change(Fault):
    """Return ``change(steps)`` in place of the AgentSteps."""

    change: Callable[[AgentSteps], Any]

    def spoil(self, steps: AgentSteps, earlier: AgentSteps | None) -> Any:
        return self.change(steps)


@attrs.frozen
class ReuseArrays(Fault):
    """Return the same arrays every time, with new contents. Strike at every step: ``times=sys.maxsize``."""

    def spoil(self, steps: AgentSteps, earlier: AgentSteps | None) -> AgentSteps:
        if earlier is None:
            return steps
        for name in ("obs", "reward", "terminated", "truncated"):
            getattr(earlier, name)[...] = getattr(steps, name)
        earlier.final_obs = steps.final_obs
        return earlier


def inform(make_info: Callable[[], Mapping[str, Any]]) -> Change:
    """The fault of returning an ``info`` that ``make_info()`` makes."""
    return Change(lambda steps: attrs.evolve(steps, info=[dict(make_info()) for _ in range(len(steps))]))


Anything = Fault | Sleep | Raise | Die
"""What FaultyEnvironment takes, or a sequence of them."""
At = Literal["start", "reset", "step", "call", "close"]


class FaultyEnvironment(EchoEnvironment):
    """An EchoEnvironment in which ``fault`` (or several, in order) strikes.

    ``at`` says in which call: the constructor ("start"), ``reset``, ``step``, ``close``, or ``misbehave`` (for "call").
    The first ``after`` calls go well, the next ``times`` do not, those after them go well again; each new object counts
    anew. ``only_env`` and ``only_generation`` leave all others healthy: with ``only_generation=0`` a restart heals.
    A step takes ``sleep_s``, so that those who go on while another hangs do not keep all cores busy.

    ``context`` and ``seeds`` (one per reset) tell what it was given.
    """

    def __init__(
        self,
        context: EnvContext,
        fault: Anything | Sequence[Any],
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
        """Where a fault strikes that waits for a call; otherwise it returns "fine"."""
        self._strike("call")
        return "fine"

    def surroundings(self) -> dict[str, Any]:
        """The ``surroundings`` of the worker's process."""
        return surroundings()

    def _strike(self, at: str) -> bool:
        """Go wrong if it is time; whether it was."""
        if at != self._at:
            return False
        self._n_calls += 1
        if self._n_calls - 1 not in self._strikes:
            return False
        for fault in self._faults:
            if isinstance(fault, Fault):
                fault.strike()
            else:
                _perform(fault)
        return True

    def _spoiled(self, results: Steps, strikes: bool) -> Steps:
        if not strikes:
            return results
        steps: Any = results["default"]
        for fault in self._faults:
            if isinstance(fault, Fault):
                steps = fault.spoil(steps, self._earlier)
        self._earlier = steps
        return {"default": steps}


def faulty(fault: Anything | Sequence[Any], **when: Any) -> Callable[[EnvContext], FaultyEnvironment]:
    """A factory of FaultyEnvironments; ``when`` are their other arguments."""
    return functools.partial(FaultyEnvironment, fault=fault, **when)
