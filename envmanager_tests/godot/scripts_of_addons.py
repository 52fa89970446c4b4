"""Compares the addons for Godot 4 and Godot 3, which are two sets of scripts that should do the same.

Each script is cut into functions and fields, in which the words and the syntax of Godot 4 become those of Godot 3.
Where the two still differ, the difference is listed in ``accepted_differences.txt``. ``python -m
envmanager_tests.godot.scripts_of_addons`` shows all differences; with ``--accept`` it writes that list.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import sys
from pathlib import Path

import envmanager.godot

ADDONS = Path(envmanager.godot.__file__).parent
ACCEPTED = Path(__file__).parent / "accepted_differences.txt"
DOCK = {"dock.gd", "job.gd", "plot.gd", "setup.gd"}
"""Scripts of the dock, which only the editor of Godot 4 has."""

_IN_3 = {
    "PackedFloat32Array": "PoolRealArray",
    "PackedInt32Array": "PoolIntArray",
    "PackedByteArray": "PoolByteArray",
    "PackedStringArray": "PoolStringArray",
    "TYPE_PACKED_FLOAT32_ARRAY": "TYPE_REAL_ARRAY",
    "TYPE_PACKED_INT32_ARRAY": "TYPE_INT_ARRAY",
    "TYPE_PACKED_BYTE_ARRAY": "TYPE_RAW_ARRAY",
    "TYPE_FLOAT": "TYPE_REAL",
    "RefCounted": "Reference",
    "RenderingServer": "VisualServer",
    "remove_at": "remove",
    "Node3D": "Spatial",
    "Transform3D": "Transform",
    "RigidBody3D": "RigidBody",
    "PhysicsServer2D": "Physics2DServer",
    "PhysicsServer3D": "PhysicsServer",
    "SubViewportContainer": "ViewportContainer",
    "SubViewport": "Viewport",
    "is_empty": "empty",
    "instantiate": "instance",
    "scene_file_path": "filename",
    "get_configuration_warnings": "get_configuration_warning",
    "_get_configuration_warnings": "_get_configuration_warning",
    "update_configuration_warnings": "update_configuration_warning",
    "physics_ticks_per_second": "iterations_per_second",
    "to_utf8_buffer": "to_utf8",
    "rfind": "find_last",
    "maxi": "max",
    "mini": "min",
    "maxf": "max",
    "minf": "min",
    "ceilf": "ceil",
    "absf": "abs",
    "clampf": "clamp",
    "_enable_plugin": "enable_plugin",
    "_disable_plugin": "disable_plugin",
    "_can_handle": "can_handle",
    "_parse_begin": "parse_begin",
    "_parse_property": "parse_property",
}
"""Words of Godot 4 and what they are called in Godot 3."""

_DEFINITION = re.compile(r"(?:static )?func (\w+)|(?:const|var) (\w+)|(extends|class_name) ")
_TYPE = r"[\w.]+(?:\[\w+\])?"


def pieces(file: Path) -> dict[str, str]:
    """The functions, fields and constants of a script by name, each with the comment above it, in words of Godot 3.

    Types, which the two versions write at different places, are left out, and so is how a field is shown in the editor.
    """
    found: dict[str, str] = {}
    waiting: list[str] = []
    name = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        plain = _plain(line)
        match = _DEFINITION.match(plain)
        if match:
            name = match[1] or match[2] or match[3]
            found[name] = "\n".join([*waiting, plain])
            waiting = []
        elif plain.startswith(("\t", ")")):
            found[name] += "\n" + plain
        elif plain:
            waiting.append(plain)
    return found


def _plain(line: str) -> str:
    """A line in words of Godot 3, without types and annotations."""
    line = re.sub(r"^(\t*)##", r"\1#", line.rstrip())
    if re.match(r"@(tool|icon|export_group|warning_ignore)|tool$", line.strip()):
        return ""
    line = re.sub(r"^(@export\w*|export)(\(.*?\))? ", "", line)
    line = re.sub(r"^@?onready ", "", line)
    line = re.sub(r"\w+", lambda word: _IN_3.get(word[0], word[0]), line)
    line = re.sub(r'^class_name (\w+), ".*"', r"class_name \1", line)
    line = re.sub(r"\bTime\.get_ticks", "OS.get_ticks", line)
    if re.match(r"\t*(static )?(func|var|const|for) |\)|\t*\w+: ", line):
        line = re.sub(rf"\) -> {_TYPE}:$", "):", line)
        line = re.sub(rf"(\b\w+): {_TYPE}(?=[,)]| =| in |$)", r"\1", line)
        line = line.replace(" := ", " = ")
    return line


def differences() -> dict[tuple[str, str], list[str]]:
    """The lines that only one addon has (``-``: that of Godot 4, ``+``: that of Godot 3), by script and piece."""
    found = {}
    for file in sorted({file.name for major in (4, 3) for file in (ADDONS / f"addon{major}").glob("*.gd")} - DOCK):
        paths = [ADDONS / f"addon{major}" / file for major in (4, 3)]
        four, three = (pieces(path) if path.exists() else {} for path in paths)
        for piece in dict.fromkeys([*four, *three]):
            texts = [own.get(piece, "").splitlines() for own in (four, three)]
            lines = [line for line in difflib.ndiff(*texts) if line[0] in "-+"]
            if lines:
                found[file, piece] = lines
    return found


def fingerprint(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


def accepted() -> dict[tuple[str, str], str]:
    """The fingerprints of the differences that were looked at, by script and piece."""
    rows = (line.split() for line in ACCEPTED.read_text(encoding="utf-8").splitlines())
    return {(file, piece): known for file, piece, known in rows}


if __name__ == "__main__":
    rows = []
    for (script, name), lines in differences().items():
        print(f"{script} {name}", *lines, sep="\n    ")
        rows.append(f"{script} {name} {fingerprint(lines)}\n")
    if "--accept" in sys.argv:
        ACCEPTED.write_text("".join(rows), encoding="utf-8")
