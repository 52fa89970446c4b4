#!/bin/sh
# get_godot_rl_plugin.sh DIR: the Godot plugin of godot_rl_agents (MIT) into DIR, for `make bench-godot`; nothing of it is
# kept in this repository. SOURCE is a git repository that has the commit.
set -e
COMMIT=bf5d6a2d7374c65ecb23cd8cdc425cac25399ec4
SOURCE=${SOURCE:-https://github.com/edbeeching/godot_rl_agents_plugin}
if [ -e "$1/addons/godot_rl_agents/sync.gd" ]; then exit 0; fi
mkdir -p "$1"
git -C "$1" init --quiet
git -C "$1" fetch --quiet --depth 1 "$SOURCE" "$COMMIT"
git -C "$1" checkout --quiet FETCH_HEAD -- addons/godot_rl_agents
