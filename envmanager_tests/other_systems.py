"""Runs a script as if on Windows or macOS: what Python lacks there is taken away first.

What is lacking is read from typeshed, the type stubs that come with mypy, which say for each name where it exists.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import mypy

SYSTEMS = {"windows": "win32", "macos": "darwin"}
"""The systems that can be simulated, and their ``sys.platform``."""
_STUBS = Path(mypy.__file__).parent / "typeshed" / "stdlib"
_MODULES = ("errno", "fcntl", "mmap", "os", "resource", "select", "signal", "socket", "_socket", "time")
_MODULES_THAT_MAY_LACK = (
    *("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty", "_posixsubprocess"),
    *(f"multiprocessing.popen_{how}" for how in ("fork", "forkserver", "spawn_posix")),
)
_BOOTSTRAP = Path(__file__).with_name("bootstrap_of_other_systems.py")


@cache
def lacking(platform: str) -> dict[str, list[str]]:
    """Return the names that Python has on Linux and not on ``platform``, by module that exists on both."""
    there = [module for module in _MODULES if module not in lacking_modules(platform)]
    return {module: sorted(_names(module, "linux") - _names(module, platform)) for module in there}


@cache
def lacking_modules(platform: str) -> list[str]:
    """Return the modules of the standard library that ``platform`` has not."""
    return [module for module in _MODULES_THAT_MAY_LACK if all(name[0] == "_" for name in _names(module, platform))]


def _names(module: str, platform: str) -> set[str]:
    path = _STUBS.joinpath(*module.split("."))
    path = path / "__init__.pyi" if path.is_dir() else path.with_suffix(".pyi")
    return set(_defined(ast.parse(path.read_text()).body, platform)) if path.exists() else set()


def _defined(body: list[ast.stmt], platform: str) -> Iterator[str]:
    """Yield the names that these statements of a stub define on a platform."""
    known = {"sys": SimpleNamespace(platform=platform, version_info=sys.version_info), "TYPE_CHECKING": True}
    for node in body:
        if isinstance(node, ast.If):
            holds = eval(compile(ast.Expression(node.test), "stub", "eval"), known)
            yield from _defined(node.body if holds else node.orelse, platform)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname for alias in node.names if alias.asname)  # a stub exports only these


def run_on(
    system: str,
    script: str,
    *,
    preloaded: Iterable[str],
    preloaded_by_children: Iterable[str] = ("psutil",),
    absent: Iterable[str] = (),
    timeout_s: float = 300,
) -> str:
    """Run a script as if on ``system``, and return what it printed; fail with its errors.

    On macOS the processes that it starts with ``sys.executable`` lack the same, worker processes among them.

    ``preloaded``: other people's modules that the script will need. They are imported before anything is taken away:
    they bring code of their own for each system, chosen when they were built or are imported. ``absent``: other
    people's modules that are not installed there either. ``preloaded_by_children``: the same as ``preloaded``, for
    processes that the script starts.
    """
    platform = SYSTEMS[system]
    told = {
        "platform": platform,
        "names": lacking(platform),
        "modules": [*lacking_modules(platform), *absent],
        "preloaded": list(preloaded),
        "preloaded_by_children": list(preloaded_by_children),
    }
    done = subprocess.run(
        [
            sys.executable,
            "-X",
            "faulthandler",
            "-X",
            "warn_default_encoding",
            "-W",
            "ignore::EncodingWarning",
            str(_BOOTSTRAP),
            json.dumps(told),
            "-c",
            script,
        ],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, (
        f"as if on {system}, exit code {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}"
    )
    return done.stdout
