"""Each test belongs to a suite that a target runs, and CONTRIBUTING.md names the suites of each room of the package."""

from __future__ import annotations

import re
from pathlib import Path

import envmanager
from envmanager_tests.suites import suites_of

PACKAGE = Path(envmanager.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted((ROOT / "envmanager_tests").rglob("test_*.py"))
ROOMS = sorted(init.parent.name for init in PACKAGE.glob("*/__init__.py"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def suites_of_targets() -> set[str]:
    found = re.search(r"^OTHER_SUITES = (.+)$", MAKEFILE, re.M)
    assert found
    return {"core", "load", *found[1].split(), *re.findall(r"--suite=([a-z-]+)", MAKEFILE)}


def test_the_files_of_tests_belong_to_suites_that_targets_run() -> None:
    assert [file.name for file in FILES if not suites_of(file) <= suites_of_targets()] == []


def test_cases_that_only_some_targets_run_are_in_a_suite_of_theirs() -> None:
    texts = {file: file.read_text(encoding="utf-8") for file in FILES if file != Path(__file__)}
    under_others = {
        file for file, text in texts.items() if re.search(r"MARKED_START_METHODS|mark\.start_methods", text)
    }
    thorough = {file for file, text in texts.items() if re.search(r"mark\.(thorough|sample)\b", text)}

    assert len(under_others) > 10
    assert [file.name for file in under_others if not suites_of(file) >= {"start-methods", "faults"}] == []
    assert [file.name for file in thorough if "faults" not in suites_of(file)] == []


def rows() -> dict[str, set[str]]:
    """Return the suites in the table of CONTRIBUTING.md by what was touched."""
    _, _, text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## What you touched")
    cells = re.findall(r"^\| (.+?) \| (.+?) \|$", text.partition("\n## ")[0], re.M)
    return {
        name: set(re.findall(r"`([a-z-]+)`", suites))
        for touched, suites in cells
        for name in re.findall(r"`([\w/]+)`", touched)
    }


def test_each_room_of_the_package_has_suites_that_exist() -> None:
    assert [room for room in ROOMS if not rows().get(room)] == []
    assert set().union(*rows().values()) <= suites_of_targets()
