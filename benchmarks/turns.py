"""PettingZoo's games of turns in a manager, beside a loop over ``agent_iter()``: whether every row is equal.

    pip install 'pettingzoo[classic,butterfly]'
    python -m benchmarks.turns [--episodes 100] [--only chess go] [--kind subprocess]

Each game is played twice with the same seeds and random legal moves. Compared are, move by move, which agents there
are and which acts, their observations and rewards, and who has ended how. ``ledger`` says whether the rewards that
agents were told sum to the ``rewards`` that the environment gave after each move. A game whose libraries are missing
is named. Games of images, and long ones, are made smaller.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from typing import Any

import attrs
import numpy as np

from envmanager import ActionInfo, AgentSteps, StepInfo, Task, make_manager
from envmanager.data.trees import take_rows

GAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "chess": ("classic.chess.chess", {}),
    "connect_four": ("classic.connect_four.connect_four", {}),
    "go": ("classic.go.go", {"board_size": 7}),
    "hanabi": ("classic.hanabi.hanabi", {}),
    "leduc_holdem": ("classic.rlcard_envs.leduc_holdem", {}),
    "rps": ("classic.rps.rps", {}),
    "texas_holdem": ("classic.rlcard_envs.texas_holdem", {"num_players": 4}),
    "texas_holdem_no_limit": ("classic.rlcard_envs.texas_holdem_no_limit", {"num_players": 3}),
    "tictactoe": ("classic.tictactoe.tictactoe", {}),
    "cooperative_pong": ("butterfly.cooperative_pong.cooperative_pong", {"max_cycles": 60}),
    "knights_archers_zombies": (
        "butterfly.knights_archers_zombies.knights_archers_zombies",
        {"num_archers": 1, "num_knights": 1, "max_cycles": 250},
    ),
    "pistonball": ("butterfly.pistonball.pistonball", {"n_pistons": 4, "max_cycles": 20}),
}
"""Module in PettingZoo and arguments, by game."""

Row = tuple[bool, float, bool, bool, list[np.ndarray]]
"""Whether the agent acts, its reward, whether it has been terminated and truncated, and what it sees."""
Rows = dict[Any, Row]


def make(name: str) -> Any:
    """Make the game. Raises ImportError if its libraries are missing."""
    module, arguments = GAMES[name]
    return importlib.import_module(f"pettingzoo.{module}").env(**arguments)


@attrs.define
class Mover:
    """A player of random legal moves, which are equal for equal observations."""

    space: Any
    _random: np.random.Generator = attrs.field(factory=lambda: np.random.default_rng(0))

    def move(self, obs: Any) -> Any:
        if isinstance(obs, dict) and "action_mask" in obs:
            return self._random.choice(np.flatnonzero(obs["action_mask"]))
        if hasattr(self.space, "n"):
            return self._random.integers(self.space.n)
        return self._random.uniform(self.space.low, self.space.high).astype(self.space.dtype)

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        (row,) = range(len(steps))
        return ActionInfo(np.asarray(self.move(take_rows(steps.obs, row)))[None])


def direct(env: Any, seeds: range, debts: Counter[str]) -> Iterator[Rows]:
    """Play by ``agent_iter()``. Yield the rows after each reset and move. ``debts``: rewards given less those told."""
    mover = Mover(env.action_space(env.possible_agents[0]))
    for seed in seeds:
        env.reset(seed=seed)
        rows: Rows = {}
        for agent in env.agent_iter():
            obs, reward, terminated, truncated, _ = env.last()
            debts[agent] -= reward
            ended = bool(terminated or truncated)
            rows[agent] = not ended, float(np.float32(reward)), bool(terminated), bool(truncated), _arrays(obs)
            if ended:
                env.step(None)
                continue
            rows |= {
                each: (False, 0.0, False, False, _arrays(env.observe(each))) for each in env.agents if each != agent
            }
            yield rows
            rows = {}
            env.step(mover.move(obs))
            debts.update(env.rewards)
        yield rows


def managed(kind: str, name: str, numbers: list[Any], space: Any, seeds: range) -> Iterator[Rows]:
    """Play as tasks of a manager with one environment. Yield the same rows. ``numbers`` has the agents by number."""
    with make_manager({"kind": kind, "n_envs": 1}, partial(make, name)) as manager:
        mover = Mover(space)
        for behavior in manager.behavior_specs:
            manager.set_policy(behavior, mover)
        infos = manager.reset(tasks=[Task(seed=seed) for seed in seeds])
        while True:
            for info in infos:
                rows = rows_of(info, numbers)
                if rows:
                    yield rows
            if manager.tasks.done:
                return
            infos = manager.step()


def rows_of(info: StepInfo, numbers: list[Any]) -> Rows:
    rows: Rows = {}
    for steps in info.current.values():
        ended, final = steps.ended, iter(range(len(steps)))
        for row, agent_id in enumerate(steps.agent_id.tolist()):
            obs = take_rows(steps.final_obs, next(final)) if ended[row] else take_rows(steps.obs, row)
            acts = steps.acting is None or bool(steps.acting[row])
            flags = bool(steps.terminated[row]), bool(steps.truncated[row])
            rows[numbers[agent_id]] = acts, float(steps.reward[row]), *flags, _arrays(obs)
    return rows


def _arrays(obs: Any) -> list[np.ndarray]:
    return [np.array(obs[key]) for key in sorted(obs)] if isinstance(obs, dict) else [np.array(obs)]


def is_equal(one: Row, other: Row) -> bool:
    """Return whether both rows say the same, whatever the dtypes of observations."""
    return one[:4] == other[:4] and all(map(np.array_equal, one[4], other[4]))


def compare(name: str, kind: str, n_episodes: int) -> str:
    """Play the game in both ways. Return the line of the table, or raise ImportError if its libraries are missing."""
    env, seeds, debts = make(name), range(n_episodes), Counter[str]()
    env.reset(seed=0)
    numbers, space = list(env.possible_agents), env.action_space(env.possible_agents[0])
    n_moves = n_rows = n_ends = n_wrong = 0
    began = time.perf_counter()
    one: Rows
    other: Rows
    for one, other in zip_longest(direct(env, seeds, debts), managed(kind, name, numbers, space, seeds), fillvalue={}):
        n_moves += any(row[0] for row in one.values())
        n_rows += len(one)
        n_ends += sum(row[2] or row[3] for row in one.values())
        n_wrong += one.keys() != other.keys() or not all(is_equal(row, other[agent]) for agent, row in one.items())
    env.close()
    debt = max(map(abs, debts.values()), default=0)
    ledger = "0" if debt < 1e-6 * n_rows else f"{debt:g} apart"
    time_s = time.perf_counter() - began
    return f"| {name} | {n_episodes} | {n_moves:,} | {n_rows:,} | {n_ends:,} | {n_wrong} | {ledger} | {time_s:.0f} s |"


def main() -> None:
    """Print a table with a line for each game."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--only", nargs="*", choices=list(GAMES), default=list(GAMES), metavar="GAME")
    parser.add_argument("--kind", default="simple", choices=["simple", "subprocess"])
    arguments = parser.parse_args()
    print("| game | episodes | moves | rows | ends | unequal moves | ledger | time |", flush=True)
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in arguments.only:
        try:
            print(compare(name, arguments.kind, arguments.episodes), flush=True)
        except ImportError as error:
            print(f"| {name} | skipped: {error} |", flush=True)


if __name__ == "__main__":
    main()
