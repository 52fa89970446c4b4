"""The game of the Godot workloads: the demo rolling_ball, and the same scene as a game of a peer.

All contenders use the same engine. Standard library only, because a peer's interpreter imports this module.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import envmanager
from benchmarks.roster import CannotTakePart

TICKS = {"ball": 1, "ball4": 4, "ball8": 8}
"""Physics ticks per action, by environment."""

PLUGIN = "ENVMANAGER_BENCH_GODOT_RL"
"""Environment variable with the folder of godot_rl_agents' plugin. The folder contains ``addons/godot_rl_agents``."""

_SCENE = Path(envmanager.__file__).parent / "godot" / "demos" / "rolling_ball" / "4" / "rolling_ball.tscn"
_PEER_GAME = Path(__file__).with_name("godot_rl_game")


def find_engine() -> str:
    """Return the path of the Godot 4 that all contenders use: $ENVMANAGER_GODOT, else one on PATH."""
    given = os.environ.get("ENVMANAGER_GODOT")
    for name in ("godot4", "godot") if given is None else (given,):
        found = shutil.which(os.path.expanduser(name))
        if found is not None and "godot3" not in os.path.basename(found):
            return os.path.abspath(found)
    raise CannotTakePart("there is no Godot 4 on PATH or in $ENVMANAGER_GODOT: `tools/get_godot4.sh DIR` fetches one")


def find_plugin() -> Path:
    """Return the folder of godot_rl_agents' addon; raise CannotTakePart if it was not fetched."""
    given = os.environ.get(PLUGIN)
    addon = None if given is None else Path(given).expanduser() / "addons" / "godot_rl_agents"
    if addon is None or not (addon / "sync.gd").is_file():
        where = f"${PLUGIN} is not set" if given is None else f"{given} has no addons/godot_rl_agents"
        raise CannotTakePart(f"{where}: `make bench-godot` fetches its plugin, where GitHub can be reached")
    return addon


def make_peer_project(to: Path) -> Path:
    """Make a project in ``to`` with the demo's scene but an agent of godot_rl_agents; return ``to``.

    The scene has the same bodies, with the same shapes and positions, as the demo.
    """
    shutil.copytree(_PEER_GAME, to)
    shutil.copytree(find_plugin(), to / "addons" / "godot_rl_agents")
    scene = _SCENE.read_text(encoding="utf-8").replace("res://rolling_ball.gd", "res://ball.gd")
    scene = scene.replace('[node name="Arena" type="Node"', '[node name="Arena" type="Node2D"')
    scene = re.sub(r"^(spacing|observation_size|continuous_size) = .*\n", "", scene, flags=re.MULTILINE)
    (to / "arena.tscn").write_text(scene, encoding="utf-8")
    return to
