"""The table of options in docs/trainers.md has all of them, with their defaults."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import attrs
import pytest

pytest.importorskip("torch")

from envmanager.training.algorithms.dqn import DQNOptions
from envmanager.training.algorithms.ppo import PPOOptions
from envmanager.training.algorithms.sac import SACOptions

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
COLUMNS = {"ppo": PPOOptions, "dqn": DQNOptions, "sac": SACOptions}
ABSENT = "–"


def parts_of(cell: str) -> list[str]:
    """What is in a cell, separated by commas outside of backticks."""
    found = (part.strip() for part in re.findall(r"`[^`]*`|[^,`]+", cell))
    return [part.strip("`") for part in found if part]


def value_of(text: str) -> Any:
    """A default as the page writes it."""
    words = {"true": True, "false": False, "none": None}
    try:
        return words[text] if text in words else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def defaults_on_the_page() -> dict[str, dict[str, Any]]:
    table = PAGE.read_text(encoding="utf-8").partition("| option |")[2].partition("\n\n")[0]
    found: dict[str, dict[str, Any]] = {kind: {} for kind in COLUMNS}
    for line in table.splitlines()[2:]:
        names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for kind, cell in zip(COLUMNS, cells[:3], strict=True):
            if cell != ABSENT:
                found[kind] |= dict(zip(parts_of(names), map(value_of, parts_of(cell)), strict=True))
    return found


@pytest.mark.parametrize("kind", COLUMNS)
def test_every_option_is_on_the_page_with_its_default(kind: str) -> None:
    fields = attrs.fields(COLUMNS[kind])
    defaults = {
        field.name: list(field.default) if isinstance(field.default, tuple) else field.default for field in fields
    }
    assert defaults_on_the_page()[kind] == defaults
