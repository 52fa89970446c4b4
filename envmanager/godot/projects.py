"""Installs the addon in folders of Godot projects, and copies the package's demos and its template of a game.

The rule: a project keeps its own files. Only ``addons/envmanager`` is overwritten, and one line of ``project.godot`` is
added.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from envmanager.errors import NotWritten, UsageError
from envmanager.system.files import reporting, write_anew

HERE = Path(__file__).parent
ADDONS = {5: HERE / "addon4", 4: HERE / "addon3"}
"""Addon for each ``config_version`` of ``project.godot``: 5 is Godot 4, 4 is Godot 3."""
MAJORS = (4, 3)
THREADS = "worker_pool/max_threads"
"""Setting of Godot 4 for the number of threads that share the physics."""
AUTOLOAD = 'EnvManager="*res://addons/envmanager/bridge.gd"'
NOT_SHIPPED = shutil.ignore_patterns(".godot", ".import", "addons", "*.uid")


def demos() -> tuple[str, ...]:
    """Return the names of the demo games."""
    return tuple(sorted(folder.name for folder in (HERE / "demos").iterdir()))


def config_version(project: Path) -> int:
    """Return the format of a project: 5 (Godot 4) or 4 (Godot 3). Raises UsageError for another folder."""
    file = project / "project.godot"
    if not file.is_file():
        raise UsageError(f"{project} is not a Godot project: it has no project.godot. Name the folder that has one.")
    found = re.search(r"^config_version\s*=\s*(\d+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    version = int(found[1]) if found else 0
    if version not in ADDONS:
        raise UsageError(
            f"{file} has config_version={version or 'none'}; there are addons for 5 (Godot 4) and 4 (Godot 3). "
            "Open and save the project with one of these engines."
        )
    return version


def install_addon(project: Path | str) -> Path:
    """Install or update the addon in a project; return the addon's folder.

    The autoload ``EnvManager`` is added to ``project.godot`` if it is missing. Raises UsageError if the folder is no
    project, or if ``EnvManager`` is another autoload.
    """
    project = Path(project)
    addon = ADDONS[config_version(project)]
    with_autoload = _with_autoload(project / "project.godot")
    to = project / "addons" / "envmanager"
    _copy_folder(addon, to)
    write_anew(project / "project.godot", with_autoload)
    return to


def copy_demo(name: str, major: int, to: Path | str) -> Path:
    """Copy a demo for Godot 4 or 3 into the folder ``to``, with the addon; return the folder."""
    if name not in demos():
        raise UsageError(f"there is no demo {name!r}; there are {', '.join(demos())}.")
    return _copy(HERE / "demos" / name, major, Path(to))


def new_project(to: Path | str, major: int = 4) -> Path:
    """Make a game to start from: an arena, an agent and the addon; return its folder, named as the game."""
    to = Path(to)
    if (to / "project.godot").exists():
        raise UsageError(f"{to} has a project.godot already. install_addon() is for games that are there.")
    _copy(HERE / "template", major, to)
    file = to / "project.godot"
    title = re.sub(r'["\\\n]', "", to.resolve().name)
    write_anew(file, file.read_text(encoding="utf-8").replace('"New game"', f'"{title}"'))
    return to


def _copy(games: Path, major: int, to: Path) -> Path:
    if major not in MAJORS:
        raise UsageError(f"there is nothing for Godot {major}, only for 4 and 3.")
    _copy_folder(games / str(major), to)
    install_addon(to)
    return to


def _copy_folder(source: Path, to: Path) -> None:
    with reporting(to):
        try:
            shutil.copytree(source, to, dirs_exist_ok=True, ignore=NOT_SHIPPED)
        except shutil.Error as error:  # has every file that could not be copied; the first tells enough
            _, file, reason = error.args[0][0]
            raise NotWritten(f"{file} cannot be written: {reason}.") from error


def _with_autoload(file: Path) -> str:
    """Return the text of ``project.godot`` with the autoload in it."""
    text = file.read_text(encoding="utf-8")
    there = re.search(r"^EnvManager\s*=.*$", text, re.MULTILINE)
    if there and "res://addons/envmanager/bridge.gd" not in there[0]:
        raise UsageError(f"{file} has an autoload of the name EnvManager already: {there[0]}. Give it another name.")
    if there:
        return text
    if re.search(r"^\[autoload\][ \t]*$", text, re.MULTILINE):
        return re.sub(r"^\[autoload\][ \t]*$", f"[autoload]\n\n{AUTOLOAD}", text, count=1, flags=re.MULTILINE)
    return f"{text.rstrip()}\n\n[autoload]\n\n{AUTOLOAD}\n"
