"""``python -m benchmarks`` as a process, and the launcher with contenders' processes that misbehave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import launcher as launcher_module
from benchmarks.launcher import Launcher, NotMeasured
from benchmarks.protocol import Job

CHECKOUT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks"]
TIMEOUT_S = 500


def run(*arguments):
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_a_quick_measurement_has_a_table_goals_and_a_json_file(tmp_path):
    done = run("--quick", "--goals", "--contenders", "ours-simple,gymnasium-sync", "--out", tmp_path / "a.json")

    said = json.loads((tmp_path / "a.json").read_text())
    (cell,) = said["summary"]
    assert (done.returncode, done.stderr) == (0, "")
    assert {line["contender"] for line in cell["contenders"]} == {"ours-simple", "gymnasium-sync"}
    assert all(line["steps_per_s"] > 0 for line in cell["contenders"])
    assert [turn["contender"] for turn in said["turns"]][:: len(said["turns"]) - 1] == ["bare", "bare"]
    target = next(target for target in said["targets"] if target["about"] == "in process")
    assert target["value"] == pytest.approx(
        next(c for c in cell["contenders"] if c["contender"] == "gymnasium-sync")["best_of_ours_to_it"]
    )
    assert "Gymnasium SyncVectorEnv" in done.stdout
    assert "envmanager (in process)" in done.stdout


def test_processes_are_measured_too_and_a_peer_that_is_not_installed_is_skipped_and_said(tmp_path):
    python = tmp_path / "python-without-sb3"  # wherever these tests run
    python.write_text(
        f"#!{sys.executable}\nimport runpy, sys\nsys.modules['stable_baselines3'] = None\n"
        "del sys.argv[:2]\nrunpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
    )
    python.chmod(0o755)

    contenders = ("--contenders", "ours-processes,sb3-dummy", "--python", f"sb3={python}")
    done = run("--quick", "--seconds", 0.5, *contenders, "--out", tmp_path / "a.json")

    assert done.returncode == 0
    assert "envmanager (a worker each)" in done.stdout
    (line,) = json.loads((tmp_path / "a.json").read_text())["summary"][0]["contenders"]
    assert 0 < line["trainer_cores"] < line["all_cores"]
    assert "skipped: sb3:" in done.stdout
    assert "pip install stable-baselines3" in done.stdout


def test_ctrl_c_ends_a_measurement_and_keeps_what_was_measured(tmp_path):
    cell = ("--workload", "noop", "--n-envs", "2", "--contenders", "ours-processes")
    with subprocess.Popen(
        [*COMMAND, *cell, "--seconds", "600", "--out", str(tmp_path / "a.json")],
        cwd=CHECKOUT,
        env={name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        family = wait_for_children(process, "benchmarks.zygote")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT_S)

    assert (process.returncode, err) == (130, "")
    assert "interrupted" in out
    assert json.loads((tmp_path / "a.json").read_text())["ended"] == "interrupted"
    assert psutil.wait_procs(family, timeout=60)[1] == []


def wait_for_children(process, name):
    """All descendants, once a zygote has forked a turn."""
    while process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        if sum(name in " ".join(each.cmdline()) for each in family if each.is_running()) >= 2:
            return family
    pytest.fail(process.stderr.read())


JOB = Job("gymnasium-sync", "noop", 2, 0.01, 0.0, 30.0)
FAKE = f"""#!{sys.executable}
import json, os, sys, time
def say(event, **fields): print(json.dumps({{"event": event, **fields}}), flush=True)
say("ready", versions={{}})
for line in sys.stdin:
"""


@pytest.fixture
def fake(tmp_path):
    """A launcher of zygotes that answer every job with a few lines of Python."""

    def make(answer):
        python = tmp_path / "python"
        python.write_text(FAKE + "".join(f"    {line}\n" for line in answer.splitlines()))
        python.chmod(0o755)
        return Launcher({"gymnasium": str(python)})

    return make


def test_a_job_is_measured():
    with Launcher({}) as launcher:
        first, second = launcher.run(JOB), launcher.run(JOB)

        assert set(launcher.versions["gymnasium"]) >= {"python", "numpy", "gymnasium"}
    assert min(first.n_steps, second.n_steps) > 0
    assert 0.01 <= first.wall_s < 60


def test_an_exception_of_a_contender_is_told_with_its_traceback():
    with Launcher({}) as launcher:
        with pytest.raises(NotMeasured, match="KeyError") as caught:
            launcher.run(Job("gymnasium-sync", "no such workload", 2, 0.01, 0.0, 30.0))
        assert "Traceback" in caught.value.details
        assert launcher.run(JOB).n_steps > 0


def test_a_contender_that_cannot_take_part_says_why(fake):
    with (
        fake('say("unable", text="not here")\nsay("ended", exit_code=0)') as launcher,
        pytest.raises(NotMeasured, match="not here") as caught,
    ):
        launcher.run(JOB)

    assert caught.value.kind == "unable"


def test_a_turn_whose_process_dies_is_told_with_its_last_output(fake):
    with (
        fake('print("the end", file=sys.stderr, flush=True)\nsay("ended", exit_code=-11)') as launcher,
        pytest.raises(NotMeasured, match=r"ended \(exit code -11\)") as caught,
    ):
        launcher.run(JOB)

    assert "the end" in caught.value.details


def test_a_zygote_that_hangs_or_dies_is_replaced_by_another(fake, mocker):
    mocker.patch.object(launcher_module, "MORE_S", 0.0)
    hangs = Job("gymnasium-sync", "noop", 2, 0.01, 0.0, 0.05)
    with fake("time.sleep(1000) if json.loads(line)['limit_s'] < 1 else sys.exit(3)") as launcher:
        with pytest.raises(NotMeasured, match="did not respond"):
            launcher.run(hangs)
        with pytest.raises(NotMeasured, match=r"ended \(exit code 3\)"):
            launcher.run(JOB)


def test_ctrl_c_at_the_moment_a_turn_says_its_pid_ends_the_turn(mocker):
    hear = launcher_module.Zygote._next
    turns = []

    def interrupted(self, timeout_s):
        said = hear(self, timeout_s)
        if said["event"] == "started":
            turns.append(psutil.Process(said["pid"]))
            raise KeyboardInterrupt
        return said

    mocker.patch.object(launcher_module.Zygote, "_next", interrupted)
    with pytest.raises(KeyboardInterrupt), Launcher({}) as launcher:
        launcher.run(Job("gymnasium-sync", "noop", 2, 600.0, 0.0, 600.0))

    assert len(turns) == 1
    assert psutil.wait_procs(turns, timeout=60)[1] == []


def test_a_library_that_is_missing_is_missing_for_good(fake, tmp_path):
    with fake("") as launcher:
        (tmp_path / "python").write_text(f'#!{sys.executable}\nprint(\'{{"event": "missing", "text": "No module"}}\')')
        for _ in range(2):
            with pytest.raises(NotMeasured, match="No module: pip install gymnasium") as caught:
                launcher.run(JOB)

    assert caught.value.kind == "missing"


def test_an_interpreter_that_cannot_be_started_is_missing(tmp_path):
    with Launcher({"gymnasium": str(tmp_path)}) as launcher, pytest.raises(NotMeasured, match="cannot be started"):
        launcher.run(JOB)
