"""The trial of an environment in a worker process, with a deadline for each call.

::

    Trial ── make, begin, advance, facts, finish ──▶ Subject, in a worker ──▶ the environment
      ▲                                                  └── whether a step or a reset ──▶ a small file
      └── Moment, or a Failure: an exception, the end of the process, no return in time

If the worker process has ended, by itself or at the deadline of a call, the next call starts a new worker.
"""

from __future__ import annotations

import math
import os
import pickle
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import attrs
import numpy as np

from envmanager.adapters.factories import call_factory, resolve
from envmanager.adapters.recipes import EnvRecipe
from envmanager.check.playthrough import ArrayWatch, Failure, Moment
from envmanager.data.seeding import derive_seed
from envmanager.data.specs import BehaviorSpecs, SpecMismatch, describe_value
from envmanager.data.steps import Steps
from envmanager.env_manager import EnvManager
from envmanager.environment import EnvContext
from envmanager.errors import EnvManagerError, EnvRaised, UsageError, WorkerDied, WorkerTimedOut
from envmanager.options import ProcessOptions
from envmanager.placing.pair import Hosted, Player, call_within, probing_manager, try_two
from envmanager.simple_env_manager import SimpleEnvManager
from envmanager.subprocess_env_manager import SubprocessEnvManager

_CANNOT_BE_SEEDED = ".*cannot be seeded"
"""Pattern of the warning that an adapter, such as dm_env's, gives for an environment that cannot be seeded."""
_LAST_CALL = "last-call"
"""Name of the file that says ``"step"`` during a step, and ``"reset"`` from the call of a reset on, also in a step."""
LEAST_S, MOST_S = 5.0, 60.0
"""Bounds of a call's deadline. A call without an earlier one to compare it with has the greater."""
TIMES = 10
"""Deadline of a call, as a multiple of the longest one so far. A step may contain a reset, so resets count for it."""
_COMPARED = {"begin": ("begin",), "advance": ("advance", "begin"), "finish": ("make", "begin", "advance")}
"""Calls whose times bound a call. There is no deadline before the first of these has returned, except MOST_S."""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OF_AGENT = re.compile(r" of agent ('[^']*'|[^\[]*)")
"""Pattern of the part of a path that names an agent. It is removed, so that a cast is reported once for all agents."""


class Cast(NamedTuple):
    """A field of steps that needs casts: its name, the type in the spec, and a description of the first cast value."""

    field: str
    expected: str
    got: str


class Facts(NamedTuple):
    """Facts about an environment: its casts, and whether its returned arrays were watched, reused or changed later.

    ``lingering``: names of the agents that ended and stayed. ``assumes_mode`` and ``earned_at_restart``: see
    LateVectorGroup.
    """

    casts: Sequence[Cast]
    is_watched: bool
    reused: bool
    changed: bool
    lingering: Sequence[str]
    assumes_mode: bool
    earned_at_restart: float | None


class Trial:
    """A context manager that tries environments in a worker process, one at a time. On exit the worker is stopped.

    The arguments are those of ``check_environment``.
    """

    def __init__(
        self,
        env_factory: Any,
        *,
        seed: int,
        timeout_s: float | None,
        in_process: bool,
        on_call: Callable[[str], Any],
        options: ProcessOptions,
    ) -> None:
        named = env_factory.env if isinstance(env_factory, EnvRecipe) else env_factory
        # A module is imported in the worker, because its import may crash too.
        self._factory = env_factory if isinstance(named, str) and ":" in named else resolve(env_factory)
        self._seed = seed
        self._timeout_s = timeout_s
        self.in_process = in_process
        self._manager_class = SimpleEnvManager if in_process else SubprocessEnvManager
        self._on_call = on_call
        self._longest_s: dict[str, float] = {}
        """Time of the longest call so far, by name."""
        self._manager: EnvManager | None = None
        self._options = options

    def __enter__(self) -> Trial:
        self._folder = tempfile.mkdtemp(prefix="envmanager-check-")
        self._options = attrs.evolve(self._options, seed=self._seed, log_dir=self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_worker()
        shutil.rmtree(self._folder, ignore_errors=True)

    def make(self) -> BehaviorSpecs | Failure:
        """Make an environment. Return its specs, or a Failure. Raises UsageError or MissingExtra for a bad factory."""
        made = self.ask("make", "making it")
        if isinstance(made, EnvManagerError):
            raise made
        return made  # type: ignore[no-any-return]

    def move(self) -> None:
        """Stop the worker. Later ones are new Python processes with another hash seed, unless PYTHONHASHSEED is set."""
        self._end_worker()
        environ = dict(os.environ if self._options.worker_env is None else self._options.worker_env)
        if environ.get("PYTHONHASHSEED", "random") == "random":
            environ["PYTHONHASHSEED"] = "1"
        self._options = attrs.evolve(self._options, start_method="spawn", worker_env=environ)

    def try_two(self) -> bool:
        """Try two environments in one process, as ``placing.pair.try_two`` does. Raises OnePerProcess."""
        self._on_call("two in one process")
        return try_two(self._manager_class, [self._factory] * 2, self._options, is_apart=not self.in_process)

    def ask(self, name: str, text: str, *args: Any) -> Any:
        """Call the Subject's method ``name``, starting a worker if there is none. Return the result, or a Failure.

        ``text``: what is said of the call before it is made.
        """
        if self._manager is None:
            subject = partial(Subject, self._factory, self._seed, os.path.join(self._folder, _LAST_CALL))
            longest_s = self._timeout_s or max(MOST_S, self._options.timeouts.start_s)
            call_s = longest_s + LEAST_S  # for a process that was stopped
            self._manager = probing_manager(self._manager_class, subject, self._options, "check", call_s=call_s)
        limit_s = self._limit_s(name)
        self._on_call(text if self.in_process else f"{text} (at most {limit_s:.3g} s)")
        began = time.monotonic()
        try:
            result = call_within(limit_s, self._manager, name, *args)
            self._longest_s[name] = max(self._longest_s.get(name, 0.0), time.monotonic() - began)
        except EnvRaised as error:  # such as SystemExit; for ordinary exceptions a Subject returns a Failure
            result = Failure(f"it raised {error.type_name}: {error.cause}".rstrip(": "))
        except (WorkerDied, WorkerTimedOut) as error:
            self._end_worker()
            result = _end_of(error)
        if name == "advance" and isinstance(result, Failure):
            with open(os.path.join(self._folder, _LAST_CALL), encoding="utf-8") as file:
                result = attrs.evolve(result, phase="restart" if file.read().strip() == "reset" else "step")
        return result

    def _limit_s(self, name: str) -> float:
        if self.in_process:
            return math.inf
        compared = _COMPARED.get(name, ())
        if name == "make":
            return self._timeout_s or self._options.timeouts.start_s
        if self._timeout_s is not None or not compared or compared[0] not in self._longest_s:
            return self._timeout_s or MOST_S
        longest_s = max(self._longest_s.get(each, 0.0) for each in compared)
        return min(MOST_S, max(LEAST_S, TIMES * longest_s))

    def _end_worker(self) -> None:
        if self._manager is not None:
            self._manager.close()
            self._manager = None


def _end_of(error: WorkerDied | WorkerTimedOut) -> Failure:
    evidence = _without_own_frames(error.output)
    if isinstance(error, WorkerTimedOut):
        text = f"it did not return within {error.timeout_s:.3g} s, and its process was killed"
        return Failure(text, "timed out", evidence=evidence)
    if error.exit.startswith("EXIT("):
        text = f"it ended its process with exit code {error.exit[5:-1]}"
    elif error.exit == "SIGKILL":
        text = "its process was killed (SIGKILL; out of memory?)"
    else:
        text = f"its process crashed ({error.exit})"
    return Failure(text, "died", evidence=evidence)


def _without_own_frames(output: str) -> str:
    """Return ``output`` with each stack (innermost frame first) cut off at the first frame of this library."""
    kept = []
    is_own = False
    for line in output.splitlines():
        is_frame = line.startswith("  File ")
        is_own = is_frame and (is_own or f'"{_PACKAGE}{os.sep}' in line)
        if not is_own:
            kept.append(line)
    return "\n".join(kept)


class Subject(Hosted):
    """The part of a Trial that runs in the worker."""

    stacks_fd = 2

    def __init__(self, env_factory: Any, seed: int, last_call_path: str) -> None:
        """Open the file for the last call's name."""
        self._factory = env_factory
        self._seed = seed
        self._last_call = open(last_call_path, "w", encoding="utf-8")  # noqa: SIM115  (until the process ends)
        self._player: Any = None  # a Player while there is an environment
        self._is_watched = False
        self._after_reset: dict[int | None, dict[str, bytes]] = {}
        """Pickled states of the global random generators after the first reset with a seed."""
        self._drawn: dict[str, None] = {}

    def _note(self, call: str) -> None:
        self._last_call.seek(0)
        self._last_call.write(f"{call:<5}")
        self._last_call.flush()

    def _note_cast(self, path: str, expected: Any, value: Any) -> None:
        field = _OF_AGENT.sub("", path)
        self._casts.setdefault(field, Cast(field, str(expected), describe_value(value)))

    def make(self) -> BehaviorSpecs | Failure | EnvManagerError:
        """Make a new environment. Return its specs, or a Failure. Return an error if its factory cannot be found."""
        context = EnvContext(env_id=0, worker_id=0, seed=derive_seed(self._seed, 0), n_envs=2)  # rows of a vector
        self._watch = ArrayWatch(partial(self._note, "reset"))
        self._casts: dict[str, Cast] = {}

        def make() -> BehaviorSpecs | EnvManagerError:
            try:
                if isinstance(self._factory, str | EnvRecipe):
                    self._factory = resolve(self._factory)
            except EnvManagerError as error:
                return error
            self._player = Player(call_factory(self._factory, context), infos=True)
            self._player.group.casting.on_cast = self._note_cast
            self._is_watched = self._watch.attach(self._player.made)
            return dict(self._player.group.behavior_specs)

        return _tried(make)  # type: ignore[no-any-return]

    def begin(self, seed: int, env_seed: int | None) -> Moment | Failure:
        """Reset the environment with ``env_seed`` (None: without a seed). Return its data (a Moment), or a Failure.

        ``seed`` seeds the random actions of the following steps.
        """
        moment = self._moment(lambda: self._player.reset(env_seed, seed), is_reset=True)
        found = {"random": random.getstate(), "numpy.random": np.random.get_state()}
        if "torch" in sys.modules:
            found["torch"] = sys.modules["torch"].get_rng_state().tolist()  # a tensor's pickle has its address
        states = {name: pickle.dumps(state) for name, state in found.items()}
        before = self._after_reset.setdefault(env_seed, states)
        self._drawn.update(dict.fromkeys(name for name, state in states.items() if state != before.get(name, state)))
        return moment

    def advance(self) -> Moment | Failure:
        """Take a step with random actions. Return its data (a Moment), or a Failure."""
        self._note("step")
        return self._moment(lambda: self._player.step(), is_reset=False)

    def facts(self) -> Facts:
        """Return the Facts about the most recently made environment."""
        group, watch = self._player.group, self._watch
        return Facts(
            list(self._casts.values()),
            self._is_watched,
            watch.reused,
            watch.changed,
            [repr(agent) for agent in watch.lingering],
            getattr(group, "assumes_mode", False),
            getattr(group, "earned_at_restart", None),
        )

    def drawn(self) -> list[str]:
        """Return the names of the global random generators that were used and that no reset with a seed seeds."""
        return list(self._drawn)

    def finish(self) -> Failure | None:
        """Close the environment. Return a Failure if closing fails, else None."""
        player, self._player = self._player, None
        return _tried(player.group.close)  # type: ignore[no-any-return]

    def _moment(self, act: Callable[[], Steps], *, is_reset: bool) -> Moment | Failure:
        return _tried(lambda: Moment.of(act(), self._player.group.behavior_specs, is_reset=is_reset))  # type: ignore[no-any-return]

    def close(self) -> None:
        self._last_call.close()
        if self._player is not None:
            self._player.group.close()


def _tried(act: Callable[[], Any]) -> Any:
    """Return the result of ``act()``, or a Failure that describes its exception."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=_CANNOT_BE_SEEDED)
            return act()
    except Exception as error:
        return _failure_of(error)


def _failure_of(error: Exception) -> Failure:
    if isinstance(error, SpecMismatch):
        return Failure(str(error), "mismatch", path=error.path)
    if isinstance(error, UserWarning):
        return Failure(str(error), "not seeded")
    if isinstance(error, UsageError):
        return Failure(str(error).rstrip("."), "refused")
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return Failure(f"it raised {type(error).__name__}: {error}".rstrip(": .") + place)
