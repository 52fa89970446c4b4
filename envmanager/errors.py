"""The base class of this library's errors, and its most common subclasses. Some modules define further subclasses.

::

    EnvManagerError
    ├── WorkerError              an error in one worker or in one of its environments
    │   ├── EnvRaised            the environment's own code raised
    │   ├── EpisodeNotBegun      a task's episode ended or failed within the actions that it begins with
    │   ├── BadObservation       the environment returned a value that violates its spec
    │   ├── WorkerDied           the worker's process ended unexpectedly
    │   │   └── WorkerOutOfMemory    it was killed because it, or its machine, had too little memory
    │   ├── WorkerTimedOut       the worker did not respond in time
    │   ├── ConnectionLost       the environment lost its server, or found none in time
    │   ├── NotPlaced            no node of the cluster had room for the worker
    │   ├── ProtocolError        the worker sent what the protocol does not allow
    │   └── RestartsExhausted    a worker failed more often than its RestartPolicy allows
    ├── BadAction                invalid actions or env_ids; raised before anything is sent
    ├── ManagerClosed            a call was made after close(), or was still running during close()
    ├── CallStopped              EnvManager.stop_waiting() ended a wait
    ├── LostEpisode              the worker in which a coroutine played an episode has failed
    ├── StalePolicy              a rollout was decided by a policy that is too old; in results, it is not raised
    ├── UsageError               an invalid or untimely call, or invalid or contradictory options
    │   └── ConfigError          an invalid config
    ├── ServerFull               a server has no room for one more environment; also a ConnectionError
    ├── NotWritten               a file could not be written, as on a full disk; also an OSError
    └── ImportFailed             a library is installed, but importing it failed; also an ImportError
        └── MissingExtra         an optional library is not installed; also a ModuleNotFoundError

The text of a WorkerError says what happened and to which worker. Programs can read the worker, phase and cause from the
error's attributes. The rule: text and attributes survive pickling.
"""

from __future__ import annotations

import copyreg
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from typing_extensions import Unpack


class EnvManagerError(Exception):
    """The base class of the errors that this library defines for its users."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls cls(*args), which fails for a keyword-only constructor. __new__ of an OSError may drop args.
        return copyreg.__newobj__, (type(self), *self.args), {**self.__dict__, "args": self.args}  # type: ignore[attr-defined]


class Where(TypedDict):
    """The keyword arguments that all errors about a worker have in common. WorkerError describes them."""

    worker_id: int
    env_ids: Sequence[int]
    phase: str


class WorkerError(EnvManagerError):
    """An error in a worker or in one of its environments.

    ``headline`` is a one-line summary for logs. ``cause`` says what went wrong, such as ``"SIGSEGV"``. ``phase`` says
    what the worker was doing: ``"start"``, ``"reset"``, ``"begin"``, ``"step"``, ``"call"``, ``"idle"`` or ``"close"``.
    The phase ``"recycled"`` means that a healthy worker was replaced as planned.
    """

    def __init__(
        self, text: str, *, worker_id: int, env_ids: Sequence[int], phase: str, cause: str, what: str = ""
    ) -> None:
        """``what``: the headline without the worker, by default the first line of ``text``."""
        super().__init__(text)
        self.worker_id, self.phase, self.cause = worker_id, phase, cause
        self.env_ids = tuple(int(env_id) for env_id in env_ids)
        self.headline = next(iter((f"worker {worker_id} {what}" if what else text).splitlines()), "")

    def suggest_one_each(self, env_ids: Sequence[int]) -> None:
        """Add advice to this error, which ended the start of a worker with ``env_ids``, unless the first env raised it.

        Some simulators exist once per process, and raise, end it or hang when a second one is made.
        """
        is_first = isinstance(self, EnvRaised) and self.env_ids == tuple(env_ids[:1])
        if len(env_ids) > 1 and not is_first and isinstance(self, EnvRaised | WorkerDied | WorkerTimedOut):
            self.args = (
                f"{self}\nWorker {self.worker_id} has {len(env_ids)} environments in one process. If a process can "
                "hold only one of them, give each a worker of its own: SubprocessEnvManager with n_workers=n_envs (in "
                "a config kind: subprocess without n_workers).",
            )


def _who(where: Where) -> str:
    worker_id, ids = where["worker_id"], [int(env_id) for env_id in where["env_ids"]]
    if not ids:
        return f"worker {worker_id}"
    if len(ids) == 1:
        return f"worker {worker_id} (env {ids[0]})"
    if ids == list(range(ids[0], ids[-1] + 1)):
        return f"worker {worker_id} (envs {ids[0]}-{ids[-1]})"
    return f"worker {worker_id} (envs {', '.join(map(str, ids))})"


def _when(where: Where) -> str:
    return {"start": "at start", "idle": "while idle"}.get(where["phase"], f"in {where['phase']}")


def _tail(output: str) -> str:
    return f"\nThe end of its output:\n{output}" if output else ""


_AFTER_EXCEPTION = {
    "reset": "Another reset() may follow.\n",
    "step": (
        "Fix the environment, or let such workers be replaced: RestartPolicy(on_exception='restart'), in a config "
        "restarts.on_exception: restart. As it is, the worker takes no more steps until reset().\n"
    ),
    "call": "The worker stays usable.\n",
}


class EnvRaised(WorkerError):
    """Error raised when an environment's own code raised an exception. The text ends with the worker's traceback.

    ``__cause__`` is the original exception, or None if a worker's process could not send it. ``type_name`` is the
    name of the exception's class. ``remote_traceback`` is the traceback as text, or ``""`` if there is none.
    """

    def __init__(
        self, *, type_name: str, cause: str, remote_traceback: str, advice: str = "", **where: Unpack[Where]
    ) -> None:
        self.type_name, self.remote_traceback = type_name, remote_traceback
        what = f"raised {type_name} {_when(where)}: {cause}"
        advice += _AFTER_EXCEPTION.get(where["phase"], "")
        text = f"the environment in {_who(where)} {what}\n{advice}\n{remote_traceback}"
        super().__init__(text, cause=cause, what=what, **where)

    def leave_out_restarts(self) -> None:
        """Leave out the advice to have such workers replaced, for a RestartPolicy by which they are."""
        self.args = (str(self).replace(_AFTER_EXCEPTION["step"], "", 1),)


class EpisodeNotBegun(WorkerError):
    """Error of a task whose episode ended or failed within the actions with which it was to begin.

    ``task`` is the index of the task, and ``step`` the number of its action (0: the reset). ``failure`` is an EnvRaised
    or BadObservation, or None if the episode ended. The worker goes on.
    """

    def __init__(self, *, task: int, step: int, failure: EnvManagerError | None = None, **where: Unpack[Where]) -> None:
        self.task, self.step, self.failure = task, step, failure
        cause = "the episode ended" if failure is None else str(getattr(failure, "cause", failure))
        what = f"could not begin task {task}, at action {step} of those to begin with: {cause}"
        told = "" if failure is None else f"\n{failure}"
        text = (
            f"{_who(where)} {what}. The task was given up; the environment can begin another. Actions lead elsewhere "
            "than where they were taken if the seed or the options differ, or if the environment is not repeatable, "
            f"which `envmanager check --env …` tells.{told}"
        )
        super().__init__(text, cause=cause, what=what, **where)


class BadObservation(WorkerError):
    """Error raised when an environment returned a value that violates the spec. ``path`` is the name of the value."""

    def __init__(self, *, path: str, expected: str, got: str, **where: Unpack[Where]) -> None:
        self.path, self.expected, self.got = path, expected, got
        cause = f"{path} should be {expected}, but is {got}"
        what = f"broke its spec {_when(where)}: {cause}"
        space = " or its declared space" if path.startswith(("obs", "final_obs", "the behavior")) else ""
        advice = f"Fix the environment{space}; `envmanager check --env …` shows such mistakes one by one."
        super().__init__(f"the environment in {_who(where)} {what}. {advice}", cause=cause, what=what, **where)


_HINTS = {
    "SIGKILL": " Only the kernel (out of memory?) or a person sends SIGKILL.",
    "EXIT(?)": " Its exit code is unknown: the process that reaps workers is busy or has ended, or your program reaps "
    "its children itself.",
}
"""What is known about ends of processes, by ``WorkerDied.exit``."""


class WorkerDied(WorkerError):
    """Error raised when a worker's process ended unexpectedly. ``exit`` names the cause, such as ``"SIGSEGV"``."""

    def __init__(self, *, exit: str, output: str = "", ticket: int = 0, **where: Unpack[Where]) -> None:
        self.exit, self.output, self.ticket = exit, output, ticket
        what, hint = f"died {_when(where)} ({exit}", _HINTS.get(exit, "")
        text = f"{_who(where)} {what}, request {ticket}).{hint}{_tail(output)}"
        super().__init__(text, cause=exit, what=f"{what})", **where)


class WorkerOutOfMemory(WorkerDied):
    """Error raised when a worker's process was killed because of memory: by its limit, or by the kernel.

    ``in_use_mb``: resident memory, in MiB, of the process and its children at that time, or 0 if it is unknown.
    ``killed_by``: who has killed it, and at which limit.
    """

    def __init__(
        self, *, in_use_mb: float, killed_by: str, exit: str, output: str = "", ticket: int = 0, **where: Unpack[Where]
    ) -> None:
        self.exit, self.output, self.ticket = exit, output, ticket
        self.in_use_mb, self.killed_by = in_use_mb, killed_by
        had = f" with {in_use_mb:,.0f} MiB" if in_use_mb else ""
        what = f"ran out of memory {_when(where)}{had}"
        text = (
            f"{_who(where)} {what} (request {ticket}): it was killed by {killed_by}. If it leaks, "
            "RestartPolicy(recycle_above_mb=…) replaces it in time, and with keep_episodes no episode is lost. If it "
            f"needs as much, raise memory_limit_mb, or run fewer workers.{_tail(output)}"
        )
        WorkerError.__init__(self, text, cause=f"out of memory{had}", what=what, **where)


class WorkerTimedOut(WorkerError):
    """Error raised when a worker did not respond within ``timeout_s`` seconds and was killed."""

    def __init__(self, *, timeout_s: float, output: str = "", ticket: int = 0, **where: Unpack[Where]) -> None:
        self.timeout_s, self.output, self.ticket = timeout_s, output, ticket
        what, phase = f"did not respond within {timeout_s:g} s {_when(where)}", where["phase"]
        text = (
            f"{_who(where)} {what} (request {ticket}) and was killed. If the environment is only slow, "
            f"raise Timeouts({phase}_s=…), timeouts.{phase}_s in a config.{_tail(output)}"
        )
        super().__init__(text, cause=f"no response within {timeout_s:g} s", what=what, **where)


class ConnectionLost(WorkerError):
    """Error raised when an environment lost its server, or found none within ``timeout_s`` seconds (0: did not wait).

    ``__cause__`` is the ConnectionError of the environment. ``is_charged`` says whether the replacement of the worker
    counts as a restart of its RestartPolicy. It does not, unless the connection before was lost within 10 s too.
    """

    def __init__(
        self, *, type_name: str, cause: str, timeout_s: float = 0.0, is_charged: bool = False, **where: Unpack[Where]
    ) -> None:
        self.type_name, self.timeout_s, self.is_charged = type_name, timeout_s, is_charged
        cause = f"{type_name}: {cause}".removesuffix(": ")
        what = f"lost its server {_when(where)}: {cause}"
        advice = "Its environment is not used again."
        if timeout_s:
            what = f"found no server within {timeout_s:g} s {_when(where)}: {cause}"
            advice = "Start the server, or raise Timeouts(start_s=…), timeouts.start_s in a config."
        super().__init__(f"{_who(where)} {what}. {advice}", cause=cause, what=what, **where)


class NotPlaced(WorkerError):
    """Error raised when no node had room for a worker within ``timeout_s`` seconds. ``missing`` says what was short."""

    def __init__(
        self, *, worker_id: int, env_ids: Sequence[int], timeout_s: float, wanted: str, missing: str, cluster: str
    ) -> None:
        self.timeout_s, self.wanted, self.missing, self.cluster = timeout_s, wanted, missing, cluster
        where = Where(worker_id=worker_id, env_ids=env_ids, phase="start")
        what = f"could not be placed within {timeout_s:g} s: {missing}"
        text = (
            f"{_who(where)} wants {wanted} and {what}. "
            f"The cluster has {cluster}. Ask for less (resources=…), use fewer workers (n_workers=…), or add a node "
            "that has it. If a node is only slow to start, raise Timeouts(start_s=…)."
        )
        super().__init__(text, cause=missing, what=what, **where)


class ProtocolError(WorkerError):
    """Error raised when a worker sent a message that violates the protocol. ``reason`` describes the message.

    No part of the message was used. The worker was killed, unless it is a game that the user started.
    """

    def __init__(
        self, *, reason: str, output: str = "", ticket: int = 0, advice: str = "", **where: Unpack[Where]
    ) -> None:
        self.reason, self.output, self.ticket = reason, output, ticket
        what, sent = f"broke the protocol {_when(where)}", f"it sent {reason}"
        text = f"{_who(where)} {what} (request {ticket}) and was killed: {sent}. Nothing of it was used. {advice}"
        super().__init__(f"{text}{_tail(output)}", cause=reason, what=f"{what}: {sent}", **where)


class RestartsExhausted(WorkerError):
    """Error raised when a worker failed after the last restart that its RestartPolicy allows.

    ``first`` and ``last`` are the worker's first and last errors within ``within_s`` seconds. The text contains the
    headline of ``first`` and the full text of ``last``.
    """

    def __init__(
        self, *, first: WorkerError, last: WorkerError, restarts: int, within_s: float, then: str = "raise"
    ) -> None:
        times = "once" if restarts == 1 else f"{restarts} times"
        window = f" within {within_s:g} s" if math.isfinite(within_s) else ""
        if window and isinstance(last, WorkerTimedOut):
            window += " (time in which it hung is not counted)"
        self.first, self.last = first, last
        where = Where(worker_id=last.worker_id, env_ids=last.env_ids, phase=last.phase)
        what = f"was restarted {times}{window} and failed again"
        super().__init__(
            f"{_who(where)} {what}.\n"
            "Fix the cause of the last error, or allow more (--restarts N, in a config restarts.max_restarts)"
            f"{', or go on without this worker (restarts.then: drop)' if then == 'raise' else ''}.\n"
            f"First: {first.headline}\nLast: {last}",
            cause=last.cause,
            what=f"{what}: {last.headline}",
            **where,
        )


class BadAction(EnvManagerError):
    """Error raised for invalid actions or env_ids. Nothing has been sent, so the manager is unchanged."""


class ManagerClosed(EnvManagerError):
    """Error raised by a call made after ``close()``, or by a call that was running when the manager was closed."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: the manager was closed before or during this call. Make a new manager.")


class CallStopped(EnvManagerError):
    """Error raised by a wait for steps that ``EnvManager.stop_waiting`` has ended. No step is lost: see ``state()``."""


class UsageError(EnvManagerError):
    """Error raised for an invalid or untimely call, or for options that are invalid or contradictory."""


class ConfigError(UsageError):
    """Error raised for an invalid config. The text has one line per mistake."""


class LostEpisode(EnvManagerError):
    """Error raised in a coroutine whose episode was cut, because the worker in which it played has failed.

    ``cause``: error of the worker, usually a WorkerError. ``task``: what the episode was begun with.
    """

    def __init__(self, cause: Exception, *, task: Any, env_id: int) -> None:
        self.cause, self.task, self.env_id = cause, task, env_id
        why = (getattr(cause, "headline", "") or str(cause)).rstrip(".")
        super().__init__(f"the episode in env {env_id} was lost: {why}. Begin another one: pool.begin(task).")


class StalePolicy(EnvManagerError):
    """Error of a result of ``Pool.play`` with a step that a policy ``lag`` versions before the present one decided."""

    def __init__(self, *, lag: int, max_policy_lag: int) -> None:
        self.lag, self.max_policy_lag = lag, max_policy_lag
        super().__init__(f"the policy of the oldest step is {lag} versions old, above max_policy_lag={max_policy_lag}.")


class ServerFull(EnvManagerError, ConnectionError):
    """Error that an environment raises in ``reset`` if its server has no room for it now. It is a ConnectionError too.

    ``kind: asyncio`` tries again until ``Timeouts.start_s`` has passed.
    """


class NotWritten(EnvManagerError, OSError):
    """Error raised when a file could not be written, for example because the disk is full. It is an OSError too."""


class ImportFailed(EnvManagerError, ImportError):
    """Error raised when ``library`` is installed but cannot be imported, or lacks a part that is imported.

    An ``except ImportError`` clause catches this error and its subclass MissingExtra too.
    """

    def __init__(self, text: str, *, library: str) -> None:
        super().__init__(text)
        self.name = self.library = library


class MissingExtra(ImportFailed, ModuleNotFoundError):
    """Error raised when an optional library is not installed. The text ends with the pip command that installs it."""

    def __init__(self, what: str, *, library: str, extra: str | None, package: str = "envmanager") -> None:
        wanted = library.partition(".")[0] if extra is None else f"'{package}[{extra.replace('_', '-')}]'"
        super().__init__(f"{what} needs {library}, which is not installed: pip install {wanted}", library=library)
        self.extra = extra
