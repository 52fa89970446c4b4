"""The game of the Godot workloads: the demo rolling_ball, and the same scene as a game of a peer.

The rule: standard library only, because a peer's interpreter imports it, and one engine for all who take part.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from envmanager.bench.roster import CannotTakePart

TICKS = {"ball": 1, "ball4": 4, "ball8": 8}
"""By environment: physics ticks per action."""

PLUGIN = "ENVMANAGER_BENCH_GODOT_RL"
"""Names the folder with godot_rl_agents' plugin, which has ``addons/godot_rl_agents``."""

_PACKAGE = Path(__file__).parent
_SCENE = _PACKAGE.parent / "godot" / "demos" / "rolling_ball" / "4" / "rolling_ball.tscn"
_PEER_GAME = _PACKAGE / "godot_rl_game"


def find_engine() -> str:
    """The Godot 4 that all use: $ENVMANAGER_GODOT, else one on PATH."""
    given = os.environ.get("ENVMANAGER_GODOT")
    for name in ("godot4", "godot") if given is None else (given,):
        found = shutil.which(os.path.expanduser(name))
        if found is not None and "godot3" not in os.path.basename(found):
            return os.path.abspath(found)
    raise CannotTakePart("there is no Godot 4 on PATH nor in $ENVMANAGER_GODOT: `make godot4` brings one")


def find_plugin() -> Path:
    """The addon of godot_rl_agents; CannotTakePart when nobody has brought it."""
    given = os.environ.get(PLUGIN)
    addon = None if given is None else Path(given).expanduser() / "addons" / "godot_rl_agents"
    if addon is None or not (addon / "sync.gd").is_file():
        where = f"${PLUGIN} is not set" if given is None else f"{given} has no addons/godot_rl_agents"
        raise CannotTakePart(f"{where}: `make bench-godot` fetches its plugin, where GitHub can be reached")
    return addon


def make_peer_project(to: Path) -> Path:
    """The demo's scene with an agent of godot_rl_agents in the place of the demo's own; the folder of the project.

    The bodies, their shapes and where they stand are those of the demo.
    """
    shutil.copytree(_PEER_GAME, to)
    shutil.copytree(find_plugin(), to / "addons" / "godot_rl_agents")
    scene = _SCENE.read_text(encoding="utf-8").replace("res://rolling_ball.gd", "res://ball.gd")
    scene = scene.replace('[node name="Arena" type="Node"', '[node name="Arena" type="Node2D"')
    scene = re.sub(r"^(spacing|observation_size|continuous_size) = .*\n", "", scene, flags=re.MULTILINE)
    (to / "arena.tscn").write_text(scene, encoding="utf-8")
    return to
