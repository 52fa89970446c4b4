"""Trains many PPOs on a MuJoCo task at once, on one core, and prints how much each variant of the trainer matters.

    nice python tools/ppo_variants.py [--env Hopper-v4] [--seeds 16] [--first 0] [--steps 65536] [--only NAME …]

The settings are those of ``ppo-hopper`` in compare_learning.py. The variants are the combinations of what differs in
this library's PPO and in Stable-Baselines3's: whether the scales of observations and of rewards are learned with each
step, as there, or with each rollout, as here. All training runs are one batch: the first axis of each tensor is the
run. So this is neither library's code. But from the same weights, environment and random numbers, ``sb3`` learns the
weights that Stable-Baselines3's PPO learns, and ``ours`` those that this library's learns, within 1e-6. It prints, with
standard errors over the seeds, the return of the last 100 training episodes, and that of ten greedy ones.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor

ROLLOUT, MINIBATCH, EPOCHS, RATE, GAMMA, LAMBDA, CLIP, HIDDEN = 2048, 64, 10, 3e-4, 0.99, 0.95, 0.2, 64
N_GREEDY = 10


class Variant(NamedTuple):
    """What is learned with each rollout instead of each step, and whether advantages are divided by n or n - 1."""

    late_observations: bool
    late_rewards: bool
    divides_by_n: bool = False


VARIANTS = {
    "sb3": Variant(False, False),
    "ours": Variant(True, True, divides_by_n=True),
    "late observations": Variant(True, False),
    "late rewards": Variant(False, True),
}
RATIO = math.sqrt((MINIBATCH - 1) / MINIBATCH)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--env", default="Hopper-v4")
    parser.add_argument("--seeds", type=int, default=16, help="training runs of each variant")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=65_536)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    runs = Runs(
        arguments.env, [VARIANTS[name] for name in arguments.only for _ in seeds], [*seeds] * len(arguments.only)
    )
    for n_steps in range(ROLLOUT, arguments.steps + 1, ROLLOUT):
        runs.collect()
        runs.learn(n_steps / arguments.steps)
        print(n_steps, file=sys.stderr)
    last, greedy = ([of[at : at + len(seeds)] for at in range(0, runs.n, len(seeds))] for of in runs.figures())
    print("| variant | last 100 episodes | greedy | by seed |\n|---|---|---|---|")
    for name, own, theirs in zip(arguments.only, last, greedy, strict=True):
        each = ", ".join(f"{mean:.0f}" for mean in own)
        print(f"| {name} | {with_error(own)} | {with_error(theirs)} | {each} |")


def with_error(values: Sequence[float]) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.0f} ± {error:.0f}"


class Moments:
    """Means and variances of ``[n_runs, …]`` numbers so far."""

    def __init__(self, *shape: int) -> None:
        self.mean, self.variance = np.zeros(shape), np.ones(shape)
        self.count = np.full((shape[0], *[1] * (len(shape) - 1)), 1e-4)

    def update(self, values: np.ndarray, chosen: np.ndarray) -> None:
        """Update those of the ``chosen`` runs with ``values``, ``[n, n_runs, …]``."""
        total, where = self.count + len(values), chosen.reshape(self.count.shape)
        delta = values.mean(0) - self.mean
        spread = self.variance * self.count + values.var(0) * len(values) + delta**2 * self.count * len(values) / total
        self.mean = np.where(where, self.mean + delta * len(values) / total, self.mean)
        self.variance = np.where(where, spread / total, self.variance)
        self.count = np.where(where, total, self.count)

    def normalized(self, values: np.ndarray, center: bool = True) -> np.ndarray:
        scaled = (values - self.mean * center) / np.sqrt(self.variance + 1e-8)
        return np.clip(scaled, -10, 10).astype(np.float32)


class Runs:
    """Training runs, one for each variant and seed. Tests of the arithmetic may replace the random numbers."""

    def __init__(self, env: str, variants: Sequence[Variant], seeds: Sequence[int]) -> None:
        self.n = len(seeds)
        made = [gymnasium.make(env) for _ in seeds]
        self.limit = made[0].spec.max_episode_steps if made[0].spec and made[0].spec.max_episode_steps else 10**9
        self.envs: list[Any] = [each.unwrapped for each in made]  # without the checks, which cost as much as a step
        self.space: Any = made[0].action_space
        self.n_inputs, self.n_actions = self.envs[0].observation_space.shape[0], self.space.shape[0]
        self.late, self.late_rewards, by_n = np.array(variants).T
        self.correction = torch.from_numpy(np.where(by_n, RATIO, 1.0).astype(np.float32))[:, None]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.noise: Callable[[], Tensor] = lambda: torch.stack(
            [torch.randn(self.n_actions, generator=each) for each in generators]
        )
        self.order: Callable[[], Tensor] = lambda: torch.stack(
            [torch.randperm(ROLLOUT, generator=each) for each in generators]
        )
        begun = [self._begin(each) for each in generators]
        self.weights = [torch.stack(parts).requires_grad_() for parts in zip(*begun, strict=True)]
        """Three weights and biases in turn for the actor, and for the critic, then the logarithms of the spreads."""
        self.optimizer = torch.optim.Adam(self.weights, lr=RATE, eps=1e-5, fused=True)
        self.scale, self.spread = Moments(self.n, self.n_inputs), Moments(self.n)
        self.obs = np.stack([env.reset(seed=seed)[0] for env, seed in zip(self.envs, seeds, strict=True)])
        self.scale.update(self.obs[None], ~self.late)
        self.total, self.discounted, self.length = np.zeros(self.n), np.zeros(self.n), np.zeros(self.n, np.int64)
        self.returns: list[list[float]] = [[] for _ in seeds]
        self.rows: dict[str, np.ndarray] = {}

    def _begin(self, generator: torch.Generator) -> list[Tensor]:
        parts = []
        for n_out, last_gain in ((self.n_actions, 0.01), (1, 1.0)):
            sizes = ((self.n_inputs, HIDDEN, math.sqrt(2)), (HIDDEN, HIDDEN, math.sqrt(2)), (HIDDEN, n_out, last_gain))
            for before, after, gain in sizes:
                weight = torch.nn.init.orthogonal_(torch.empty(after, before), gain, generator=generator)
                parts += [weight.T.contiguous(), torch.zeros(1, after)]
        return [*parts, torch.zeros(1, self.n_actions)]

    def output(self, obs: Tensor, first: int) -> Tensor:
        """Return what the network whose parts begin at ``first`` makes of ``[n_runs, n, k]``."""
        for part in (first, first + 2):
            obs = torch.baddbmm(self.weights[part + 1], obs, self.weights[part]).tanh()
        return torch.baddbmm(self.weights[first + 5], obs, self.weights[first + 4])

    def log_prob(self, mean: Tensor, action: Tensor) -> Tensor:
        log_std = self.weights[12]
        each = -0.5 * ((action - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)
        return each.sum(-1)

    @torch.no_grad()
    def collect(self) -> None:
        """Play a rollout in each environment, and compute its advantages."""
        found: dict[str, list[np.ndarray]] = {
            name: [] for name in ("seen", "obs", "action", "old", "value", "reward", "scaled", "cut", "ended")
        }
        for _ in range(ROLLOUT):
            obs = self.scale.normalized(self.obs)
            rows = torch.from_numpy(obs)[:, None]
            mean = self.output(rows, 0)
            action = mean + self.noise()[:, None] * self.weights[12].exp()
            acted = action[:, 0].numpy()
            seen, reward, ended, last = self._step(np.clip(acted, self.space.low, self.space.high))
            value = self.output(rows, 6)[:, 0, 0].numpy()
            row = (self.obs, obs, acted, self.log_prob(mean, action)[:, 0].numpy(), value, reward)
            self.obs = seen
            self.scale.update(seen[None], ~self.late)
            self.discounted = self.discounted * GAMMA + reward
            self.spread.update(self.discounted[None], np.ones(self.n, np.bool_))
            self.discounted[ended] = 0.0
            cut = np.zeros(self.n, np.float32)
            if last:
                at = list(last)
                final = seen.copy()
                final[at] = list(last.values())
                cut[at] = GAMMA * self._values(final)[at]
            for name, part in zip(found, (*row, self.spread.normalized(reward, center=False), cut, ended), strict=True):
                found[name].append(part)
        of = self.rows = {name: np.stack(parts) for name, parts in found.items()}
        scaled = np.where(self.late_rewards, self.spread.normalized(of["reward"], center=False), of["scaled"])
        self._add_advantages(scaled + of["cut"])
        if self.late.any():
            self.scale.update(of["seen"], self.late)
            of["obs"] = np.where(self.late[:, None], self.scale.normalized(of["seen"]), of["obs"])
            obs, action = (torch.from_numpy(of[name].swapaxes(0, 1).copy()) for name in ("obs", "action"))
            of["old"] = np.where(self.late, self.log_prob(self.output(obs, 0), action).numpy().T, of["old"])

    def _step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[int, np.ndarray]]:
        """Return observations, rewards, ends, and the last observations of episodes that the limit of time cut."""
        seen, rewards, ended = np.empty_like(self.obs), np.empty(self.n), np.zeros(self.n, np.bool_)
        last: dict[int, np.ndarray] = {}
        self.length += 1
        for run, (env, action) in enumerate(zip(self.envs, actions, strict=True)):
            seen[run], rewards[run], ended[run], _, _ = env.step(action)
            self.total[run] += rewards[run]
            if not ended[run] and self.length[run] >= self.limit:
                last[run] = seen[run].copy()
                ended[run] = True
            if ended[run]:
                self.returns[run].append(float(self.total[run]))
                self.total[run], self.length[run] = 0.0, 0
                seen[run] = env.reset()[0]
        return seen, rewards, ended, last

    def _values(self, obs: np.ndarray) -> np.ndarray:
        values: np.ndarray = self.output(torch.from_numpy(self.scale.normalized(obs))[:, None], 6)[:, 0, 0].numpy()
        return values

    def _add_advantages(self, reward: np.ndarray) -> None:
        value, goes_on = self.rows["value"], 1.0 - self.rows["ended"]
        advantage, after, running = np.zeros_like(value), self._values(self.obs), np.zeros(self.n)
        for row in reversed(range(ROLLOUT)):
            running = reward[row] + GAMMA * goes_on[row] * (after + LAMBDA * running) - value[row]
            advantage[row], after = running, value[row]
        self.rows |= {"advantage": advantage, "goal": advantage + value}

    def learn(self, progress: float) -> None:
        """Learn from the rollout."""
        self.optimizer.param_groups[0]["lr"] = RATE * (1 - progress)
        names = ("obs", "action", "old", "advantage", "goal")
        rows = [torch.from_numpy(self.rows[name].swapaxes(0, 1).copy()) for name in names]
        runs = torch.arange(self.n)[:, None]
        for _ in range(EPOCHS):
            for chosen in self.order().split(MINIBATCH, dim=1):
                obs, action, old, advantage, goal = (part[runs, chosen] for part in rows)
                ratio = (self.log_prob(self.output(obs, 0), action) - old).exp()
                deviation = advantage.std(1, keepdim=True) * self.correction
                advantage = (advantage - advantage.mean(1, keepdim=True)) / (deviation + 1e-8)
                gain = torch.min(advantage * ratio, advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean(1)
                error = (goal - self.output(obs, 6)[..., 0]).square().mean(1)
                self.optimizer.zero_grad()
                (0.25 * error - gain).sum().backward()
                gradients = [each.grad for each in self.weights if each.grad is not None]
                norm = torch.stack([each.flatten(1).norm(dim=1) for each in gradients]).norm(dim=0)
                for each in gradients:
                    each.mul_((0.5 / (norm + 1e-6)).clamp(max=1.0)[:, None, None])
                self.optimizer.step()

    @torch.no_grad()
    def figures(self) -> tuple[list[float], list[float]]:
        """Return for each run the mean return of its last 100 episodes, and that of greedy ones."""
        greedy = np.zeros((self.n, N_GREEDY))
        for episode in range(N_GREEDY):
            obs = np.stack([env.reset(seed=10_000 + episode)[0] for env in self.envs])
            running = np.ones(self.n, np.bool_)
            for _ in range(self.limit):
                mean = self.output(torch.from_numpy(self.scale.normalized(obs))[:, None], 0)[:, 0].numpy()
                for run in np.flatnonzero(running):
                    action = np.clip(mean[run], self.space.low, self.space.high)
                    obs[run], reward, ended, _, _ = self.envs[run].step(action)
                    greedy[run, episode] += reward
                    running[run] = not ended
                if not running.any():
                    break
        return [statistics.fmean(each[-100:]) for each in self.returns], greedy.mean(1).tolist()


if __name__ == "__main__":
    main()
