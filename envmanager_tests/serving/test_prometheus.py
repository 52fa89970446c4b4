"""What Prometheus gets, read by its own parser."""

from __future__ import annotations

import sys
import time
import urllib.request
from typing import Any

import pytest

from envmanager import SimpleEnvManager, SubprocessEnvManager
from envmanager_tests.serving.asking import brief, get, refusal, start, succeeding

pytest.importorskip("prometheus_client", reason="the extra serve is not installed")
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as families


def samples(text: str, parse: Any = families) -> dict[tuple[str, ...], float]:
    """The values by name and values of labels."""
    return {(each.name, *each.labels.values()): each.value for family in parse(text) for each in family.samples}


def test_metrics_are_those_of_the_manager():
    with SimpleEnvManager(brief, n_envs=2) as manager:
        server = start(manager)
        server.figures["default"] = {"value_loss": 0.25, "unknown": float("nan")}
        for _ in range(40):
            manager.step()
        server.watch.sample(time.perf_counter_ns())
        found = samples(get(server, "/metrics")[2])

    assert found["envmanager_env_steps_total",] == 80
    assert found["envmanager_worker_steps_total", "0"] == 40
    assert found["envmanager_worker_restarts_total", "0"] == 0
    assert found["envmanager_worker_failed", "0"] == 0
    assert found["envmanager_episodes_total",] == manager.episodes.count > 0
    assert found["envmanager_episode_return", "default"] == pytest.approx(manager.episodes.mean_of_recent())
    assert found["envmanager_training_figure", "default", "value_loss"] == 0.25
    assert ("envmanager_training_figure", "default", "unknown") not in found
    assert {"envmanager_trainer_wait_seconds_total", "envmanager_steps_lost_total"} <= {name for name, *_ in found}
    assert 0 <= found["envmanager_worker_idle_share", "0"] <= 1


def test_tasks_are_among_them():
    with SimpleEnvManager("CartPole-v1", n_envs=2) as manager:
        server = start(manager)
        assert "envmanager_tasks_done_total" not in get(server, "/metrics")[2]
        manager.reset(tasks=range(5))
        while not manager.tasks.done:
            manager.step()
        found = samples(get(server, "/metrics")[2])

    assert found["envmanager_tasks_done_total",] == found["envmanager_tasks",] == 5


def test_measures_and_memory_are_among_them():
    with SubprocessEnvManager(succeeding, n_envs=2, measures=["is_success"]) as manager:
        server = start(manager)
        for _ in range(40):
            manager.step()
        server.watch.sample(time.perf_counter_ns())
        found = samples(get(server, "/metrics")[2])

    assert found["envmanager_episode_measure", "default", "is_success"] == pytest.approx(0.5, abs=0.1)
    assert found["envmanager_worker_memory_bytes", "0"] > 2**20


def test_openmetrics_is_given_to_those_who_accept_it_and_names_are_escaped():
    with SimpleEnvManager(brief) as manager:
        server = start(manager)
        server.figures['odd "name"\n\\'] = {"a": 1.0}
        _, headers, text = get(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")

    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert samples(text, open_families)["envmanager_training_figure", 'odd "name"\n\\', "a"] == 1.0


def test_without_the_library_the_answer_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "envmanager.serving.prometheus", raising=False)
    with SimpleEnvManager(brief) as manager:
        server = start(manager)
        assert refusal(server, "/metrics") == 501
        with urllib.request.urlopen(server.url, timeout=60) as answer:
            assert answer.status == 200
