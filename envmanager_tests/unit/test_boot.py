"""The first code of a new Python process."""

from __future__ import annotations

import sys

import pytest

from envmanager.processes.boot import python


def test_a_new_python_has_all_options_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_xoptions", {"mine": True, "pycache_prefix": "/somewhere"})
    monkeypatch.setattr(sys, "warnoptions", ["error::ResourceWarning"])

    executable, *options = python("a python", "boot", "run")
    assert executable == "a python"
    assert {"-Xmine", "-Xpycache_prefix=/somewhere", "-Werror::ResourceWarning"} <= set(options)
