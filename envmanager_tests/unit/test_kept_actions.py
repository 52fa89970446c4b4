"""The log of a worker's actions, and what is held for the logs of all workers."""

from __future__ import annotations

import random

import numpy as np

from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.keeping.log import EpisodeLog, Rounds

SUITE = "core"

SPECS = {"default": BehaviorSpec(ArraySpec((1,), np.dtype(np.float32)), ArraySpec((2,), np.dtype(np.int64)))}


def test_steps_of_all_workers_and_of_one_stand_in_each_log_in_their_order() -> None:
    rounds, chosen, number = Rounds(), random.Random(0), 0
    logs = rounds.logs = [EpisodeLog(n_envs, SPECS, rounds, is_single=True) for n_envs in (2, 3)]
    expected: list[list[list[int]]] = [[[], []], [[], [], []]]
    for _ in range(300):
        actions = np.arange(number, number + 10, dtype=np.int64).reshape(5, 2)
        number += 10
        parts = {0: ([0, 1], actions[:2]), 1: ([0, 1, 2], actions[2:])}
        if chosen.random() < 0.5:
            rounds.held.append(actions.tobytes())
        else:
            worker = chosen.randrange(2)
            rows = sorted(chosen.sample(parts[worker][0], chosen.randint(1, len(parts[worker][0]))))
            parts = {worker: (rows, parts[worker][1][rows])}
            logs[worker].keep({"default": parts[worker][1]}, {"default": np.array(rows)})
        for worker, (rows, own) in parts.items():
            for row, action in zip(rows, own.tolist(), strict=True):
                expected[worker][row].append(action)
            if chosen.random() < 0.1:
                last, of_rows = logs[worker].last()
                assert (last["default"].tolist(), of_rows["default"].tolist()) == (own.tolist(), rows)
        if chosen.random() < 0.02:
            logs[0].begin(1)
            expected[0][1] = []
        if chosen.random() < 0.1:
            logs[chosen.randrange(2)].tidy()
    for log, of_rows in zip(logs, expected, strict=True):
        log.tidy()
        for row, actions_of_row in enumerate(of_rows):
            kept = log.actions_of(row, log.n_steps)
            assert (kept or {"default": np.zeros((0, 2))})["default"].tolist() == actions_of_row
