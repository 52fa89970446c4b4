"""Frames per second of a Godot game in which agents act by an exported policy: ``python -m benchmarks.godot_policies``.

One engine plays without a trainer and without a window, a physics tick a frame, as fast as it can. All agents act in
every fourth frame, which is the longest. For comparison the same agents play by a ``heuristic()`` that calls ``act()``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from envmanager import BehaviorSpec
from envmanager.data.specs import ArraySpec
from envmanager.godot.games import BY_MAJOR, find_engine, new_project
from envmanager.training.algorithms.trainers import make_trainer
from envmanager.training.policies.exporting import export_policy
from envmanager.training.policies.saved import SavedPolicy

N_AGENTS, N_SEEN, N_ACTS, N_FRAMES = 100, 12, 2, 600
NETWORKS = ([64, 64], [256, 256])
AGENT = """extends "res://addons/envmanager/agent.gd"

var n = 0


func observe():
	n += 1
	return {floats}([sin(n), cos(n), 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])


func act(_continuous, _discrete):
	pass


func heuristic():
	act({floats}([0, 0]), {ints}())
"""
PROBE = """extends "res://addons/envmanager/arena.gd"

var times = []
var last = 0


func _process(_delta):
	var now = {clock}.get_ticks_usec()
	times.append(now - last)
	last = now
	if times.size() == {frames}:
		print("TIMES ", times)
		get_tree().quit()
"""
WORDS = {
    4: {"floats": "PackedFloat32Array", "ints": "PackedInt32Array", "clock": "Time"},
    3: {"floats": "PoolRealArray", "ints": "PoolIntArray", "clock": "OS"},
}


def make_game(folder: Path, major: int) -> Path:
    """Write a game of N_AGENTS agents, without policies."""
    game = new_project(folder / f"game{major}", major)
    words: dict[str, Any] = {**WORDS[major], "frames": N_FRAMES}
    (game / "agent.gd").write_text(AGENT.format(**words))
    (game / "arena.gd").write_text(PROBE.format(**words))
    return game


def write_scene(game: Path, major: int, policy: str) -> None:
    """Write the scene, whose agents name ``policy``."""
    lines = [f"[gd_scene load_steps=3 format={major - 1}]"]
    lines += [f'[ext_resource path="res://{name}.gd" type="Script" id={i}]' for i, name in ((1, "agent"), (2, "arena"))]
    lines += ['[node name="Game" type="Node2D"]']
    fields = f'observation_size = {N_SEEN}\ncontinuous_size = {N_ACTS}\npolicy = "{policy}"'
    for i in range(N_AGENTS):
        lines += [f'[node name="Agent{i}" type="Node" parent="."]\nscript = ExtResource( 1 )\n{fields}']
    lines += ['[node name="Arena" type="Node" parent="."]\nscript = ExtResource( 2 )']
    (game / "game.tscn").write_text("\n\n".join(lines) + "\n")


def frame_times_us(binary: str, game: Path, major: int) -> np.ndarray:
    """Play the game, and return the duration of each frame but the first ten."""
    command = [binary, "--path", str(game), "--fixed-fps", "60", *(["--headless"] if major == 4 else [])]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "ERROR: EnvManager" not in printed.stderr, printed.stderr
    found = re.search(r"^TIMES (\[.*\])$", printed.stdout, re.MULTILINE)
    assert found is not None, printed.stdout + printed.stderr
    return np.array(json.loads(found[1])[10:])


def export(game: Path, hidden: list[int]) -> str:
    """Export a policy with such a network into the game, and return its path there."""
    spec = BehaviorSpec(ArraySpec((N_SEEN,)), ArraySpec((N_ACTS,), np.float32, -1, 1))
    options = {"kind": "ppo", "hidden": hidden, "normalize_observations": True}
    policy = SavedPolicy("default", spec, make_trainer("default", spec, options, seed=0, device="cpu"), 0)
    export_policy(policy, game / "hero.policy", to="godot", observations=np.zeros((9, N_SEEN), np.float32))
    return "res://hero.policy"


def main(majors: list[int]) -> None:
    """Print a row for each engine and network."""
    print(f"{N_AGENTS} agents, {N_SEEN} numbers seen, {N_ACTS} done, an action every 4 frames")
    for major in majors:
        _, binary = find_engine(major=major)
        with tempfile.TemporaryDirectory() as folder:
            game = make_game(Path(folder), major)
            for hidden in (None, *NETWORKS):
                write_scene(game, major, "" if hidden is None else export(game, hidden))
                times = frame_times_us(binary, game, major)
                acting = np.sort(times)[-len(times) // 4 :]
                print(
                    f"Godot {major}  {'heuristic()' if hidden is None else f'hidden {hidden}':20}"
                    f"  {1e6 / times.mean():8,.0f} frames/s  frame with actions {np.median(acting) / 1000:.2f} ms"
                )


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or list(BY_MAJOR))
