"""A live view of a training run. The newest policies play the run's Godot game in a window.

::

    run/checkpoints/latest ── its plan, its trainers ──▶ greedy policies ──▶ one engine, in real time
             └── read at most once a second, between two steps

Nothing is written into the training's folder. If a newer checkpoint cannot be played, a warning is logged and the
earlier policies continue to play.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from envmanager.errors import EnvManagerError, UsageError, WorkerDied
from envmanager.godot.games import protocol_of
from envmanager.importing import needed_by
from envmanager.observe.episodes import Episodes
from envmanager.options import RestartPolicy, Wait
from envmanager.registry import ManagerOptions, make_manager
from envmanager.training.learners import FreezeKeys
from envmanager.training.policies.saved import SavedTraining, find
from envmanager.training.runs import checkpoints
from envmanager.training.runs.plan import CONTROL

with needed_by("envmanager.training", extra="torch"):
    import torch

if TYPE_CHECKING:
    from envmanager.env_manager import EnvManager

LOOK_EVERY_S = 1.0
"""Seconds between checks for a newer checkpoint, and between reports of finished episodes."""
_CLOSED_BY_HAND = "EXIT(0)"

_logger = logging.getLogger("envmanager")


@attrs.frozen(kw_only=True)
class WatchPlan:
    """The options for watching a training run. ``directory``: the training's folder.

    ``checkpoint``: name or path of the only checkpoint to play; None to always play the newest. ``shown``: number of
    arenas to show. ``binary``: path of an engine to use instead of the training's. ``headless``: whether to run without
    a window. ``steps``: number of steps to play in each environment; None for no limit.
    """

    directory: Path
    checkpoint: str | None = None
    shown: int = 3
    binary: str | None = None
    headless: bool = False
    steps: int | None = None


class Report(Protocol):
    """A receiver of reports on the checkpoints and episodes that a Watching plays."""

    def plays(self, game: str, checkpoint: str) -> None:
        """Report that the policies of ``checkpoint`` now play ``game``."""

    def ended(self, n_steps: int, returns: Mapping[str, list[float]]) -> None:
        """Report the returns, by behavior, of newly ended episodes. ``n_steps``: number of steps played so far."""


class Watching:
    """A player of a training run's checkpoints. ``go`` returns after ``plan.steps`` steps or when the window closes."""

    def __init__(self, plan: WatchPlan, report: Report) -> None:
        self._plan = plan
        self._report = report
        self._source = Source(plan)
        self._game = ""
        self._n_steps = 0
        self._returns: dict[str, list[float]] = {}

    def go(self) -> None:
        """Play for ``plan.steps`` steps or until the window closes. Raises UsageError if the checkpoint is unusable."""
        saved = self._source.first()
        options = manager_options(saved, self._plan)
        self._game = str(options.env)
        torch.set_num_threads(1)  # the engine and the training need the other cores
        with make_manager(options) as manager:
            self._take(manager, saved)
            try:
                self._play(manager, saved.reset_options())
            except WorkerDied as error:
                if error.phase != "step" or error.exit != _CLOSED_BY_HAND:
                    raise
            finally:
                self._tell()

    def _play(self, manager: EnvManager, given: Mapping[str, Any] | None) -> None:
        episodes = Episodes(
            lambda ended: self._returns.setdefault(ended.behavior, []).append(ended.total), keeps_returns=False
        )
        episodes.add_all(manager.reset({"options": given}))
        keys, due = FreezeKeys(manager), time.monotonic() + LOOK_EVERY_S
        while self._plan.steps is None or self._n_steps < self._plan.steps:
            episodes.add_all(manager.step())
            self._n_steps += 1
            for behavior in keys.pressed():
                _logger.warning(
                    "this window only shows the training, so a key does not freeze %r here: write frozen = [%r] into "
                    "%s, or train with engine.window: true and press the key there.",
                    behavior,
                    behavior,
                    self._plan.directory / CONTROL,
                )
            if time.monotonic() >= due:
                self._tell()
                self._look(manager)
                due = time.monotonic() + LOOK_EVERY_S

    def _tell(self) -> None:
        returns, self._returns = self._returns, {}
        if returns:
            self._report.ended(self._n_steps, returns)

    def _look(self, manager: EnvManager) -> None:
        try:
            newer = self._source.newer()
            if newer is not None:
                self._take(manager, newer)
        except EnvManagerError as error:
            _logger.warning("a newer checkpoint cannot be played, so the previous one continues to play: %s", error)

    def _take(self, manager: EnvManager, saved: SavedTraining) -> None:
        for behavior, policy in saved.policies_for(manager.behavior_specs).items():
            manager.set_policy(behavior, policy)
        self._report.plays(self._game, saved.path.name)


class Source:
    """A source of checkpoints to play: always the training's newest, or only the checkpoint named in the plan."""

    def __init__(self, plan: WatchPlan) -> None:
        self._directory, self._name = plan.directory, plan.checkpoint
        self._seen: Path | None = None

    def first(self) -> SavedTraining:
        """Open and return the first checkpoint to play. Raises UsageError if it does not exist or cannot be read."""
        if self._name is None:
            return self._open()
        elsewhere = Path(self._name)
        if elsewhere in checkpoints.written(elsewhere.parent):
            return SavedTraining.open(elsewhere)
        return SavedTraining.open(self._directory, self._name)

    def newer(self) -> SavedTraining | None:
        """Return the next checkpoint to play, or None if there is no new one. Raises UsageError if it is unreadable."""
        try:
            found = self._seen if self._name is not None else find(self._directory)
        except UsageError:  # the training has been restarted and has no checkpoint yet
            return None
        if found == self._seen:
            return None
        self._seen = found
        return self._open()

    def _open(self) -> SavedTraining:
        saved = SavedTraining.open(self._directory)
        self._seen = saved.path
        return saved


def manager_options(saved: SavedTraining, plan: WatchPlan) -> ManagerOptions:
    """Return manager options that run the training's game in one engine, in real time.

    Raises UsageError if the training does not play a Godot game.
    """
    options = saved.manager_options()
    if options.kind != "godot":
        raise UsageError(
            f"the training in {plan.directory} plays {options.env!r} with the manager {options.kind!r}, which is no "
            "Godot game: there is nothing to watch."
        )
    engine = {
        **(options.engine or {}),
        "window": not plan.headless,
        "speed": "realtime",
        "shown": plan.shown,
        "pin": False,  # otherwise it would share a core with the training's first engine
        "attach": None,
    }
    if plan.binary is not None:
        engine["binary"] = plan.binary
    is_unchanged = (engine.get("protocol") or protocol_of(str(options.env))) == "godot_rl"
    return ManagerOptions(
        kind="godot",
        env=options.env,
        n_envs=1 if is_unchanged else plan.shown,  # a game of godot_rl_agents has its own number of copies
        wait=Wait.all(),
        restarts=RestartPolicy(max_restarts=0),
        engine=engine,
    )
