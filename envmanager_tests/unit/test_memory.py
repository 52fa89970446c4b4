"""How much memory is left, read from trees of files like those of the kernel."""

from __future__ import annotations

import pytest

from envmanager._workers import memory
from envmanager.system import cgroups

MIB = 1 << 20
UNLIMITED = 9223372036854771712  # what version 1 says when nobody has set a limit


@pytest.fixture
def left(tmp_path, monkeypatch):
    """Write the files of cgroups, and what ``/proc/self/cgroup`` says; then how many MiB are left of 1,000."""
    monkeypatch.setattr(cgroups, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "own")
    monkeypatch.setattr(memory, "_mem_available", lambda: 1000 * MIB)

    def left_mib(own, files):
        (tmp_path / "own").write_text(own)
        for name, value in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(value if isinstance(value, str) else f"{value * MIB}\n")
        return memory.available_bytes() // MIB

    return left_mib


V1 = "9:name=systemd:/\n4:memory:/jobs/mine\n1:cpu:/other\n0::/\n"
V2 = "0::/jobs/mine\n"


def v1(folder, limit, usage, stat=""):
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": usage,
        f"{folder}/memory.stat": stat,
    }


def v2(folder, limit, usage, stat=""):
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": usage, f"{folder}/memory.stat": stat}


@pytest.mark.parametrize(
    "folder", ["memory/jobs/mine", "memory/jobs", "memory"], ids=["own", "around", "a container's"]
)
def test_a_limit_of_version_1_counts_wherever_it_is(left, folder):
    assert left(V1, v1(folder, 250, 50)) == 200


@pytest.mark.parametrize("folder", ["jobs/mine", "jobs", ".", "unified/jobs/mine"])
def test_a_limit_of_version_2_counts_wherever_it_is(left, folder):
    assert left(V2, v2(folder, 250, 50)) == 200


def test_the_least_of_all_limits_counts(left):
    files = {**v2("jobs/mine", 300, 10), **v2("jobs", 400, 380), **v2(".", "max\n", 900)}
    assert left(V2, files) == 20


@pytest.mark.parametrize("own", [V1, V2, ""])
def test_without_limits_the_machine_counts(left, own):
    files = {**v1("memory/jobs/mine", f"{UNLIMITED}\n", 5), **v2("jobs/mine", "max\n", 5)}
    assert left(own, files) == 1000


def test_limits_of_groups_that_this_process_is_not_in_do_not_count(left):
    assert left(V1, {**v1("memory/other", 1, 0), **v1("cpu/other", 1, 0)}) == 1000


@pytest.mark.parametrize("own", [V1, V2])
def test_files_that_nobody_reads_any_more_are_no_use_of_memory(left, own):
    files = {
        **v1("memory/jobs/mine", 250, 200, f"inactive_file 1\ntotal_inactive_file {120 * MIB}\nmapped_file 7\n"),
        **v2("jobs/mine", 250, 200, f"anon 5\ninactive_file {120 * MIB}\n"),
    }
    assert left(own, files) == 170


def test_a_group_that_is_over_its_limit_has_nothing_left(left):
    assert left(V2, v2("jobs/mine", 100, 150)) == 0


def test_a_group_outside_of_what_can_be_seen_is_the_root(left):
    assert left("0::/../elsewhere\n", v2(".", 250, 50)) == 200


def test_a_file_that_says_nonsense_is_no_limit(left):
    assert left(V2, {**v2("jobs/mine", "much\n", 5), **v2("jobs", 5, "some\n")}) == 1000


@pytest.mark.parametrize("limit", [v1("memory", 250, 50), v2(".", 250, 50)], ids=["version 1", "version 2"])
def test_without_proc_the_limits_at_the_root_count(left, limit, tmp_path, monkeypatch):
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "none")
    assert left("", limit) == 200


def test_without_proc_there_is_no_more_than_the_machine_has(monkeypatch):
    monkeypatch.setattr(cgroups, "words", lambda _: [])
    assert 0 < memory.available_bytes() < 2**50
