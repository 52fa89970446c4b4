"""The host of a GodotEnvManager. It finds a game and runs its engines, or waits for a game that the user starts."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from envmanager.data.seeding import derive_seed
from envmanager.errors import UsageError
from envmanager.godot.engine_link import EngineLink, EnginePlan
from envmanager.godot.games import UNFINISHED, Game, command_for, find_game, import_command
from envmanager.godot.options import GodotOptions, check_json
from envmanager.hosts.descriptors import wait_for
from envmanager.hosts.link import SIGKILL
from envmanager.hosts.link_host import LinkHost, Resources
from envmanager.hosts.poller import Poller
from envmanager.hosts.spin import spin_ns
from envmanager.kernel.host import EnvWorker
from envmanager.kernel.table import Entry
from envmanager.options import ResetConfig
from envmanager.processes.starting import execute
from envmanager.system.interrupts import allow_interrupts, defer_interrupts
from envmanager.system.machine import count_cores

LONG_SPIN_NS = 1_000_000  # how long a trainer with a core to itself polls: longer than a step of 64 arenas
_logger = logging.getLogger("envmanager")
_QUIET_S = 2.0  # without a new imported file: the import of a project of Godot 3 counts as over
_MOST_QUIET = 10  # times that, if no file was imported at all
_ENGINE_SEEDS = 2**31  # added to a worker_id to derive its engine's own seed; exceeds all env_ids


def engines_may_spin(n_engines: int) -> bool:
    """Return whether engines may spin while they wait, which requires one core per engine and one for the trainer.

    GDScript cannot yield, so an engine that spins needs a core that neither the trainer nor another engine uses.
    """
    return n_engines < count_cores()


def trainer_spin_ns(n_engines: int) -> int:
    """Return the time (ns) for which the trainer may poll for answers before it sleeps; 0 if it must sleep at once."""
    return LONG_SPIN_NS if engines_may_spin(n_engines) else spin_ns(n_engines)


class EngineHost(LinkHost[EngineLink]):
    """The host of a GodotEnvManager. The workers are engines that play the same game; each arena is an environment."""

    steps_some_rows = False
    repeats_one = moves_all = True
    rewrites_arrays = False  # each answer comes in new arrays
    link_class: ClassVar[type[EngineLink]] = EngineLink

    options: GodotOptions

    def _make_resources(self) -> Resources[EngineLink]:
        self._told: set[str] = set()
        self._scratch = scratch = Path(tempfile.mkdtemp(prefix="envmanager-godot-"))  # for the games' files
        poller: Poller[EngineLink] = Poller(spin_ns=trainer_spin_ns(len(self.context.entries)))
        give_back = partial(shutil.rmtree, scratch, ignore_errors=True)
        return Resources(self.options.timeouts.close_s, poller, give_back)

    @cached_property
    def game(self) -> Game:
        """Game that the engines play. On first use, it is located and its assets are imported."""
        game = find_game(self.env_factory, self.options.engine, self._scratch)
        _import_assets(game, self.options.timeouts.start_s)
        return game

    def make_worker(self, worker_id: int) -> EnvWorker:
        """Start an engine, or listen for a game that the user starts. Return without waiting for its connection."""
        self.context.calls.require_open("the start of a worker")
        entry, options = self.context.entries[worker_id], self.options
        is_attached = options.engine.attach is not None
        cores = sorted(os.sched_getaffinity(0))
        seed = secrets.randbits(31) if options.seed is None else options.seed
        plan = self.plan_of(
            entry,
            EnginePlan,
            options=options,
            command=() if is_attached else command_for(self.game, options.engine),
            environ=self._environ(entry),
            cores={cores[worker_id % len(cores)]} if options.engine.pin else set(cores),
            seed=derive_seed(seed, _ENGINE_SEEDS + worker_id, entry.generation),
            may_spin=not is_attached and engines_may_spin(len(self.context.entries)),
            told=self._told,
        )
        return self.care_for(lambda: self.link_class(plan, self.context.events, entry.times))

    def _environ(self, entry: Entry) -> dict[str, str]:
        """Return the environment variables for ``entry``'s engine. Create its user data folders if they are private."""
        environ = dict(os.environ if self.options.worker_env is None else self.options.worker_env)
        if self.options.engine.user_data == "private":
            for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
                folder = self._scratch / f"user-{entry.worker_id}" / name.lower()
                folder.mkdir(parents=True, exist_ok=True)
                environ[name] = str(folder)
        if self.options.engine.pin:  # on one core, threads of Mesa's software renderer only cost time
            environ.setdefault("LP_NUM_THREADS", "0")
        return environ

    def check_can_travel(self, payload: Any) -> None:
        """Raise UsageError if ``payload`` contains a function, or if reset options or arguments are not JSON values."""
        if not isinstance(payload, list):
            options = payload.options if isinstance(payload, ResetConfig) else payload  # or those of a task
            check_json(dict(options or {}), "the reset options")
            return
        for own in payload:
            if not isinstance(own, tuple):  # actions, or the rows to render
                continue
            name, *rest = own
            if callable(name):
                raise UsageError(
                    f"call() got the function {getattr(name, '__name__', name)!r}, which cannot travel into an engine: "
                    "name a method of the arena's script."
                )
            if len(rest) > 1:  # arguments or values, rows, arguments by name
                check_json([rest[0], *rest[2:]], f"the arguments for {name!r}")


def _import_assets(game: Game, within_s: float) -> None:
    """Import a project's assets if necessary. Raises UsageError if the import takes more than ``within_s`` seconds.

    The import ends with this program. If it is cut, the next start imports the project again.
    """
    if import_command(game) is None:
        return
    imported = game.path / ".import"
    with contextlib.ExitStack() as undo:
        folder = os.open(game.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        undo.callback(os.close, folder)
        fcntl.flock(folder, fcntl.LOCK_EX)
        if (command := import_command(game)) is None:  # another program has done it meanwhile
            return
        _logger.warning("%s is imported before its first start, which may take a minute", game.path)
        if game.major < 4:
            with contextlib.suppress(OSError):  # a folder that cannot be written stays as it is
                imported.mkdir(exist_ok=True)
                (imported / UNFINISHED).touch()
        nowhere = undo.enter_context(open(os.devnull, "wb"))
        try:
            with defer_interrupts():
                deadline = time.monotonic() + max(within_s, 60.0)  # on a busy machine a program starts slowly
                process = execute(command, os.environ, nowhere.fileno(), os.sched_getaffinity(0), deadline)
                undo.callback(process.release)
                undo.callback(process.signal, SIGKILL)
        except OSError as error:
            raise UsageError(f"{game.path} cannot be imported: {error}. Open it in the editor once.") from error
        deadline = time.monotonic() + within_s
        begun_ns = written_ns = imported.stat().st_mtime_ns if imported.is_dir() else 0
        n_quiet, has_ended, is_over = 0, False, False
        while not has_ended and not is_over:
            with allow_interrupts():
                has_ended = bool(wait_for([process.pidfd], min(_QUIET_S, deadline - time.monotonic())))
            if game.major < 4 and imported.is_dir():
                before_ns, written_ns = written_ns, imported.stat().st_mtime_ns
                n_quiet = n_quiet + 1 if written_ns == before_ns else 0
                is_over = n_quiet >= (1 if written_ns != begun_ns else _MOST_QUIET) and _has_imported(game.path)
            if not has_ended and not is_over and time.monotonic() > deadline:
                raise UsageError(
                    f"{game.path} was not imported within {within_s:g} s (timeouts.start_s); the next start tries "
                    "again. Give it more time, or open the project in the editor once."
                )
        if has_ended and process.exit_name() != "EXIT(0)":
            _logger.warning("the import of %s ended by %s; the next start tries again", game.path, process.exit_name())
            return
    (imported / UNFINISHED).unlink(missing_ok=True)


def _has_imported(project: Path) -> bool:
    # The editor of Godot 3's server does not end if the project has fonts: it waits for a preview that is never drawn.
    texts = "".join(path.read_text(encoding="utf-8") for path in project.rglob("?*.import") if path.is_file())
    return all((project / name).exists() for name in re.findall(r'"res://(\.import/.+?)"', texts))
