"""Code that sets up a new Python process of this library, and that kills the process when the trainer dies.

The rule: this module imports only the standard library. It imports no module that only some systems have.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import pkgutil
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

THREAD_CAPS = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
    *("BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "OPENCV_FOR_THREADS_NUM"),
)
"""Environment variables that limit the threads of math libraries and OpenCV. The default in workers is 1."""
_LARGEST_HANDLER = 1 << 16
"""Largest pickle, in bytes, of a logging handler that workers take over. A filter may refer to a whole trainer."""


class Inheritance(NamedTuple):
    """Settings of this process that a new process takes over."""

    environ: dict[str, str]
    path: list[str]
    argv: list[str]
    multiprocessing: tuple[str, bytes, str | None]
    """Name of the process, and the trainer's authkey and start method."""
    logging: tuple[int, dict[str, int], bytes]
    """Level of ``logging.disable``, levels of loggers, and a pickled handler of the root logger, or b""."""
    warnings: list[Any]
    """Filters of the warnings that Python defines. To unpickle others would import the modules that define them."""


def inheritance(name: str, environ: Mapping[str, str]) -> Inheritance:
    """Return the Inheritance of a new process called ``name``, with ``environ`` and this process's other settings."""
    import multiprocessing  # here, because an engine does not need it

    own = multiprocessing.current_process()
    start_method = multiprocessing.get_start_method(allow_none=True)
    settings = name, bytes(own.authkey), start_method
    filters = [each for each in warnings.filters if each[2].__module__ == "builtins"]
    return Inheritance(dict(environ), list(sys.path), list(sys.argv), settings, _logging_settings(), filters)


def _logging_settings() -> tuple[int, dict[str, int], bytes]:
    import logging

    import cloudpickle

    root, handler = logging.getLogger(), b""
    loggers = root.manager.loggerDict.copy().items()
    levels = {name: each.level for name, each in loggers if isinstance(each, logging.Logger) and each.level}
    streams = {id(getattr(sys, name)): name.strip("_") for name in ("__stdout__", "__stderr__", "stdout", "stderr")}
    for each in reversed(root.handlers):
        with contextlib.suppress(Exception):  # it has no standard stream, or a filter that cannot be pickled
            stream = streams[id(each.stream)]  # type: ignore[attr-defined]
            pickled = cloudpickle.dumps((stream, each.level, each.formatter, each.filters))
            handler = pickled if len(pickled) <= _LARGEST_HANDLER else handler
    return root.manager.disable, {"root": root.level, **levels}, handler


def inherit(inherited: Inheritance) -> None:
    """Apply ``inherited`` to this process. Libraries that are imported later read the new environment variables."""
    sys.path[:], sys.argv[:] = inherited.path, inherited.argv
    set_environ(inherited.environ)
    import multiprocessing

    name, authkey, start_method = inherited.multiprocessing
    process = multiprocessing.current_process()
    process.name, process.authkey = name, authkey
    multiprocessing.set_start_method(start_method, force=True)
    warnings.resetwarnings()
    warnings.filters[:] = inherited.warnings  # type: ignore[index]
    import logging

    class Handler(logging.StreamHandler):  # type: ignore[type-arg]
        """A StreamHandler whose filters may need what only the trainer has. Their errors are no environment's."""

        def handle(self, record: logging.LogRecord) -> Any:
            try:
                return super().handle(record)
            except Exception:
                return self.handleError(record)

    disabled, levels, pickled = inherited.logging
    with contextlib.suppress(Exception):  # there is no handler, or a class that it needs cannot be imported here
        stream, level, formatter, filters = pickle.loads(pickled)
        handler = Handler(getattr(sys, stream))
        handler.setLevel(level)
        handler.setFormatter(formatter)
        handler.filters[:] = filters
        logging.basicConfig(handlers=[handler], force=True)
    logging.disable(disabled)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def set_environ(environ: Mapping[str, str]) -> None:
    """Replace all environment variables with ``environ``. On Windows keep SYSTEMROOT, without which sockets fail."""
    needed = {name: os.environ[name] for name in ("SYSTEMROOT",) if sys.platform == "win32" and name in os.environ}
    os.environ.clear()
    os.environ.update({**needed, **environ})


def python(executable: str, module: str, function: str) -> list[str]:
    """Return a Python command with this process's options that calls a function of a module of this package."""
    from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]  # as multiprocessing does

    others = [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in sys._xoptions.items()]
    code = f"import sys; sys.path[:] = {sys.path!r}; from envmanager.processes.{module} import {function}"
    code += f"; {function}(*map(int, sys.argv[1:]))"
    return [executable, *_args_from_interpreter_flags(), *others, "-c", code]


def flush_output() -> None:
    """Flush standard output and standard error, unless they are closed or None."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def end_group() -> None:
    """Kill this process at once and, except on Windows, all processes of the group that it leads."""
    if sys.platform == "win32":
        os._exit(1)
    with contextlib.suppress(ProcessLookupError):  # a fork of a worker leads no group
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def end_with_trainer(life_fd: int) -> None:
    """Start a thread that reads a pipe, whose write end only the trainer holds, to its end, and calls ``end_group``.

    The thread needs the GIL, so native code that holds the GIL can outlive the trainer.
    """

    def wait_and_end() -> None:
        with contextlib.suppress(OSError):  # the environment has closed the descriptor
            while os.read(life_fd, 1):
                pass
            end_group()

    threading.Thread(target=wait_and_end, name="envmanager-lifeline", daemon=True).start()


def run() -> None:
    """Read a function, its arguments and settings from standard input, apply the settings, and call the function.

    Standard input is also the pipe that ends with the trainer.
    """
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    life_fd = os.dup(0)
    with open(os.devnull, "rb") as null:  # the environments' standard input
        os.dup2(null.fileno(), 0)
    with open(life_fd, "rb", closefd=False) as file:
        try:
            inherited, function, connection, arguments = pickle.load(file)
        except (EOFError, pickle.UnpicklingError):  # the trainer has died
            os._exit(1)
    end_with_trainer(life_fd)
    inherit(inherited)
    if isinstance(connection, bytes):  # Windows
        connection = socket.fromshare(connection).detach()  # type: ignore[attr-defined]
    for fd in (connection, *arguments[0]):
        if isinstance(fd, int) and sys.platform != "win32":
            os.set_inheritable(fd, False)
    pkgutil.resolve_name(function)([connection, *arguments[0]], *arguments[1:])
