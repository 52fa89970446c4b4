"""A module imports only from its own floor and those below, and importing the package costs next to nothing."""

from __future__ import annotations

import ast
import multiprocessing
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import envmanager

ROOT = Path(envmanager.__file__).parent
FLOORS = {
    "ground": ["errors", "importing", "system"],
    "what travels": ["data", "options", "policy", "structuring"],
    "what is observed": ["observe", "tasks"],
    "environments": ["environment", "adapters"],
    "kernel": ["keeping", "kernel", "recording", "serving", "env_manager"],
    "workers": ["hosts"],
    "processes": ["processes"],
    "placement": ["placing"],
    "managers": [
        "auto_env_manager",
        "coroutines",
        "godot",
        "ray_cluster",
        "replay_env_manager",
        "simple_env_manager",
        "subprocess_env_manager",
        "registry",
    ],
    "tools": ["check", "testing", "interop", "rollouts", "training", "cli", "__main__"],
}
"""A module imports from its own floor and from those before it, and never itself through others."""


ROOMS = [
    "adapters", "coroutines", "data", "godot", "hosts", "keeping", "kernel", "observe", "placing", "processes",
    "ray_cluster", "system", "training.algorithms", "training.policies", "training.runs",
]  # fmt: skip
"""Their folders hold modules, and do nothing themselves."""


TRAINING = ["the loop", "algorithms", "runs", "policies"]
"""The rooms of ``training``, lowest first. A module in one imports only from it and those before it.

The loop (the modules directly in ``training``) needs no PyTorch, but for the learner's process.
"""


def floor_of(module: str) -> int:
    for number, names in enumerate(FLOORS.values()):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return number
    raise AssertionError(f"module {module} stands on no floor: add it to FLOORS")


def modules() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


_TO_IMPORT = re.compile(r"envmanager(\.\w+)+:[\w.]+")
"""A text by which something is imported later."""


def imports_of(path: Path, *, for_types: bool = False) -> set[str]:
    """The modules of this package that the file imports or names, anywhere in it; with ``for_types`` also for types."""
    tree = ast.parse(path.read_text())
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if not for_types
        and isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
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
        elif isinstance(node, ast.Constant) and _TO_IMPORT.fullmatch(str(node.value)):
            found.add(str(node.value).partition(":")[0])
    return {name.partition(".")[2] for name in found if name.startswith("envmanager.")}


def _submodule(package: str, name: str) -> str:
    inside = ROOT.parent.joinpath(*package.split("."), f"{name}.py")
    return f"{package}.{name}" if inside.exists() else package


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_imports_only_from_its_own_floor_and_those_below(path: Path) -> None:
    module = name_of(path)
    if path.name == "__init__.py" and module in ROOMS:
        assert not imports_of(path)
        return
    for imported in imports_of(path):
        assert floor_of(imported) <= floor_of(module), f"{module} imports {imported} from a floor above"


def room_of(module: str) -> int:
    _, room, *inner = module.split(".")
    return TRAINING.index(room) if inner or room in TRAINING else 0


@pytest.mark.parametrize("path", [path for path in modules() if "training" in path.parts], ids=name_of)
def test_a_module_of_training_imports_only_from_its_own_room_and_those_below(path: Path) -> None:
    module = name_of(path)
    for imported in imports_of(path):
        if module != "training" and imported.startswith("training."):
            assert room_of(imported) <= room_of(module), f"{module} imports {imported} from a room above"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=name_of)
def test_no_module_imports_what_is_not_installed_with_it(path: Path) -> None:
    assert re.findall(r"^ *(?:from|import) (?:benchmarks|envmanager_tests)\b.*", path.read_text(), re.M) == []


def test_no_module_imports_itself_through_others() -> None:
    imports = {name_of(path): imports_of(path, for_types=True) for path in modules()}
    TopologicalSorter(imports).prepare()  # CycleError names those that stand in a circle


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


def test_only_documented_parts_of_multiprocessing_are_used() -> None:
    used = set()
    for node in (node for path in ROOT.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            used |= {each.name for each in node.names if each.name.startswith("multiprocessing.")}
        elif isinstance(node, ast.ImportFrom) and re.match(r"multiprocessing\b", node.module or ""):
            used |= {f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "multiprocessing":
            used.add(ast.unparse(node))
    assert used <= {f"multiprocessing.{name}" for name in multiprocessing.__all__}


def test_the_life_of_a_worker_knows_no_descriptor_and_no_process() -> None:
    path = ROOT / "hosts" / "life.py"
    inside = {name.partition(".")[0] for name in imports_of(path)}
    outside = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(path.read_text()))
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
        + ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
    }
    assert not inside & {"hosts", "processes"}
    assert not outside & {"os", "select", "signal", "socket", "subprocess", "threading"}


def test_the_helper_loads_nothing_but_the_standard_library() -> None:
    code = """
import sys
before = set(sys.modules)
import envmanager.processes.helper
print(*{name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)
"""
    command = [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT.parent)!r})\n{code}"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=500, check=True).stdout.split() == [
        "envmanager"
    ]
