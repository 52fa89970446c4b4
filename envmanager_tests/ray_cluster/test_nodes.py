"""Nodes that go, nodes that come, and workers for which there is none."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from envmanager import EnvContext, RestartPolicy, SubprocessEnvManager, Timeouts, UsageError, Wait, WorkerDied
from envmanager.errors import NotPlaced
from envmanager.observe import events
from envmanager.testing import EchoEnvironment
from envmanager.testing.fault_checks import CheckedTrainer, returns_within, until
from envmanager.testing.leaks import SLACK_S, SOON_S, descendants
from envmanager_tests.process.test_kept_episodes import ALL, KEPT, Make, played, without_faults
from envmanager_tests.ray_cluster.conftest import CPUS_OF_A_NODE, STORE_BYTES

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

from envmanager.ray_cluster.manager import RayEnvManager

N_STEPS = 20_000


@contextmanager
def one_more_node(cluster: Any, **resources: Any) -> Iterator[Any]:
    """A node that may be taken away inside the block, and is gone after it."""
    node = cluster.add_node(num_cpus=CPUS_OF_A_NODE, object_store_memory=STORE_BYTES, **resources)
    try:
        yield node
    finally:
        lose(cluster, node)
        until(lambda: node.node_id not in alive())  # Ray waits for some heartbeats


def alive() -> list[str]:
    """The nodes that Ray believes to be there."""
    import ray

    return [str(node["NodeID"]) for node in ray.nodes() if node["Alive"]]


def lose(cluster: Any, node: Any) -> None:
    """Have a node go without a word, as a machine does that loses its power. A second time does nothing."""
    if node not in cluster.worker_nodes:
        return
    (raylet,) = node.all_processes["raylet"]
    for pid in [raylet.process.pid, *descendants(raylet.process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)


def node_of(env: EchoEnvironment) -> str:
    """Called where the environment is."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def all_cpus_are_free() -> bool:
    """Whether Ray has heard of the end of every actor before; until then it spreads new ones over fewer nodes."""
    import ray

    return bool(ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])


def n_env_steps(trainer: CheckedTrainer) -> int:
    return trainer.manager.stats().env_steps


def test_a_node_lost_in_the_middle_of_steps_costs_its_workers_episodes_and_mixes_up_nothing(cluster: Any) -> None:
    with one_more_node(cluster) as node:
        head = cluster.head_node.node_id
        placement = [head, node.node_id, head, node.node_id]
        with RayEnvManager(EchoEnvironment, 16, n_workers=4, placement=placement) as manager:
            trainer = CheckedTrainer(manager)
            trainer.reset()
            assert [own == node.node_id for own in manager.call(node_of)] == [False] * 4 + [True] * 4 + [False] * 4 + [
                True
            ] * 4
            trainer.step_until(lambda: n_env_steps(trainer) >= N_STEPS // 2)
            lose(cluster, node)
            trainer.until_lost(n=2)
            trainer.step_until(lambda: n_env_steps(trainer) >= N_STEPS)

            assert sorted(info.worker_id for info in trainer.lost) == [1, 3]
            assert all(isinstance(info.lost.cause, WorkerDied) for info in trainer.lost if info.lost is not None)
            assert [worker.generation for worker in trainer.workers] == [0, 1, 0, 1]
            assert node.node_id not in manager.call(node_of)
            assert manager.stats().restarts == 2
            trainer.go_on(range(4))


@pytest.mark.parametrize("wait", [ALL, Wait.any()], ids=["all", "any"])
def test_kept_episodes_of_a_node_that_is_lost_go_on_in_others(cluster: Any, wait: Wait) -> None:
    with one_more_node(cluster) as node:
        placement = [cluster.head_node.node_id, node.node_id]

        def lose_it(n_rows: int) -> None:
            if n_rows >= 20:  # this step is in flight
                lose(cluster, node)

        with RayEnvManager(Make(), 4, n_workers=2, seed=1, restarts=KEPT, placement=placement) as manager:
            streams = played(manager, wait=wait, meanwhile=lose_it)
            stats = manager.stats()
            assert [worker.generation for worker in stats.workers] == [0, 1]
            assert (streams.lost, stats.episodes_kept, stats.episodes_diverged, stats.steps_lost) == (0, 2, 0, 0)
    assert streams.digests == without_faults()


def test_a_worker_without_a_node_waits_for_one_that_joins_later(cluster: Any) -> None:
    options: Any = {"resources": {"custom": {"license": 1}}, "restarts": RestartPolicy(backoff_s=0)}
    with (
        one_more_node(cluster, resources={"license": 1}) as node,
        RayEnvManager(EchoEnvironment, 1, **options) as manager,
    ):
        trainer = CheckedTrainer(manager)
        trainer.reset()
        trainer.go_on([0])
        lose(cluster, node)
        trainer.step_until(lambda: manager.events.count(events.Restarted), wait=Wait.any(timeout_s=0.05))
        with one_more_node(cluster, resources={"license": 1}) as other:
            trainer.until_lost()
            trainer.go_on([0])
            assert manager.call(node_of) == [other.node_id]


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"n_workers": 3, "resources": {"custom": {"unobtainium": 1}}}, "no node has 1 unobtainium (no node has any)"),
        (
            {"n_workers": 1, "resources": {"num_cpus": 1000}},
            f"no node has 1000 CPU (the most that one has is {CPUS_OF_A_NODE})",
        ),
        (
            {"n_workers": 4, "resources": {"num_cpus": CPUS_OF_A_NODE}, "squeeze": False},
            "all CPU is taken, but for 0 CPU",
        ),
    ],
    ids=["what nobody has", "more than anybody has", "more than is free"],
)
def test_a_start_for_which_there_is_no_room_says_once_and_in_time_what_is_missing(
    cluster: Any, options: dict[str, Any], missing: str
) -> None:
    began = time.monotonic()
    with pytest.raises(NotPlaced) as raised, returns_within(5.0):
        RayEnvManager(EchoEnvironment, 4, timeouts=Timeouts(start_s=5.0), **options)
    assert time.monotonic() - began < 5.0 + SLACK_S
    assert missing in str(raised.value)
    assert f"3 nodes with {3 * CPUS_OF_A_NODE} CPU" in str(raised.value)


def test_spread_workers_are_on_all_nodes_and_named_ones_where_they_were_put(cluster: Any) -> None:
    until(all_cpus_are_free)
    with RayEnvManager(EchoEnvironment, 6, placement="spread") as manager:
        assert len(set(manager.call(node_of))) == 3
    ids = [node.node_id for node in cluster.list_all_nodes()]
    with RayEnvManager(EchoEnvironment, 3, placement=ids) as manager:
        assert manager.call(node_of) == ids
        assert all(worker.node for worker in manager.stats().workers)


@pytest.mark.parametrize(("placement", "complaint"), [(["mars"] * 2, "no such node"), ([], "0 nodes for 2 workers")])
def test_a_node_that_is_not_there_is_refused(cluster: Any, placement: list[str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        RayEnvManager(EchoEnvironment, 2, placement=placement)


def wide(context: EnvContext) -> EchoEnvironment:
    return EchoEnvironment(context, n_agents=5000)


def test_arrays_of_the_object_store_are_the_trainers_own_to_write_into(cluster: Any) -> None:
    """Observations of 200 kB go through the object store, whose arrays are read-only."""
    with RayEnvManager(wide, 2) as manager:
        trainer = CheckedTrainer(manager)
        for info in [*trainer.reset(), *trainer.step(Wait.all())]:
            assert info.current["default"].obs.nbytes >= 200_000
            assert info.current["default"].obs.flags.writeable


@pytest.mark.parametrize("n_workers", [1, 2])
def test_batches_are_the_trainers_own_to_write_into(cluster: Any, n_workers: int) -> None:
    with RayEnvManager(EchoEnvironment, 4, n_workers=n_workers) as manager:
        manager.reset()
        batch = manager.recv(Wait.all())
        batch.obs[:] = -1
        manager.send(np.arange(4), batch.env_ids)
        assert manager.recv(Wait.all()).obs[:, 3].tolist() == [0, 1, 2, 3]


def test_environment_variables_reach_the_actors(cluster: Any) -> None:
    options: Any = {"runtime_env": {"env_vars": {"ONE": "1"}}, "worker_env": {"TWO": "2"}}
    with RayEnvManager(EchoEnvironment, 1, **options) as manager:
        (seen,) = manager.call(lambda env: (os.environ.get("ONE"), os.environ.get("TWO")))
        assert seen == ("1", "2")


def test_auto_puts_cheap_environments_into_few_actors_and_says_why(cluster: Any) -> None:
    with RayEnvManager(EchoEnvironment, 64, n_workers="auto", timeouts=Timeouts(start_s=SOON_S)) as manager:
        assert manager.n_workers <= 4
        assert "a call of an actor" in manager.stats().placement


# Nodes that come and go.


def moves(manager: Any) -> list[tuple[int, str]]:
    return [(event.worker_id, event.why) for event in manager.events if isinstance(event, events.Recycled)]


def test_a_run_begins_on_the_nodes_that_are_there_and_spreads_when_another_joins(cluster: Any) -> None:
    until(all_cpus_are_free)
    options: Any = {"resources": {"num_cpus": CPUS_OF_A_NODE}, "place_s": 2.0, "seed": 1, "restarts": KEPT}
    with RayEnvManager(Make(), 4, n_workers=4, **options) as manager, contextlib.ExitStack() as exits:
        (squeezed,) = (event for event in manager.events if isinstance(event, events.Squeezed))
        assert "all CPU is taken" in str(squeezed)
        joined: list[Any] = []

        def join(n_rows: int) -> None:
            if n_rows == 20 and not joined:
                joined.append(exits.enter_context(one_more_node(cluster)))
            if n_rows >= 20 and not moves(manager):
                time.sleep(0.1)  # the run is long enough to see it

        streams = played(manager, n_rounds=600, meanwhile=join)
        assert moves(manager) == [(squeezed.worker_id, "as there is a place for it")]
        assert manager.call(node_of)[squeezed.worker_id] == joined[0].node_id
        assert (streams.lost, manager.stats().restarts) == (0, 0)
        manager.close()
    assert streams.digests == without_faults(n_rounds=600)


def test_workers_move_to_a_node_that_joins_until_the_shares_are_even(cluster: Any) -> None:
    until(all_cpus_are_free)
    with RayEnvManager(Make(), 8, n_workers=8, seed=1, restarts=KEPT) as manager, contextlib.ExitStack() as exits:
        joined: list[Any] = []

        def join(n_rows: int) -> None:
            if n_rows == 20 and not joined:
                joined.append(exits.enter_context(one_more_node(cluster)))
            if n_rows >= 20 and len(moves(manager)) < 2:
                time.sleep(0.05)  # the run is long enough to see it

        streams = played(manager, n_rounds=1500, meanwhile=join)
        n_on = manager.call(node_of).count(joined[0].node_id)
        assert {why for _, why in moves(manager)} == {"for even shares of the nodes"}
        assert n_on == len(moves(manager)) >= 2
        assert (streams.lost, manager.stats().restarts) == (0, 0)
        manager.close()
    with SubprocessEnvManager(Make(), 8, n_workers=2, seed=1, restarts=KEPT) as other:
        assert streams.digests == played(other, n_rounds=1500).digests


def test_workers_leave_a_node_that_is_to_end_before_it_does(cluster: Any) -> None:
    with one_more_node(cluster) as node:
        placement = [node.node_id, cluster.head_node.node_id, node.node_id, cluster.head_node.node_id]
        options: Any = {"placement": placement, "seed": 1, "restarts": KEPT}
        with RayEnvManager(Make(), 4, n_workers=4, **options) as manager:
            assert manager.call(node_of) == placement

            def end(n_rows: int) -> None:
                if n_rows == 20:
                    drain(node)
                if n_rows >= 20 and len(moves(manager)) < 2:
                    time.sleep(0.1)
                if n_rows == 550:
                    lose(cluster, node)

            streams = played(manager, n_rounds=600, meanwhile=end)
            assert sorted(moves(manager)) == [(0, "as its node is to end"), (2, "as its node is to end")]
            assert (streams.lost, manager.stats().restarts) == (0, 0)
    assert streams.digests == without_faults(n_rounds=600)


def drain(node: Any) -> None:
    """Give notice of the end of a node, as a cloud's spot instance does."""
    import ray
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    client = ray._private.worker.global_worker.gcs_client
    end_ms = int(1000 * (time.time() + 600))
    accepted, why = client.drain_node(node.node_id, DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, "spot", end_ms)
    assert accepted, why


def test_a_start_may_wait_for_nodes(cluster: Any) -> None:
    with pytest.raises(UsageError, match="has 3 of min_nodes=4 nodes after 1 s"):
        RayEnvManager(EchoEnvironment, 1, min_nodes=4, timeouts=Timeouts(start_s=1.0))
    with RayEnvManager(EchoEnvironment, 1, min_nodes=3) as manager:
        manager.reset()
