"""Finds the engine for a game, and the command that plays it.

::

    "my_game" ── a folder with project.godot ┐
    "game.pck" ── an exported pack            ├──▶ Game ── EngineOptions ──▶ command line, folder
    "game.x86_64" ── an exported game         │
    "demo:coin_chase" ── copied from here ────┘

The rule: mistakes in a game's name, its files or its engine are reported before anything is started.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import attrs

from envmanager.errors import UsageError
from envmanager.godot.options import EngineOptions
from envmanager.godot.projects import config_version, copy_demo, demos

VARIABLE = "ENVMANAGER_GODOT"
"""Environment variable with the engine's binary, for games whose config names none."""
BY_MAJOR = {4: ("godot4", "godot"), 3: ("godot3-server", "godot3", "godot")}
"""Names of engines on PATH by major version; the first that is found is used."""
HOW_TO_GET = {
    4: "Download it from https://godotengine.org/download, or (Debian sid) `apt-get install godot4`",
    3: "`apt-get install godot3-server` brings it on Debian and Ubuntu",
}
DEFAULT_TICKS_PER_SECOND = 60
"""Godot's default, for projects that do not set it."""
_TICKS = re.compile(r"^common/physics_(?:ticks_per_second|fps)\s*=\s*(\d+)", re.MULTILINE)
_DEMO = "demo:"


@attrs.frozen
class Game:
    """A game and the engine that plays it."""

    path: Path
    """A folder with project.godot, a .pck, or a program."""
    binary: str
    major: int
    ticks_per_second: int

    @property
    def is_project(self) -> bool:
        """Whether ``path`` is a folder as the editor opens it."""
        return self.path.is_dir()


def find_game(env: str, options: EngineOptions, scratch: Path) -> Game:
    """Return the game that ``env`` names; a demo is copied into ``scratch``.

    Raises UsageError if there is no such game, no engine for it, or if the engine has no window but one is wanted.
    """
    game = _named(env, options, scratch)
    if options.window and _is_server(game.binary):
        raise UsageError(
            f"{game.binary} has no window: name an engine that has one (engine.binary; --binary of `godot watch`), or "
            "leave out engine.window (--headless)."
        )
    return game


def _named(env: str, options: EngineOptions, scratch: Path) -> Game:
    if env.startswith(_DEMO):
        return _demo(env.removeprefix(_DEMO), options, scratch)
    path = Path(env).expanduser().resolve()
    if not path.exists():
        raise UsageError(
            f"there is no Godot game {env!r}: name a folder with project.godot, a .pck, an exported game, or one of "
            f"{', '.join(_DEMO + name for name in demos())}."
        )
    if path.is_dir():
        major = major_of(path)
        return Game(path, find_binary(major, options.binary), major, _ticks_per_second(path))
    if path.suffix == ".pck":
        major, binary = _any_engine(options.binary)
        return Game(path, binary, major, DEFAULT_TICKS_PER_SECOND)
    if not os.access(path, os.X_OK):
        raise UsageError(f"{path} is neither a folder with project.godot, nor a .pck, nor a program that may be run.")
    return Game(path, str(path), 4, DEFAULT_TICKS_PER_SECOND)


def _demo(name: str, options: EngineOptions, scratch: Path) -> Game:
    major, binary = _any_engine(options.binary)
    folder = copy_demo(name, major, scratch / name)
    return Game(folder, binary, major, _ticks_per_second(folder))


def major_of(project: Path) -> int:
    """Return the major version of Godot that a project is for: 4 or 3. Raises UsageError for another folder."""
    return config_version(project) - 1


def _ticks_per_second(project: Path) -> int:
    found = _TICKS.search((project / "project.godot").read_text(encoding="utf-8"))
    return int(found[1]) if found else DEFAULT_TICKS_PER_SECOND


def find_binary(major: int, chosen: str | None = None) -> str:
    """Return the path of an engine of this major version: ``chosen``, else $ENVMANAGER_GODOT, else one on PATH.

    Raises UsageError when there is none.
    """
    given = chosen or os.environ.get(VARIABLE)
    if given is not None:
        found = shutil.which(os.path.expanduser(given))
        if found is None:
            where = "engine.binary" if chosen else f"${VARIABLE}"
            raise UsageError(f"{where} is {given!r}, which is no program that can be run here.")
        return os.path.abspath(found)
    for name in BY_MAJOR[major]:
        found = shutil.which(name)
        if found is not None:
            return os.path.abspath(found)
    raise UsageError(
        f"there is no engine for a game of Godot {major} on PATH ({', '.join(BY_MAJOR[major])}). {HOW_TO_GET[major]}; "
        f"or name it: engine.binary in the config, or ${VARIABLE}."
    )


def find_major(chosen: str | None) -> int | None:
    """Return the major version of an installed engine, by its name; Godot 4 first. None without an engine."""
    given = chosen or os.environ.get(VARIABLE)
    if given is not None:
        return 3 if "3" in os.path.basename(given) else 4
    return next((major for major, names in BY_MAJOR.items() if any(map(shutil.which, names))), None)


def _any_engine(chosen: str | None) -> tuple[int, str]:
    """Return the major version and the path of an engine. Raises UsageError when there is none."""
    major = find_major(chosen)
    if major is not None:
        return major, find_binary(major, chosen)
    raise UsageError(
        f"there is no Godot on PATH ({', '.join(BY_MAJOR[4] + BY_MAJOR[3])}). {HOW_TO_GET[4]}. For Godot 3: "
        f"{HOW_TO_GET[3]}. Or name it: engine.binary in the config, or ${VARIABLE}."
    )


def command_for(game: Game, options: EngineOptions) -> list[str]:
    """Return the command line that plays the game."""
    command = [game.binary]
    if game.is_project:
        command += ["--path", str(game.path)]
    elif game.path.suffix == ".pck":
        command += ["--main-pack", str(game.path)]
    if not options.window and game.major >= 4:
        command += ["--headless"]
    elif not options.window and not _is_server(game.binary):
        command += ["--no-window"]
    command += ["--audio-driver", "Dummy"]
    if options.speed == "max":
        command += ["--fixed-fps", str(options.fixed_fps or game.ticks_per_second)]
    return command


def _is_server(binary: str) -> bool:
    return os.path.basename(binary).endswith("-server")


def import_command(game: Game) -> Sequence[str] | None:
    """Return the command that imports a project's images and sounds; None if that is not needed."""
    if not game.is_project:
        return None
    imported = game.path / (".godot" if game.major >= 4 else ".import")
    has_assets = next(game.path.rglob("*.import"), None) is not None
    if imported.exists() or not has_assets:
        return None
    if game.major >= 4:
        return [game.binary, "--headless", "--path", str(game.path), "--import"]
    return [game.binary, "--path", str(game.path), "--editor", "--quit"]
