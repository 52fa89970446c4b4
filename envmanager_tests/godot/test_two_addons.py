"""The addons for Godot 4 and Godot 3 stay the same, but for the differences that were accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from envmanager_tests.godot.scripts_of_addons import ADDONS, DOCK, accepted, differences, fingerprint, pieces

HOW = "make the same change in both addons, or look at the difference and accept it: python -m " + pieces.__module__


def test_what_one_addon_does_the_other_does_too() -> None:
    known = accepted()
    for (file, piece), lines in differences().items():
        told = "\n".join([f"{piece} of {file} differs; {HOW} --accept", *lines])
        assert fingerprint(lines) == known.get((file, piece)), told


def test_no_difference_is_accepted_that_is_gone() -> None:
    gone = accepted().keys() - differences().keys()

    assert not gone, f"remove the lines of {gone}: python -m {pieces.__module__} --accept"


def test_most_of_the_addons_is_the_same() -> None:
    n_pieces = sum(len(pieces(file)) for file in (ADDONS / "addon4").glob("*.gd") if file.name not in DOCK)

    assert len(differences()) < n_pieces / 3


FOUR = """@tool
class_name Named
extends RefCounted

## How many.
@export_range(0, 9, 1, "or_greater") var size := 0
var chosen := PackedInt32Array()


## The sum of all.
static func total(of: PackedInt32Array, from := 0) -> int:
	for number: int in of:
		from = maxi(number, from)
	return from if not of.is_empty() else %s
"""
THREE = """tool
class_name Named, "res://icon.svg"
extends Reference

# How many.
export(int, 0, 9) var size = 0
var chosen: PoolIntArray = PoolIntArray()


# The sum of all.
static func total(of: PoolIntArray, from: int = 0) -> int:
	for number in of:
		from = max(number, from)
	return from if not of.empty() else %s
"""


@pytest.mark.parametrize(("there", "is_same"), [("0", True), ("1", False)])
def test_the_syntax_of_a_version_is_no_difference_and_another_value_is(
    tmp_path: Path, there: str, is_same: bool
) -> None:
    for name, text in (("4.gd", FOUR % "0"), ("3.gd", THREE % there)):
        (tmp_path / name).write_text(text)
    four, three = pieces(tmp_path / "4.gd"), pieces(tmp_path / "3.gd")

    assert list(four) == ["class_name", "extends", "size", "chosen", "total"]
    assert {name for name in four if four[name] != three[name]} == (set() if is_same else {"total"})
