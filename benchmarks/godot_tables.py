"""The Godot part of a measurement as Markdown: ``python -m benchmarks.godot_tables out/bench-godot/bench.json``."""

from __future__ import annotations

import json
import sys
from typing import Any

TICKS = {"godot": 1, "godot-4": 4, "godot-8": 8}
CONTENDERS = (
    *("bare", "ours-codec", "ours-engine-frames", "ours-engine", "ours-engines-2", "ours-engines-4"),
    *("godot_rl-fastest", "godot_rl-fixed", "godot_rl-default"),
)


def rates(measured: dict[str, Any]) -> dict[tuple[str, int, str], float]:
    """Return the steps per second by workload, number of arenas per engine and contender."""
    found = {}
    for cell in measured["summary"]:
        found[cell["workload"], cell["n_envs"], "bare"] = cell["bare_steps_per_s"]
        for line in cell["contenders"]:
            found[cell["workload"], cell["n_envs"], line["contender"]] = line["steps_per_s"]
    return found


def labels(measured: dict[str, Any]) -> dict[str, str]:
    """Return the label of each contender."""
    named = {line["contender"]: line["label"] for cell in measured["summary"] for line in cell["contenders"]}
    return {"bare": "bare driver", **named}


def print_rates(measured: dict[str, Any]) -> None:
    """Print a table per number of ticks, with a row per contender and a column per number of arenas."""
    found, named = rates(measured), labels(measured)
    for workload, ticks in TICKS.items():
        sizes = sorted({n_envs for name, n_envs, _ in found if name == workload})
        if not sizes:
            continue
        print(f"\nAgent-steps per second, {ticks} tick{'s' * (ticks > 1)} per action:\n")
        print(f"| arenas per engine | {' | '.join(map(str, sizes))} |\n|---|{'---|' * len(sizes)}")
        for contender in CONTENDERS:
            own = [found.get((workload, size, contender)) for size in sizes]
            if any(own):
                cells = " | ".join("" if rate is None else f"{rate:,.0f}" for rate in own)
                print(f"| {named[contender]} | {cells} |")


def print_targets(measured: dict[str, Any]) -> None:
    """Print the targets of the Godot workloads and the measured values."""
    print("\n| what | arenas | against | wanted | measured | |\n|---|---|---|---|---|---|")
    named = labels(measured)
    for target in measured["targets"]:
        if target["workload"].startswith("godot") and target["value"] is not None:
            sign = "≤" if target["at_most"] else "≥"
            against = named.get(target["against"], "")
            met = {True: "met", False: "not met", None: ""}[target["met"]]
            row = (
                target["about"],
                target["n_envs"],
                against,
                f"{sign} {target['goal']:g}",
                f"{target['value']:.2f}",
                met,
            )
            print("|", " | ".join(map(str, row)), "|")


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        measured = json.load(file)
    print_rates(measured)
    if "targets" in measured:  # with --goals
        print_targets(measured)


if __name__ == "__main__":
    main()
