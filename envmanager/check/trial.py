"""The trial of an environment in a worker process, with a deadline for each call.

::

    Trial ── make, begin, advance, facts, finish ──▶ Subject, in a worker ──▶ the environment
      ▲                                                  └── name of the call in progress ──▶ a small file
      └── Moment, or a Failure: an exception, the end of the process, no return in time

If the worker process has ended, or was killed after a timeout, the next call starts a new worker.
"""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import attrs
import numpy as np

from envmanager.adapters.choosing import build_group, n_envs_of
from envmanager.adapters.factories import call_factory, resolve
from envmanager.check.playthrough import ArrayWatch, ByRow, Failure, Moment
from envmanager.data.seeding import derive_seed, derive_seeds
from envmanager.data.specs import ArraySpec, BehaviorSpec, BehaviorSpecs, SpecMismatch, describe_value
from envmanager.data.steps import Steps
from envmanager.data.trees import Tree
from envmanager.env_manager import EnvManager
from envmanager.environment import EnvContext, EnvGroup, Environment
from envmanager.errors import EnvManagerError, EnvRaised, UsageError, WorkerDied, WorkerTimedOut
from envmanager.options import RestartPolicy, Timeouts
from envmanager.placing.probing import actions_for
from envmanager.policy import Policy
from envmanager.simple_env_manager import SimpleEnvManager
from envmanager.subprocess_env_manager import SubprocessEnvManager

_CANNOT_BE_SEEDED = ".*cannot be seeded"
"""Pattern of the warning that an adapter, such as dm_env's, gives for an environment that cannot be seeded."""
_LAST_CALL = "last-call"
_STDERR = 2
"""Descriptor that writes to the worker's log."""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OF_AGENT = re.compile(r" of agent ('[^']*'|[^\[]*)")
"""Pattern of the part of a path that names an agent. It is removed, so that a cast is reported once for all agents."""


class Cast(NamedTuple):
    """A field of steps that needs casts: its name, the type in the spec, and a description of the first cast value."""

    field: str
    expected: str
    got: str


class Facts(NamedTuple):
    """Facts about an environment: its casts, and whether its returned arrays were watched, reused or changed later."""

    casts: Sequence[Cast]
    is_watched: bool
    reused: bool
    changed: bool


class Trial:
    """A context manager that tries environments in a worker process, one at a time. On exit the worker is stopped.

    ``timeout_s``: seconds that a call may take. ``in_process``: whether to run the environment in the caller's
    process, without deadlines; a crash then ends that process. ``on_call`` receives a line of text before each call.
    """

    def __init__(
        self,
        env_factory: Any,
        *,
        seed: int,
        timeout_s: float,
        in_process: bool,
        on_call: Callable[[str], Any],
    ) -> None:
        # A module is imported in the worker, because its import may crash too.
        self._factory = env_factory if isinstance(env_factory, str) and ":" in env_factory else resolve(env_factory)
        self._seed = seed
        self._timeout_s = timeout_s
        self._in_process = in_process
        self._on_call = on_call
        self._folder = ""
        self._manager: EnvManager | None = None

    def __enter__(self) -> Trial:
        self._folder = tempfile.mkdtemp(prefix="envmanager-check-")
        return self

    def __exit__(self, *_: object) -> None:
        self._end_worker()
        shutil.rmtree(self._folder, ignore_errors=True)

    def make(self) -> BehaviorSpecs | Failure:
        """Make an environment. Return its specs, or a Failure. Raises UsageError or MissingExtra for a bad factory."""
        self._on_call("making it")
        error = self._ask("find")
        if isinstance(error, EnvManagerError):
            raise error
        return error or self._ask("make")  # type: ignore[no-any-return]

    def begin(self, seed: int, env_seed: int | None) -> Moment | Failure:
        """Reset the environment. Return the data of the reset (a Moment), or a Failure.

        ``seed`` seeds the random actions of the following steps, ``env_seed`` the environment (None: without a seed).
        """
        self._on_call("reset")
        return self._ask("begin", seed, env_seed)  # type: ignore[no-any-return]

    def advance(self, at_step: int) -> Moment | Failure:
        """Take the next step, which is step number ``at_step``, with random actions. Return a Moment, or a Failure."""
        self._on_call(f"step {at_step:,}")
        return self._ask("advance")  # type: ignore[no-any-return]

    def facts(self) -> Facts:
        """Return the Facts about the most recently made environment. Its process must still be running."""
        return self._ask("facts")  # type: ignore[no-any-return]

    def finish(self) -> Failure | None:
        """Close the environment. Return a Failure if closing fails, else None."""
        self._on_call("close")
        return self._ask("finish")  # type: ignore[no-any-return]

    def _ask(self, name: str, *args: Any) -> Any:
        """Call the Subject's method ``name``, starting a worker if there is none. Return the result, or a Failure."""
        if self._manager is None:
            self._manager = self._start_worker()
        try:
            return self._manager.call(name, *args)[0]
        except EnvRaised as error:  # such as SystemExit; for ordinary exceptions a Subject returns a Failure
            failure = Failure(f"it raised {error.type_name}: {error.cause}".rstrip(": "))
        except (WorkerDied, WorkerTimedOut) as error:
            self._end_worker()
            failure = _end_of(error)
        return attrs.evolve(failure, in_restart=name == "advance" and self._last_call() == "reset")

    def _last_call(self) -> str:
        """Return the name of the last call to the environment: ``"reset"``, ``"step"``, or "" if none was recorded."""
        with open(os.path.join(self._folder, _LAST_CALL), encoding="utf-8") as file:
            return file.read().strip()

    def _start_worker(self) -> EnvManager:
        dump_after_s = None if self._in_process else self._timeout_s * 0.9
        subject = partial(Subject, self._factory, self._seed, os.path.join(self._folder, _LAST_CALL), dump_after_s)
        if self._in_process:
            return SimpleEnvManager(subject, 1)
        return SubprocessEnvManager(
            subject,
            1,
            timeouts=Timeouts(call_s=self._timeout_s),
            restarts=RestartPolicy(max_restarts=0),
            log_dir=self._folder,
        )

    def _end_worker(self) -> None:
        if self._manager is not None:
            self._manager.close()
            self._manager = None


def _end_of(error: WorkerDied | WorkerTimedOut) -> Failure:
    evidence = _without_own_frames(error.output)
    if isinstance(error, WorkerTimedOut):
        text = f"it did not return within {error.timeout_s:g} s, and its process was killed"
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


class Subject(Environment):
    """The part of a Trial that runs in the worker. It is an Environment only so that a manager can host it."""

    SPEC = BehaviorSpec(ArraySpec((1,)), ArraySpec((), np.int64))

    def __init__(self, env_factory: Any, seed: int, last_call_path: str, dump_after_s: float | None) -> None:
        """Open the file for the last call's name. If a call takes ``dump_after_s`` seconds, all stacks are printed."""
        self._factory = env_factory
        self._seed = seed
        self._last_call = open(last_call_path, "w", encoding="utf-8")  # noqa: SIM115  (until the process ends)
        self._dump_after_s = dump_after_s
        self._group: EnvGroup | None = None
        self._watch = ArrayWatch(self._note)
        self._is_watched = False
        self._casts: dict[str, Cast] = {}
        self._policies: dict[str, Policy] = {}
        self._policy_seed = 0
        self._steps: Steps = {}

    def _note(self, call: str) -> None:
        self._last_call.seek(0)
        self._last_call.write(f"{call:<5}")
        self._last_call.flush()

    def _note_cast(self, path: str, expected: Any, value: Any) -> None:
        field = _OF_AGENT.sub("", path)
        self._casts.setdefault(field, Cast(field, str(expected), describe_value(value)))

    def find(self) -> EnvManagerError | Failure | None:
        """Look up the factory. Return the error if it cannot be found, a Failure if its module raises, else None."""
        try:
            if isinstance(self._factory, str):
                self._factory = resolve(self._factory)
        except EnvManagerError as error:
            return error
        except Exception as error:
            return _failure_of(error)
        return None

    def make(self) -> BehaviorSpecs | Failure:
        """Make a new environment. Return its specs, or a Failure if it cannot be made."""
        context = EnvContext(env_id=0, worker_id=0, seed=derive_seed(self._seed, 0))
        self._watch = ArrayWatch(self._note)
        self._casts = {}

        def make() -> BehaviorSpecs:
            made = call_factory(self._factory, context)
            self._group = build_group([made], range(n_envs_of(made) or 1))
            self._group.casting.on_cast = self._note_cast
            self._is_watched = self._watch.attach(made)
            return dict(self._group.behavior_specs)

        return self._try(make)  # type: ignore[no-any-return]

    def begin(self, seed: int, env_seed: int | None) -> Moment | Failure:
        """Reset the environment with ``env_seed``; seed the actions with ``seed``. Return a Moment, or a Failure."""
        assert self._group is not None
        self._policies, self._policy_seed = {}, seed
        seeds = derive_seeds(env_seed, self._group.env_ids)
        return self._moment(partial(self._group.reset, seeds=seeds, options=None), is_reset=True)

    def advance(self) -> Moment | Failure:
        """Take a step with random actions. Return its data (a Moment), or a Failure."""
        assert self._group is not None
        group = self._group

        def make_policy(spec: BehaviorSpec) -> Policy:
            return ByRow(spec, self._policy_seed)

        def act() -> Steps:
            return group.step(actions_for(self._steps, self._policies, group.behavior_specs, make_policy))

        return self._moment(act, is_reset=False)

    def facts(self) -> Facts:
        """Return the Facts about the most recently made environment."""
        return Facts(list(self._casts.values()), self._is_watched, self._watch.reused, self._watch.changed)

    def finish(self) -> Failure | None:
        """Close the environment. Return a Failure if closing fails, else None."""
        assert self._group is not None
        group, self._group = self._group, None
        return self._try(group.close)  # type: ignore[no-any-return]

    def _moment(self, act: Callable[[], Steps], *, is_reset: bool) -> Moment | Failure:
        def moment() -> Moment:
            assert self._group is not None
            self._steps = act()
            return Moment.of(self._steps, self._group.behavior_specs, is_reset=is_reset)

        return self._try(moment)  # type: ignore[no-any-return]

    def _try(self, act: Callable[[], Any]) -> Any:
        """Return the result of ``act()``, or a Failure that describes its exception."""
        n_resets = self._watch.n_resets
        if self._dump_after_s is not None:
            faulthandler.dump_traceback_later(self._dump_after_s, file=_STDERR)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=_CANNOT_BE_SEEDED)
                return act()
        except Exception as error:
            return _failure_of(error, in_restart=self._watch.n_resets > n_resets)
        finally:
            if self._dump_after_s is not None:
                faulthandler.cancel_dump_traceback_later()

    @property
    def behavior_specs(self) -> BehaviorSpecs:
        return {"default": self.SPEC}

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        raise NotImplementedError

    def step(self, actions: Mapping[str, Tree]) -> Steps:
        raise NotImplementedError

    def close(self) -> None:
        self._last_call.close()
        if self._group is not None:
            self._group.close()


def _failure_of(error: Exception, *, in_restart: bool = False) -> Failure:
    if isinstance(error, SpecMismatch):
        return Failure(str(error), "mismatch", in_restart)
    if isinstance(error, UserWarning):
        return Failure(str(error), "not seeded")
    if isinstance(error, UsageError):
        return Failure(str(error).rstrip("."), "refused", in_restart)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return Failure(f"it raised {type(error).__name__}: {error}".rstrip(": .") + place, "raised", in_restart)
