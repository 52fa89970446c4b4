"""``envmanager godot watch``: print a line for each checkpoint that plays, and one a second on ended episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envmanager.cli.display import of_behavior
from envmanager.cli.run import EXIT_DONE, Notices, Stopped, StopSignals
from envmanager.cli.wrapping import describe_notice
from envmanager.training.evaluation import mean_and_spread
from envmanager.training.watching import Watching, WatchPlan


def watch(**options: Any) -> int:
    """Play and return the exit code: 128 + the signal's number when a signal ended it.

    ``options`` are those of WatchPlan.
    """
    lines = Lines()
    with Notices(lines), StopSignals():
        try:
            Watching(WatchPlan(**options), lines).go()
        except Stopped as stopped:
            return stopped.exit_code
    return EXIT_DONE


class Lines:
    """A Report that prints lines, and a display of notices."""

    def plays(self, game: str, checkpoint: str) -> None:
        """Print which checkpoint plays from now on."""
        self._show(f"{game}: checkpoint {checkpoint} plays")

    def ended(self, n_steps: int, returns: Mapping[str, list[float]]) -> None:
        """Print the mean returns of the episodes since the last report; each arena has taken ``n_steps``."""
        told = [f"steps of each arena {n_steps:,}", f"episodes {sum(map(len, returns.values())):,}"]
        for behavior, own in returns.items():
            told.append(f"return{of_behavior(behavior, returns)} {mean_and_spread(own)[0]:.4g}")
        self._show("  ".join(told))

    def show_notice(self, level: str, text: str) -> None:
        """Show a warning of the library."""
        self._show(describe_notice(level, text))

    def _show(self, text: str) -> None:
        print(text, flush=True)
