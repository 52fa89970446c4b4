"""What goes to a policy, and what may come back."""

import numpy as np
import pytest

from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.steps import ActionInfo, AgentSteps, StepInfo
from envmanager.errors import BadAction
from envmanager.kernel.policy_steps import call_policies

SPEC = BehaviorSpec(ArraySpec((2,)), ArraySpec((), np.int64))


class Policy:
    """Acts with ones, and with the outputs it was made with."""

    def __init__(self, outputs):
        self.outputs, self.steps = outputs, None

    def get_action(self, steps):
        self.steps = steps
        return ActionInfo(np.ones(len(steps), np.int64), self.outputs)


def worker_of(first_id, n_agents):
    ids = np.arange(first_id, first_id + n_agents)
    flags = np.zeros(n_agents, bool)
    steps = AgentSteps(ids, np.zeros((n_agents, 2), np.float32), np.zeros(n_agents, np.float32), flags, flags)
    return StepInfo(None, {"default": steps}, None, first_id)


def called(policy, *infos):
    return [actions["default"] for actions in call_policies(infos, {"default": policy}, {"default": SPEC})[0]]


@pytest.mark.parametrize("infos", [[worker_of(0, 3)], [worker_of(0, 2), worker_of(2, 1)]], ids=["one", "two"])
def test_a_policy_gets_arrays_of_its_own(infos):
    policy = Policy({})
    called(policy, *infos)

    for name in ("agent_id", "obs", "reward", "terminated", "truncated"):
        arrays = [getattr(info.current["default"], name) for info in infos]
        assert not any(np.shares_memory(getattr(policy.steps, name), array) for array in arrays)


def test_outputs_are_dealt_to_the_workers():
    first, second = called(Policy({"value": np.array([5.0, 6, 7])}), worker_of(0, 2), worker_of(2, 1))

    assert (first.outputs["value"].tolist(), second.outputs["value"].tolist()) == ([5, 6], [7])


def test_outputs_stay_as_they_were_when_the_policy_writes_its_next_ones():
    value = np.array([5.0, 6])
    (taken,) = called(Policy({"value": value}), worker_of(0, 2))
    value[:] = 0

    assert taken.outputs["value"].tolist() == [5, 6]


def test_outputs_may_be_lists_and_become_arrays():
    (taken,) = called(Policy({"value": [[1, 2], [3, 4]]}), worker_of(0, 2))

    assert taken.outputs["value"].shape == (2, 2)


@pytest.mark.parametrize(
    ("values", "got"),
    [
        (None, "but is None"),
        (1.0, "but is float 1.0"),
        (np.array(1.0), r"but is float64\[\]"),
        (np.zeros(2), r"but is float64\[2\]"),
        ([1, 2], r"but is int64\[2\]"),
        ({0: 1}, "but is a dict"),
        ([[1], [1, 2]], "but is a list that cannot be made an array"),
    ],
)
def test_an_output_that_does_not_have_a_row_per_agent_is_named(values, got):
    with pytest.raises(BadAction, match=f"output 'value' of the policy of behavior 'default' .* 1 rows.*{got}"):
        called(Policy({"value": values}), worker_of(0, 1))


@pytest.mark.parametrize("outputs", [None, [1], np.zeros(1), "value"])
def test_outputs_without_names_are_refused(outputs):
    with pytest.raises(BadAction, match="the outputs of the policy of behavior 'default' should be a mapping"):
        called(Policy(outputs), worker_of(0, 1))


def test_an_answer_that_is_no_action_info_is_refused():
    class Forgetful:
        def get_action(self, steps):
            return np.ones(len(steps), np.int64)

    with pytest.raises(BadAction, match="not an ActionInfo"):
        called(Forgetful(), worker_of(0, 1))
