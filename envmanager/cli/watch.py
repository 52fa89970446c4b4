"""``envmanager godot watch``: a line when a checkpoint plays, and one a second of the episodes that have ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envmanager.cli.display import describe_notice
from envmanager.cli.run import EXIT_DONE, Notices, Stopped, StopSignals
from envmanager.training.evaluation import mean_and_spread
from envmanager.training.watching import Watching, WatchPlan


def watch(**options: Any) -> int:
    """Play; the exit code, 128 + the signal's number when one ended it. ``options`` are those of WatchPlan."""
    lines = Lines()
    with Notices(lines), StopSignals():
        try:
            Watching(WatchPlan(**options), lines).go()
        except Stopped as stopped:
            return stopped.exit_code
    return EXIT_DONE


class Lines:
    """A Report, and where notices go."""

    def plays(self, game: str, checkpoint: str) -> None:
        """The policies of this checkpoint play from now on."""
        self._show(f"{game}: checkpoint {checkpoint} plays")

    def ended(self, n_steps: int, returns: Mapping[str, list[float]]) -> None:
        """After so many steps: what the episodes brought that ended lately."""
        told = [f"steps {n_steps:,}", f"episodes {sum(map(len, returns.values())):,}"]
        for behavior, own in returns.items():
            whose = f" of {behavior!r}" if len(returns) > 1 else ""
            told.append(f"return{whose} {mean_and_spread(own)[0]:.4g}")
        self._show("  ".join(told))

    def show_notice(self, level: str, text: str) -> None:
        """What the library warns of."""
        self._show(describe_notice(level, text))

    def _show(self, text: str) -> None:
        print(text, flush=True)
