"""Writes the scripts for Godot 3, of the addon, the demo games and the template, from those for Godot 4.

::

    addon4/NAME.gd        ──┐
    demos/GAME/4/NAME.gd  ──┼── words and syntax of Godot 3 ──┬──▶ addon3/NAME.gd
    template/4/NAME.gd    ──┘                                 │    demos/GAME/3/NAME.gd
    overrides3/…/NAME.gd  ──── what differs, in Godot 3 ──────┘    template/3/NAME.gd

A script is cut into pieces: its head up to the first empty line, constants, variables and functions, each with the
comment above it. A piece of the same name in ``overrides3`` takes the place of the translated one, whose comment stays
if it has none itself. Another piece there comes after the last of its sort. A first line ``# Without: a, b`` names the
pieces that Godot 3 does not get.

``python tools/addon3.py`` writes the scripts. With ``--check``, a part of ``make check``, it names those that are
stale. The tests of Godot have an engine parse and play what was written.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

GODOT = Path(__file__).resolve().parents[1] / "envmanager" / "godot"
ONLY_4 = {"dock.gd", "job.gd", "plot.gd", "setup.gd", "script_errors.gd"}
"""Scripts of the dock, which only the editor of Godot 4 has, and of the Logger, which came with 4.5."""

WORDS = {
    "PackedFloat32Array": "PoolRealArray",
    "PackedInt32Array": "PoolIntArray",
    "PackedByteArray": "PoolByteArray",
    "PackedStringArray": "PoolStringArray",
    "TYPE_PACKED_FLOAT32_ARRAY": "TYPE_REAL_ARRAY",
    "TYPE_PACKED_INT32_ARRAY": "TYPE_INT_ARRAY",
    "TYPE_PACKED_BYTE_ARRAY": "TYPE_RAW_ARRAY",
    "TYPE_FLOAT": "TYPE_REAL",
    "Callable": "FuncRef",
    "CollisionObject3D": "CollisionObject",
    "Node3D": "Spatial",
    "PhysicsServer2D": "Physics2DServer",
    "PhysicsServer3D": "PhysicsServer",
    "RefCounted": "Reference",
    "RenderingServer": "VisualServer",
    "RigidBody3D": "RigidBody",
    "SubViewport": "Viewport",
    "Transform3D": "Transform",
    "Vector2i": "Vector2",
    "absf": "abs",
    "ceilf": "ceil",
    "clampf": "clamp",
    "constant_force": "applied_force",
    "ctrl_pressed": "control",
    "instantiate": "instance",
    "is_empty": "empty",
    "keycode": "scancode",
    "limit_length": "clamped",
    "maxf": "max",
    "minf": "min",
    "physics_ticks_per_second": "iterations_per_second",
    "process_mode": "pause_mode",
    "PROCESS_MODE_ALWAYS": "PAUSE_MODE_PROCESS",
    "process_physics_priority": "process_priority",
    "remove_at": "remove",
    "rfind": "find_last",
    "scene_file_path": "filename",
    "to_utf8_buffer": "to_utf8",
    "update_configuration_warnings": "update_configuration_warning",
    "_can_handle": "can_handle",
    "_disable_plugin": "disable_plugin",
    "_enable_plugin": "enable_plugin",
    "_get_configuration_warnings": "_get_configuration_warning",
    "_parse_begin": "parse_begin",
    "_parse_property": "parse_property",
}  # fmt: skip
"""Words of Godot 4, in code, comments and messages, and what Godot 3 calls the same."""

BEFORE = [
    (r"^(\t*)##", r"\1#"),
    (r"^@tool$", "tool"),
    (r"@tool\b", "`tool`"),
    (r"^@icon\((.*)\)\n(class_name \w+)", r"\2, \1"),
    (r"^\t*(@export_group\(.*|@warning_ignore\(.*|_peer\.poll\(\))\n", ""),
    (r"^@onready ", "onready "),
    # Fields in the inspector. The end of a range is strict in Godot 3, so it is put farther away.
    (
        r'^@export_range\((\S+), (\S+), (\S+), "or_greater"\)',
        lambda match: f"@export_range({match[1]}, {100 * float(match[2]):.0f}, {match[3]})",
    ),
    (r"^@export_range\((\S+, [^,)]+).*?\) var (\w+ := -?\d+)$", r"export(int, \1) var \2"),
    (r"^@export_range\((.*?)\)", r"export(float, \1)"),
    (r"^@export_enum\(", 'export(String, "", '),
    (r"^@export_file\(", "export(String, FILE, "),
    (r"^@export (var \w+: )Array\[PackedScene\]", r"export(Array, PackedScene) \1Array"),
    (r"^@export (var \w+: )Array\[\w+\]", r"export(Array, Resource) \1Array"),
    (r"^@export (var \w+): \w+ = null", r"export(Resource) \1 = null"),
    (r'^@export (var \w+ := ")', r"export(String) \1"),
    (r"^@export (var \w+ := (?:true|false))", r"export(bool) \1"),
    (r"^@export (var \w+ := \d+\.)", r"export(float) \1"),
    (r"^@export (var \w+ := {)", r"export(Dictionary) \1"),
    (r"^@export (var \w+ := \[)", r"export(Array) \1"),
    (r"^@export (var \w+ := (\w+)\()", r"export(\2) \1"),
    (r"^(export\(.*?\) var \w+)(?:: \w+)? :?= ", r"\1 = "),  # without a type, so that scripts may set a list or null
    # Types: Godot 3 has fewer, and infers too few of those in a function.
    (r"\bArray\[[\w.]+\]", "Array"),
    (r": Image\.Format\b", ": int"),
    (r" -> Variant:$", ":"),
    (r"^(\t+(?:var|const) \w+)(?:: [\w.]+)? :?= ", r"\1 = "),
    (r"^(\t+for \w+): \w+ in ", r"\1 in "),
    # Signals and functions as values.
    (r"^(\t+.+)\.(\w+)\.((?:dis)?connect)\((\w+)\)$", r'\1.\3("\2", self, "\4")'),
    (r"\bCallable\(self, ", "funcref(self, "),
    (r"\.call\(\)", ".call_func()"),
    # What Godot 3 does otherwise.
    (r"\bTime\.get_ticks", "OS.get_ticks"),
    (r" \+ OS\.get_cmdline_user_args\(\)", ""),
    (r'\bDisplayServer\.get_name\(\) (==|!=) "headless"', r'OS.get_name() \1 "Server"'),
    (r"\bJSON\.stringify\(", "JSON.print("),
    (r"\b(\w+)\.to_byte_array\(\)", r"Wire.bytes_of(\1)"),
    (r"\bColor\.([A-Z]+)\b", lambda match: f"Color.{match[1].lower()}"),
    (r"\bautowrap_mode = TextServer\.AUTOWRAP_WORD_SMART", "autowrap = true"),
    (r"\bTYPE_STRING_NAME, |, TYPE_VECTOR[23]I", ""),
    (r"\b(\w+) is AnimatableBody[23]D and \1\.sync_to_physics\b", r'\1.get("motion/sync_to_physics") == true'),
    (r"\b(\w+)\.sync_to_physics = (\w+)", r'\1.set("motion/sync_to_physics", \2)'),
    (r"^\telif body is CharacterBody[23]D:\n\t\tbody\.velocity = velocity\n", ""),
]
"""Patterns of Godot 4, and what takes their place, one after the other, before the words are exchanged."""

DEFINITION = re.compile(r"(?:@?export\w*(?:\(.*?\))? |@?onready )?(?:static )?(const|var|func|signal|enum) (\w+)")
LIST_OF = re.compile(
    r"^(\t+)(?:return |(var )?([\w.]+)(?:: \w+)? :?= )(.+)\.(filter|map|any)\(func\((\w+)(?:: \w+)?\)(?: -> \w+)?: "
    r"return (.+)\)$",
    re.MULTILINE,
)


class Piece(NamedTuple):
    """A head, a constant, a variable or a function of a script."""

    sort: str
    name: str
    before: str
    """Empty lines before it."""
    comment: str
    text: str


def pieces_of(script: str) -> list[Piece]:
    """Return the pieces of a script, whose texts are the script again when they are joined."""
    head = re.match(rf"(?:(?!{DEFINITION.pattern}).+\n)*", script)
    found = [Piece("head", "head", "", "", head[0])] if head and "extends " in head[0] else []
    waiting = ""
    for line in script[len(found[0].text) if found else 0 :].splitlines(keepends=True):
        definition = DEFINITION.match(line)
        if definition:
            comment = waiting.lstrip("\n")
            found.append(Piece(*definition.groups(), waiting[: len(waiting) - len(comment)], comment, line))
            waiting = ""
        elif line.startswith(("\t", ")", "]", "}")):
            found[-1] = found[-1]._replace(text=found[-1].text + waiting + line)
            waiting = ""
        else:
            waiting += line
    if waiting:
        found[-1] = found[-1]._replace(text=found[-1].text + waiting)
    return found


def in_3(script: str) -> str:
    """Return a script for Godot 4 in the words and the syntax of Godot 3."""
    script = LIST_OF.sub(_loop, script)
    for pattern, instead in BEFORE:
        script = re.sub(pattern, instead, script, flags=re.MULTILINE)
    script = re.sub(r"\w+", lambda word: WORDS.get(word[0], word[0]), script)
    while rounded := re.search(r"\b(max|min)i(?=\()", script):
        end = _end_of_call(script, rounded.end())
        script = f"{script[: rounded.start()]}int({rounded[1]}{script[rounded.end() : end]}){script[end:]}"
    return script


def _loop(match: re.Match[str]) -> str:
    """A loop in the place of a function as an argument, which Godot 3 does not have."""
    indent, var, target, source, how, each, value = match.groups()
    if target == source or (target and how == "any"):
        return match[0]  # no such loop is written: this needs an override
    if how == "any":
        return f"{indent}for {each} in {source}:\n{indent}\tif {value}:\n{indent}\t\treturn true\n{indent}return false"
    var, name = (var or "", target) if target else ("var ", "found")
    lines = [f"{var}{name} = []", f"for {each} in {source}:"]
    lines += [f"\tif {value}:", f"\t\t{name}.append({each})"] if how == "filter" else [f"\t{name}.append({value})"]
    return "\n".join(indent + line for line in [*lines, *([] if target else ["return found"])])


def _end_of_call(script: str, start: int) -> int:
    """The position after the bracket that closes the one at ``start``."""
    depth = 0
    for i in range(start, len(script)):
        depth += {"(": 1, ")": -1}.get(script[i], 0)
        if depth == 0:
            return i + 1
    raise ValueError(f"no closing bracket: {script[start : start + 80]}")


def script_for_3(script: str, overrides: str) -> str:
    """Return the script for Godot 3. Raises ValueError for an override without effect."""
    order = pieces_of(in_3(script))
    pieces = {piece.name: piece for piece in order}
    without = re.match(r"# Without: (.+)\n", overrides)
    for name in without[1].split(", ") if without else []:
        if name not in pieces:
            raise ValueError(f"there is no {name} to leave out")
        at = order.index(pieces.pop(name))
        gone = order.pop(at)
        if at < len(order) and order[at].sort == gone.sort:  # the next one may be the first of its sort now
            order[at] = pieces[order[at].name] = order[at]._replace(before=gone.before)
    for own in pieces_of(overrides[without.end() if without else 0 :].lstrip("\n")):
        same = pieces.get(own.name)
        if same is None:
            last = max(i for i, piece in enumerate(order) if piece.sort in (own.sort, "head"))
            order.insert(last + 1, own._replace(before="\n\n" if own.sort == "func" else ""))
        elif same.text == own.text and own.comment in ("", same.comment):
            raise ValueError(f"the override of {own.name} says what the translation says")
        else:
            order[order.index(same)] = own._replace(before=same.before, comment=own.comment or same.comment)
    text = "".join(piece.before + piece.comment + piece.text for piece in order)
    for unused in re.findall(r"^const (\w+) := preload\(.*\n", text, re.MULTILINE):
        if len(re.findall(rf"\b{unused}\b", text)) == 1:  # it was the type of a field, which is a Resource in Godot 3
            text = re.sub(rf"(?<=\n\n)const {unused} :=.*\n\n|const {unused} :=.*\n", "", text)
    return text


def scripts() -> dict[Path, str]:
    """Return what the scripts for Godot 3 should be, by their paths below ``envmanager/godot``."""
    found = {}
    unused = set(GODOT.glob("overrides3/**/*.gd"))
    for source in sorted(GODOT.rglob("*.gd")):
        path = source.relative_to(GODOT)
        if not {"4", "addon4"} & set(path.parts) or path.name in ONLY_4:
            continue
        to = Path(*({"4": "3", "addon4": "addon3"}.get(part, part) for part in path.parts))
        own = GODOT / "overrides3" / Path(*(part for part in path.parts if part not in ("4", "addon4")))
        overrides = own.read_text(encoding="utf-8") if own in unused else ""
        unused.discard(own)
        try:
            found[to] = script_for_3(source.read_text(encoding="utf-8"), overrides)
        except ValueError as error:
            sys.exit(f"{own}: {error}")
        if path.parts[0] == "addon4":  # demos and the template become games of their users, who may well change them
            also = f" and {own.relative_to(GODOT).as_posix()}" if overrides else ""
            told = f"# Generated by `python tools/addon3.py` from {path.as_posix()}{also}: change these.\n"
            found[to] = told + found[to]
    if unused:
        sys.exit(f"nothing is overridden by {', '.join(sorted(map(str, unused)))}")
    return found


def main() -> None:
    """Write the scripts, or name those that are stale and exit with 1."""
    wanted = scripts()
    there = {path.relative_to(GODOT) for path in GODOT.rglob("*.gd") if {"3", "addon3"} & set(path.parts)}
    texts = {path: (GODOT / path).read_text(encoding="utf-8") for path in there}
    stale = sorted(path for path in there | wanted.keys() if texts.get(path) != wanted.get(path))
    if stale and "--check" in sys.argv:
        sys.exit("\n".join(f"{GODOT / path} is stale: run python tools/addon3.py" for path in stale))
    for path in stale:
        if path in wanted:
            (GODOT / path).write_text(wanted[path], encoding="utf-8")
        else:
            (GODOT / path).unlink()
        print(f"{'written' if path in wanted else 'removed'}: {GODOT / path}")


if __name__ == "__main__":
    main()
