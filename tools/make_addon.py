"""Packs the addon as a zip for each major version of Godot, in the shape that the Asset Library wants: ``make addon``.

::

    envmanager/godot/addon     README.md, LICENSE, icons ──┬──▶ dist/envmanager-godot4-addon-VERSION.zip
    envmanager/godot/addon4    scripts, plugin.cfg ────────┘        addons/envmanager/…

The rule: the same files give the same bytes. So no entry has the time of its file, and nothing is compressed.
"""

from __future__ import annotations

import re
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from envmanager.godot.games import BY_MAJOR, copy_addon  # noqa: E402

EARLIEST = (1980, 1, 1, 0, 0, 0)
"""Time that a zip gives to all its entries; it can hold no earlier one."""
PLAIN_FILE = 0o100644 << 16


def make_addon(major: int, to: Path) -> Path:
    """Write the zip of the addon for one major version of Godot into the folder ``to``; return its path."""
    with tempfile.TemporaryDirectory() as scratch:
        addon = copy_addon(major, Path(scratch))
        (version,) = re.findall(r'^version="(.+)"$', (addon / "plugin.cfg").read_text(encoding="utf-8"), re.MULTILINE)
        path = to / f"envmanager-godot{major}-addon-{version}.zip"
        to.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path, "w") as packed:
            for file in sorted(file for file in addon.rglob("*") if file.is_file()):
                entry = zipfile.ZipInfo(file.relative_to(scratch).as_posix(), EARLIEST)
                entry.external_attr, entry.create_system = PLAIN_FILE, 3  # as on Linux, wherever it is made
                packed.writestr(entry, file.read_bytes())
    return path


if __name__ == "__main__":
    for version in BY_MAJOR:
        print(make_addon(version, Path(sys.argv[1])))
