"""Functions that find a Godot game and its engine, install the addon, and copy the demo games and the template.

::

    "my_game" ── a folder with project.godot ┐
    "game.pck" ── an exported pack            ├──▶ Game ── EngineOptions ──▶ command line
    "game.x86_64" ── an exported game         │
    "demo:coin_chase" ── copied from here ────┘
"""

from __future__ import annotations

import functools
import mmap
import os
import re
import shutil
import subprocess
from pathlib import Path

import attrs

from envmanager.errors import NotWritten, UsageError
from envmanager.godot.options import EngineOptions, Protocol
from envmanager.observe.files import reporting, write_atomically

VARIABLE = "ENVMANAGER_GODOT"  # path of the engine, if a config has no ``engine.binary``
BY_MAJOR = {4: ("godot4", "godot"), 3: ("godot3-server", "godot3", "godot")}  # programs to look for on PATH
HOW_TO_GET = {
    4: "Download it from https://godotengine.org/download, or (Debian sid) `apt-get install godot`",
    3: "`apt-get install godot3-server` brings it on Debian and Ubuntu",
}
DEFAULT_TICKS_PER_SECOND = 60  # Godot's default number of physics ticks per second, for projects that do not set it
THREADS = "worker_pool/max_threads"  # project setting of Godot 4: number of threads that compute the physics
_ADDON, _PLUGIN = b"addons/envmanager/bridge.gd", b"addons/godot_rl_agents/sync.gd"  # of this library, of godot_rl
AUTOLOAD = 'EnvManager="*res://addons/envmanager/bridge.gd"'
_PLUGINS = {4: ("PackedStringArray", '"res://addons/envmanager/plugin.cfg"'), 3: ("PoolStringArray", '"envmanager"')}
"""Type of the list of enabled plugins in project.godot, and the addon's entry in it, by major version of Godot."""
_SCANNED = "editor/filesystem_cache"  # begin of the path, below .godot, of what Godot 4 writes when all is imported
UNFINISHED = "envmanager-unfinished"  # file in .import while a project of Godot 3 is imported, and after a cut
HERE = Path(__file__).parent
NOT_SHIPPED = shutil.ignore_patterns(".godot", ".import", "addons", "*.uid")
_PACK = b"GDPC"  # the first bytes of an exported pack
_TICKS = re.compile(r"^common/physics_(?:ticks_per_second|fps)\s*=\s*(\d{1,9})", re.MULTILINE)
DEMO = "demo:"
_IMPORTED = {
    *(".import", ".png", ".jpg", ".jpeg", ".svg", ".webp", ".bmp", ".tga", ".exr", ".hdr", ".wav", ".ogg", ".mp3"),
    *(".glb", ".gltf", ".obj", ".dae", ".fbx", ".ttf", ".otf", ".csv"),
}  # suffixes of files that Godot 3 imports


@attrs.frozen
class Game:
    """A game and the engine that plays it. ``binary`` is the engine's path, and ``major`` Godot's major version."""

    path: Path
    """Path of a folder with project.godot, of a .pck, or of an exported game."""
    binary: str
    major: int
    ticks_per_second: int


def find_game(env: str, options: EngineOptions, scratch: Path) -> Game:
    """Find the game that ``env`` names and an engine for it. A demo is copied into the folder ``scratch``.

    Raises UsageError if ``env`` names no game, if there is no engine for the game, or if ``options.window`` is set but
    the engine is a server build, which has no window.
    """
    path = Path(env).expanduser().resolve()
    if env.startswith(DEMO):
        major, binary = find_engine(options.binary)
        path = copy_demo(name := env.removeprefix(DEMO), major, scratch / name)
        (path / ".godot" / _SCANNED).mkdir(parents=True, exist_ok=True)  # a demo has nothing worth an import
    elif not path.exists():
        raise UsageError(
            f"there is no Godot game {env!r}: name a folder with project.godot, a .pck, an exported game, or one of "
            f"{', '.join(DEMO + name for name in demos())}."
        )
    elif path.is_dir():
        major = major_of(path)
        _, binary = find_engine(options.binary, major)
    elif path.suffix == ".pck":
        with path.open("rb") as pack:
            if pack.read(len(_PACK)) != _PACK:
                raise UsageError(f"{path} is no exported pack, or is damaged: export it again.")
        major, binary = find_engine(options.binary)
    elif os.access(path, os.X_OK):
        major, binary = 4, str(path)
    else:
        raise UsageError(f"{path} is neither a folder with project.godot, nor a .pck, nor a program that may be run.")
    if options.window and _is_server(binary):
        raise UsageError(
            f"{binary} has no window: name an engine that has one (engine.binary; --binary of `godot watch`), or "
            "leave out engine.window (--headless)."
        )
    found = _TICKS.search((path / "project.godot").read_text(encoding="utf-8")) if path.is_dir() else None
    return Game(path, binary, major, int(found[1]) if found else DEFAULT_TICKS_PER_SECOND)


def protocol_of(env: str) -> Protocol:
    """Return "godot_rl" for a game with the plugin godot_rl_agents and without this library's addon, else "envmanager".

    A project has the addon if ``project.godot`` loads it. An exported game is searched for the scripts' file names.
    """
    path = Path(env).expanduser()
    if path.is_dir():
        has_ours = (path / "project.godot").is_file() and _find_autoload(path)[1]
        has_theirs = (path / _PLUGIN.decode()).is_file()
    else:
        files = [path, path.with_suffix(".pck")]
        has_ours, has_theirs = (any(_holds(file, name) for file in files) for name in (_ADDON, _PLUGIN))
    return "godot_rl" if has_theirs and not has_ours else "envmanager"


def _holds(file: Path, text: bytes) -> bool:
    """Return whether a file contains ``text``; False if it cannot be read."""
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(text) >= 0
    except (OSError, ValueError):  # there is no such file, or it is empty
        return False


def find_engine(chosen: str | None = None, major: int | None = None) -> tuple[int, str]:
    """Return the major version and path of an engine: ``chosen``, else $ENVMANAGER_GODOT, else one on PATH.

    ``major``: version that the engine must have; None accepts any, on PATH preferably 4. An engine that does not report
    its version is trusted to have it, or 4. Raises UsageError if no such engine is found, if ``chosen`` has another
    version, or if it or $ENVMANAGER_GODOT names no program.
    """
    given = chosen or os.environ.get(VARIABLE)
    problem = "there is no Godot:" if major is None else f"there is no engine for a game of Godot {major}:"
    if given is not None:
        where = "engine.binary" if chosen else f"${VARIABLE}"
        found = shutil.which(os.path.expanduser(given))
        if found is None:
            raise UsageError(f"{where} is {given!r}, which is no program that can be run here.")
        version = version_of(found) or f"{major or 4}."
        own = int(version.partition(".")[0])
        if major in (None, own):
            return own, os.path.abspath(found)
        problem = f"{where} is {given!r}, an engine of Godot {version}, but the game is for Godot {major}"
        if chosen:
            raise UsageError(f"{problem}. Name an engine of Godot {major}, or leave engine.binary out.")
        problem += ", and"
    majors = list(BY_MAJOR) if major is None else [major]
    for each in majors:
        for found in filter(None, map(shutil.which, BY_MAJOR[each])):
            if (version_of(found) or f"{each}.").startswith(f"{each}."):
                return each, os.path.abspath(found)
    names = ", ".join(name for each in majors for name in BY_MAJOR[each])
    how = ". For Godot 3: ".join(HOW_TO_GET[each] for each in majors)
    raise UsageError(
        f"{problem} none is on PATH ({names}). {how}; or name it: engine.binary in the config, or ${VARIABLE}."
    )


def find_major() -> int | None:
    """Return the major version of the engine that ``find_engine`` finds; None if there is none."""
    try:
        return find_engine()[0]
    except UsageError:
        return None


@functools.cache
def version_of(binary: str) -> str | None:
    """Return the version that ``binary --version`` prints, such as ``"4.6.3"``; None if it prints none."""
    try:
        told = subprocess.run([binary, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=30.0)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(rb"^\d+\.\d+(\.\d+)?", told.stdout, re.MULTILINE)
    return found[0].decode() if found else None


def command_for(game: Game, options: EngineOptions) -> list[str]:
    command = [game.binary]
    if game.path.is_dir():
        command += ["--path", str(game.path)]
    elif game.path.suffix == ".pck":
        command += ["--main-pack", str(game.path)]
    if not options.window and game.major >= 4:
        command += ["--headless"]
    elif not options.window and not _is_server(game.binary):
        command += ["--no-window"]
    command += ["--audio-driver", "Dummy"]
    is_unchanged = options.protocol == "godot_rl"
    if options.speed == "max":
        ticks_per_second = DEFAULT_TICKS_PER_SECOND if is_unchanged else game.ticks_per_second  # the plugin sets them
        command += ["--fixed-fps", str(options.fixed_fps or ticks_per_second)]
    if is_unchanged:
        command += [] if options.scene is None else [options.scene]
        ticks = {} if options.ticks_per_action is None else {"action_repeat": options.ticks_per_action}
        for name, value in {"speedup": 1, **ticks, **options.parameters}.items():
            command.append(f"--{name}={str(value).lower() if isinstance(value, bool) else value}")
    return command


def _is_server(binary: str) -> bool:
    return os.path.basename(binary).endswith("-server")


def import_command(game: Game) -> list[str] | None:
    """Return the command that imports a project's images, sounds and classes; None if no import is needed.

    A fresh clone of a Godot 4 project needs an import, because ``.godot`` is not committed. Projects of Godot 3 list
    their classes in ``project.godot``, so they need an import only for files such as images. An import that was cut is
    needed again.
    """
    imported = game.path / ".import"
    if game.major >= 4:
        is_whole = any((game.path / ".godot").glob(f"{_SCANNED}*"))
    else:
        is_whole = imported.exists() and not (imported / UNFINISHED).exists()
    if not game.path.is_dir() or is_whole:
        return None
    files = set(game.path.rglob("*")) - set((game.path / "addons" / "envmanager").rglob("*"))  # our icons may wait
    if game.major < 4 and not any(path.suffix in _IMPORTED for path in files):
        return None
    how = ["--headless", "--import"] if game.major >= 4 else ["--editor", "--quit"]
    return [game.binary, "--path", str(game.path), *how]


# Projects.


def demos() -> tuple[str, ...]:
    return tuple(sorted(folder.name for folder in (HERE / "demos").iterdir()))


def major_of(project: Path) -> int:
    """Return Godot's major version, 4 or 3, for a project. Raises UsageError for a folder without such a project."""
    file = project / "project.godot"
    if not file.is_file():
        raise UsageError(f"{project} is not a Godot project: it has no project.godot. Name the folder that has one.")
    found = re.search(r"^config_version\s*=\s*(\d{1,9})", file.read_text(encoding="utf-8"), re.MULTILINE)
    version = int(found[1]) if found else 0
    if version - 1 not in BY_MAJOR:
        raise UsageError(
            f"{file} has config_version={version or 'none'}; there are addons for 5 (Godot 4) and 4 (Godot 3). "
            "Open and save the project with one of these engines."
        )
    return version - 1


def install_addon(project: Path | str) -> Path:
    """Install or update the addon in the folder of a project, and enable its plugin. Return the addon's folder.

    Adds the autoload ``EnvManager`` to ``project.godot`` if it is missing. Raises UsageError if the folder is not
    a project, or if it has another autoload named ``EnvManager``. Raises NotWritten if a file cannot be written.
    """
    project = Path(project)
    major, file = major_of(project), project / "project.godot"
    text = file.read_text(encoding="utf-8")
    there, is_ours = _find_autoload(project)
    if there and not is_ours:
        raise UsageError(f"{file} has an autoload of the name EnvManager already: {there}. Give it another name.")
    kind, plugin = _PLUGINS[major]
    enabled = re.search(rf"^enabled\s*=\s*{kind}\(\s*([^)]*?)\s*\)", text, re.MULTILINE)
    if enabled is None:
        text = _with_line(text, "editor_plugins", f"enabled={kind}({plugin})")
    elif not re.search(r'"(res://addons/envmanager/plugin\.cfg|envmanager)"', enabled[1]):
        text = text.replace(enabled[0], f"enabled={kind}({', '.join(filter(None, (enabled[1], plugin)))})")
    if not there:
        text = _with_line(text, "autoload", AUTOLOAD)
    to = copy_addon(major, project)
    write_atomically(file, text)
    return to


def _with_line(text: str, section: str, line: str) -> str:
    """Return the text of a project.godot with ``line`` in a section, which is added if it is missing."""
    text, n = re.subn(rf"^\[{section}\][ \t]*$", f"[{section}]\n\n{line}", text, count=1, flags=re.MULTILINE)
    return text if n else f"{text.rstrip()}\n\n[{section}]\n\n{line}\n"


def _find_autoload(project: Path) -> tuple[str, bool]:
    """Return the ``EnvManager`` autoload line of ``project.godot`` ("" if missing) and whether it loads the addon."""
    found = re.search(r"^EnvManager\s*=.*$", (project / "project.godot").read_text(encoding="utf-8"), re.MULTILINE)
    line = found[0] if found else ""
    uid = project / "addons/envmanager/bridge.gd.uid"  # by which Godot 4.4 and later may name the script
    return line, "/envmanager/bridge.gd" in line or (uid.exists() and uid.read_text().strip() in line)


def copy_addon(major: int, project: Path) -> Path:
    """Copy the addon for Godot 4 or 3 into ``addons/envmanager`` of a project, and return that folder.

    Any other scripts and icons in that folder are deleted, together with their .uid and .import files.
    """
    to, shipped = project / "addons" / "envmanager", set()
    for source in (HERE / "addon", HERE / f"addon{major}"):  # what both versions have, then the scripts
        _copy_folder(source, to)
        shipped |= {path.relative_to(source) for path in source.rglob("*")}
    with reporting(to):
        for path in [*to.rglob("*.gd"), *to.rglob("*.svg")]:
            if path.relative_to(to) not in shipped:
                for own in (path, Path(f"{path}.uid"), Path(f"{path}.import")):
                    own.unlink(missing_ok=True)
    return to


def copy_demo(name: str, major: int, to: Path | str) -> Path:
    """Copy a demo for Godot 4 or 3 and the addon into ``to``. Return ``to``. Raises UsageError for an unknown name."""
    if name not in demos():
        raise UsageError(f"there is no demo {name!r}; there are {', '.join(demos())}.")
    return _copy(HERE / "demos" / name, major, Path(to))


def new_project(to: Path | str, major: int = 4) -> Path:
    """Copy the template game and the addon into ``to``. Return ``to``. Raises UsageError if ``to`` has a project."""
    to = Path(to)
    if (to / "project.godot").exists():
        raise UsageError(f"{to} has a project.godot already. install_addon() is for games that are there.")
    _copy(HERE / "template", major, to)
    file = to / "project.godot"
    title = re.sub(r'["\\\n]', "", to.resolve().name)
    write_atomically(file, file.read_text(encoding="utf-8").replace('"New game"', f'"{title}"'))
    return to


def _copy(games: Path, major: int, to: Path) -> Path:
    if major not in BY_MAJOR:
        raise UsageError(f"there is nothing for Godot {major}, only for 4 and 3.")
    _copy_folder(games / str(major), to)
    install_addon(to)
    return to


def _copy_folder(source: Path, to: Path) -> None:
    with reporting(to):
        try:
            shutil.copytree(source, to, dirs_exist_ok=True, ignore=NOT_SHIPPED)
        except shutil.Error as error:  # it has all files that could not be copied; report the first
            _, file, reason = error.args[0][0]
            raise NotWritten(f"{file} cannot be written: {reason}.") from error
