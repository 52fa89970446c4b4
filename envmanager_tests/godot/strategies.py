"""Random specs, steps and frames, and how often hypothesis tries them.

``ENVMANAGER_FUZZ_EXAMPLES=100000 pytest envmanager_tests/godot/test_frames.py`` has the parsers try so many.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as st

from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.steps import AGENT_BITS, AgentSteps
from envmanager.data.trees import map_tree
from envmanager.godot.frames import FROM_ENGINE, WITHOUT_TICKET, limit_of, pack

# What is found is repeated by the seed that hypothesis prints; a run of so many keeps no examples.
fuzzing = hypothesis.settings(
    max_examples=int(os.environ.get("ENVMANAGER_FUZZ_EXAMPLES", "100")),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)

MAX_FRAME_BYTES = 3000
"""Of a steps frame in the tests of the parser."""

_NAMES = st.text("abc_ü", min_size=1, max_size=4)
_SHAPES = st.lists(st.integers(1, 3), max_size=3).map(tuple)


@st.composite
def frames(draw: Any) -> tuple[Any, int, bytes]:
    """Kind, ticket and body of one frame that an engine may send."""
    kind = draw(st.sampled_from(sorted(FROM_ENGINE)))
    ticket = 0 if kind in WITHOUT_TICKET else draw(st.integers(0, 2**32 - 1))
    length = draw(st.integers(0, min(limit_of(kind, MAX_FRAME_BYTES), MAX_FRAME_BYTES)))
    return kind, ticket, bytes([draw(st.integers(0, 255))]) * length


streams = st.lists(frames(), max_size=5)


def bytes_of(stream: list[tuple[Any, int, bytes]]) -> bytes:
    """The frames, one after the other."""
    return b"".join(pack(*frame) for frame in stream)


@st.composite
def cuts_of(draw: Any, data: bytes) -> list[bytes]:
    """``data`` in any pieces."""
    places = draw(st.lists(st.integers(0, len(data)), max_size=12).map(sorted))
    return [data[start:stop] for start, stop in zip([0, *places], [*places, len(data)], strict=True)]


@st.composite
def mutated(draw: Any, data: bytes) -> bytes:
    """``data`` with some bytes changed, left out or put in."""
    spoiled = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(spoiled)))
        what = draw(st.sampled_from(["change", "leave out", "put in"]))
        new = draw(st.binary(min_size=1, max_size=4))
        spoiled[at : at + (0 if what == "put in" else len(new))] = b"" if what == "leave out" else new
    return bytes(spoiled)


@st.composite
def array_specs(draw: Any) -> ArraySpec:
    """One array, with bounds or without."""
    dtype = np.dtype(draw(st.sampled_from(["float32", "int32", "uint8", "int64", "float64"])))
    shape = draw(_SHAPES)
    low, high = draw(st.sampled_from([(None, None), (0, None), (None, 7), (0, 7)]))
    each = draw(st.booleans())
    bounds = [
        None if bound is None else np.full(shape if each else (), bound, dtype)  # one for all, or one for each number
        for bound in (low, high)
    ]
    return ArraySpec(shape, dtype, *bounds)


@st.composite
def _trees(draw: Any) -> Any:
    names = draw(st.lists(_NAMES, min_size=1, max_size=3, unique=True))
    return draw(array_specs()) if len(names) == 1 else {name: draw(array_specs()) for name in names}


@st.composite
def behavior_specs(draw: Any) -> dict[str, BehaviorSpec]:
    """One to three behaviors."""
    names = draw(st.lists(_NAMES, min_size=1, max_size=3, unique=True))
    return {name: BehaviorSpec(draw(_trees()), draw(_trees())) for name in names}


class Population:
    """Agents of some behaviors that come and go in some environments, as a random generator decides."""

    def __init__(self, specs: dict[str, BehaviorSpec], env_ids: list[int], seed: int, *, infos: bool) -> None:
        self._specs = specs
        self._env_ids = env_ids
        self._random = np.random.default_rng(seed)
        self._infos = infos
        self._n_seen = dict.fromkeys(env_ids, 0)
        self._alive: dict[str, list[int]] = {name: [] for name in specs}

    def reset(self) -> dict[str, AgentSteps]:
        """Everybody leaves, some join."""
        self._alive = {name: [self._new(env_id) for env_id in self._env_ids] for name in self._specs}
        return {name: self._steps(name, ids, ids, is_first=True) for name, ids in self._alive.items()}

    def step(self) -> dict[str, AgentSteps]:
        """Some leave, some join, some end; or, half of the time, nobody comes or goes."""
        found = {}
        for name, ids in self._alive.items():
            stay, rows = ids, ids
            if self._random.random() < 0.5:
                stay = [agent_id for agent_id in ids if self._random.random() < 0.8]
                stay = stay + [self._new(env_id) for env_id in self._env_ids if self._random.random() < 0.2]
                rows = [*ids, *(agent_id for agent_id in stay if agent_id not in ids)]
            self._alive[name] = stay
            if rows and self._random.random() < 0.9:
                found[name] = self._steps(name, rows, stay)
        return found

    def actions(self, steps: dict[str, AgentSteps]) -> dict[str, Any]:
        """Random actions for those that want one; for some behaviors, none."""
        return {
            name: self._arrays(self._specs[name].action, len(own.acting_rows))
            for name, own in steps.items()
            if self._random.random() < 0.8
        }

    def _new(self, env_id: int) -> int:
        self._n_seen[env_id] += 1
        return (env_id << AGENT_BITS) + self._n_seen[env_id] - 1

    def _steps(self, name: str, rows: list[int], stay: list[int], *, is_first: bool = False) -> AgentSteps:
        n = len(rows)
        kind = np.zeros(n, np.int64) if is_first or self._random.random() < 0.5 else self._random.integers(0, 4, n)
        acting = np.array([agent_id in stay for agent_id in rows], np.bool_)
        m = int(np.count_nonzero(kind))
        spec = self._specs[name].observation
        return AgentSteps(
            np.array(rows, np.int64),
            self._arrays(spec, n),
            np.zeros(n, np.float32) if is_first else self._random.normal(size=n).astype(np.float32),
            (kind & 1).astype(np.bool_),
            (kind >> 1).astype(np.bool_),
            self._arrays(spec, m) if m else None,
            None if acting.all() else acting,
            self._dicts(n) if self._infos else None,
            self._dicts(m) if self._infos and m else None,
        )

    def _dicts(self, n: int) -> list[dict[str, Any]]:
        choices: list[dict[str, Any]] = [{}, {"score": 1.5}, {"name": "ü", "path": [1, [2, {}]]}]
        return [dict(choices[index]) for index in self._random.integers(0, 3, n)]

    def _arrays(self, spec: Any, n: int) -> Any:
        def of(leaf: ArraySpec) -> np.ndarray:
            drawn: np.ndarray = self._random.integers(0, 8, (n, *leaf.shape)).astype(leaf.dtype)
            return drawn

        return map_tree(of, spec)
