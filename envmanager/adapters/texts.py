"""Adapters for environments of texts: TextArena's games, GEM's environments, and questions of Reasoning Gym.

::

    "textarena:TicTacToe-v0"     observation: (player, what that player reads)        action: that player's move
    "gem:rg:chain_sum"           observations and actions of the environment
    "reasoning_gym:chain_sum"    observation: a question                              action: the answer

Observations and actions are objects. These libraries seed the random generators of Python and NumPy that all code of a
process shares, so episodes repeat only if the environment is alone in its process.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.adapters.resets import Resetter
from envmanager.adapters.rows import check_info, flag, real_number
from envmanager.data.casting import Casting
from envmanager.data.specs import ArraySpec, BehaviorSpec, BehaviorSpecs, SpecMismatch, describe_value, object_array
from envmanager.data.steps import AgentSteps, Steps
from envmanager.data.trees import Tree
from envmanager.environment import Environment
from envmanager.errors import UsageError
from envmanager.importing import nearest, needed_by

BEHAVIOR = "default"
_OBJECTS = BehaviorSpec(ArraySpec(dtype=np.dtype(object)), ArraySpec(dtype=np.dtype(object)))
_MOST_PLAYERS = 15

_REGISTRIES = {
    "textarena": ("textarena.envs.registration", "ENV_REGISTRY"),
    "gem": ("gem.envs.registration", "ENV_REGISTRY"),
    "reasoning_gym": ("reasoning_gym.factory", "DATASETS"),
}
"""Modules and names of the registries of environments, by library."""


class TextEnvironment(Environment):
    """An environment whose ``reset`` and ``step`` return what Gymnasium's do, but that declares no spaces."""

    can_rest = True

    def __init__(self, env: Any) -> None:
        self.casting: Casting = Casting()
        self._env = env
        self._reset = Resetter(env)
        self._options: Mapping[str, Any] | None = None

    @property
    def behavior_specs(self) -> BehaviorSpecs:
        return {BEHAVIOR: _OBJECTS}

    @property
    def wrapped(self) -> Any:
        return self._env

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        self._options = options
        obs, info = self._begun(seeds[0], options)
        steps = AgentSteps.first(agent_id=np.zeros(1, np.int64), obs=object_array([obs]), info=[info])
        return {BEHAVIOR: steps}

    def step(self, actions: Mapping[str, Tree]) -> Steps:
        return self.steps_of(self._env.step(self.action_of(actions)))

    def action_of(self, actions: Mapping[str, Tree]) -> Any:
        return actions[BEHAVIOR][0]

    def steps_of(self, result: Any) -> Steps:
        obs, reward, terminated, truncated, info = self._result(result)
        number = real_number(reward, "reward", self.casting)
        ends = flag(terminated, "terminated", self.casting), flag(truncated, "truncated", self.casting)
        check_info(info, "info")
        final_obs = acting = None
        reset_info: list[dict[str, Any]] | None = None
        if any(ends):
            final_obs = object_array([obs])
            if self.rests:
                acting = np.zeros(1, np.bool_)
            else:
                obs, first_info = self._begun(None, self._options)
                reset_info = [first_info]
        steps = AgentSteps.stepped(
            agent_id=np.zeros(1, np.int64),
            obs=object_array([obs]),
            reward=np.array([number], np.float32),
            terminated=np.array(ends[:1]),
            truncated=np.array(ends[1:]),
            final_obs=final_obs,
            acting=acting,
            info=[info],
            reset_info=reset_info,
        )
        return {BEHAVIOR: steps}

    def close(self) -> None:
        getattr(self._env, "close", lambda: None)()

    def _begun(self, seed: int | None, options: Mapping[str, Any] | None) -> tuple[Any, Any]:
        result = self._reset(self._env, seed=seed, options=options)
        if not isinstance(result, tuple) or len(result) != 2:
            raise SpecMismatch("the result of reset", "(obs, info)", describe_value(result))
        check_info(result[1], "info")
        return result

    def _result(self, result: Any) -> Any:
        """Return what ``step`` returned as observation, reward, terminated, truncated and info."""
        if not isinstance(result, tuple) or len(result) != 5:
            raise SpecMismatch(
                "the result of step", "(obs, reward, terminated, truncated, info)", describe_value(result)
            )
        return result


class GameEnvironment(TextEnvironment):
    """A game of TextArena in which one agent plays all players, each in turn.

    An observation is the number of the player whose turn it is, and what that player reads. The reward of a step is
    that of the player who has moved, at the end of the game; the info has the ``rewards`` of all, and ``game_info``.
    The option ``num_players`` of an episode is by default the least number that the game takes.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._n_players: int | None = None
        self._player = 0

    def close(self) -> None:
        """Do nothing, because ``close`` of a game returns its rewards and releases nothing."""

    def _begun(self, seed: int | None, options: Mapping[str, Any] | None) -> tuple[Any, Any]:
        given = dict(options or {})
        n_players = given.pop("num_players", self._n_players)
        if given:
            raise UsageError(f"a game of TextArena has only the option num_players, not {sorted(given)}.")
        if n_players is None:
            self._n_players = n_players = self._least_number_of_players(seed)
        self._env.reset(num_players=n_players, seed=seed)
        return self._turn(), {}

    def _least_number_of_players(self, seed: int | None) -> int:
        refusal: Exception | None = None
        for n_players in range(1, _MOST_PLAYERS + 1):
            try:
                self._env.reset(num_players=n_players, seed=seed)
            except (AssertionError, ValueError) as error:
                refusal = refusal or error
            else:
                return n_players
        raise UsageError(f"the game takes no number of players from 1 to {_MOST_PLAYERS}: {refusal}") from refusal

    def _turn(self) -> Any:
        self._player, text = self._env.get_observation()
        return self._player, text

    def _result(self, result: Any) -> Any:
        done, info = result
        reward = 0.0
        if done:
            rewards, game_info = self._env.close()
            reward, info = (rewards or {}).get(self._player, 0.0), {**info, "rewards": rewards, "game_info": game_info}
        return self._turn(), reward, done, False, info


class Questions:
    """Questions of a data set of Reasoning Gym, one an episode. The reward is the score of the answer.

    Options of an episode are an entry of the data set, so that the data set itself is a list of tasks. Without them, a
    question is made from the seed.
    """

    def __init__(self, name: str, **config: Any) -> None:
        self._make, self._name, self._config = importlib.import_module("reasoning_gym").create_dataset, name, config
        self._seeds = random.Random()
        self._dataset = self._made(0)
        self._entry: Mapping[str, Any] = {}

    def _made(self, seed: int) -> Any:
        return self._make(self._name, **{"size": 1, "seed": seed, **self._config})

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        """Return a question, and what the data set tells of it."""
        if seed is not None:
            self._seeds.seed(seed)
        self._entry = options or self._made(self._seeds.getrandbits(32))[0]
        return self._entry["question"], dict(self._entry.get("metadata", {}))

    def step(self, answer: str) -> Any:
        """Score an answer, which ends the episode. The observation is the data set's own answer."""
        score = self._dataset.score_answer(answer=answer, entry=dict(self._entry))
        return self._entry.get("answer", ""), float(score), True, False, {}


@attrs.frozen
class RegisteredText:
    """A factory of the environment that a library of texts has registered under ``env_id``."""

    library: str
    env_id: str

    def __call__(self, **arguments: Any) -> Any:
        if self.library == "reasoning_gym":
            return TextEnvironment(Questions(self.env_id, **arguments))
        return importlib.import_module(self.library).make(self.env_id, **arguments)


def find_text(library: str, env_id: str) -> RegisteredText:
    """Return a factory for an environment of texts. Raises UsageError if there is none, and MissingExtra."""
    module, name = _REGISTRIES[library]
    with needed_by(f"env '{library}:{env_id}'", extra=library):
        known = getattr(importlib.import_module(module), name)
        importlib.import_module(library)  # which registers them
    if env_id not in known:
        raise UsageError(f"{library} has no environment {env_id!r}{nearest(env_id, list(known))}")
    return RegisteredText(library, env_id)
