"""The first lines of a worker process, and of the server that workers are forked from.

The rule: nothing here may raise (an exception would kill the server, and starting a worker would fail with a bare
EOFError), and the thread caps must be set before NumPy is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
from collections.abc import Iterable
from multiprocessing import parent_process

from envmanager._workers.descriptors import Fd

THREAD_CAPS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def cap_threads() -> None:
    """One thread per worker for the math libraries, unless the user has decided otherwise.

    Otherwise n_workers × n_cores threads would fight for the cores.
    """
    for name in THREAD_CAPS:
        os.environ.setdefault(name, "1")


def preload(names: Iterable[str]) -> None:
    """Import these modules; those that cannot be imported are left to the worker."""
    for name in names:
        with contextlib.suppress(BaseException):
            importlib.import_module(name)


def _replace_sentinel(life_fd: int) -> None:
    """Multiprocessing watches what this process was described in, a file, which would stay in memory.

    The life pipe tells what it wants to know: whether the parent lives.
    """
    parent = parent_process()
    if parent is not None:
        os.dup2(life_fd, parent.sentinel, inheritable=False)


def run(fds: dict[str, Fd], environ: dict[str, str], launch: bytes) -> None:
    """The target of every worker process; what needs NumPy comes pickled, and is loaded after the environment is set.

    ``environ`` replaces the environment variables: a server's are those of the moment when it started.
    """
    _replace_sentinel(fds["life"].fd)
    os.environ.clear()
    os.environ.update(environ)
    cap_threads()
    child = importlib.import_module("envmanager._workers.child")
    child.main({name: wrapped.fd for name, wrapped in fds.items()}, pickle.loads(launch))
