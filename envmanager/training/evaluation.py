"""Evaluation of policies over a fixed number of episodes, which is divided among the environments in advance.

Counting whichever episodes end first would favour short episodes. Instead, a fixed number of episodes is counted for
each seat of each environment, however long they take. An agent that joins takes the seat of an agent that has left.

An ``Evaluator`` evaluates while a training is paused, in environments of its own::

    training's manager    step ─ step ─ update ─ step ─ │             │ step ─ update ─ …
    evaluator's manager                                 │ 20 episodes │

The rule: such an evaluation does not affect the training. The training's environments, their episodes, the steps in
flight and PyTorch's random generators (CPU and CUDA) are unchanged afterwards.
"""

from __future__ import annotations

import csv
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np

from envmanager.data.seeding import derive_seed
from envmanager.data.steps import AGENT_BITS, StepInfo
from envmanager.env_manager import EnvManager
from envmanager.errors import ConfigError, UsageError
from envmanager.observe import events
from envmanager.observe.episodes import Episode, Episodes
from envmanager.options import Wait, plain
from envmanager.policy import Policy
from envmanager.registry import ManagerOptions, make_manager
from envmanager.simple_env_manager import SimpleEnvManager
from envmanager.system.machine import count_cores
from envmanager.tasks import TaskResult
from envmanager.training.trainer import Trainer

_GENERATION = 2**31 - 1
"""Generation for ``derive_seed`` that no worker reaches, so that evaluations share no seed with the training."""
_logger = logging.getLogger("envmanager")


@attrs.frozen
class Evaluation:
    """The result of an evaluation: for each behavior, the returns and lengths of its agents' evaluated episodes.

    A return is the sum of one agent's rewards in one episode; a length is the number of this agent's steps. The returns
    and lengths of a behavior are in the same order. ``n_episodes`` is the number of episodes evaluated, each of which
    has one return per agent.
    """

    returns_of: Mapping[str, list[float]]
    lengths_of: Mapping[str, list[int]] = attrs.field(factory=dict)
    n_episodes: int = 0
    results: Sequence[TaskResult] = ()
    """Results of the tasks, in their order, if the evaluation had tasks. A lost task has no return; see its error."""
    lost: int = 0
    """Number of episodes that failed workers have cut. Long episodes are lost more often than short ones, so the other
    episodes played instead can have other returns. Episodes of dropped workers are lost too, and not played again."""

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write a table of ``results``, with a row for each agent of each task. Options and ids are written as JSON."""
        names = ("task", "id", "seed", "options", "env_id", "behavior", "agent", "return", "length", "terminated",
                 "attempts", "error")  # fmt: skip
        with open(path, "w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            table.writerow(names)
            for each in self.results:
                task = (each.index, *map(_text, (each.task.id, each.task.seed, each.task.options)), each.env_id)
                end = (each.terminated, each.attempts, "" if each.error is None else str(each.error).partition("\n")[0])
                for episode in each.episodes:
                    agent = episode.agent_id & (1 << AGENT_BITS) - 1
                    table.writerow((*task, episode.behavior, agent, episode.total, episode.length, *end))
                if not each.episodes:
                    table.writerow((*task, "", "", "", "", *end))

    @property
    def returns(self) -> list[float]:
        """Episode returns of all agents of all behaviors."""
        return [one for returns in self.returns_of.values() for one in returns]

    @property
    def lengths(self) -> list[int]:
        """Episode lengths of all agents of all behaviors."""
        return [one for lengths in self.lengths_of.values() for one in lengths]

    @property
    def mean(self) -> float:
        """Mean of the returns of all agents of all behaviors."""
        return mean_and_spread(self.returns)[0]

    @property
    def spread(self) -> float:
        """Standard deviation of the returns of all agents of all behaviors."""
        return mean_and_spread(self.returns)[1]


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def mean_and_spread(returns: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation of ``returns``."""
    return float(np.mean(returns)), float(np.std(returns))


def shares(n_episodes: int, n_envs: int) -> list[int]:
    """Split ``n_episodes`` evenly among ``n_envs`` environments. Return the number of episodes for each environment."""
    each, rest = divmod(n_episodes, n_envs)
    return [each + (env_id < rest) for env_id in range(n_envs)]


def evaluate(
    manager: EnvManager,
    policies: Mapping[str, Policy],
    *,
    episodes_per_env: int | Sequence[int] | None = None,
    tasks: Iterable[Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Reset ``manager``, play with ``policies`` until every agent has finished its episodes, and return the results.

    Pass ``tasks``, of each of which one episode is played, in whichever environment is free: see ``EnvManager.reset``.
    The results do not depend on the number of environments, and no environment waits for a slower one. Where episodes
    cannot begin on demand, or environments are unlike, pass ``episodes_per_env`` instead.

    ``episodes_per_env`` is one number for all environments or a list with a number for each. ``config`` is passed to
    ``manager.reset``. The manager plays another episode for each episode lost with a failed worker; all episodes of a
    dropped worker are left out. ``Evaluation.lost`` counts both. Raises UsageError for an invalid ``episodes_per_env``.
    """
    if tasks is not None:
        if episodes_per_env is not None:
            raise UsageError("evaluate() takes tasks or episodes_per_env, not both.")
        for behavior, policy in policies.items():
            manager.set_policy(behavior, policy)
        with logged_as_evaluation():
            manager.reset(config, tasks=list(tasks))
            while not manager.tasks.done:
                manager.step()
        results, n_lost = manager.tasks.results, manager.tasks.n_lost
        ended = [episode for result in results for episode in result.episodes]
        behaviors = dict.fromkeys([*policies, *(episode.behavior for episode in ended)])
        returns_of = {each: [episode.total for episode in ended if episode.behavior == each] for each in behaviors}
        lengths_of = {each: [episode.length for episode in ended if episode.behavior == each] for each in behaviors}
        return Evaluation(returns_of, lengths_of, len(results) - n_lost, results, n_lost)
    if episodes_per_env is None:
        raise UsageError("evaluate() needs tasks or episodes_per_env.")
    evaluation = evaluate_until(lambda: False, manager, policies, episodes_per_env=episodes_per_env, config=config)
    assert evaluation is not None
    return evaluation


def evaluate_until(
    is_over: Callable[[], bool],
    manager: EnvManager,
    policies: Mapping[str, Policy],
    *,
    episodes_per_env: int | Sequence[int],
    config: Mapping[str, Any] | None = None,
) -> Evaluation | None:
    """Evaluate as ``evaluate`` does, but check ``is_over()`` before each step and return None once it is True."""
    given = plain(episodes_per_env)
    wanted = [given] * manager.n_envs if isinstance(given, int) else list(given)
    if len(wanted) != manager.n_envs or min(wanted) < 0 or not any(wanted):
        raise UsageError(f"episodes_per_env must be a number, or {manager.n_envs} of them, not {episodes_per_env}.")
    for behavior, policy in policies.items():
        manager.set_policy(behavior, policy)
    envs = [_EnvEpisodes(n) for n in wanted]
    ended: list[Episode] = []
    episodes = Episodes(on_end=ended.append, keeps_returns=False)
    n_dropped = -1  # so that the first check includes workers dropped earlier
    with logged_as_evaluation():
        infos = manager.reset(config)
        for now in itertools.count():
            for info in infos:
                episodes.add(info)
                _add(envs, info, ended, now)
                ended.clear()
            if manager.events.count(events.Dropped) > n_dropped:
                n_dropped = manager.events.count(events.Dropped)
                for worker in manager.stats().workers:
                    for env_id in worker.env_ids if worker.dropped else ():
                        envs[env_id].lost += envs[env_id].wanted
                        envs[env_id].wanted = 0
            if all(env.is_over for env in envs):
                break
            if is_over():
                return None
            infos = manager.step()
    returns_of: dict[str, list[float]] = {behavior: [] for behavior in policies}
    lengths_of: dict[str, list[int]] = {behavior: [] for behavior in policies}
    for env in envs:
        for episode in (episode for seat in env.seats.values() for episode in seat.episodes[: env.wanted]):
            returns_of.setdefault(episode.behavior, []).append(episode.total)
            lengths_of.setdefault(episode.behavior, []).append(episode.length)
    return Evaluation(returns_of, lengths_of, sum(env.wanted for env in envs), lost=sum(env.lost for env in envs))


@contextmanager
def logged_as_evaluation() -> Iterator[None]:
    """Begin the lines that this thread logs in the block with ``evaluation:``, to tell them from the training's."""
    thread = threading.get_ident()

    def name(record: logging.LogRecord) -> bool:
        if record.thread == thread:
            record.msg = f"evaluation: {record.msg}"
        return True

    _logger.addFilter(name)
    try:
        yield
    finally:
        _logger.removeFilter(name)


@attrs.define
class _Seat:
    """The episodes of one agent, and of later agents that took its place."""

    behavior: str
    seen: int = -1
    """Last step with a row for the agent."""
    began: int | None = None
    """Step in which the current episode began; None after its end."""
    episodes: list[Episode] = attrs.field(factory=list)


@attrs.define
class _EnvEpisodes:
    """The episodes of one environment. The first ``wanted`` of each seat are evaluated.

    An agent has left when another agent has begun and finished an episode since the last row for it.
    """

    wanted: int
    lost: int = 0
    seats: dict[int, _Seat] = attrs.field(factory=dict, init=False)
    """Seats by the agent_id of the last agent, in the order in which their last episodes ended."""
    newest: int = attrs.field(default=-1, init=False)
    """Step in which the newest of the finished episodes began."""

    @property
    def is_over(self) -> bool:
        """Whether each seat has its episodes, but for seats of agents that have left."""
        done = (len(seat.episodes) >= self.wanted or seat.seen < self.newest for seat in self.seats.values())
        return not self.wanted or (bool(self.seats) and all(done))

    def seat(self, behavior: str, agent_id: int) -> _Seat:
        """Return the seat of an agent. A new agent gets the seat that is free for longest, or else a new seat."""
        if agent_id not in self.seats:
            free = (
                before
                for before, seat in self.seats.items()
                if seat.behavior == behavior and (seat.began is None or seat.seen < self.newest)
            )
            left = self.seats.pop(next(free, -1), None)
            self.seats[agent_id] = _Seat(behavior, episodes=[] if left is None else left.episodes)
        return self.seats[agent_id]


def _add(envs: Sequence[_EnvEpisodes], info: StepInfo, ended: Sequence[Episode], now: int) -> None:
    """Add a StepInfo of step ``now`` to the episodes of its environments. ``ended``: the episodes that end in it."""
    if info.lost is not None:
        for env_id in {env_id for steps in info.current.values() for env_id in steps.env_id[steps.truncated].tolist()}:
            envs[env_id].lost += not envs[env_id].is_over
            for seat in envs[env_id].seats.values():
                seat.began = None
    for episode in ended:
        env = envs[episode.env_id]
        seat = env.seat(episode.behavior, episode.agent_id)
        seat.episodes.append(episode)
        env.newest, seat.began = max(env.newest, seat.began or 0), None
        env.seats[episode.agent_id] = env.seats.pop(episode.agent_id)  # behind the seats that are free already
    for behavior, steps in info.current.items():
        present = steps.agent_id if steps.acting is None else steps.agent_id[steps.acting | ~steps.ended]
        # Agents with a seat come first, so that new agents do not take it.
        for agent_id in sorted(
            present.tolist(), key=lambda agent_id: agent_id not in envs[agent_id >> AGENT_BITS].seats
        ):
            seat = envs[agent_id >> AGENT_BITS].seat(behavior, agent_id)
            seat.seen, seat.began = now, now if seat.began is None else seat.began


class Evaluator:
    """A context manager that evaluates greedy policies in its own environments, with the same seeds each time.

    ``options``, ``manager`` and ``seed`` are those of the training. The evaluator makes a second manager and closes it
    on exit. Each evaluation plays ``n_episodes`` episodes. Raises the errors of ``options_for`` and ``make_manager``.
    """

    def __init__(self, options: ManagerOptions, manager: EnvManager, *, n_episodes: int, seed: int) -> None:
        self._seed = derive_seed(seed, 0, generation=_GENERATION)
        with logged_as_evaluation():
            self._manager = make_manager(options_for(options, manager, n_episodes=n_episodes))
        self._episodes_per_env = shares(n_episodes, self._manager.n_envs)

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def evaluate(self, trainers: Mapping[str, Trainer], is_over: Callable[[], bool]) -> Evaluation | None:
        """Pause the trainers, play the episodes and return the evaluation, or None as soon as ``is_over()`` is True."""
        for trainer in trainers.values():
            trainer.pause()  # so that the weights stay equal to those in a checkpoint written now
        policies = {behavior: trainer.greedy_policy() for behavior, trainer in trainers.items()}
        before = generator_states()
        try:
            return evaluate_until(
                is_over,
                self._manager,
                policies,
                episodes_per_env=self._episodes_per_env,
                config={"seed": self._seed},
            )
        finally:
            restore_generators(before)


def options_for(options: ManagerOptions, manager: EnvManager, *, n_episodes: int) -> ManagerOptions:
    """Return the training's options, changed for an evaluation's manager with at most ``n_episodes`` environments.

    Raises ConfigError when the training is attached to a running game, which cannot be started a second time.
    """
    kind = options.kind
    if kind == "auto":
        kind = "simple" if isinstance(manager, SimpleEnvManager) else "subprocess"
    n_envs = min(options.n_envs, n_episodes)
    n_workers = options.n_workers
    if n_workers == "auto" or options.kind == "auto":
        n_workers = count_cores()
    return attrs.evolve(
        options,
        kind=kind,
        n_envs=n_envs,
        n_workers=None if n_workers is None else min(n_workers, n_envs),
        local_envs=0,
        wait=Wait.all(),  # so that policies see the same batches each time
        seed=None,
        trace=None,
        log_dir=None if options.log_dir is None else os.path.join(options.log_dir, "evaluation"),
        engine=None if options.engine is None else _engine(options.engine),
    )


def _engine(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return engine options with ``window`` and ``pin`` set to False. Raises ConfigError if ``attach`` is set."""
    if options.get("attach") is not None:
        raise ConfigError(
            "training.evaluate_every needs a second game for its evaluations, but engine.attach gives only one: leave "
            "out one of the two."
        )
    return {**options, "window": False, "pin": False}


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
