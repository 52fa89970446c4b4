"""Docstrings begin with a verb or a noun; one that begins with a pronoun or a preposition reads like a riddle."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
