"""PPO learns CartPole on a cluster of two nodes, also when one of them is lost in the middle."""

from __future__ import annotations

import faulthandler
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
pytest.importorskip("torch", reason="PyTorch is not installed")

from envmanager.cli.config_files import TRAINING_TABLES, load_config
from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun
from envmanager_tests.ray_cluster.test_nodes import lose, node_of, one_more_node

pytestmark = [pytest.mark.load, pytest.mark.timeout(900)]

CONFIG = Path(__file__).parents[2] / "docs" / "examples" / "ppo_cartpole.yaml"
SOLVED = 475
"""Where CartPole counts as solved (Gymnasium's reward threshold); 500 is all that there is."""


class LosesANode(Report):
    """A report that has a node go when a third of the steps are taken."""

    def __init__(self, cluster: Any, node: Any, n_steps: int) -> None:
        self._lose = lambda: lose(cluster, node)
        self._node = node
        self._at = n_steps // 3
        self.n_on_it = 0
        self.is_done = False

    def updated(self, run: Any, update: Any) -> None:
        if not self.is_done and run.manager.stats().env_steps >= self._at:
            self.n_on_it = run.manager.call(node_of).count(self._node.node_id)
            self._lose()
            self.is_done = True


def tables_for(nodes: list[str]) -> Any:
    tables = load_config(CONFIG, TRAINING_TABLES)
    tables["training"]["seed"] = 0
    tables["manager"] |= {"kind": "ray", "n_workers": len(nodes), "cluster": {"placement": nodes}}
    return tables


@pytest.mark.parametrize("is_lost", [False, True], ids=["both nodes stay", "one node is lost"])
def test_ppo_on_two_nodes_solves_cartpole(cluster: Any, tmp_path: Path, is_lost: bool) -> None:
    faulthandler.cancel_dump_traceback_later()  # it is meant to take that long
    with one_more_node(cluster) as node:
        tables = tables_for([cluster.head_node.node_id, node.node_id])
        plan = TrainingPlan.parse(tables, tmp_path)
        report = LosesANode(cluster, node, tables["training"]["steps"] if is_lost else 10**12)
        result = TrainingRun(plan, report).go()
    assert result.evaluation is not None
    print(
        f"evaluation {result.evaluation.mean:.0f} ± {result.evaluation.spread:.0f} in {result.wall_s:.0f} s; "
        f"{result.stats.restarts} workers replaced, {result.stats.steps_lost} steps lost"
    )
    assert report.is_done is is_lost
    assert (result.stats.restarts > 0) is is_lost
    assert result.evaluation.mean >= SOLVED
