"""Compares contenders of ``benchmarks`` that stay alive side by side in one process and take short turns.

``python -m benchmarks`` gives every turn a process of its own, so turns are long, and a shared machine may be twice as
fast in one turn as in the next. Here a round takes a second or less, and medians over the ratios of each round are
printed. A contender must be importable by this interpreter, and sleep while the others take their turns.

    python tools/compare_in_turns.py noop:8 cartpole:32 --contenders gymnasium-sync,ours-simple,ours-auto
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.contender import Contender
from benchmarks.measure import Clocks, measure, warm_up
from benchmarks.roster import label_of, make_contender

PLACED = "ours-simple,ours-workers,ours-processes,ours-share,ours-auto,ours-auto-local,gymnasium-sync,bare"
WARM_UP_S = 0.3


def main() -> None:
    """Measure each cell and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cells", nargs="+", metavar="WORKLOAD:N_ENVS")
    parser.add_argument("--contenders", default=PLACED, help="names in benchmarks/roster.py; the first is the measure")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.06, help="of a turn")
    arguments = parser.parse_args()
    logging.basicConfig(format="  %(message)s", level=logging.WARNING)
    logging.getLogger("envmanager").setLevel(logging.INFO)  # shows which placement "auto" has chosen, and why
    for cell in arguments.cells:
        workload, _, n_envs = cell.partition(":")
        print(f"{workload}, {n_envs} environments", flush=True)
        names = arguments.contenders.split(",")
        show(compare(workload, int(n_envs), names, arguments.rounds, arguments.seconds), int(n_envs))


def compare(workload: str, n_envs: int, names: Sequence[str], n_rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return the steps per second of each contender in each round."""
    contenders: dict[str, Contender] = {}
    rates: dict[str, list[float]] = {name: [] for name in names}
    clocks = Clocks()
    try:
        for name in names:
            contenders[name] = make_contender(name, workload, n_envs)
            contenders[name].get_ready()
        n_calls = {name: warm_up(contender, WARM_UP_S, clocks) for name, contender in contenders.items()}
        for _ in range(n_rounds):
            for name in random.sample(names, len(names)):
                contenders[name].run(n_calls[name])  # refills the CPU's caches, which others have used meanwhile
                n_steps, wall_s, *_ = measure(contenders[name], n_calls=n_calls[name], seconds=seconds, clocks=clocks)
                rates[name].append(n_steps / wall_s)
    finally:
        for contender in contenders.values():
            contender.close()
    return rates


def show(rates: Mapping[str, Sequence[float]], n_envs: int) -> None:
    """Print the median rates, and the medians and quartiles of the ratios to the first contender."""
    first, *_ = rates
    print(f"  {'':44}{'steps/s':>12}{'ratio':>8}   quartiles")
    for name, own in rates.items():
        ratios = [rate / other for rate, other in zip(own, rates[first], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        label = label_of(name, n_envs)
        print(f"  {label:44}{statistics.median(own):>12,.0f}{middle:>8.3f}   {low:.2f}-{high:.2f}")
    print(flush=True)


if __name__ == "__main__":
    main()
