"""What works on Windows and macOS, as far as a simulation tells: on Windows, worker processes cannot be simulated."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from envmanager_tests.first_steps import LINUX_ONLY
from envmanager_tests.other_systems import SYSTEMS, lacking, lacking_modules, run_on
from envmanager_tests.start_methods import IS_PORTABLE

SUITE = "systems portable"

OTHERS = ("gymnasium", "mpe2", "pettingzoo", "psutil", "pytest", "hypothesis", "rich", "typer", "yaml")
"""Other people's modules, but for those that need PyTorch: these are tried with the training runs."""
LIGHT = ("gymnasium", "psutil", "pytest")
"""Those that a script about one thing needs."""
NEED_TORCH = ("torch", "stable_baselines3", "ray", "mlagents", "mlagents_envs")

SCRIPT = """
import json, os, sys
from envmanager_tests.first_steps import failing_imports

failed = failing_imports()
from envmanager import SimpleEnvManager, SubprocessEnvManager, UsageError, make_manager
from envmanager.policy import RandomPolicy

def play(manager):
    with manager:
        for name, spec in manager.behavior_specs.items():
            manager.set_policy(name, RandomPolicy(spec, seed=0))
        manager.reset()
        return sum(len(manager.step()) for _ in range(50))

def refusal(make):
    try:
        make()
    except UsageError as error:
        return str(error)

def systems_of_workers():
    with SubprocessEnvManager("CartPole-v1", 2) as manager:
        return manager.call(lambda env: [sys.platform, hasattr(os, "pidfd_open")])

has_workers = sys.platform == "darwin"
told = {
    "failed": failed,
    "simple": play(SimpleEnvManager("CartPole-v1", 2)),
    "auto": has_workers and play(make_manager({"kind": "auto", "env": "CartPole-v1", "n_envs": 2, "wait": "all"})),
    "portable": has_workers and play(SubprocessEnvManager("CartPole-v1", 2, wait="all")),
    "workers": has_workers and systems_of_workers(),
    "native": refusal(lambda: SubprocessEnvManager("CartPole-v1", 2, transport="native")),
    "godot": refusal(lambda: make_manager({"kind": "godot", "env": "demo:rolling_ball"})),
}
print(json.dumps(told))
"""


@pytest.mark.parametrize("system", SYSTEMS)
def test_managers_work_and_what_needs_linux_says_so(system: str) -> None:
    told = json.loads(run_on(system, SCRIPT, preloaded=OTHERS, absent=NEED_TORCH))

    allowed = LINUX_ONLY if system == "windows" else set()
    assert {name: error for name, error in told["failed"].items() if name not in allowed} == {}
    assert told["simple"] == 50
    assert bool(told["auto"]) is (system == "macos")
    assert told["portable"] == (100 if system == "macos" else False)
    assert told["workers"] == ([["darwin", False]] * 2 if system == "macos" else False)
    assert 'transport="native" needs Linux' in told["native"]
    assert "GodotEnvManager needs Linux" in told["godot"]


CONTRACT = """
import os, sys, pytest

plugins = "-p no:cacheprovider -p no:xdist -o timeout_method=thread -W ignore::pytest.PytestAssertRewriteWarning"
os.environ["ENVMANAGER_TRANSPORT"] = "portable"
sys.exit(pytest.main(["--quiet", "--capture=no", *plugins.split(), FILE, "-k", SELECTED]))
"""
CONTRACT_LIBRARIES = (*OTHERS, "pytest_mock", "pytest_timeout", "xdist", "ale_py")


def check_contract(system: str, file: str, selected: str, part: str, timeout_s: float = 300) -> None:
    """Run all that is selected in `make test-portable`, and a part of it in `make test-systems`."""
    selected = selected if IS_PORTABLE else f"{selected} and ({part})"
    script = f"FILE, SELECTED = 'envmanager_tests/{file}', {selected!r}\n{CONTRACT}"
    assert " passed" in run_on(system, script, preloaded=CONTRACT_LIBRARIES, timeout_s=timeout_s)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_contract_of_managers_holds_in_one_process(system: str) -> None:
    part = "every_step or send_and_recv or close or call or exception or freed or tasks or same_seed"
    check_contract(system, "contract/test_managers.py", "TestSimpleEnvManager", part)


@pytest.mark.parametrize(
    ("file", "selected", "part"),
    [
        ("contract/test_managers.py", "TestPortableTransport", "(every_step and any) or send_and_recv or close_works"),
        ("faults/test_fault_contract.py", "TestForkserver", "(case_13 and 0) or case_17_when"),
    ],
    ids=["managers", "faults"],
)
@pytest.mark.timeout(1300)
def test_the_contracts_hold_over_workers_on_macos(file: str, selected: str, part: str) -> None:
    check_contract("macos", file, selected, part, timeout_s=1200)


@pytest.mark.parametrize("system", SYSTEMS)
def test_links_to_actors_of_ray_work_with_an_actor_that_is_played(system: str) -> None:
    """Ray itself is not needed for this."""
    check_contract(system, "unit/test_ray_worker.py", "test", "woken or step_that or closing or place")


def test_the_quickstart_runs_on_macos_with_workers_and_without_a_guard() -> None:
    script = re.findall(r"```python\n(.*?)```", Path("docs/quickstart.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    assert "SubprocessEnvManager" in script
    assert "terminated" in run_on("macos", script, preloaded=LIGHT)


LEFT_BEHIND = """
import threading
from envmanager.testing import nothing_left_behind

end = threading.Event()
with nothing_left_behind():
    thread = threading.Thread(target=end.wait)
    thread.start()
    end.set()
end.clear()
try:
    with nothing_left_behind():
        thread = threading.Thread(target=end.wait, name="left")
        thread.start()
except AssertionError as error:
    print(error)
end.set()
"""


@pytest.mark.parametrize("system", SYSTEMS)
def test_threads_that_are_left_behind_are_found(system: str) -> None:
    assert "'threads': ['left']" in run_on(system, LEFT_BEHIND, preloaded=LIGHT)


COMMANDS = """
import os, sys, tempfile
from envmanager.cli import main

tempfile.tempdir = FOLDER
for command in ("run --env CartPole-v1 --n-envs 2 --manager simple --steps 200", *COMMANDS):
    sys.argv = ["envmanager", *command.split()]
    print("exit code", main())
print("left behind", os.listdir(FOLDER))
"""


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_command_line_runs_and_on_macos_checks_and_explains(system: str, tmp_path: Path) -> None:
    commands = (
        ["check --env CartPole-v1", "run --env CartPole-v1 --manager auto --explain --steps 9"]
        if system == "macos"
        else []
    )
    script = f"FOLDER, COMMANDS = {str(tmp_path)!r}, {commands}\n{COMMANDS}"
    told = run_on(system, script, preloaded=[*OTHERS, "rich.live", "typer.testing"])

    assert "200 of 200 environment steps" in told
    assert told.count("exit code 0") == 1 + len(commands)
    assert "left behind []" in told
    if commands:
        assert "no problems found" in told
        assert "measured: a step of an environment takes" in told


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_folder_is_locked_for_one_training(system: str) -> None:
    pytest.importorskip("filelock", reason="PyTorch brings it")
    script = "from envmanager_tests import first_steps\nfirst_steps.files_are_replaced_and_folders_locked()"
    assert run_on(system, script, preloaded=LIGHT) == ""


SLOW_STEPS = """
import time
import gymnasium, numpy
from envmanager import SimpleEnvManager
from envmanager.policy import RandomPolicy

class Slow(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (1,)), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return numpy.zeros(1, numpy.float32), {}

    def step(self, action):
        until_ns = time.perf_counter_ns() + 2_000_000
        while time.perf_counter_ns() < until_ns:
            pass
        return numpy.zeros(1, numpy.float32), 0.0, False, False, {}

with SimpleEnvManager(Slow) as manager:
    for name, spec in manager.behavior_specs.items():
        manager.set_policy(name, RandomPolicy(spec, seed=0))
    manager.reset()
    for _ in range(20):
        manager.step()
    print(manager.stats().workers[0].step_time_p50_s)
"""


@pytest.mark.parametrize("system", SYSTEMS)
def test_steps_shorter_than_a_tick_of_the_systems_clock_are_measured(system: str) -> None:
    assert float(run_on(system, SLOW_STEPS, preloaded=LIGHT)) >= 0.001


INTERRUPTED = """
import signal
from envmanager import SimpleEnvManager
from envmanager.system.interrupts import defer_interrupts

manager = SimpleEnvManager("CartPole-v1")
manager.reset()
try:
    with defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        print("the block went on")
except KeyboardInterrupt:
    print("then it was raised")
manager.reset()
manager.close()
with defer_interrupts():
    pass
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_interrupt_of_the_main_thread_is_deferred(system: str) -> None:
    assert run_on(system, INTERRUPTED, preloaded=LIGHT).splitlines() == ["the block went on", "then it was raised"]


INTERRUPTED_WAITS = """
import _thread
import socket
import threading
import time
from envmanager.hosts import descriptors
from envmanager.hosts.poller import Poller
from envmanager.system.interrupts import allow_interrupts, defer_interrupts

def loopback_pair():  # what ``socket.socketpair`` is there
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]

socket.socketpair = loopback_pair
poller = Poller()
waits = {
    "wait_for": lambda: descriptors.wait_for([poller.bell_fd], 60),
    "poller": lambda: poller.get(1, time.monotonic() + 60),
}
for name, wait in waits.items():
    began = time.monotonic()
    assert descriptors.wait_for([poller.bell_fd], 0.3) == set()
    assert time.monotonic() - began >= 0.25, "the wait has ended early"
    timer = threading.Timer(0.3, _thread.interrupt_main)  # like Ctrl-C there, it ends no system call
    timer.start()
    try:
        with defer_interrupts(), allow_interrupts():
            wait()
    except KeyboardInterrupt:
        print(name, "interrupted")
poller.close()
"""


def test_a_wait_on_windows_notices_an_interrupt_that_ends_no_system_call() -> None:
    told = run_on("windows", INTERRUPTED_WAITS, preloaded=LIGHT, timeout_s=50)

    assert told.splitlines() == ["wait_for interrupted", "poller interrupted"]


DOCUMENTED = {
    "Linux": """
        os.copy_file_range os.eventfd os.eventfd_read os.eventfd_write os.memfd_create os.pidfd_open os.splice
        os.sched_getaffinity os.sched_setaffinity os.getrandom os.getxattr os.O_PATH os.O_TMPFILE
        signal.pidfd_send_signal signal.SIGRTMIN signal.SIGRTMAX select.epoll socket.SOCK_CLOEXEC socket.SOCK_NONBLOCK
        socket.SO_PEERCRED time.CLOCK_BOOTTIME mmap.MAP_POPULATE fcntl.F_SETSIG fcntl.F_SETPIPE_SZ resource.prlimit
    """,
    "Unix, not macOS": """
        os.fdatasync os.pipe2 os.posix_fallocate os.P_PIDFD signal.sigtimedwait signal.sigwaitinfo
        time.pthread_getcpuclockid
    """,
    "Unix": """
        os.fork os.register_at_fork os.killpg os.getpgid os.setsid os.setpgid os.pread os.pwrite os.geteuid os.getuid
        os.mkfifo os.sendfile os.statvfs os.uname os.sched_yield os.WNOHANG os.WIFEXITED
        os.O_CLOEXEC os.O_DIRECTORY os.O_NOFOLLOW os.O_NONBLOCK os.posix_spawn signal.SIGKILL signal.SIGSTOP
        signal.SIGCONT signal.SIGCHLD signal.SIGALRM signal.SIGHUP signal.SIGUSR1 signal.SIGUSR2 signal.setitimer
        signal.pthread_sigmask signal.pthread_kill signal.sigwait select.poll select.PIPE_BUF socket.send_fds
        socket.recv_fds socket.AF_UNIX time.clock_gettime mmap.MAP_SHARED mmap.PROT_READ
        fcntl.flock resource.getrlimit
    """,
    "Unix, Windows": """
        os.kill os.waitpid os.pipe os.dup2 os.set_inheritable os.cpu_count os.symlink os.O_APPEND os.O_EXCL os.fsync
        signal.SIGINT signal.SIGTERM signal.SIGABRT signal.raise_signal signal.set_wakeup_fd select.select
        socket.socketpair socket.SO_KEEPALIVE time.monotonic_ns time.perf_counter_ns time.thread_time mmap.mmap
    """,
}
"""Names by the systems that have them, from Python's documentation: "Availability", notes, and the page of each module.

``socket.send_fds`` needs ``sendmsg``, which Windows has not, although "Availability" names Windows. Left out is what a
system has since a newer Python: on Windows ``os.set_blocking`` (3.12) and ``os.fchmod`` (3.13), on macOS ``os.waitid``
(3.13)."""


@pytest.mark.parametrize("available", DOCUMENTED)
def test_the_simulations_take_away_what_the_documentation_says(available: str) -> None:
    for name in DOCUMENTED[available].split():
        module, attribute = name.split(".")
        assert hasattr(importlib.import_module(module), attribute), f"{name} is not a name of Python here"
        lacks = {
            system: module in lacking_modules(platform) or attribute in lacking(platform)[module]
            for system, platform in SYSTEMS.items()
        }
        on_macos = available in ("Unix", "Unix, Windows")
        assert lacks == {"windows": "Windows" not in available, "macos": not on_macos}, name
