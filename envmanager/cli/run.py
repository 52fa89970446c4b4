"""``envmanager run``: step environments, show the progress, and print a summary.

::

    Plan ── make_manager ──▶ EnvManager ── StepInfo ──▶ Episodes (counts) ──▶ Display, at intervals
                                 └── logger ──▶ Notices ──▶ Display      └──▶ RunSummary ──▶ Display, --out

The manager is closed before the summary is printed, even after Ctrl-C, SIGTERM or an EnvManagerError.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from envmanager.cli.display import RunDisplay, RunSummary, write_json
from envmanager.cli.explained import Explained
from envmanager.cli.output import LibraryLog
from envmanager.cli.plan import Plan, serve, set_policies
from envmanager.errors import EnvManagerError, NotWritten, UsageError
from envmanager.observe import events
from envmanager.registry import make_manager

if TYPE_CHECKING:
    from typing_extensions import Self

    from envmanager.env_manager import EnvManager


EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_NOT_WRITTEN = 0, 1, 2, 3


def run(plan: Plan, display: RunDisplay, *, verbose: bool = False) -> int:
    """Run ``plan``, show the progress on ``display``, and return the exit code.

    Once a manager has started, a summary is shown, and written to ``plan.out``, even if a signal or an error ended the
    run.
    """
    summary = RunSummary(plan)
    try:
        with Notices(display.show_notice, verbose=verbose), StopSignals() as signals:
            _go(summary, display, signals)
        summary.ended = "done"
    except SystemExit:
        summary.ended = "interrupted"
        raise
    finally:
        if summary.stats.workers:
            display.show_summary(summary)
            if plan.out is not None:
                write_json(plan.out, summary.to_json())
    return EXIT_DONE


def exit_code_of(error: EnvManagerError) -> int:
    """Return the exit code for ``error``: 2 for a UsageError, 3 for NotWritten, 1 for any other error."""
    if isinstance(error, NotWritten):
        return EXIT_NOT_WRITTEN
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED


def _go(summary: RunSummary, display: RunDisplay, signals: StopSignals) -> None:
    """Start the manager of a run, step it as often as planned, and fill in ``summary``."""
    plan = summary.plan
    display.show_start(plan)
    explaining = Explained(plan.manager, display) if plan.explain else contextlib.nullcontext()
    with explaining, display.echoing(plan.manager) as options, make_manager(options) as manager:
        if manager.placement:
            display.show_line(manager.placement)
        if plan.serve is not None:
            display.show_line(f"watch it at {serve(manager, plan.serve, summary.episodes).url}")
        try:
            _step(summary, display, manager)
        finally:
            signals.hold()
            summary.stats = manager.stats()


def _step(summary: RunSummary, display: RunDisplay, manager: EnvManager) -> None:
    plan, episodes = summary.plan, summary.episodes
    n_behaviors = set_policies(manager, plan.make_policy, 0)
    episodes.add_all(manager.reset({"seed": plan.seed, "options": plan.options}))
    started = time.perf_counter()
    with display.running(started):
        try:
            while episodes.env_steps < plan.steps:
                n_behaviors = set_policies(manager, plan.make_policy, n_behaviors)
                episodes.add_all(manager.step())
                if time.perf_counter() >= display.due:
                    display.update(time.perf_counter(), episodes, manager.stats())
        finally:
            summary.wall_s = time.perf_counter() - started


class _Forgiving:
    """A text stream that drops what nobody reads any more."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(BrokenPipeError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class EndOfInput:
    """A thread that waits for the end of standard input, which also comes when the program that holds it is killed.

    Until ``then`` is called, the end counts as a Ctrl-C. From now on, output that such a program would have read is
    dropped, so that the training ends as usual.
    """

    def __init__(self) -> None:
        sys.stdout, sys.stderr = _Forgiving(sys.stdout), _Forgiving(sys.stderr)
        self._then: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGINT)
        self._has_ended = False
        self._lock = threading.Lock()
        threading.Thread(target=self._wait, name="end of input", daemon=True).start()

    def then(self, call: Callable[[], None]) -> None:
        """Call ``call`` in that thread when the input ends, or now if it has ended."""
        with self._lock:
            self._then = call
            if self._has_ended:
                call()

    def _wait(self) -> None:
        with contextlib.suppress(OSError):  # it is closed, or its terminal is gone
            while os.read(0, 65536):
                pass
        with self._lock:
            self._has_ended = True
            self._then()


HINT = "its episode is lost, the others go on; --verbose shows the evidence."
HINT_KEPT = "its episode goes on in the next one, if it can be repeated; --verbose shows the evidence."
HINT_IN_RESET = "no episode had begun; --verbose shows the evidence."


class Notices(LibraryLog):
    """A logging handler and context manager that passes the library's warnings and errors to ``show``.

    ``show`` receives the level, ``"note"``, ``"warning"`` or ``"error"``, and the text.

    With ``verbose=True`` it also shows the evidence of each failure. With ``verbose=False`` it shows, after the first
    restart, a hint to use ``--verbose``. Commands without that option pass None, which shows no hint.
    """

    def __init__(self, show: Callable[[str, str], None], *, verbose: bool | None = None) -> None:
        super().__init__(logging.DEBUG if verbose else logging.WARNING)
        self._show = show
        self._hints = verbose is False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            event = record.args[0] if isinstance(record.args, tuple) and record.args else None
            if record.levelno >= logging.WARNING:
                level = "error" if record.levelno >= logging.ERROR else "warning"
                self._show(level, self.format(record))
            elif isinstance(event, events.Failed):
                self._show("note", self.format(record))
            if self._hints and isinstance(event, events.Restarted):
                self._hints, hint = False, HINT_KEPT if event.policy.keep_episodes else HINT
                self._show("note", HINT_IN_RESET if event.cause.phase in ("start", "reset") else hint)
        except Exception:  # like logging's own handlers, so that a closed terminal does not interrupt a step
            self.handleError(record)


class Stopped(KeyboardInterrupt):
    """Error raised in the main thread to end the command on Ctrl-C or SIGTERM, with the exit code ``exit_code``."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit_code = 128 + signum


class StopSignals:
    """A context in which the first SIGINT or SIGTERM raises Stopped, and later signals are ignored.

    At the end of the context, Stopped becomes a SystemExit with its exit code. After ``hold()`` both signals are
    ignored, so that the manager can close.
    """

    _holding = False

    def __enter__(self) -> Self:
        self._before = {signum: signal.signal(signum, self._stop) for signum in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, _: object, error: object, *__: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if isinstance(error, Stopped):
            raise SystemExit(error.exit_code) from None

    def hold(self) -> None:
        """Ignore SIGINT and SIGTERM until the context ends."""
        self._holding = True

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        if not self._holding:
            self._holding = True
            raise Stopped(signum)
