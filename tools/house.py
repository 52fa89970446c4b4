"""Measures how much there is to read, and fails when it has grown: ``python tools/house.py``, a part of ``make check``.

The kernel is everything but adapters, bridges, trainers, tools, the placement of environments, recordings, kept
episodes, and the managers of engines and clusters. A limit is the value that a figure has today; lower it when the
figure gets smaller. ``goal`` is the value to reach.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1] / "envmanager"
AROUND = {
    "__main__", "adapters", "auto_env_manager", "check", "cli", "coroutines", "godot", "interop", "keeping", "observe",
    "placing", "ray_cluster", "recording", "replay_env_manager", "rollouts", "serving", "testing", "training",
}  # fmt: skip
SUBPROCESS = "subprocess_env_manager"
SMALL_LINES = 3
"""Maximum number of lines of a small function's body, for which a reader has to jump and finds little."""


class Figure(NamedTuple):
    """A measured value, its upper limit, and the value to reach."""

    name: str
    value: float
    limit: float
    goal: float


def name_of(path: Path) -> str:
    """Return the module's dotted name below the package; "" for the package itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """Return all modules by name."""
    return {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def kernel() -> list[Path]:
    """Return the files of the kernel's modules."""
    return [path for name, path in modules().items() if name.partition(".")[0] not in AROUND]


def n_lines(paths: list[Path]) -> int:
    """Return the number of lines of these files."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


@cache
def imports_of(module: str) -> frozenset[str]:
    """Return the modules of this package that a module imports, in functions too, but not under TYPE_CHECKING."""
    found = set()
    for node in _but_for_types(ast.parse(modules()[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("envmanager"):
            package = node.module.removeprefix("envmanager").removeprefix(".")
            for alias in node.names:
                inner = f"{package}.{alias.name}".removeprefix(".")
                found.add(inner if inner in modules() else package)
    return frozenset(found - {"", module})


def _but_for_types(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from _but_for_types(child)


@cache
def depth(module: str) -> int:
    """Return the number of modules in the longest chain of imports that begins with this module."""
    return 1 + max((depth(each) for each in imports_of(module)), default=0)


def reached(module: str) -> set[str]:
    """Return all modules that this module imports, directly or not, itself included."""
    found, todo = set(), [module]
    while todo:
        current = todo.pop()
        if current not in found:
            found.add(current)
            todo.extend(imports_of(current))
    return found


def private_functions() -> tuple[int, float]:
    """Return how many private functions are small and used once, and the percentage of those that are used once."""
    functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
    uses: Counter[str] = Counter()
    for path in kernel():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(node)
            elif isinstance(node, ast.Name):
                uses[node.id] += 1
            elif isinstance(node, ast.Attribute):
                uses[node.attr] += 1
    private = [each for each in functions if each.name.startswith("_") and not each.name.endswith("__")]
    once = [each for each in private if uses[each.name] == 1]
    return sum(_body_lines(each) <= SMALL_LINES for each in once), 100 * len(once) / len(private)


def _body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return 0 if not body else (body[-1].end_lineno or 0) - body[0].lineno + 1


def underscores_of_the_manager() -> int:
    """Return the number of private attributes of EnvManager that its subclasses use."""
    (manager,) = [
        node for node in ast.parse((ROOT / "env_manager.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]  # fmt: skip
    own = {node.attr for node in ast.walk(manager) if isinstance(node, ast.Attribute) and node.attr.startswith("_")}
    used = set()
    for kind in ("simple_env_manager", SUBPROCESS, "auto_env_manager", "godot.manager", "ray_cluster.manager"):
        tree = ast.parse(modules()[kind].read_text(encoding="utf-8"))
        assigned = {
            node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
        used |= {
            node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in own - assigned
        }
    return len(used)


def arrows_up() -> int:
    """Return the number of modules and folders beside each other that import one another, directly or not."""
    parts: defaultdict[str, set[str]] = defaultdict(set)
    for module in filter(None, modules()):
        parts[module.partition(".")[0]] |= {each.partition(".")[0] for each in imports_of(module)}
    below = {part: others - {part} for part, others in parts.items()}
    for _ in below:
        below = {part: others.union(*(below.get(each, set()) for each in others)) for part, others in below.items()}
    return sum(part in others for part, others in below.items())


def checks_for_links() -> int:
    """Return the number of places that ask whether a worker is a Link, as for fakes."""
    calls = (
        node for path in modules().values() for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and len(node.args) == 2
    )  # fmt: skip
    return sum(ast.unparse(call.func) == "isinstance" and ast.unparse(call.args[1]) == "Link" for call in calls)


def rooms_of(name: str) -> int:
    """Return the number of folders with modules in one folder, which counts itself."""
    return len({path.parent for path in of_folder(name)})


def of_folder(name: str) -> list[Path]:
    """Return the modules of one folder."""
    return [path for module, path in modules().items() if module.partition(".")[0] == name]


def figures() -> list[Figure]:
    """Measure everything."""
    n_small, once = private_functions()
    return [
        Figure("lines of the kernel", n_lines(kernel()), 14_715, 10_200),
        Figure("modules of the kernel", len(kernel()), 60, 50),
        Figure("lines of the package", n_lines(list(modules().values())), 50_031, 35_500),
        Figure("longest chain of imports below SubprocessEnvManager", depth(SUBPROCESS), 10, 10),
        Figure("modules that SubprocessEnvManager reaches", len(reached(SUBPROCESS)), 53, 50),
        Figure("parts of the package that import one another", arrows_up(), 0, 0),
        Figure(f"private functions of at most {SMALL_LINES} lines and one use", n_small, 7, 7),
        Figure("% of private functions that are used once", round(once, 1), 37, 42),
        Figure("private attributes of the manager that its kinds use", underscores_of_the_manager(), 0, 0),
        Figure("places that ask whether a worker is a Link", checks_for_links(), 0, 0),
        Figure("modules of training", len(of_folder("training")), 34, 32),
        Figure("modules of training per room", len(of_folder("training")) // rooms_of("training"), 8, 8),
        Figure("lines of the kind ray", n_lines(of_folder("ray_cluster")), 1_184, 900),
        Figure("lines of the kind godot", n_lines(of_folder("godot")), 2_939, 2_600),
    ]


def main() -> None:
    """Print all figures; exit with 1 when one is above its limit."""
    measured = figures()
    print(f"{'':52} {'now':>8} {'limit':>8} {'goal':>8}")
    for each in measured:
        too_much = "  more than its limit" if each.value > each.limit else ""
        print(f"{each.name:52} {each.value:8,g} {each.limit:8,g} {each.goal:8,g}{too_much}")
    sys.exit(any(each.value > each.limit for each in measured))


if __name__ == "__main__":
    main()
