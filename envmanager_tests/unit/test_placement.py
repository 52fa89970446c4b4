"""Where environments are placed: the decision alone, and what it is made from."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envmanager import placing
from envmanager.adapters.choosing import build_group
from envmanager.environment import EnvContext
from envmanager.errors import ConfigError, UsageError
from envmanager.placing.placement import IN_PROCESS, Placement, Probe, choose, isolate, round_s
from envmanager.placing.probing import ProbedEnvironment, RunDelay, StepTime, make_probed, summarize
from envmanager.registry import ManagerOptions, known_kinds, structure
from envmanager.system import machine

BOX = gymnasium.spaces.Box(0, 1, (4,), np.float32)


# What probes found on two cores of a virtual machine, one of them while a neighbour took half of its time.
MESSAGE_S = 49e-6  # on that machine when it was fastest
NOOP = Probe(wall_s=3.1e-6, cpu_s=3.4e-6, unevenness=0.9, obs_bytes=16, message_s=1.3 * MESSAGE_S)
CARTPOLE = Probe(wall_s=10.7e-6, cpu_s=10.9e-6, unevenness=1.0, obs_bytes=16, message_s=1.1 * MESSAGE_S)
SLOWED_CARTPOLE = Probe(wall_s=20.6e-6, cpu_s=21.1e-6, unevenness=0.9, obs_bytes=16, message_s=1.7 * MESSAGE_S)
PONG = Probe(wall_s=522e-6, cpu_s=523e-6, unevenness=0.4, obs_bytes=28224, message_s=1.3 * MESSAGE_S)
LARGE = Probe(wall_s=19.0e-6, cpu_s=19.9e-6, unevenness=0.4, obs_bytes=2**19, message_s=1.4 * MESSAGE_S)
STRAGGLER = Probe(wall_s=2.0e-3, cpu_s=65e-6, unevenness=4.5, obs_bytes=16, message_s=1.7 * MESSAGE_S)


def computing(seconds: float, **more: float) -> Probe:
    return Probe(wall_s=seconds, cpu_s=seconds, **more)


def sleeping(seconds: float, **more: float) -> Probe:
    return Probe(wall_s=seconds, cpu_s=0.01 * seconds, **more)


class Counting(gymnasium.Env):
    """Sleeps, or computes, a while in each step."""

    observation_space = BOX
    action_space = gymnasium.spaces.Discrete(2)
    sleep_s = compute_s = 0.0
    closed = False

    def reset(self, *, seed=None, options=None):
        self.seed = seed
        return np.zeros(4, np.float32), {}

    def step(self, action):
        time.sleep(self.sleep_s)
        until = time.thread_time() + self.compute_s
        while time.thread_time() < until:
            pass
        return np.zeros(4, np.float32), 0.0, False, False, {}

    def close(self):
        type(self).closed = True


class Sleeping(Counting):
    sleep_s = 0.006  # a measured step is a little shorter: waits for a core, and what the clocks take, are taken off


class Computing(Counting):
    compute_s = 0.005


class Raising(Counting):
    def step(self, action):
        raise ValueError("the robot fell over")


class OfTexts(Counting):
    action_space = gymnasium.spaces.Text(5)


def probe_of(env: gymnasium.Env, *, seed: int | None = None, **more: float) -> Probe:
    """The probe of an environment, taken in this process."""
    probed = ProbedEnvironment(build_group([env], [0]), **more)
    probed.reset(seeds=[seed], options=None)
    while not probed.is_done:
        probed.step({})
    return probed.probe


# The choice.


@pytest.mark.parametrize("n_cores", [1, 2, 16])
@pytest.mark.parametrize("n_envs", [1, 2, 8])
def test_environments_that_cost_nothing_run_in_this_process(n_envs, n_cores):
    placement = choose(computing(0.5e-6), n_envs, n_cores)

    assert (placement.kind, placement.n_workers) == ("simple", 1)


@pytest.mark.parametrize(("n_envs", "n_cores"), [(8, 2), (8, 4), (64, 16), (4, 4)])
def test_environments_that_compute_get_a_worker_per_core(n_envs, n_cores):
    placement = choose(computing(0.01), n_envs, n_cores)

    assert (placement.kind, placement.n_workers) == ("subprocess", n_cores)


@pytest.mark.parametrize(
    ("probe", "n_envs", "best"),
    [
        (NOOP, 8, 1),
        (NOOP, 64, 1),
        (CARTPOLE, 8, 1),
        (CARTPOLE, 64, 2),
        (SLOWED_CARTPOLE, 8, 1),
        (SLOWED_CARTPOLE, 64, 2),
        (PONG, 8, 2),
        (LARGE, 8, 1),
        (LARGE, 32, 1),
        (STRAGGLER, 8, 8),
    ],
    ids=[
        *("noop", "many noops", "cartpole", "many cartpoles", "slowed cartpole", "many slowed cartpoles", "pong"),
        *("large observations", "many large observations", "straggler"),
    ],
)
def test_on_two_cores_it_chooses_what_was_measured_to_be_fastest(probe, n_envs, best):
    placement = choose(probe, n_envs, 2)

    assert (placement.kind == "simple", placement.n_workers) == (best == 1, best)


def test_there_are_no_more_workers_than_environments():
    assert choose(computing(0.01), 3, 16).n_workers == 3


@pytest.mark.parametrize("n_cores", [1, 2, 16])
@pytest.mark.parametrize("n_envs", [2, 8, 100])
def test_environments_that_sleep_get_a_worker_each(n_envs, n_cores):
    placement = choose(sleeping(0.02), n_envs, n_cores)

    assert (placement.kind, placement.n_workers) == ("subprocess", n_envs)


def test_environments_that_wait_for_an_engine_get_a_worker_each():
    assert choose(Probe(wall_s=0.03, cpu_s=0.004), 8, 2).n_workers == 8


def test_environments_that_compute_unevenly_get_a_worker_each():
    assert choose(computing(0.01, unevenness=4.0), 8, 2).n_workers == 8


def test_one_environment_that_takes_long_is_kept_out_of_this_process():
    assert choose(computing(0.01), 1, 2).kind == "subprocess"


def test_without_this_process_many_cheap_environments_share_few_workers():
    placement = choose(computing(0.5e-6), 64, 16, in_process=False)

    assert placement.kind == "subprocess"
    assert placement.n_workers <= 4


def test_a_given_number_of_workers_leaves_only_the_kind_open():
    assert choose(sleeping(0.02), 8, 2, n_workers=3) == Placement(
        "subprocess", 3, choose(sleeping(0.02), 8, 2, n_workers=3).reason
    )
    assert choose(computing(0.5e-6), 8, 2, n_workers=3).kind == "simple"


def test_nothing_runs_in_this_process_beside_workers_unless_asked():
    assert choose(computing(7e-6), 64, 2, in_process=False).local_envs == 0


def test_asked_to_this_process_takes_its_part_where_messages_are_what_costs():
    placement = choose(computing(7e-6), 64, 2, in_process=False, local_envs="auto")

    assert placement.n_workers == 1
    assert 24 <= placement.local_envs <= 32
    assert str(placement).startswith(f"{placement.local_envs} in this process and {64 - placement.local_envs} ")


@pytest.mark.parametrize("probe", [sleeping(0.02), computing(0.01), computing(0.01, unevenness=4.0), PONG])
def test_asked_to_this_process_takes_no_part_where_that_saves_little(probe):
    assert choose(probe, 8, 2, in_process=False, local_envs="auto") == choose(probe, 8, 2, in_process=False)


def test_with_one_core_there_is_nothing_to_share():
    assert choose(computing(7e-6), 64, 1, in_process=False, local_envs="auto").local_envs == 0


def test_a_given_number_of_local_environments_is_kept():
    placement = choose(sleeping(0.02), 8, 2, local_envs=3)

    assert (placement.kind, placement.n_workers, placement.local_envs) == (
        "subprocess",
        2,
        3,
    )  # as slow as the local ones


@pytest.mark.parametrize(
    ("probe", "n_envs", "n_local"),
    [
        (NOOP, 8, 8),
        (CARTPOLE, 8, 8),
        (CARTPOLE, 32, 16),
        (SLOWED_CARTPOLE, 32, 16),
        (STRAGGLER, 8, 0),
    ],
    ids=["noop", "cartpole", "many cartpoles", "many slowed cartpoles", "straggler"],
)
def test_asked_to_this_process_takes_its_part_where_that_was_measured_to_be_fastest(probe, n_envs, n_local):
    placement = choose(probe, n_envs, 2, local_envs="auto")

    found = n_envs if placement.kind == "simple" else placement.local_envs
    assert n_local * 0.7 <= found <= n_local


def test_environments_on_many_threads_get_fewer_workers_than_cores_in_time():
    on_four_threads = Probe(wall_s=0.01, cpu_s=0.04)

    assert round_s(on_four_threads, 8, 8, 8) == pytest.approx(0.04, rel=0.1)


def test_in_this_process_a_round_takes_the_sum_of_all_steps():
    assert round_s(sleeping(0.02), 8, IN_PROCESS, 2) == pytest.approx(8 * 0.02, rel=0.01)


def test_in_workers_a_round_takes_as_long_as_the_fullest_worker():
    assert round_s(sleeping(0.02), 8, 3, 2) == pytest.approx(3 * 0.02, rel=0.02)


def test_in_workers_a_round_takes_at_least_what_the_cores_must_compute():
    assert round_s(computing(0.02), 8, 8, 2) == pytest.approx(4 * 0.02, rel=0.02)


@given(
    wall_s=st.floats(1e-6, 1e-3),
    n_envs=st.integers(1, 64),
    n_cores=st.integers(1, 64),
    slowness=st.sampled_from([0.25, 0.5, 2.0, 4.0]),
    local_envs=st.sampled_from([0, "auto"]),
)
def test_on_a_machine_that_is_slower_in_all_the_choice_is_the_same(wall_s, n_envs, n_cores, slowness, local_envs):
    message_s = Probe(wall_s=0, cpu_s=0).message_s
    probes = [computing(wall_s), computing(wall_s * slowness, message_s=slowness * message_s)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placing.placement, "SPIN_NS", 0)  # a spin is the one thing that is as long on all machines
        chosen = [choose(probe, n_envs, n_cores, local_envs=local_envs) for probe in probes]

    assert len({(each.kind, each.n_workers, each.local_envs) for each in chosen}) == 1


def test_a_wall_clock_of_zero_is_computing():
    assert Probe(wall_s=0.0, cpu_s=0.0).busy_share == 1.0


@given(
    wall_s=st.floats(1e-7, 10.0),
    busy=st.floats(0.0, 8.0),
    n_envs=st.integers(1, 64),
    n_cores=st.integers(1, 64),
    unevenness=st.floats(0.0, 10.0),
    in_process=st.booleans(),
    local_envs=st.just("auto") | st.integers(0, 63),
)
def test_whatever_was_measured_the_choice_is_possible_and_said(
    wall_s, busy, n_envs, n_cores, unevenness, in_process, local_envs
):
    local_envs = local_envs if local_envs == "auto" else min(local_envs, n_envs - 1)
    probe = Probe(wall_s=wall_s, cpu_s=busy * wall_s, unevenness=unevenness)

    placement = choose(probe, n_envs, n_cores, in_process=in_process, local_envs=local_envs)

    assert 1 <= placement.n_workers <= n_envs - placement.local_envs
    assert local_envs in (placement.local_envs, "auto")
    assert placement.kind == "subprocess" or (in_process and placement.n_workers == 1)
    assert "\n" not in str(placement)
    assert ", because " in str(placement)


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        (computing(0.5e-6), ["8 environments in this process", "0.5 µs", "too little"]),
        (computing(0.01), ["8 environments in 2 workers, one per core", "10 ms", "100%"]),
        (sleeping(0.02), ["8 environments in 8 workers, one each", "20 ms", "only 1%"]),
        (computing(0.01, unevenness=4.0), ["8 environments in 8 workers, one each", "some steps far more"]),
    ],
)
def test_the_choice_is_said_with_what_was_measured(probe, words):
    reason = choose(probe, 8, 2).reason

    assert all(word in reason for word in words), reason


# What it is made from.


def test_a_step_that_sleeps_takes_time():
    probe = probe_of(Sleeping(), probe_s=0.1)

    assert probe.wall_s >= 0.005
    assert probe.obs_bytes == 16


def test_a_step_that_computes_is_seen_to():
    probe = probe_of(Computing(), probe_s=0.1)

    assert probe.cpu_s >= 0.004


def test_a_probe_takes_two_steps_at_least_and_not_too_many():
    assert probe_of(Sleeping(), probe_s=0.0).n_steps == 2
    assert probe_of(Counting(), probe_s=60.0, max_steps=20).n_steps == 20


def test_a_probe_begins_with_the_environments_seed():
    env = Counting()

    probe_of(env, seed=17, max_steps=2)

    assert env.seed == 17


def summary(walls_ns: list[int]) -> Probe:
    first = 10**10  # what is done for the first time does not count
    steps = [StepTime(first, first), *(StepTime(each, each) for each in walls_ns)]
    return summarize(steps, obs_bytes=0)


def test_steps_that_are_now_and_then_slow_are_uneven():
    assert summary([10**6] * 100).unevenness == 0.0
    assert summary([*[10**6] * 99, 10**9]).unevenness == 0.0, "one of a hundred, such as a reset, says nothing"
    assert summary([*[10**6] * 9, 10**7] * 10).unevenness == pytest.approx(9 / 1.9, rel=0.05)


def test_the_first_step_does_not_count():
    assert summary([10**6] * 100).wall_s == pytest.approx(1e-3)


def test_time_spent_waiting_for_a_core_is_not_the_environments():
    assert StepTime.of(10**6, 10**5, 4 * 10**5).wall_ns == 6 * 10**5
    assert StepTime.of(10**6, 10**5, 10**7).wall_ns == 10**5, "it took at least what it computed"
    assert StepTime.of(10**6, 4 * 10**6, 0).wall_ns == 10**6, "several threads compute at once"


def test_waiting_for_a_core_is_counted_where_the_kernel_tells(monkeypatch):
    with RunDelay() as delay:
        assert delay.ns() >= 0
    monkeypatch.setattr(os, "open", unavailable)
    with RunDelay() as delay:
        assert delay.ns() == 0


def unavailable(*_):
    raise FileNotFoundError


def test_actions_that_cannot_be_drawn_ask_for_a_choice_by_hand():
    OfTexts.closed = False

    with pytest.raises(UsageError, match="Set kind and n_workers yourself"):
        make_probed(OfTexts, EnvContext(0, 0))

    assert OfTexts.closed


def test_a_probe_reports_after_every_part_how_many_steps_it_has_taken():
    probed = make_probed(Counting, EnvContext(0, 0))

    parts = [probed.reset(seeds=[None], options=None), *(probed.step({}) for _ in range(5))]

    assert [part["default"].obs.tolist() for part in parts] == [[[n, 0]] for n in (0, 1, 2, 4, 8, 16)]
    probed.close()
    assert Counting.closed


@pytest.mark.parametrize(
    ("chosen", "n_workers", "local_envs", "where"),
    [
        ({}, 8, 0, "8 environments in 8 workers, one each"),
        ({"local_envs": "auto"}, 8, 0, "8 environments in 8 workers, one each"),
        ({"n_workers": 2}, 2, 0, "8 environments in 2 workers"),
        ({"local_envs": 3}, 5, 3, "3 in this process and 5 environments in 5 workers, one each"),
    ],
)
def test_environments_that_should_not_share_a_process_get_a_worker_each_unless_the_user_has_chosen(
    chosen, n_workers, local_envs, where
):
    word = "because" if n_workers == 8 else "as chosen by hand, although"

    assert isolate("the probe ended", 8, **chosen) == Placement(
        "subprocess", n_workers, f"{where}, {word} the probe ended", local_envs
    )


# Cores.


@pytest.fixture
def cgroup(tmp_path, monkeypatch) -> Iterator[object]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "own")

    def write(files, own="3:memory:/other\n2:cpu,cpuacct:/a/b\n0::/a/b\n"):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return machine.count_cores()

    return write


def test_without_a_cgroup_the_affinity_counts(cgroup):
    assert cgroup({}) == 8


@pytest.mark.parametrize(("text", "expected"), [("max 100000", 8), ("250000 100000", 3), ("5000 100000", 1), ("", 8)])
def test_a_cgroups_quota_counts_and_a_part_of_a_core_is_one(cgroup, text, expected):
    assert cgroup({"a/b/cpu.max": text}) == expected


def test_a_quota_further_up_counts_too(cgroup):
    assert cgroup({"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"}) == 2


@pytest.mark.parametrize("folder", ["cpu", "cpu/a", "cpu/a/b", "cpu,cpuacct/a/b"])
def test_quotas_of_version_1_count_wherever_they_are(cgroup, folder):
    period = {f"{folder}/cpu.cfs_period_us": "100000\n"}
    assert cgroup({f"{folder}/cpu.cfs_quota_us": "400000\n", **period}) == 4
    assert cgroup({f"{folder}/cpu.cfs_quota_us": "-1\n", **period}) == 8


def test_quotas_of_groups_that_this_process_is_not_in_do_not_count(cgroup):
    assert cgroup({"cpu/other/cpu.max": "100000 100000", "other/cpu.max": "100000 100000"}) == 8


def test_a_group_outside_of_what_can_be_seen_is_the_root(cgroup):
    assert cgroup({"cpu.max": "200000 100000"}, own="0::/../elsewhere\n") == 2


def test_without_proc_the_quotas_at_the_root_count(cgroup, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "none")
    assert cgroup({"cpu.max": "200000 100000"}) == 2


def test_the_real_cores_can_be_counted():
    assert 1 <= machine.count_cores() <= len(os.sched_getaffinity(0))


# Asking for it.


def test_auto_is_a_kind_and_a_number_of_workers():
    assert "auto" in known_kinds()
    assert structure(ManagerOptions, {"kind": "auto", "n_workers": "auto"}).n_workers == "auto"


@pytest.mark.parametrize("n_workers", ["many", "8", 0, True, 2.0])
def test_other_words_are_refused(n_workers):
    with pytest.raises(ConfigError, match=r'n_workers must be a whole number of at least 1, or "auto", not'):
        structure(ManagerOptions, {"n_workers": n_workers, "n_envs": 8})
