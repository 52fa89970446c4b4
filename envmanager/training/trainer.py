"""The interface of a trainer, which trains the policy of one behavior, and the error for numbers it cannot learn from.

The rule: a NaN or an infinite number is found before a trainer receives it, or before weights with it are saved.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from envmanager.data.specs import as_array
from envmanager.data.steps import AGENT_BITS, AgentSteps, StepInfo
from envmanager.data.trees import leaves, paths
from envmanager.errors import EnvManagerError, UsageError
from envmanager.policy import Policy

if TYPE_CHECKING:
    from torch import nn

Arrays = Mapping[str, np.ndarray]


class NotFinite(EnvManagerError):
    """Error raised when a training meets NaN or an infinite number, which no trainer and no checkpoint receives.

    ``what`` names the number, such as ``"reward"``, ``"obs['speed'][2]"``, ``"loss"`` or a weight. ``n_steps``: agent
    steps of the training before. ``env_id`` is None for what an update of the trainer of ``behavior`` made.
    """

    def __init__(self, behavior: str, what: str, value: float, n_steps: int, agent_id: int | None = None) -> None:
        self.behavior, self.what, self.value, self.n_steps = behavior, what, value, n_steps
        self.env_id = None if agent_id is None else agent_id >> AGENT_BITS
        number = f"{what} = {value} after agent step {n_steps:,}"
        if agent_id is None:
            text = (
                f"{behavior!r} has {number}, and is not saved. Its environments gave only finite numbers, so the "
                "training has diverged: lower learning_rate, or scale large rewards and observations "
                "(normalize_rewards, normalize_observations). --resume goes on from the last checkpoint."
            )
        else:
            agent = agent_id & (1 << AGENT_BITS) - 1
            text = (
                f"env {self.env_id} gave {f'agent {agent} of ' if agent else ''}{behavior!r} {number}. No trainer has "
                "received it, because all weights would become NaN. Mend the environment, or replace such numbers in "
                "a wrapper; `envmanager check` and check_values: true find them too."
            )
        super().__init__(text)


def require_finite(behavior: str, steps: AgentSteps, n_steps: int) -> None:
    """Raise NotFinite for a reward, or a number in an observation to learn from, that is not finite.

    Not learned from are the observations of agents that do not act, and the last ones of episodes that terminated.
    """
    for root, tree in (("reward", steps.reward), ("obs", steps.obs), ("final_obs", steps.final_obs)):
        for number, leaf in enumerate(() if tree is None else leaves(tree)):
            column = as_array(leaf)
            if column.dtype.kind not in "fc" or np.isfinite(column).all():
                continue
            rows = np.flatnonzero(steps.ended) if root == "final_obs" else np.arange(len(steps))
            learned = {"obs": steps.acting_rows, "final_obs": np.flatnonzero(~steps.terminated)}.get(root, rows)
            for place in np.argwhere(~np.isfinite(column)).tolist():
                row, what = rows[place[0]], paths(tree, root)[number] + "".join(f"[{index}]" for index in place[1:])
                if row in learned:
                    raise NotFinite(behavior, what, column[tuple(place)].item(), n_steps, int(steps.agent_id[row]))


class Trainer(ABC):
    """A trainer of one behavior. The controller passes StepInfos to ``add`` and calls ``update`` while ``is_ready()``.

    ``version`` is the number of updates so far; the policy puts this number into every ActionInfo.
    """

    behavior: str
    policy: Policy
    """Policy that acts during training."""
    version: int = 0
    max_policy_lag: float = 1
    """Maximum age of a step in flight at an update, in policy versions. The controller's option overrides it."""
    frozen: bool = False
    """Whether the behavior only acts, greedily. Set from the config, and by ``TrainerController.freeze``."""
    n_before_update: int = 0
    """Number of agent steps before the first update outside rounds, as far as the options say."""
    stops: Callable[[], bool] = staticmethod(lambda: False)
    """Whether an update that takes long is to raise CallStopped. Then it has changed nothing, and comes again."""
    learns_while_playing: bool = False
    """Whether the weights of the policy also change between calls of ``update``."""

    @abstractmethod
    def add(self, info: StepInfo) -> int:
        """Add a worker's step. Copy the arrays, since they are reused. Return the number of new steps to learn from."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Return whether there are enough steps to update. Called again after each update until it returns False."""

    @abstractmethod
    def update(self, progress: float) -> dict[str, float]:
        """Update the weights and increment ``version``. ``progress`` rises from 0 to 1 in the course of training.

        Returns figures for displays and metrics, by name. One that is not finite ends the training.
        """

    @abstractmethod
    def greedy_policy(self) -> Policy:
        """Return a policy that does not explore, for evaluation. It shares the weights, so later updates change it."""

    @abstractmethod
    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return the state that a resumed training run needs, as arrays by name and a dict of JSON data.

        It has the steps in progress too: unless ``environments_were_reset`` follows on a resume, the episodes go on.
        """

    @abstractmethod
    def restore(self, arrays: Arrays, facts: Mapping[str, Any]) -> None:
        """Restore the state that ``state`` returned as ``(arrays, facts)``."""

    def restore_policy(self, arrays: Arrays, facts: Mapping[str, Any]) -> None:
        """Restore the greedy policy from the result of ``state``. The trainer need not be able to learn afterwards.

        The default restores everything. An override can save time, because an array is read from disk only on access.
        """
        self.restore(arrays, facts)

    def greedy_module(self) -> nn.Module:
        """Return the greedy policy as a module, for export. The module need not follow later updates.

        ``forward(*leaves)`` takes the leaves of an observation, tensors ``[n, …]`` in the order of the spec. It returns
        a tuple of the leaves of the action for the environment: shifted, scaled, clipped, and in the spec's dtypes. The
        module includes the policy's normalization, can be traced (``torch.jit.trace``), and works for any n. To be
        exported to Godot games it has a method ``dense()``, which returns its Encoder and a list of DenseLayers. The
        default raises UsageError.
        """
        raise UsageError(
            f"the trainer of {self.behavior!r} cannot be exported: {type(self).__name__} has no greedy_module(), which "
            "returns its greedy policy as a torch.nn.Module."
        )

    def can_update(self) -> bool:
        """Return whether an update is possible at all, even with fewer steps than ``is_ready`` requires.

        Called at the end of a round, and again after each update until it returns False.
        """
        return self.is_ready()

    def not_finite(self) -> str | None:
        """Return the name of a weight that is NaN or infinite, or None. Weights are not saved then.

        The default looks at the parameters of the attribute ``model``, if that is a ``torch.nn.Module``.
        """
        named_parameters = getattr(getattr(self, "model", None), "named_parameters", None)
        for name, tensor in () if named_parameters is None else named_parameters():
            if not tensor.detach().isfinite().all():
                return str(name)
        return None

    def pause(self) -> None:  # noqa: B027  (not needed by trainers that learn only in update())
        """Stop learning, for a freeze or an evaluation, so that the weights do not change until the next ``add``."""

    def collected(self, n_steps: int) -> None:  # noqa: B027  (not needed with constant exploration)
        """Adapt the policy's exploration to ``n_steps`` agent steps so far. ``add`` and ``restore`` must call this."""

    def close(self) -> None:  # noqa: B027
        """Release processes, files and other resources. Must be idempotent."""

    def environments_were_reset(self) -> None:  # noqa: B027  (not needed by trainers that keep nothing between steps)
        """Discard the data of steps in flight. Called before all environments are reset, and at the end of a freeze."""


def require_can_learn_apart(trainer: Any) -> None:
    """Raise UsageError if ``trainer``, a Trainer or its class, cannot learn in a separate process.

    For example, PPO cannot, because it needs steps of its current policy.
    """
    if not math.isinf(trainer.max_policy_lag):
        name = trainer.__name__ if isinstance(trainer, type) else type(trainer).__name__
        raise UsageError(
            f"{name} cannot learn in a process of its own: its policy would change while it plays, and it learns only "
            f"from steps of its present one (max_policy_lag is {trainer.max_policy_lag:g}). Leave out `apart`, or take "
            "a trainer with a replay: dqn, sac."
        )


def generator_states() -> dict[str, np.ndarray]:
    """Return the states of PyTorch's random generators by name, such as ``"torch"`` (CPU) and ``"cuda0"``."""
    import torch

    of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    found = {"torch": torch.get_rng_state(), **{f"cuda{number}": state for number, state in enumerate(of_gpus)}}
    return {name: state.numpy() for name, state in found.items()}


def restore_generators(states: Mapping[str, np.ndarray]) -> None:
    """Restore the states that ``generator_states`` returned. States of missing GPUs are ignored."""
    import torch

    torch.set_rng_state(torch.from_numpy(np.array(states["torch"])))
    for number in range(torch.cuda.device_count()):
        if f"cuda{number}" in states:
            torch.cuda.set_rng_state(torch.from_numpy(np.array(states[f"cuda{number}"])), number)


def named(part: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return ``arrays`` with ``part`` and a dot before each name: in part ``"a"``, ``"bias"`` becomes ``"a.bias"``."""
    return {f"{part}.{name}": array for name, array in arrays.items()}


def of_part(part: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays whose names begin with ``part`` and a dot. The returned names do not have this prefix."""
    return {name[len(part) + 1 :]: arrays[name] for name in arrays if name.startswith(f"{part}.")}
