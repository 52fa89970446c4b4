"""The program behind ``other_systems.run_on``: takes away what another system has not, then runs a script."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import fcntl
import functools
import importlib
import io
import json
import os
import pathlib
import runpy
import shlex
import shutil
import socket
import sys
import tempfile
import time
import warnings
from types import SimpleNamespace
from typing import Any

_PRELOADED = (
    *("asyncio", "cloudpickle", "concurrent.futures", "inspect", "logging", "multiprocessing.connection"),
    *("multiprocessing.reduction", "multiprocessing.spawn", "numpy.random", "pdb", "shutil", "socket", "subprocess"),
    *("tempfile", "traceback", "attrs", "cattrs"),
)
"""What decides when it is imported which system it is on."""
_LINUX_ONLY_FOLDERS = ("/proc", "/dev/shm", "/sys")
_WINDOWS_TICK_NS = 1_000_000_000 // 64
"""Interval (ns) at which ``time.monotonic`` advances on Windows, up to Python 3.12."""


def become(told: dict[str, Any]) -> None:
    """Take away what the other system has not."""
    for name in (*_PRELOADED, *told["preloaded"]):
        importlib.import_module(name)
    for module, names in told["names"].items():
        for holder in (importlib.import_module(module), sys.modules.get("_" + module)):
            for name in names:
                if holder is not None and hasattr(holder, name):
                    delattr(holder, name)
    for module in told["modules"]:
        sys.modules[module] = None  # type: ignore[assignment]  # importing it is then an ImportError
    _hide_folders()
    sys.platform = told["platform"]
    if sys.platform == "win32":
        _become_windows()
    _update_pathlib()


def _update_pathlib() -> None:
    """Let Python 3.10's pathlib call the functions that were replaced: it has kept those of before in a class."""
    kept = getattr(pathlib, "_NormalAccessor", None)
    for name in ("listdir", "open", "readlink", "rename", "replace", "rmdir", "scandir", "stat", "unlink"):
        if hasattr(kept, name):
            setattr(kept, name, staticmethod(getattr(io if name == "open" else os, name)))


def _hide_folders() -> None:
    def hidden(original: Any) -> Any:
        @functools.wraps(original)
        def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(_LINUX_ONLY_FOLDERS):
                raise FileNotFoundError(2, "No such file or directory", path)
            return original(path, *arguments, **options)

        return call

    for name in ("listdir", "lstat", "open", "readlink", "scandir", "stat"):
        setattr(os, name, hidden(getattr(os, name)))
    io.open = builtins.open = hidden(builtins.open)


def _refuse_to_move_open_files() -> None:
    listdir, readlink = os.listdir.__wrapped__, os.readlink.__wrapped__  # type: ignore[attr-defined]

    def refuse_if_open(path: Any) -> None:
        path = os.path.abspath(path)
        for descriptor in listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the one of the listing
                target = readlink(f"/proc/self/fd/{descriptor}")
                if target == path or target.startswith(f"{path}{os.sep}"):
                    raise PermissionError(13, "it is being used by a process (WinError 32)", path)

    def guarded(original: Any) -> Any:
        @functools.wraps(original)
        def call(*paths: Any, **options: Any) -> Any:
            for path in paths:
                if options.get("dir_fd") is None:
                    refuse_if_open(path)
            return original(*paths, **options)

        return call

    for name in ("remove", "rename", "replace", "rmdir", "unlink"):
        setattr(os, name, guarded(getattr(os, name)))


def _refuse_what_windows_refuses() -> None:
    rename, fsync, open_descriptor, symlink = os.rename, os.fsync, os.open, os.symlink

    @functools.wraps(rename)
    def rename_to_new(source: Any, target: Any, **options: Any) -> None:
        if os.path.lexists(target):
            raise FileExistsError(17, "the file exists (WinError 183)", target)
        rename(source, target, **options)

    @functools.wraps(fsync)
    def flush_writable(file: Any) -> None:
        if fcntl.fcntl(file, fcntl.F_GETFL) & 3 == os.O_RDONLY:
            raise PermissionError(13, "it is open only for reading")
        fsync(file)

    @functools.wraps(open_descriptor)
    def open_file(path: Any, *arguments: Any, **options: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(13, "it is a folder", path)
        return open_descriptor(path, *arguments, **options)

    @functools.wraps(symlink)
    def refuse_links(source: Any, target: Any, *_: Any, **__: Any) -> None:
        raise OSError(22, "a required privilege is not held (WinError 1314)", source, None, target)

    os.rename, os.fsync, os.open, os.symlink = rename_to_new, flush_writable, open_file, refuse_links
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # there, it opens no folders


def _coarsen_monotonic() -> None:
    fine_ns = time.monotonic_ns
    time.monotonic_ns = lambda: fine_ns() // _WINDOWS_TICK_NS * _WINDOWS_TICK_NS
    time.monotonic = lambda: time.monotonic_ns() / 1e9


def _connected_sockets() -> tuple[socket.socket, socket.socket]:
    """Return two sockets that are connected over the loopback, as Python does where the system has no socket pairs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return ours, theirs


def _locks_of_windows() -> Any:
    """Return a module ``filelock`` as far as training runs use it: that of Windows calls functions of its kernel."""

    class Timeout(TimeoutError):
        """Says that another file holds the lock."""

    class FileLock:
        def __init__(self, path: Any, *, timeout: float, fallback_to_soft: bool) -> None:
            assert (timeout, fallback_to_soft) == (0, False)
            self._path, self._file = path, io.BytesIO()

        def acquire(self) -> None:
            self._file = open(self._path, "ab")  # noqa: SIM115
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self._file.close()
                raise Timeout from error

        def release(self) -> None:
            self._file.close()

    return SimpleNamespace(FileLock=FileLock, Timeout=Timeout)


def _become_windows() -> None:
    import signal

    signal.SIGBREAK = 21  # type: ignore[attr-defined]
    load = ctypes.CDLL.__init__

    @functools.wraps(load)
    def load_by_name(self: Any, name: Any, *arguments: Any, **options: Any) -> None:
        if name is None:
            raise TypeError("argument of type 'NoneType' is not iterable")
        load(self, name, *arguments, **options)

    ctypes.CDLL.__init__ = load_by_name  # type: ignore[method-assign]
    sys.modules["filelock"] = _locks_of_windows()
    socket.socketpair = _connected_sockets  # type: ignore[assignment]
    _refuse_to_move_open_files()
    _refuse_what_windows_refuses()
    _coarsen_monotonic()
    # The encoding of text files is that of the country there, so it has to be given.
    warnings.filterwarnings("error", category=EncodingWarning, module=r"envmanager\.")
    ctypes.pythonapi = _PythonAlone(ctypes.pythonapi)  # type: ignore[assignment]


class _PythonAlone:
    """Python's own library, which has nothing of the C library's there."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("Py", "_Py")):
            return getattr(self._library, name)
        raise AttributeError(name)


def _simulate_children(told: dict[str, Any], folder: str) -> None:
    """Replace ``sys.executable`` by a program that takes away the same before it runs what it is given."""
    program = os.path.join(folder, "python")
    command = shlex.join([sys.executable, os.path.abspath(__file__), json.dumps({**told, "is_child": True})])
    with open(program, "w", encoding="utf-8") as file:
        file.write(f'#!/bin/sh\nexec {command} "$@"\n')
    os.chmod(program, 0o755)
    sys.executable = program


def _run(arguments: list[str]) -> None:
    """Run ``python ARGUMENTS``: options, which are ignored, then ``-c CODE``, ``-m MODULE`` or a file."""
    while arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
        del arguments[: 2 if arguments[0] in ("-X", "-W") else 1]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<script>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


def main() -> None:
    told = json.loads(sys.argv[1])
    sys.path[0] = os.getcwd()
    if "is_child" in told or told["platform"] == "win32":  # there are no worker processes as on Windows
        become(told)
        _run(sys.argv[2:])
    else:
        with tempfile.TemporaryDirectory() as folder:
            _simulate_children({**told, "preloaded": told["preloaded_by_children"]}, folder)
            become(told)
            _run(sys.argv[2:])


if __name__ == "__main__":
    main()
