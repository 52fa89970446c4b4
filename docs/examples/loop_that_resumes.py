"""A policy gradient in one page, around a Gymnasium ``VectorEnv``. Killed at any moment, it goes on from its file.

    python docs/examples/loop_that_resumes.py run.pt --updates 100

The file has the network, its optimizer, the generator, where the environments stand, and what the loop has counted.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from envmanager import RestartPolicy, SubprocessEnvManager
from envmanager.interop import as_vector_env

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file", type=Path)
parser.add_argument("--updates", type=int, default=100)
parser.add_argument("--n-workers", type=int, default=2)
args = parser.parse_args()

N_ENVS, N_STEPS, GAMMA = 4, 32, 0.99
torch.set_num_threads(1)
torch.manual_seed(0)
manager = SubprocessEnvManager(
    "CartPole-v1", N_ENVS, n_workers=args.n_workers, seed=0, restarts=RestartPolicy(keep_episodes=True)
)
envs = as_vector_env(manager, autoreset_mode="NextStep")
net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3))  # two logits and a value
optimizer = torch.optim.Adam(net.parameters(), 3e-3)
returns, first, ended = np.zeros(N_ENVS), 0, np.zeros(N_ENVS, bool)

if args.file.exists():
    saved = torch.load(args.file, weights_only=False)
    net.load_state_dict(saved["net"]), optimizer.load_state_dict(saved["optimizer"])
    returns, first, ended = saved["loop"]
    obs, _ = envs.reset(state=saved["envs"])
    torch.set_rng_state(saved["generator"])  # after all else that may draw
    print(f"goes on after {first} updates")
else:
    obs, _ = envs.reset(seed=0)

for update in range(first, args.updates):
    log_probs, values, rewards, goes_on, counts = [], [], [], [], []
    for _ in range(N_STEPS):
        logits, value = net(torch.as_tensor(obs)).split([2, 1], dim=1)
        chosen = Categorical(logits=logits)
        actions = chosen.sample()
        counts.append(torch.as_tensor(~ended))  # an ended episode ignores its action and begins the next one
        obs, reward, terminated, truncated, _ = envs.step(actions.numpy())
        log_probs.append(chosen.log_prob(actions)), values.append(value[:, 0])
        ended = terminated | truncated
        rewards.append(torch.as_tensor(reward, dtype=torch.float32)), goes_on.append(torch.as_tensor(~ended))
        returns += reward
        returns[ended] = 0.0
    target, targets = net(torch.as_tensor(obs))[:, 2].detach(), []
    for reward, going in zip(reversed(rewards), reversed(goes_on), strict=True):
        target = reward + GAMMA * target * going
        targets.append(target)
    advantages = torch.stack(targets[::-1]) - torch.stack(values)
    losses = -torch.stack(log_probs) * advantages.detach() + 0.5 * advantages**2
    optimizer.zero_grad()
    losses[torch.stack(counts)].mean().backward()
    optimizer.step()
    everything = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "generator": torch.get_rng_state()}
    new = args.file.with_suffix(".new")
    with new.open("wb") as file:
        torch.save({**everything, "envs": envs.state(), "loop": (returns, update + 1, ended)}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, args.file)  # the file is there whole, or the one before

weights = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
print(f"{args.updates} updates, weights {hashlib.sha256(weights).hexdigest()}")
envs.close()
