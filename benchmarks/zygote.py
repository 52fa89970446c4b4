"""A process that imports a library and then forks one process per turn: ``python -m benchmarks.zygote FAMILY``.

::

    stdin: Job, Job, …        stdout: ready │ missing, then per turn: started, measured │ failed, ended

Importing PyTorch or Gymnasium takes seconds, and forking a process that has imported it milliseconds. Every turn still
begins in a process in which nothing ran before. Output of libraries goes to stderr; stdout has only these lines.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from typing import IO

from benchmarks.measure import Clocks, measure, warm_up
from benchmarks.protocol import (
    ENDED,
    FAILED,
    MEASURED,
    MISSING,
    READY,
    STARTED,
    UNABLE,
    Job,
    job_of,
    line_of,
)
from benchmarks.roster import FAMILIES, CannotTakePart, load_family, make_contender
from benchmarks.workloads import ALL


def main(family: str) -> int:
    """Serve jobs until stdin ends."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        load_family(family)
    except ImportError as error:
        lines.write(line_of(MISSING, text=str(error)))
        return 0
    lines.write(line_of(READY, versions=versions_of(family)))
    for line in sys.stdin:
        serve(job_of(line), lines)
    return 0


def serve(job: Job, lines: IO[str]) -> None:
    """Fork a child that takes the turn, wait for it, and report its end."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)  # so that all processes that it starts can be killed with it
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            code = take_turn(job, lines)
        finally:
            os._exit(code)  # the child must run neither this process's loop nor its exit handlers
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # processes that it left running would disturb the next turn
    lines.write(line_of(ENDED, exit_code=os.waitstatus_to_exitcode(status)))


def take_turn(job: Job, lines: IO[str]) -> int:
    """Make the contender, measure it and report the result; return the exit code."""
    lines.write(line_of(STARTED, pid=os.getpid()))
    faulthandler.dump_traceback_later(job.limit_s, exit=True)
    try:
        lines.write(measured_line(job))
    except CannotTakePart as reason:
        lines.write(line_of(UNABLE, text=str(reason)))
    except Exception as error:
        lines.write(line_of(FAILED, text=f"{type(error).__name__}: {error}", traceback=traceback.format_exc()))
        return 1
    return 0


def measured_line(job: Job) -> str:
    """Measure the job's contender, and return the line of its result."""
    clocks = Clocks()
    started = time.monotonic()
    contender = make_contender(job.contender, ALL[job.workload].env, job.n_envs)
    start_s = time.monotonic() - started
    contender.get_ready()
    n_calls = warm_up(contender, job.warm_up_s, clocks)
    n_steps, wall_s, cpu_s, all_cpu_s = measure(contender, n_calls=n_calls, seconds=job.seconds, clocks=clocks)
    line = line_of(MEASURED, n_steps=n_steps, wall_s=wall_s, cpu_s=cpu_s, all_cpu_s=all_cpu_s, start_s=start_s)
    contender.close()
    return line


def versions_of(family: str) -> dict[str, str]:
    """Return the versions of Python and of the packages of this family."""
    found = {"python": sys.version.split()[0]}
    for package in ("numpy", "gymnasium", "ale-py", FAMILIES[family].package):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package.partition("[")[0])
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
