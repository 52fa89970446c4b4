"""A module imports only from floors below its own, and importing the package costs next to nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import envmanager

ROOT = Path(envmanager.__file__).parent
FLOORS = [
    ["errors", "interrupts", "timing", "trees", "weak_calls", "cgroups", "placement", "private_files", "new_files"],
    ["specs", "stats", "seeding", "events", "cores", "extras"],
    ["tensorboard"],
    [
        "_workers.descriptors",
        "_workers.lifeline",
        "_workers.crash_report",
        "_workers.forks",
        "_workers.spin",
        "_workers.groups",
    ],
    ["_workers.memory", "_workers.output_log", "_workers.guardian"],
    ["steps", "_workers.boot"],
    ["fitting"],
    ["environment", "policy", "options"],
    ["factories", "policy_calls", "env_rows", "tracing"],
    ["restarts", "cut_episodes", "core.table"],
    ["core.recovery", "core.last_rows"],
    ["core.collecting"],
    ["hosting"],
    ["episodes", "env_manager", "probing"],
    ["local_worker"],
    ["adapters"],
    ["_workers.server"],
    ["_workers.processes", "_workers.wire", "_workers.block"],
    ["_workers.child"],
    ["_workers.handle"],
    ["_workers.step_queue"],
    ["simple_env_manager", "subprocess_env_manager"],
    ["auto_env_manager"],
    ["registry"],
    ["bench"],
    ["testing"],
    ["interop"],
    ["training"],
    ["cli"],
]
"""DESIGN §9, in more and finer floors: what stands on one may import only from those before it."""

PACKAGES = ("adapters", "bench", "interop", "testing", "training", "cli")
"""Packages that are one floor: their modules may import each other."""


def floor_of(module: str) -> int:
    for number, names in enumerate(FLOORS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return number
    raise AssertionError(f"module {module} stands on no floor: add it to FLOORS")


def modules() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """The modules of this package that the file imports, anywhere in it; type-checking blocks do not count."""
    tree = ast.parse(path.read_text())
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {_submodule(node.module, alias.name) for alias in node.names}
    return {name.partition(".")[2] for name in found if name.startswith("envmanager.")}


def _submodule(package: str, name: str) -> str:
    inside = ROOT.parent.joinpath(*package.split("."), f"{name}.py")
    return f"{package}.{name}" if inside.exists() else package


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_imports_only_from_floors_below(path: Path) -> None:
    module = name_of(path)
    if module in ("_workers", "core"):
        assert not imports_of(path)
        return
    own = floor_of(module)
    for imported in imports_of(path):
        same_package = any(module.split(".")[0] == imported.split(".")[0] == package for package in PACKAGES)
        assert floor_of(imported) < own or same_package, f"{module} imports {imported} from its own floor or above"


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=True)
    return done.stdout


def test_importing_the_package_loads_no_other_library() -> None:
    loaded = run_python("import sys, envmanager; print(*sorted(n for n in sys.modules if '.' not in n))").split()

    foreign = {"numpy", "attrs", "attr", "cattrs", "cloudpickle", "gymnasium", "torch", "pettingzoo", "typer", "rich"}
    assert not foreign & set(loaded)


def test_using_the_public_names_loads_only_the_core_dependencies() -> None:
    code = """
import sys
before = {n.partition('.')[0] for n in sys.modules} | set(sys.stdlib_module_names)
import envmanager
for name in envmanager.__all__:
    getattr(envmanager, name)
print(*sorted({n.partition('.')[0] for n in sys.modules} - before))
"""
    third_party = {name for name in run_python(code).split() if not name.startswith("_")}
    dependencies = {"numpy", "attr", "attrs", "cattrs", "cloudpickle"}
    theirs = {"typing_extensions", "exceptiongroup", "cython_runtime"}  # cattrs's, and that of NumPy 1.23
    assert third_party <= dependencies | theirs | {"envmanager"}


def test_every_public_name_can_be_had() -> None:
    assert all(hasattr(envmanager, name) for name in envmanager.__all__)
    assert set(envmanager.__all__) <= set(dir(envmanager))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = envmanager.nonsense
