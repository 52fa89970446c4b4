"""Prioritized level replay (Jiang, Grefenstette and Rocktäschel 2021) as a source of tasks.

    python docs/examples/level_replay.py

A level is a seed. Levels whose last return was least expected are played more often, and levels that were not played
for long, too. In the paper the score of a level is the mean magnitude of its advantages, which a trainer knows; here it
is the distance of its last return from the mean of those before, which every environment has.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from envmanager import RandomPolicy, SubprocessEnvManager, Task, TaskResult


class LevelReplay:
    """A source of tasks that begins an episode with one of ``levels``, by the ranks of their scores and by their age.

    ``temperature``: 0.1 as in the paper; the larger, the more alike are the levels. ``staleness``: share of the
    probability that is given by age.
    """

    def __init__(
        self, levels: Sequence[int], *, temperature: float = 0.1, staleness: float = 0.1, seed: int = 0
    ) -> None:
        self.levels = list(levels)
        self.temperature, self.staleness = temperature, staleness
        n = len(self.levels)
        self.scores, self.means, self.counts, self.drawn_at = np.zeros(n), np.zeros(n), np.zeros(n, int), np.zeros(n)
        self.n_drawn = 0
        self.rng = np.random.default_rng(seed)

    def probabilities(self) -> np.ndarray:
        """Return the probability with which each level is drawn next, among those that have been drawn before."""
        ranks = np.empty(len(self.levels))
        ranks[np.argsort(-self.scores, kind="stable")] = np.arange(1, len(self.levels) + 1)
        is_seen = self.drawn_at > 0
        by_score = is_seen * ranks ** (-1 / self.temperature)
        by_age = is_seen * (self.n_drawn + 1 - self.drawn_at)
        mixed = (1 - self.staleness) * by_score / by_score.sum() + self.staleness * by_age / by_age.sum()
        return mixed / mixed.sum()

    def next_task(self, env_id: int) -> Task:
        new = np.flatnonzero(self.drawn_at == 0)
        if self.rng.random() < len(new) / len(self.levels):  # the fewer are left, the more are replayed
            k = int(self.rng.choice(new))
        else:
            k = int(self.rng.choice(len(self.levels), p=self.probabilities()))
        self.n_drawn += 1
        self.drawn_at[k] = self.n_drawn
        return Task(seed=self.levels[k], id=k)

    def ended(self, result: TaskResult) -> None:
        k = result.task.id
        self.counts[k] += 1
        self.scores[k] = abs(result.total - self.means[k])
        self.means[k] += (result.total - self.means[k]) / self.counts[k]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--levels", type=int, default=20)
    parser.add_argument("--episodes", type=int, default=500)
    arguments = parser.parse_args()
    source = LevelReplay(range(arguments.levels))
    with SubprocessEnvManager("CartPole-v1", n_envs=4, n_workers=2, seed=0) as manager:
        manager.set_policy("default", RandomPolicy(manager.behavior_specs["default"], seed=0))
        manager.reset(tasks=source)
        while source.counts.sum() < arguments.episodes:
            manager.step()
    for k in np.argsort(-source.counts)[:5]:
        print(f"level {source.levels[k]}: {source.counts[k]} episodes, mean return {source.means[k]:.1f}")


if __name__ == "__main__":
    main()
