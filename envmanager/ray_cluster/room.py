"""Says in words what a worker takes of a cluster, and why there is no room for it.

The rule: only words about numbers that others bring; nothing here asks Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_NOT_ASKED_FOR = ("node:", "object_store_memory")
"""The beginnings of the names of resources that Ray counts and workers do not ask for."""


def why_no_room(wanted: Mapping[str, float], nodes: Sequence[Mapping[str, float]], free: Mapping[str, float]) -> str:
    """Return in words which resource of ``wanted`` no node has, or else which are taken, or too scattered.

    ``nodes``: what each node has in all. ``free``: what is left of it, all nodes together.
    """
    for name, amount in wanted.items():
        most = max((node.get(name, 0.0) for node in nodes), default=0.0)
        if most < amount:
            has = f"the most that one has is {most:g}" if most else "no node has any"
            return f"no node has {amount:g} {name} ({has})"
    if not any(all(node.get(name, 0.0) >= amount for name, amount in wanted.items()) for node in nodes):
        return f"no node has all of {in_words(wanted)}"
    taken = [name for name, amount in wanted.items() if free.get(name, 0.0) < amount]
    if taken:
        left = in_words({name: free.get(name, 0.0) for name in taken})
        return f"all {' and '.join(taken)} is taken, but for {left}"
    return f"no node has {in_words(wanted)} free at once, or the one that has is slow to start a process"


def in_words(resources: Mapping[str, float]) -> str:
    """Return resources in words, such as ``"12 CPU, 2 license"``."""
    told = [
        f"{amount / 2**30:.3g} GiB memory" if name == "memory" else f"{amount:g} {name}"
        for name, amount in resources.items()
        if not name.startswith(_NOT_ASKED_FOR)
    ]
    return ", ".join(told) or "nothing"
