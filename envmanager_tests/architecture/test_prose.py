"""Docstrings begin with a verb or a noun; one that begins with a pronoun or a preposition reads like a riddle."""

from __future__ import annotations

import ast
import inspect
import itertools
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import envmanager

ROOT = Path(envmanager.__file__).parent
BENCHMARKS = ROOT.parent / "benchmarks"
MOST = 0.03
"""Share of docstrings that may open oddly, as in Gymnasium, attrs and Stable-Baselines3."""

PRONOUNS = "they them it its he she his their this these those such same none nobody somebody ones"
RELATIVES = "who whose whom whoever what whatever whichever that how where when since until so have"
PREPOSITIONS = "of for from in on with without as at to by after before"
ODD_WORDS = "|".join([*PRONOUNS.split(), *RELATIVES.split(), *PREPOSITIONS.split(), "the same", "one that"])
ODD = re.compile(rf"(?!for example\b|as in\b)({ODD_WORDS})\b", re.IGNORECASE)


class Docstring(NamedTuple):
    path: Path
    name: str
    text: str

    @property
    def folder(self) -> str:
        """The folder or module directly in a package to which it belongs."""
        return self.path.relative_to(ROOT.parent).parts[1]

    @property
    def opens_oddly(self) -> bool:
        return ODD.match(self.text.lstrip("`*: \n")) is not None


def python_files() -> list[Path]:
    return sorted([*ROOT.rglob("*.py"), *BENCHMARKS.rglob("*.py")])


def docstrings_of(path: Path) -> Iterator[Docstring]:
    """The docstrings of the module and of its classes, functions and attributes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield Docstring(path, getattr(node, "name", "the module"), text)
        body = getattr(node, "body", None)
        for before, after in itertools.pairwise(body if isinstance(body, list) else []):
            match before, after:
                case ast.Assign(targets=[target]) | ast.AnnAssign(target=target), ast.Expr(ast.Constant(str(text))):
                    yield Docstring(path, ast.unparse(target), text)


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    everything = [each for path in python_files() for each in docstrings_of(path)]
    odd = [each for each in everything if each.opens_oddly]
    by_folder = Counter(each.folder for each in odd).most_common()
    listed = [f"{each.path.relative_to(ROOT.parent)}: {each.name}: {each.text.splitlines()[0]}" for each in odd]

    share = len(odd) / len(everything)
    assert share <= MOST, "\n".join(
        [f"{len(odd)} of {len(everything)} open oddly, by folder: {dict(by_folder)}", *listed]
    )


def test_odd_openers_are_told_from_plain_ones() -> None:
    odd = ["Who asks for a decision.", "``of`` the last command.", "The same, sorted.", "Have it end.", "None is left."]
    plain = [
        "Return the plan.",
        "The placement of agents.",
        "For example, 3.",
        "As in Erlang.",
        "Whether it ended.",
        "Often.",
    ]

    assert all(Docstring(ROOT, "", text).opens_oddly for text in odd)
    assert not any(Docstring(ROOT, "", text).opens_oddly for text in plain)


_TAKERS = """
    envmanager:SubprocessEnvManager envmanager:make_manager envmanager:Task envmanager:Wait envmanager:RestartPolicy
    envmanager:Timeouts envmanager:as_environment envmanager:EnvManager.reset envmanager:EnvManager.step
    envmanager:EnvManager.send envmanager:EnvManager.recv envmanager:EnvManager.begin envmanager:EnvManager.call
    envmanager:EnvManager.pool envmanager.kernel.pool:Pool.play
    envmanager.training.evaluation:evaluate envmanager.training.controller:TrainerController
    envmanager.interop:as_vector_env envmanager.interop:as_sb3_vec_env envmanager.check.environment:check_environment
"""
_ARGUMENT = re.compile(r"^    \**(\w+): ", re.M)


def described_by(text: str) -> list[str]:
    """Return the names in the section ``Args`` of a docstring, which is its last."""
    return _ARGUMENT.findall(inspect.cleandoc(text).partition("\nArgs:\n")[2])


@pytest.mark.parametrize("name", _TAKERS.split())
def test_what_users_call_most_describes_each_of_its_arguments(name: str) -> None:
    taker = pkgutil.resolve_name(name)

    parameters = [each for each in inspect.signature(taker).parameters if each != "self"]
    assert described_by(taker.__doc__) == parameters


def test_a_manager_in_this_process_describes_what_its_options_mean_instead() -> None:
    own = described_by(str(envmanager.SimpleEnvManager.__doc__))

    assert own
    assert set(own) < set(inspect.signature(envmanager.SimpleEnvManager).parameters)


def test_no_other_docstring_has_a_list_of_arguments() -> None:
    listing = [each for path in python_files() for each in docstrings_of(path) if "Args:\n" in each.text]

    assert len(listing) == len(_TAKERS.split()) + 1
