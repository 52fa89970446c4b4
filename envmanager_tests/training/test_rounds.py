"""Rounds: so many steps with fixed policies, then those learn whose turn it is."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

pytest.importorskip("torch")

from envmanager import (
    AgentSteps,
    ArraySpec,
    ConfigError,
    RestartPolicy,
    StepInfo,
    SubprocessEnvManager,
    UsageError,
    Wait,
)
from envmanager.registry import structure
from envmanager.training.algorithms.ppo import PPO, PPOOptions
from envmanager.training.controller import TrainerController
from envmanager.training.learners import LearnersState, RoundCount, Rounds
from envmanager.training.runs.plan import TrainingPlan
from envmanager.training.runs.run import Report, TrainingRun
from envmanager_tests.envs import Duel
from envmanager_tests.training.duels import Keeps

IN_TURN = Rounds(steps=4, train=[["hero"], ["target"]])


def controller_of(manager: Any, rounds: Rounds = IN_TURN, **options: Any) -> tuple[TrainerController, Keeps, Keeps]:
    hero, target = Keeps("hero"), Keeps("target")
    trainers = {"hero": hero, "target": target}
    return TrainerController(manager, trainers, rounds=rounds, **{"wait": Wait.all(), **options}), hero, target


def play_rounds(controller: TrainerController, n: int) -> list[list[str]]:
    """Whom each of the next ``n`` rounds updated."""
    updated: list[list[str]] = []
    names: list[str] = []
    while len(updated) < n:
        number = controller.round
        names += [update.behavior for update in controller.step()]
        if controller.round != number:
            updated.append(names)
            names = []
    return updated


def test_each_round_updates_who_is_named_from_all_its_steps_and_nobody_else(duels: Any) -> None:
    controller, hero, target = controller_of(duels)
    controller.reset()
    assert play_rounds(controller, 5) == [["hero"], ["target"], ["hero"], ["target"], ["hero"]]
    assert hero.learned == [4 * 3] * 3
    assert target.learned == [4 * 3 * 2] * 2
    assert controller.n_steps == hero.n + target.n


def test_a_round_with_several_updates_them_all_and_no_chain_breaks_between_rounds_of_the_same(duels: Any) -> None:
    controller, hero, target = controller_of(duels, Rounds(steps=4, train=[["hero", "target"], ["hero"]]))
    controller.reset()
    assert play_rounds(controller, 4) == [["hero", "target"], ["hero"], ["hero", "target"], ["hero"]]
    assert hero.n_resets == 1, "that of the environments"
    assert target.n_resets == 3, "and before each of its rounds but the first"
    hero.check_chains()
    target.check_chains()


def test_policies_change_only_between_rounds(duels: Any) -> None:
    controller, hero, _ = controller_of(duels)
    hero.every = 1  # it would be ready at once
    controller.reset()
    versions = []
    for _ in range(16):
        versions.append(hero.version)
        controller.step()
    assert versions == [0] * 4 + [1] * 8 + [2] * 4


def test_every_environment_plays_the_steps_of_a_round_and_the_fast_ones_do_not_wait(duels: Any) -> None:
    controller, hero, _ = controller_of(duels, wait=Wait.any())
    controller.reset()
    duels.env_workers[2].hold = True
    for _ in range(9):
        controller.step()
    assert controller.round == 1
    assert hero.n == 9 * 2
    duels.env_workers[2].hold = False
    duels.env_workers[2].release()
    for _ in range(4):
        controller.step()
    assert controller.round == 2
    assert hero.learned == [13 * 2 + 4]
    hero.check_chains()


def test_a_worker_that_was_dropped_is_not_waited_for() -> None:
    restarts = RestartPolicy(max_restarts=0, then="drop")
    with SubprocessEnvManager(Duel, 3, restarts=restarts, wait="any") as manager:
        controller, hero, _ = controller_of(manager, wait=None)
        controller.train(60)
        os.kill(manager.stats().workers[1].pid or 0, signal.SIGKILL)
        number = controller.round or 0
        controller.train(controller.n_steps + 300)
        assert (controller.round or 0) > number + 4
        assert hero.version > 2


def test_a_round_in_which_nothing_was_collected_updates_nobody(duels: Any) -> None:
    controller, _, _ = controller_of(duels, Rounds(steps=2, train=[["hero"], ["target"]]))
    controller.reset()
    controller.trainers["hero"].add = lambda info: 0  # type: ignore[method-assign]
    assert play_rounds(controller, 2) == [[], ["target"]]


def test_who_is_frozen_by_hand_learns_in_no_round(duels: Any) -> None:
    controller, _, _ = controller_of(duels, Rounds(steps=2, train=[["hero"], ["target"], ["hero", "target"]]))
    controller.reset()
    controller.freeze("target")
    assert play_rounds(controller, 4) == [["hero"]] * 4
    controller.unfreeze("target")
    assert {name for round_ in play_rounds(controller, 3) for name in round_} == {"hero", "target"}


def test_who_is_frozen_in_their_own_round_ends_it(duels: Any) -> None:
    controller, hero, _ = controller_of(duels)
    controller.reset()
    controller.step()
    controller.freeze("hero")
    assert (controller.round, controller.learning) == (2, ("target",))
    assert play_rounds(controller, 2) == [["target"], ["target"]]
    controller.unfreeze("hero")
    play_rounds(controller, 2)
    assert hero.version == 1
    hero.check_chains()


def test_with_rounds_somebody_must_be_left_to_learn_in_one(duels: Any) -> None:
    controller, _, _ = controller_of(duels, Rounds(steps=2, train=[["hero"]]))
    with pytest.raises(UsageError, match="with 'hero' frozen no behavior would learn in any round"):
        controller.freeze("hero")
    controller.freeze("target")  # it learns in none anyway


def test_a_new_round_is_told_as_such(duels: Any) -> None:
    controller, _, _ = controller_of(duels)
    controller.reset()
    play_rounds(controller, 1)
    assert controller.changes[-1].is_round
    assert str(controller.changes[-1]) == "hero frozen, target learning from agent step 12 on (round 2)"


def test_what_is_asked_for_is_told_though_it_makes_no_difference_before_a_later_round(duels: Any) -> None:
    controller, _, _ = controller_of(duels)
    controller.freeze("target")
    controller.unfreeze("target")
    assert list(map(str, controller.changes[-2:])) == [
        "target frozen, hero learning from agent step 0 on (freeze)",
        "target learning in a later round, hero learning from agent step 0 on (unfreeze)",
    ]


def test_the_state_of_a_round_is_restored_with_the_steps_that_were_played(duels: Any) -> None:
    controller, _, _ = controller_of(duels)
    controller.reset()
    play_rounds(controller, 1)
    controller.step()
    state = controller.state()
    assert state == LearnersState(frozen=(), round=RoundCount(2, steps=1))
    again, hero, target = controller_of(duels)
    again.restore(state)
    again.reset()
    assert (again.round, again.learning) == (2, ("target",))
    assert play_rounds(again, 1) == [["target"]]
    assert target.learned == [3 * 3 * 2], "the rest of the round"
    assert hero.n == 0


def test_the_state_of_who_was_frozen_is_restored_with_the_round(duels: Any) -> None:
    controller, _, _ = controller_of(duels)
    controller.reset()
    controller.freeze("hero")
    again, _, _ = controller_of(duels)
    again.restore(controller.state())
    assert (again.round, again.learning, again.frozen) == (2, ("target",), {"hero"})


def test_a_round_count_is_of_the_slowest_worker() -> None:
    count = RoundCount(3, steps=2)
    for worker_id in (0, 0, 1):
        count.add(worker_id)
    assert count.played([0, 1]) == 3
    assert count.played([0, 1, 2]) == 2
    assert count.played([]) == 2


# PPO keeps all of a round, however long it is.


def test_ppo_learns_once_from_a_whole_round_that_is_larger_than_its_rollout(duels: Any) -> None:
    options = PPOOptions(rollout=8, epochs=1, minibatch=4096, hidden=(4,))
    trainers = {name: PPO(name, spec, options, device="cpu") for name, spec in Duel.SPECS.items()}
    for trainer in trainers.values():
        trainer._store = type(trainer._store)(Duel.SEEN, _columns(trainer), 16, grows=True)
    controller = TrainerController(
        duels, trainers, wait=Wait.all(), rounds=Rounds(steps=40, train=[["target"], ["hero"]])
    )
    controller.reset()
    n_learned: list[int] = []
    learn = trainers["target"]._learn
    trainers["target"]._learn = lambda rollout: n_learned.append(len(rollout.advantage)) or learn(rollout)  # type: ignore[method-assign,func-returns-value]
    play_rounds(controller, 3)
    assert n_learned == [40 * 3 * 2] * 2
    assert [trainer.version for trainer in trainers.values()] == [1, 2]


def _columns(trainer: Any) -> Any:
    return {name: ArraySpec(column.shape[1:], column.dtype) for name, column in trainer._store.columns.items()}


def test_a_round_of_which_nothing_is_known_that_came_next_leaves_the_weights_as_they_are() -> None:
    trainer = PPO("hero", Duel.SPECS["hero"], PPOOptions(hidden=(4,)), device="cpu")
    flags = np.zeros(1, np.float32), np.zeros(1, np.bool_), np.zeros(1, np.bool_)
    first = {"hero": AgentSteps(np.array([0]), np.zeros((1, 2), np.float32), *flags)}
    does_not_act = {"hero": attrs.evolve(first["hero"], acting=np.array([False]))}
    trainer.add(StepInfo(None, first, None, 0))
    assert trainer.add(StepInfo(first, does_not_act, {"hero": trainer.policy.get_action(first["hero"])}, 0)) == 1
    assert trainer.can_update()
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}

    trainer.update(0.0)

    assert all(bool((tensor == before[name]).all()) for name, tensor in trainer.model.state_dict().items())
    assert not trainer.can_update()


# What a config may say.


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"steps": 0, "train": [["hero"]]}, "training.rounds.steps must be a whole number of at least 1"),
        ({"steps": True, "train": [["hero"]]}, "training.rounds.steps must be|training.rounds.steps should be"),
        ({"train": [["hero"]]}, "training.rounds.steps must be"),
        ({"steps": 4}, "training.rounds.train must be a list of lists"),
        ({"steps": 4, "train": ["hero", "target"]}, r"such as \[\[hero\], \[target\]\], not \['hero', 'target'\]"),
        ({"steps": 4, "train": "hero"}, "training.rounds.train must be a list of lists"),
        ({"steps": 4, "train": []}, "training.rounds.train must be a list of lists"),
        ({"steps": 4, "train": [[]]}, "training.rounds.train must be a list of lists"),
        ({"steps": 4, "train": [[1]]}, "training.rounds.train must be a list of lists"),
        ({"steps": 4, "train": [["hero", "hero"]]}, "names the behavior 'hero' twice"),
        ({"steps": 4, "train": [["hero"]], "stepps": 4}, "did you mean training.rounds.steps"),
        (
            {"steps": 4, "train": [["heroo"]]},
            r"rounds.train names 'heroo', which has no trainer; did you mean hero\? There are trainers for 'hero', ",
        ),
        ([4], "training.rounds should be a mapping"),
    ],
    ids=str,
)
def test_mistakes_in_a_config_are_named_before_an_environment_is_made(tmp_path: Path, table: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainingPlan.parse(tables_of(rounds=table, env="never:made"), tmp_path)


def test_a_trainer_that_learns_while_it_plays_has_no_rounds(tmp_path: Path, duels: Any) -> None:
    tables = tables_of(rounds={"steps": 4, "train": [["hero"]]})
    tables["trainers"]["hero"] = {"kind": "dqn", "apart": 100}
    with pytest.raises(ConfigError, match=r"trainers\.hero\.apart"):
        TrainingPlan.parse(tables, tmp_path)
    trainer = Keeps("hero")
    trainer.learns_while_playing = True
    with pytest.raises(UsageError, match="rounds need fixed policies"):
        TrainerController(duels, {"hero": trainer}, rounds=Rounds(steps=4, train=[["hero"]]))


def test_behaviors_that_only_the_environment_knows_are_checked_when_it_does(tmp_path: Path) -> None:
    tables = tables_of(rounds={"steps": 4, "train": [["hero"], ["tagret"]]})
    tables["trainers"] = {"*": PPO_TABLE}
    with pytest.raises(UsageError, match=r"'tagret', which has no trainer; did you mean target"):
        TrainingRun(TrainingPlan.parse(tables, tmp_path), Silent()).go()


def test_rounds_are_structured_as_they_are_written() -> None:
    assert structure(Rounds, {"steps": 4, "train": [["a"], ["a", "b"]]}).train == (("a",), ("a", "b"))


# Whole training runs.

PPO_TABLE = {"kind": "ppo", "rollout": 32, "epochs": 1, "minibatch": 32, "hidden": [8], "anneal": False}


class Silent(Report):
    """Remembers who was updated, and what was saved when."""

    def __init__(self) -> None:
        self.updates: list[tuple[str, int]] = []
        self.rounds: list[int | None] = []
        self.saves: list[tuple[int | None, bool]] = []
        self.run: Any = None
        self.stop_after: int | None = None
        self.at_start: Any = lambda run: None

    def started(self, run: Any) -> None:
        self.run = run
        self.at_start(run)

    def updated(self, run: Any, update: Any) -> None:
        self.updates.append((update.behavior, update.n_steps))
        self.rounds.append(run.controller.round)
        if len(self.updates) == self.stop_after:
            run.stop()

    def saved(self, path: Path) -> None:
        controller = self.run.controller
        self.saves.append((controller.round, controller.is_between_rounds))


def weights_of(run: Any) -> dict[str, bytes]:
    """Those of each behavior, as bytes."""
    arrays = {behavior: trainer.state()[0] for behavior, trainer in run.trainers.items()}
    return {
        behavior: b"".join(own[name].tobytes() for name in sorted(own) if name.startswith("model."))
        for behavior, own in arrays.items()
    }


def tables_of(*, rounds: Any, env: Any = Duel, kind: str = "simple", **training: Any) -> dict[str, Any]:
    return {
        "manager": {"kind": kind, "env": env, "n_envs": 4, "n_workers": 2, "wait": "all"},
        "training": {"steps": 500, "evaluation_episodes": 0, "device": "cpu", "rounds": rounds, **training},
        "trainers": {"hero": PPO_TABLE, "target": dict(PPO_TABLE)},
    }


@pytest.mark.parametrize("kind", ["simple", "subprocess"])
def test_a_training_in_rounds_is_resumed_in_the_round_in_which_it_was_stopped(tmp_path: Path, kind: str) -> None:
    tables = tables_of(rounds={"steps": 6, "train": [["hero"], ["target"], ["hero", "target"]]}, kind=kind)
    first, again = Silent(), Silent()
    first.stop_after = 2  # hero, then target
    run = TrainingRun(TrainingPlan.parse(tables, tmp_path), first)
    assert run.go().ended == "stopped"
    assert run.controller is not None
    assert (run.controller.round, run.controller.learning) == (3, ("hero", "target"))
    saved = weights_of(run)

    seen: list[Any] = []
    again.at_start = lambda run: seen.append((run.controller.round, run.controller.learning, weights_of(run)))
    TrainingRun(TrainingPlan.parse(tables, tmp_path, resume=True), again).go()

    assert seen == [(3, ("hero", "target"), saved)]
    names = [name for name, _ in first.updates + again.updates]
    assert names[:7] == ["hero", "target", "hero", "target", "hero", "target", "hero"]


def test_checkpoints_on_the_way_come_between_two_rounds(tmp_path: Path) -> None:
    report = Silent()
    tables = tables_of(rounds={"steps": 6, "train": [["hero"], ["target"]]}, checkpoint_every=30)
    TrainingRun(TrainingPlan.parse(tables, tmp_path), report).go()
    *on_the_way, _ = report.saves
    assert len(on_the_way) > 4
    assert all(is_between for _, is_between in on_the_way)


def test_who_rests_keeps_its_weights_bit_for_bit_until_its_round(tmp_path: Path) -> None:
    tables = tables_of(rounds={"steps": 6, "train": [["hero"], ["target"]]})
    weights: dict[str, list[bytes]] = {"hero": [], "target": []}
    names: list[str] = []

    class Noting(Silent):
        def updated(self, run: Any, update: Any) -> None:
            names.append(update.behavior)
            for behavior, trainer in run.trainers.items():
                arrays = trainer.state()[0]
                weights[behavior].append(
                    b"".join(arrays[key].tobytes() for key in sorted(arrays) if key.startswith("model."))
                )

    TrainingRun(TrainingPlan.parse(tables, tmp_path), Noting()).go()
    assert len(names) > 5
    for behavior, own in weights.items():
        changed = [before != after for before, after in itertools.pairwise(own)]
        assert changed == [name == behavior for name in names[1:]]
