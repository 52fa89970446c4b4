"""A policy of ML-Agents' kind without a network."""

from __future__ import annotations

import numpy as np
from mlagents.trainers.action_info import ActionInfo
from mlagents.trainers.policy import Policy
from mlagents.trainers.settings import NetworkSettings
from mlagents.trainers.torch_entities.action_log_probs import LogProbsTuple
from mlagents_envs.base_env import ActionTuple, BehaviorSpec, DecisionSteps


class ToldPolicy(Policy):
    """Goes where the corridor tells it to, for one branch of actions; its log-probability is its place.

    ``calls`` lists the agents and the worker of every call.
    """

    def __init__(self, spec: BehaviorSpec, *, memory: NetworkSettings.MemorySettings | None = None) -> None:
        super().__init__(0, spec, NetworkSettings(memory=memory))
        self.calls: list[tuple[list[int], int]] = []

    def get_action(self, decision_requests: DecisionSteps, worker_id: int = 0) -> ActionInfo:
        self.calls.append((decision_requests.agent_id.tolist(), worker_id))
        told, place = decision_requests.obs[0][:, :1], decision_requests.obs[0][:, 1:2]
        action = ActionTuple(discrete=np.sign(told).astype(np.int32) + 1)
        outputs = {"action": action, "log_probs": LogProbsTuple(discrete=place), "entropy": np.abs(place[:, 0])}
        return ActionInfo(action, action, outputs, list(decision_requests.agent_id))
