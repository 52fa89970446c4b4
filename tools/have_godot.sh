#!/bin/sh
# Sees to it that there is a Godot engine: one that is here, else godot3-server from the distribution, where apt may.
set -e
for engine in "$ENVMANAGER_GODOT" godot4 godot godot3-server godot3; do
    if [ -n "$engine" ] && command -v "$engine" > /dev/null; then exit 0; fi
done
apt-get install -y --no-install-recommends godot3-server || {
    apt-get update && apt-get install -y --no-install-recommends godot3-server
} || {
    echo "There is no Godot engine here, and apt-get cannot install godot3-server (as root: apt-get install" \
        "godot3-server). Or download Godot from https://godotengine.org/download and name it in ENVMANAGER_GODOT." >&2
    exit 1
}
