"""Atari games preprocessed without Gymnasium's wrappers: the same to the byte."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest

pytest.importorskip("ale_py")
pytest.importorskip("cv2")

from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from envmanager import SimpleEnvManager, make_manager
from envmanager.adapters import atari
from envmanager.adapters.atari import Atari

SUITE = "vectors"


def wrapped(game: str, *, terminal_on_life_loss: bool, frame_skip: int) -> Any:
    made = gymnasium.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
    preprocessed = AtariPreprocessing(
        made, noop_max=30, frame_skip=frame_skip, screen_size=84, terminal_on_life_loss=terminal_on_life_loss
    )
    return FrameStackObservation(preprocessed, 4)


@pytest.mark.parametrize("life", [False, True], ids=["whole games", "lives"])
@pytest.mark.parametrize(("game", "frame_skip"), [("Breakout", 4), ("Pong", 2)])
def test_episodes_are_those_of_gymnasiums_wrappers(game: str, frame_skip: int, life: bool) -> None:
    theirs = wrapped(game, terminal_on_life_loss=life, frame_skip=frame_skip)
    ours = Atari(game, terminal_on_life_loss=life, frame_skip=frame_skip)
    chance = np.random.default_rng(0)
    np.testing.assert_array_equal(theirs.reset(seed=3)[0], ours.reset(seed=3)[0])
    n_ends = 0
    for _ in range(400):
        action = chance.integers(0, ours.action_space.n)
        (obs, *told, _), (own_obs, *own_told, _) = theirs.step(action), ours.step(action)
        np.testing.assert_array_equal(obs, own_obs)
        assert told == own_told
        if told[1] or told[2]:
            n_ends += 1
            np.testing.assert_array_equal(theirs.reset()[0], ours.reset()[0])
    assert n_ends or game == "Pong"


def test_rewards_are_clipped_to_their_signs() -> None:
    env = Atari("Seaquest", clip_rewards=True)
    env.reset(seed=0)
    chance = np.random.default_rng(1)
    rewards = {env.step(chance.integers(0, 18))[1] for _ in range(600)}
    assert rewards == {0.0, 1.0}


def test_a_game_has_a_name_for_configs() -> None:
    with SimpleEnvManager("envmanager.adapters.atari:Pong", 2) as manager:
        assert manager.behavior_specs["default"].observation.shape == (4, 84, 84)
        (info,) = manager.reset({"seed": 0})
        assert info.current["default"].obs.dtype == np.uint8


def test_what_is_no_game_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'pong'"):
        _ = atari.pong


def test_an_observation_stays_as_it_was_handed_out() -> None:
    env = Atari("Pong")
    first, _ = env.reset(seed=0)
    kept = first.copy()
    for _ in range(20):
        env.step(2)
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize(
    ("game", "options"),
    [
        ("Breakout", {"terminal_on_life_loss": True}),
        ("SpaceInvaders", {"frame_skip": 2, "size": 42, "stack": 3, "clip_rewards": True}),
    ],
)
def test_the_vectorised_form_plays_the_same_episode_but_for_the_first_stack(game: str, options: dict[str, Any]) -> None:
    form = f"envmanager.adapters.atari:{game}Vector"
    own = Atari(game, noop_max=0, **options)
    with make_manager({"kind": "simple", "env": form, "env_kwargs": {"noop_max": 0, **options}}) as manager:
        own.reset(seed=5)
        manager.reset(seed=5)
        batch = manager.recv()
        assert not batch.obs[0, :-1].any()  # filled up with zeros
        chance = np.random.default_rng(0)
        n_rewards = 0
        for step in range(1, 2000):
            action = chance.integers(own.action_space.n)
            obs, reward, terminated, *_ = own.step(action)
            manager.send(np.array([action]), [0])
            batch = manager.recv()
            assert batch.terminated[0] == terminated
            assert batch.reward[0] == reward
            n_rewards += reward != 0
            seen = batch.final_obs if terminated else batch.obs
            if step >= len(obs):
                np.testing.assert_array_equal(seen[0], obs)
            if terminated:
                break
        assert terminated
        assert n_rewards or game == "Breakout"


def test_an_episode_that_ends_in_its_first_frame_shows_nothing_of_the_one_before() -> None:
    game = Atari("Pong", noop_max=0)
    game.reset(seed=0)
    for _ in range(50):
        game.step(0)
    first, _ = game.reset(seed=1)
    game._ale = Mock(wraps=game._ale, game_truncated=lambda: True)
    obs, _, _, truncated, _ = game.step(0)
    assert truncated
    np.testing.assert_array_equal(obs[-1], first[-1])
