"""Trains many DQNs on CartPole at once, on one GPU, and prints how much each variant of the trainer matters.

    python tools/dqn_variants.py [--seeds 64] [--steps 50000] [--device cuda]

The settings are those of ``dqn-tuned`` in compare_learning.py. The variants are all combinations of what was different
in this library's DQN and in Stable-Baselines3's: the initial weights, Adam's epsilon, and the step of the first update.
All training runs are one batch: networks, replays and environments are tensors whose first axis is the run. So this is
neither library's code, but the algorithm that both have. It prints, with standard errors over the seeds, the greedy
return at the end, the mean of the ten greedy returns on the way, and the return of the last 100 training episodes.
"""

from __future__ import annotations

import argparse
import itertools
import math

import torch
from torch import Tensor

HIDDEN, BATCH, RATE, GAMMA, EPISODES = 256, 64, 2.3e-3, 0.99, 10
SHAPES = [(4, HIDDEN), (1, HIDDEN), (HIDDEN, HIDDEN), (1, HIDDEN), (HIDDEN, 2), (1, 2)]
"""Shapes of a network's weights and biases, in turn."""
VARIANTS = list(itertools.product(("default", "orthogonal"), (1e-8, 1.5e-4)))
"""Initial weights, and Adam's epsilon."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=64, help="training runs of each variant")
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    torch.set_default_device(arguments.device)
    print("| initial weights | epsilon of Adam | first update | greedy at the end | greedy on the way | last 100 |")
    print("|---|---|---|---|---|---|")
    for first_update in (1024, 1255):
        runs = Runs(arguments.seeds, first_update, arguments.steps)
        for step in range(arguments.steps):
            runs.step(step)
            if (step + 1) % 5000 == 0:
                runs.curve.append(runs.greedy_returns())
        for (weights, epsilon), figures in zip(VARIANTS, runs.figures(), strict=True):
            print(f"| {weights} | {epsilon:g} | {first_update:,} | {' | '.join(figures)} |", flush=True)


class Runs:
    """All training runs whose first update is at the same step: ``n_seeds`` of each variant, one after the other."""

    @torch.no_grad()
    def __init__(self, n_seeds: int, first_update: int, n_steps: int) -> None:
        self.first_update = first_update
        self.n = n = n_seeds * len(VARIANTS)
        self.weights, self.gradient, self.mean, self.square = (torch.zeros(n, n_weights()) for _ in range(4))
        self.parts, self.gradients = parts_of(self.weights), parts_of(self.gradient)
        for run in range(n):
            begin([part[run] for part in self.parts], VARIANTS[run // n_seeds][0])
        self.target = self.weights.clone()
        self.epsilon = torch.tensor([epsilon for _, epsilon in VARIANTS]).repeat_interleave(n_seeds)[:, None]
        self.rows = torch.zeros(n, n_steps, 10)
        """The replay: observation, next observation, action, and 0 if that was a termination or else 1."""
        self.states, self.lengths = new_states(n), torch.zeros(n)
        self.recent, self.n_episodes = torch.zeros(n, 100), torch.zeros(n, dtype=torch.long)
        self.n_batches = 0
        self.curve: list[Tensor] = []

    @torch.no_grad()
    def step(self, step: int) -> None:
        """Take one step in each environment, and learn if an update is due."""
        blind = self.first_update == 1024 and step < 1000  # as in Stable-Baselines3
        explores = 1.0 if blind else 1.0 - 0.96 * min(1.0, step / 8000)
        obs = self.states.float()
        best = values(self.parts, obs[:, None])[2][:, 0].argmax(-1)
        action = torch.where(torch.rand(self.n) < explores, torch.randint(0, 2, (self.n,)), best)
        after, terminated = physics(self.states, action)
        self.rows[:, step] = torch.cat(
            [obs, after.float(), action[:, None].float(), (~terminated[:, None]).float()], dim=1
        )
        self.lengths += 1
        ended = terminated | (self.lengths >= 500)
        place = (self.n_episodes % 100)[:, None]
        self.recent.scatter_(1, place, torch.where(ended, self.lengths, self.recent.gather(1, place)[:, 0])[:, None])
        self.n_episodes += ended
        self.states = torch.where(ended[:, None], new_states(self.n), after)
        self.lengths = torch.where(ended, 0.0, self.lengths)
        if step + 1 >= self.first_update and (step + 1 - self.first_update) % 256 == 0:
            for _ in range(128):
                self.learn(step + 1)
            self.target.copy_(self.weights)

    def learn(self, n_rows: int) -> None:
        """Learn from one batch: the Huber loss, gradients of norm 10 at most, and Adam."""
        drawn = self.rows[torch.arange(self.n)[:, None], torch.randint(0, n_rows, (self.n, BATCH))]
        obs, next_obs, action = drawn[..., :4].contiguous(), drawn[..., 4:8].contiguous(), drawn[..., 8:9].long()
        goal = 1.0 + GAMMA * drawn[..., 9] * values(parts_of(self.target), next_obs)[2].amax(-1)
        first, second, out = values(self.parts, obs)
        error = (out.gather(2, action)[..., 0] - goal).clamp_(-1, 1).div_(BATCH)
        behind = torch.zeros_like(out).scatter_(2, action, error[..., None])
        for layer, before in ((4, second), (2, first), (0, obs)):
            self.gradients[layer].copy_(before.transpose(1, 2) @ behind)
            self.gradients[layer + 1].copy_(behind.sum(1, keepdim=True))
            behind = (behind @ self.parts[layer].transpose(1, 2)).mul_(before > 0)
        self.gradient.mul_((10.0 / (self.gradient.norm(dim=1, keepdim=True) + 1e-6)).clamp_(max=1.0))
        self.n_batches += 1
        self.mean.lerp_(self.gradient, 0.1)
        self.square.mul_(0.999).addcmul_(self.gradient, self.gradient, value=0.001)
        below = self.square.sqrt().div_(math.sqrt(1 - 0.999**self.n_batches)).add_(self.epsilon)
        self.weights.addcdiv_(self.mean, below, value=-RATE / (1 - 0.9**self.n_batches))

    @torch.no_grad()
    def greedy_returns(self) -> Tensor:
        """Return the mean return of each run in ``EPISODES`` greedy episodes."""
        states, total = new_states(self.n, EPISODES), torch.zeros(self.n, EPISODES)
        alive = torch.ones(self.n, EPISODES, dtype=torch.bool)
        for _ in range(500):
            states, terminated = physics(states, values(self.parts, states.float())[2].argmax(-1))
            total += alive
            alive &= ~terminated
        return total.mean(1)

    def figures(self) -> list[list[str]]:
        """Return three means with their standard errors for each variant."""
        curve = torch.stack(self.curve, 1)
        last = self.recent.sum(1) / self.n_episodes.clamp(max=100)
        columns = [torch.stack(each.chunk(len(VARIANTS))) for each in (curve[:, -1], curve.mean(1), last)]
        return [
            [f"{own.mean():.0f} ± {own.std() / math.sqrt(len(own)):.0f}" for own in of_variant]
            for of_variant in zip(*columns, strict=True)
        ]


def n_weights() -> int:
    return sum(n_in * n_out for n_in, n_out in SHAPES)


def parts_of(weights: Tensor) -> list[Tensor]:
    """Return views of ``weights``, one row per network, in the ``SHAPES``."""
    pieces = weights.split([n_in * n_out for n_in, n_out in SHAPES], dim=1)
    return [piece.view(-1, *shape) for piece, shape in zip(pieces, SHAPES, strict=True)]


def begin(parts: list[Tensor], weights: str) -> None:
    """Set the initial weights of one network: PyTorch's own, or orthogonal ones as for PPO."""
    for weight, bias in zip(parts[::2], parts[1::2], strict=True):
        bound = len(weight) ** -0.5
        if weights == "default":
            weight.uniform_(-bound, bound)
            bias.uniform_(-bound, bound)
        else:
            gain = 1.0 if weight.shape[1] == 2 else math.sqrt(2)
            weight.copy_(torch.nn.init.orthogonal_(torch.empty(weight.shape[1], len(weight)), gain).T)


def values(parts: list[Tensor], obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the activations of both hidden layers, and the values of the actions."""
    first = torch.baddbmm(parts[1], obs, parts[0]).relu_()
    second = torch.baddbmm(parts[3], first, parts[2]).relu_()
    return first, second, torch.baddbmm(parts[5], second, parts[4])


def new_states(*shape: int) -> Tensor:
    return torch.rand(*shape, 4, dtype=torch.float64) * 0.1 - 0.05


def physics(states: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next states of CartPole-v1, and whether they are terminations."""
    speed, angle, turn = states[..., 1:].unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    push = (20.0 * action.double() - 10.0 + 0.05 * turn.square() * sin) / 1.1
    turns = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos.square() / 1.1))
    moves = push - 0.05 * turns * cos / 1.1
    after = states + 0.02 * torch.stack([speed, moves, turn, turns], -1)
    return after, (after[..., 0].abs() > 2.4) | (after[..., 2].abs() > math.radians(12))


if __name__ == "__main__":
    main()
