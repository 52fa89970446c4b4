"""Code that the comparisons with other libraries share: their arguments, and the one trainer of a config."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def parser_of(about: str | None, kind: str, trainings: Iterable[str]) -> argparse.ArgumentParser:
    """Return the parser of a script that compares trainers of this kind. ``--train`` makes it do one training run."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("config", help=f"a training config with one trainer of kind {kind}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="other than the config says")
    parser.add_argument("--sb3", default=sys.executable, help="a Python that has stable-baselines3")
    parser.add_argument("--train", choices=sorted(trainings), help=argparse.SUPPRESS)
    return parser


def config_of(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tables of a config, and the options of its only trainer."""
    from envmanager.cli.config_files import TRAINING_TABLES, load_config

    tables = load_config(path, TRAINING_TABLES)
    (trainer,) = tables["trainers"].values()
    if trainer["kind"] != kind:
        sys.exit(f"{path}: the trainer is {trainer['kind']!r}, not {kind!r}.")
    return tables, {name: value for name, value in trainer.items() if name != "kind"}
