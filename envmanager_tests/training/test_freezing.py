"""A frozen trainer only acts, greedily; when it learns again, it begins with steps that it has chosen itself."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from envmanager import (
    ActionInfo,
    RestartPolicy,
    SimpleEnvManager,
    StepInfo,
    SubprocessEnvManager,
    UsageError,
    Wait,
    WorkerDied,
    make_manager,
)
from envmanager.observe.events import Note
from envmanager.training.algorithms.dqn import DQN, DQNOptions
from envmanager.training.algorithms.ppo import PPO, PPOOptions
from envmanager.training.controller import TrainerController
from envmanager.training.learner_process import LearnerProcess
from envmanager.training.trainer import Trainer
from envmanager_tests.envs import Duel
from envmanager_tests.training.duels import DRAWN, GREEDY, Keeps

ALL, ANY = Wait.all(), Wait.any()


class Watched:
    """A manager that remembers what each policy did: what the StepInfos say that it hands out."""

    def __init__(self, manager: Any) -> None:
        self.handed_out: list[StepInfo] = []
        step = manager.step

        def remembering(wait: Any = None) -> list[StepInfo]:
            infos: list[StepInfo] = step(wait)
            self.handed_out += infos
            return infos

        manager.step = remembering

    def actions(self, behavior: str) -> list[int]:
        """The actions that StepInfos brought back, a number each, since the last time."""
        infos, self.handed_out = self.handed_out, []
        taken = [info.actions[behavior].action for info in infos if info.actions is not None]
        return [int(action) for actions in taken for action in actions]


def controller_of(manager: Any, **options: Any) -> tuple[TrainerController, Keeps, Keeps]:
    hero, target = Keeps("hero"), Keeps("target")
    controller = TrainerController(manager, {"hero": hero, "target": target}, **{"wait": ALL, **options})
    controller.reset()
    return controller, hero, target


def steps(controller: TrainerController, n: int) -> None:
    for _ in range(n):
        controller.step()


def let_go(manager: Any, worker_id: int) -> None:
    manager.env_workers[worker_id].hold = False
    manager.env_workers[worker_id].release()


# What a frozen trainer does, and does not.


def test_a_frozen_behavior_acts_greedily_and_its_trainer_gets_nothing(duels: Any) -> None:
    watched = Watched(duels)
    controller, hero, target = controller_of(duels)
    steps(controller, 4)
    assert set(watched.actions("target")) == {DRAWN}

    controller.freeze("target")
    steps(controller, 4)

    assert set(watched.actions("target")) == {GREEDY}
    assert (hero.n, target.n) == (8 * 3, 4 * 3 * 2)
    assert controller.n_steps == hero.n + target.n
    assert (controller.learning, controller.frozen) == (("hero",), {"target"})


def test_a_trainer_that_is_frozen_when_it_has_enough_is_not_updated(duels: Any) -> None:
    controller, hero, target = controller_of(duels)
    steps(controller, 2)
    controller.freeze("target")
    target.every = hero.every = 1
    updates = controller.step()
    assert {update.behavior for update in updates} == {"hero"}
    assert (target.version, target.learned) == (0, [])


def test_who_is_told_of_an_update_may_freeze_and_then_there_is_no_other(duels: Any) -> None:
    controller = TrainerController(
        duels,
        {"hero": Keeps("hero"), "target": Keeps("target", every=1)},
        wait=ALL,
        on_update=lambda update: controller.freeze(update.behavior),
    )
    controller.reset()
    steps(controller, 3)
    assert controller.trainers["target"].version == 1


def test_a_trainer_is_told_to_pause_before_it_is_frozen_and_of_a_gap_when_it_learns_again(duels: Any) -> None:
    controller, _, target = controller_of(duels)
    steps(controller, 2)
    before = target.n_resets
    controller.freeze("target")
    assert (target.n_pauses, target.n_resets) == (1, before)
    controller.unfreeze("target")
    assert (target.n_pauses, target.n_resets) == (1, before + 1)


def test_a_trainer_that_is_frozen_from_the_beginning_acts_greedily_and_can_learn_later(duels: Any) -> None:
    watched = Watched(duels)
    hero, target = Keeps("hero"), Keeps("target")
    target.frozen = True
    controller = TrainerController(duels, {"hero": hero, "target": target}, wait=ALL)
    controller.reset()
    steps(controller, 3)
    assert set(watched.actions("target")) == {GREEDY}
    controller.unfreeze("target")
    steps(controller, 3)
    assert set(watched.actions("target")) == {DRAWN}
    assert target.n == 3 * 3 * 2


def test_a_reset_leaves_those_frozen_who_are(duels: Any) -> None:
    watched = Watched(duels)
    controller, _, target = controller_of(duels)
    controller.freeze("target")
    controller.reset()
    steps(controller, 2)
    assert set(watched.actions("target")) == {GREEDY}
    assert target.n == 0


# The gap.


def test_after_a_gap_every_step_that_the_own_policy_chose_is_learned_from(duels: Any) -> None:
    controller, hero, target = controller_of(duels)
    steps(controller, 3)
    controller.freeze("target")
    steps(controller, 4)
    controller.unfreeze("target")
    steps(controller, 3)
    assert target.n == (3 + 3) * 3 * 2
    assert hero.n == 10 * 3
    target.check_chains()
    hero.check_chains()


def test_a_chain_ends_at_the_gap_and_another_begins_after_it(duels: Any) -> None:
    controller, _, target = controller_of(duels)
    steps(controller, 2)
    controller.freeze("target")
    controller.unfreeze("target")  # not a step lies between
    steps(controller, 2)
    store = target.store
    seen = store.obs[: store.n_rows, 0][store.acted[: store.n_rows]]
    assert sorted(set(seen.tolist())) == [0, 1, 2, 3]
    for row in np.flatnonzero(store.acted[: store.n_rows]):
        if store.obs[row][0] == 1:
            assert store.obs[store.successor[row]][0] == 2, "what came next had been seen before the gap"
    target.check_chains()


def test_steps_that_are_in_flight_when_it_learns_again_are_kept_from_the_trainer(duels: Any) -> None:
    watched = Watched(duels)
    controller, hero, target = controller_of(duels, wait=ANY)
    controller.freeze("target")
    duels.env_workers[2].hold = True
    steps(controller, 2)
    watched.actions("target")

    controller.unfreeze("target")
    let_go(duels, 2)
    steps(controller, 3)

    taken = watched.actions("target")
    assert taken.count(GREEDY) == 2, "the one that was in flight came, with both agents"
    assert target.n == taken.count(DRAWN), "every step but that one"
    assert hero.n == controller.n_steps - target.n
    target.check_chains()
    hero.check_chains()


def test_what_a_trainer_chose_itself_is_not_learned_from_when_it_comes_after_it_was_frozen(duels: Any) -> None:
    controller, _, target = controller_of(duels, wait=ANY)
    duels.env_workers[2].hold = True
    controller.step()
    controller.freeze("target")
    let_go(duels, 2)
    before = target.n
    steps(controller, 3)
    assert target.n == before


def test_a_step_in_flight_over_a_whole_gap_is_kept_from_the_trainer(duels: Any) -> None:
    watched = Watched(duels)
    controller, _, target = controller_of(duels, wait=ANY)
    duels.env_workers[2].hold = True
    steps(controller, 2)
    controller.freeze("target")
    controller.unfreeze("target")
    watched.actions("target")
    before = target.n
    let_go(duels, 2)
    steps(controller, 3)
    taken = watched.actions("target")
    assert set(taken) == {DRAWN}
    assert target.n - before == len(taken) - 2
    target.check_chains()


@pytest.mark.parametrize("seed", range(20))
def test_whoever_is_frozen_whenever_with_answers_that_come_late_no_greedy_step_and_no_gap_is_learned_from(
    duels: Any, seed: int
) -> None:
    random = np.random.default_rng(seed)
    watched = Watched(duels)
    controller, hero, target = controller_of(duels, wait=ANY)
    duels.step_queue.when_waiting = lambda: [let_go(duels, worker_id) for worker_id in range(3)]
    for _ in range(150):
        for worker_id in range(3):
            if random.random() < 0.3:
                duels.env_workers[worker_id].hold = True
            elif random.random() < 0.5:
                let_go(duels, worker_id)
        if random.random() < 0.2:
            behavior = ("hero", "target")[random.integers(2)]
            if behavior in controller.frozen:
                controller.unfreeze(behavior)
            elif not controller.frozen:
                controller.freeze(behavior)
        controller.step()
    for trainer in (hero, target):  # Keeps refuses a greedy step: it would have no log_prob
        trainer.check_chains()
        assert trainer.n > 0
    assert GREEDY in watched.actions("hero")


@pytest.mark.parametrize("max_lead", [1, 2])
def test_a_worker_that_was_held_back_for_its_lead_gives_no_greedy_step_to_the_trainer(
    duels: Any, max_lead: int
) -> None:
    controller, hero, target = controller_of(duels, wait=Wait.any(max_lead=max_lead))
    duels.step_queue.when_waiting = lambda: let_go(duels, 2)
    for turn in range(30):
        duels.env_workers[2].hold = True
        (controller.freeze if turn % 2 else controller.unfreeze)("target")
        controller.step()
    hero.check_chains()
    target.check_chains()


# Workers that are replaced.


def died(worker_id: int) -> WorkerDied:
    return WorkerDied(worker_id=worker_id, env_ids=[worker_id], phase="step", exit="SIGKILL")


@pytest.mark.parametrize("unfreezes", [False, True])
def test_a_worker_that_is_replaced_while_somebody_is_frozen_mixes_nothing(duels: Any, unfreezes: bool) -> None:
    controller, hero, target = controller_of(duels, wait=ANY)
    steps(controller, 2)
    if unfreezes:
        controller.freeze("target")
    duels.env_workers[1].hold = True
    controller.step()
    duels.env_workers[1].fail(died(1))
    (controller.unfreeze if unfreezes else controller.freeze)("target")
    steps(controller, 4)
    controller.freeze_only(set())
    before = target.n
    steps(controller, 3)
    assert duels.stats().restarts == 1
    assert target.n == before + 3 * 3 * 2
    for trainer in (hero, target):
        trainer.check_chains()


def test_nobody_waits_for_a_worker_that_was_dropped() -> None:
    with SubprocessEnvManager(Duel, 3, n_workers=3, restarts=RestartPolicy(max_restarts=0, then="drop")) as manager:
        hero, target = Keeps("hero", every=6), Keeps("target", every=6)
        controller = TrainerController(manager, {"hero": hero, "target": target}, wait=ANY, max_policy_lag=0)
        controller.train(60)
        os.kill(manager.stats().workers[0].pid or 0, signal.SIGKILL)
        controller.train(400)
        assert [worker.dropped for worker in manager.stats().workers] == [True, False, False]
        assert hero.version > 10


# Mistakes.


def test_an_unknown_behavior_is_refused_with_the_nearest_one(duels: Any) -> None:
    controller, _, _ = controller_of(duels)
    for refuses in (controller.freeze, controller.unfreeze, controller.toggle):
        with pytest.raises(UsageError, match=r"'targte'.*; did you mean target\? Known are 'hero', 'target'"):
            refuses("targte")


def test_nobody_left_to_learn_is_refused_and_changes_nothing(duels: Any) -> None:
    controller, _, _ = controller_of(duels)
    controller.freeze("hero")
    with pytest.raises(UsageError, match="no behavior would learn"):
        controller.freeze("target")
    assert controller.learning == ("target",)


def test_a_training_in_which_all_are_frozen_from_the_beginning_is_refused(duels: Any) -> None:
    hero = Keeps("hero")
    hero.frozen = True
    with pytest.raises(UsageError, match="with 'hero' frozen no behavior would learn"):
        TrainerController(duels, {"hero": hero}).train(10)


# What is told, and from where it may be asked for.


def test_changes_are_told_and_kept(duels: Any) -> None:
    told: list[Any] = []
    controller, _, _ = controller_of(duels, on_change=told.append)
    steps(controller, 2)
    controller.freeze("target")
    controller.freeze("target")
    controller.freeze_only({"hero"}, cause="control.toml")
    assert [(change.frozen, change.unfrozen, change.learning, change.cause) for change in told] == [
        (("target",), (), ("hero",), "freeze"),
        (("hero",), ("target",), ("target",), "control.toml"),
    ]
    assert controller.changes == told
    assert [change.n_steps for change in told] == [18, 18]
    assert str(told[0]) == "target frozen, hero learning from agent step 18 on (freeze)"


def test_a_toggle_takes_effect_before_the_next_step(duels: Any) -> None:
    controller, _, _ = controller_of(duels)
    thread = threading.Thread(target=controller.toggle, args=["target"])
    thread.start()
    thread.join()
    assert controller.learning == ("hero", "target")
    controller.step()
    assert controller.learning == ("hero",)
    controller.toggle("target")
    controller.step()
    assert controller.learning == ("hero", "target")


def test_a_toggle_after_which_nobody_would_learn_changes_nothing_and_training_goes_on(duels: Any) -> None:
    controller, hero, _ = controller_of(duels)
    controller.toggle("target")
    controller.toggle("hero")
    steps(controller, 2)
    assert controller.learning == ("hero",)
    assert hero.n == 2 * 3


def test_a_key_in_a_window_toggles_before_the_next_step_and_an_unknown_behavior_changes_nothing(duels: Any) -> None:
    controller, _, _ = controller_of(duels)
    steps(controller, 1)
    for name, behavior in (("toggle_frozen", "target"), ("toggle_frozen", "nobody"), ("shout", "hero")):
        duels.events.add(Note(worker_id=0, generation=0, name=name, data={"behavior": behavior}))
    assert controller.learning == ("hero", "target")
    steps(controller, 2)
    assert controller.learning == ("hero",)
    duels.events.add(Note(worker_id=0, generation=0, name="toggle_frozen", data={"behavior": "hero"}))
    steps(controller, 2)
    assert controller.learning == ("hero",), "one of them has to learn"
    duels.events.add(Note(worker_id=0, generation=0, name="toggle_frozen", data={"behavior": "target"}))
    steps(controller, 1)
    assert controller.learning == ("hero", "target")


def test_a_policy_may_toggle_in_the_middle_of_a_step(duels: Any) -> None:
    controller, hero, target = controller_of(duels)
    get_action = target.policy.get_action

    def toggling(seen: Any) -> ActionInfo:
        controller.toggle("target")
        return get_action(seen)

    target.policy.get_action = toggling  # type: ignore[method-assign]
    steps(controller, 5)
    assert controller.learning == ("hero",)
    assert (hero.n, target.n) == (5 * 3, 1 * 3 * 2)


# Real trainers and real managers.

SMALL = PPOOptions(rollout=24, epochs=2, minibatch=16, hidden=(8,))


def weights_of(trainer: Any) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy().copy() for name, tensor in trainer.model.state_dict().items()}


def same(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> bool:
    return all(array.tobytes() == after[name].tobytes() for name, array in before.items())


@pytest.fixture(params=["simple", "subprocess any", "subprocess all"])
def manager(request: pytest.FixtureRequest) -> Iterator[Any]:
    kind, _, wait = request.param.partition(" ")
    options = {"kind": kind, "n_envs": 4, "n_workers": 2, "wait": wait or "all", "seed": 0}
    with make_manager(options, Duel) as manager:
        yield manager


def ppos(manager: Any) -> dict[str, Trainer]:
    return {name: PPO(name, spec, SMALL, device="cpu") for name, spec in manager.behavior_specs.items()}


def test_the_weights_of_a_frozen_trainer_stay_bit_for_bit_and_those_of_others_do_not(manager: Any) -> None:
    trainers: dict[str, Any] = ppos(manager)
    controller = TrainerController(manager, trainers)
    controller.train(200)
    for frozen, learns in (("target", "hero"), ("hero", "target")):
        controller.freeze_only({frozen})
        before = {name: weights_of(trainer) for name, trainer in trainers.items()}
        optimizer = {name: value.copy() for name, value in trainers[frozen].state()[0].items()}
        controller.train(controller.n_steps + 200)
        assert same(before[frozen], weights_of(trainers[frozen]))
        assert same(optimizer, trainers[frozen].state()[0]), "nor its optimizer and what it has collected"
        assert not same(before[learns], weights_of(trainers[learns]))
    controller.freeze_only(set())
    versions = {name: trainer.version for name, trainer in trainers.items()}
    controller.train(controller.n_steps + 400)
    assert all(trainer.version > versions[name] for name, trainer in trainers.items())


def test_the_actions_of_a_frozen_trainer_are_the_likeliest_ones(manager: Any) -> None:
    trainers: dict[str, Any] = ppos(manager)
    controller = TrainerController(manager, trainers)
    controller.freeze("target")
    controller.reset()
    watched = Watched(manager)
    greedy = trainers["target"].greedy_policy()
    steps(controller, 10)
    n_seen = 0
    for info in watched.handed_out:
        assert info.actions is not None
        assert info.previous is not None
        taken = info.actions["target"]
        assert "log_prob" not in taken.outputs
        np.testing.assert_array_equal(taken.action, greedy.get_action(info.previous["target"]).action)
        n_seen += len(taken.action)
    assert n_seen > 0


def test_frozen_and_not_frozen_in_turns_real_trainers_go_on_learning(manager: Any) -> None:
    trainers: dict[str, Any] = ppos(manager)
    controller = TrainerController(manager, trainers)
    controller.reset()
    for turn in range(500):  # how many steps a turn hands out differs
        controller.freeze_only({("hero", "target")[turn % 2]})
        steps(controller, 7)
        if turn > 12 and all(trainer.version > 3 for trainer in trainers.values()):
            break
    assert all(trainer.version > 3 for trainer in trainers.values())
    for trainer in trainers.values():
        assert all(np.isfinite(array).all() for array in weights_of(trainer).values())


def test_a_worker_killed_while_somebody_is_frozen_is_replaced_and_nothing_is_mixed() -> None:
    with SubprocessEnvManager(Duel, 4, n_workers=2, wait=ANY, restarts=RestartPolicy(backoff_s=0.0)) as manager:
        hero, target = Keeps("hero", every=8), Keeps("target", every=8)
        controller = TrainerController(manager, {"hero": hero, "target": target})
        controller.train(100)
        controller.freeze("target")
        os.kill(manager.stats().workers[0].pid or 0, signal.SIGKILL)
        controller.train(controller.n_steps + 50)
        controller.unfreeze("target")  # the replacement may be under way or here
        controller.train(controller.n_steps + 100)
        assert manager.stats().restarts == 1
        assert target.n_resets == 2
        assert hero.version > 10
        assert target.version > 5


def test_dqn_learns_nothing_while_it_is_frozen_and_goes_on_after(manager: Any) -> None:
    options = DQNOptions(capacity=2000, learning_starts=20, train_every=8, batch=8, hidden=(8,))
    trainers: dict[str, Any] = {
        name: DQN(name, spec, options, device="cpu") for name, spec in manager.behavior_specs.items()
    }
    controller = TrainerController(manager, trainers)
    controller.train(150)
    controller.freeze("target")
    before, version = weights_of(trainers["target"]), trainers["target"].version
    n_rows = trainers["target"].replay.store.n_rows
    controller.train(controller.n_steps + 100)
    assert same(before, weights_of(trainers["target"]))
    assert trainers["target"].replay.store.n_rows == n_rows
    controller.unfreeze("target")
    controller.train(controller.n_steps + 150)
    assert trainers["target"].version > version


def test_one_that_learns_apart_is_frozen_once_its_learner_rests_and_is_not_behind_for_it() -> None:
    options = DQNOptions(capacity=2000, learning_starts=20, train_every=4, batch=8, hidden=(8,))
    with SimpleEnvManager(Duel, 3) as manager:
        specs = manager.behavior_specs
        with LearnerProcess(lambda: DQN("target", specs["target"], options, device="cpu"), max_ahead=30) as target:
            trainers: dict[str, Trainer] = {"hero": PPO("hero", specs["hero"], SMALL, device="cpu"), "target": target}
            controller = TrainerController(manager, trainers)
            for _ in range(8):
                controller.train(controller.n_steps + 60)
                controller.freeze("target")
                before, version = [weight.clone() for weight in target._model.parameters()], target.version
                controller.train(controller.n_steps + 20)
                after = list(target._model.parameters())
                assert all(bool((one == other).all()) for one, other in zip(before, after, strict=True))
                assert target.version == version
                controller.unfreeze("target")
            controller.freeze("target")
            assert target.state()[1]["n_steps"] == target._n_sent
