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
from collections.abc import Mapping
from typing import Any

import attrs

from envmanager.adapters.gymnasium import GymnasiumEnvironment
from envmanager.adapters.names import base_names
from envmanager.errors import UsageError
from envmanager.importing import nearest, needed_by

_MOST_PLAYERS = 15

_REGISTRIES = {
    "textarena": ("textarena.envs.registration", "ENV_REGISTRY"),
    "gem": ("gem.envs.registration", "ENV_REGISTRY"),
    "reasoning_gym": ("reasoning_gym.factory", "DATASETS"),
}
"""Modules and names of the registries of environments, by library."""


class Texts:
    """An environment whose ``reset`` and ``step`` are like Gymnasium's, but that declares no spaces."""

    observation_space = action_space = None

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def close(self) -> None:
        """Close the environment, if it can be closed."""
        getattr(self.env, "close", lambda: None)()


class Game(Texts):
    """A game of TextArena in which one agent plays all players, each in turn.

    An observation is the number of the player whose turn it is, and what that player reads. The reward of a step is
    that of the player who has moved, at the end of the game; the info has the ``rewards`` of all, and ``game_info``.
    The option ``num_players`` of an episode is by default the least number that the game takes.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._n_players: int | None = None
        self._player = 0

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        """Begin a game, and return what the first player reads."""
        given = dict(options or {})
        n_players = given.pop("num_players", self._n_players)
        if given:
            raise UsageError(f"a game of TextArena has only the option num_players, not {sorted(given)}.")
        if n_players is None:
            self._n_players = n_players = self._least_number_of_players(seed)
        each = self.env
        while each is not None:  # wrappers of TextArena 0.7 keep what players have read, and add the next game to it
            getattr(each, "full_observations", {}).clear()
            each = getattr(each, "env", None)
        self.env.reset(num_players=n_players, seed=seed)
        return self._turn(), {}

    def _least_number_of_players(self, seed: int | None) -> int:
        refusal: Exception | None = None
        for n_players in range(1, _MOST_PLAYERS + 1):
            try:
                self.env.reset(num_players=n_players, seed=seed)
            except (AssertionError, ValueError) as error:
                refusal = refusal or error
            else:
                return n_players
        raise UsageError(f"the game takes no number of players from 1 to {_MOST_PLAYERS}: {refusal}") from refusal

    def _turn(self) -> Any:
        self._player, text = self.env.get_observation()
        return self._player, text

    def step(self, action: Any) -> Any:
        """Take the move of the player whose turn it is."""
        done, info = self.env.step(action)
        reward = 0.0
        if done:
            rewards, game_info = self.env.close()
            reward, info = (rewards or {}).get(self._player, 0.0), {**info, "rewards": rewards, "game_info": game_info}
        return self._turn(), reward, done, False, info

    def close(self) -> None:
        """Do nothing, because ``close`` of a game returns its rewards and releases nothing."""


class Questions(Texts):
    """Questions of a data set of Reasoning Gym, one an episode. The reward is the score of the answer.

    Options of an episode are an entry of the data set, so that the data set itself is a list of tasks. Without them, a
    question is made from the seed.
    """

    def __init__(self, name: str, **config: Any) -> None:
        self._make, self._name, self._config = importlib.import_module("reasoning_gym").create_dataset, name, config
        self._seeds = random.Random()
        super().__init__(self._made(0))
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
        score = self.env.score_answer(answer=answer, entry=dict(self._entry))
        return self._entry.get("answer", ""), float(score), True, False, {}


class TextEnvironment(GymnasiumEnvironment):
    """The group of one environment of texts: a game of TextArena, or what has Gymnasium's methods."""

    def __init__(self, env: Any) -> None:
        super().__init__([Game(env) if "textarena.core.Env" in base_names(env) else Texts(env)], infos=True)

    @property
    def subject(self) -> Any:
        return self.wrapped.env


@attrs.frozen
class RegisteredText:
    """A factory of the environment that a library of texts has registered under ``env_id``."""

    library: str
    env_id: str

    def __call__(self, **arguments: Any) -> Any:
        if self.library == "reasoning_gym":
            return GymnasiumEnvironment.wrap(Questions(self.env_id, **arguments))
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
