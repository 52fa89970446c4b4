"""One block of memory for the rows of all workers: observations, rewards, flags and actions.

::

    steps     counts [slot][worker][behavior] = (n rows, m final rows, has acting?)
              per behavior agent_id, obs, reward, terminated, truncated, acting     [slot][row, …]
    finals    per behavior final_obs                                                [slot][row, …]
    actions   action_counts [worker][behavior] = n rows, or -1 for no action
              per behavior action, row (index of the row that each action is for)   [row, …]

    trainer's actions ── write_actions ──▶ the block ── read_payload ──▶ the worker's environments
     trainer's steps  ◀── full, read ───── the block ◀── put ────────────── the environments' steps

The worker processes of one manager share one block. Except on Windows it has no name, so no file is left behind, and it
is allocated before it is used, so that a lack of memory raises an error instead of a SIGBUS later. A Ray worker and its
manager each have a block of the same size, and send parts of the block as bytes.

The rows of a worker are adjacent, so its step is a slice. A full batch is one view if all workers use the same slot.
With ``zero_copy`` there are three slots: for the step delivered last, the step before it, and the step being written.
Otherwise one slot is enough, because a step is copied before the next command is sent to the worker.

Manager and workers lay the same arrays over the same bytes, because both derive them from a BlockLayout. Environments
of one agent each may write directly into their rows. Other steps are copied into the block if they fit.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.data.specs import BehaviorSpec
from envmanager.data.steps import COLUMNS, AgentSteps, CommandName, RowBuffer, only_agents
from envmanager.data.trees import Tree, leaves, leaves_like, map_tree, take_rows
from envmanager.errors import UsageError
from envmanager.system.machine import advice, words_of

IN_MEMORY = 8
"""Message flag: the rows of the step (in a command, the actions) are in the block."""
FULL = 1
"""Message flag: the environments wrote the step in place, and all rows act. In a command: actions for all rows."""
_ALIGNMENT = 64  # a cache line, at which each array begins


@attrs.frozen
class BehaviorLayout:
    """The rows of one behavior in the block. Worker w has the rows ``[first[w], first[w] + capacity[w])``."""

    name: str
    spec: BehaviorSpec
    first: tuple[int, ...]
    capacity: tuple[int, ...]

    @property
    def n_rows(self) -> int:
        return sum(self.capacity)


@attrs.frozen
class BlockLayout:
    """A description of the block, from which manager and workers derive the same arrays over the same bytes."""

    n_slots: int
    n_workers: int
    behaviors: tuple[BehaviorLayout, ...]

    @classmethod
    def of(
        cls, specs: Mapping[str, BehaviorSpec], max_agents: Sequence[Mapping[str, int]], *, n_slots: int
    ) -> BlockLayout:
        """Return a layout with ``max_agents[worker][behavior]`` rows. Behaviors with Python objects are left out."""
        behaviors = []
        for name, spec in specs.items():
            if not spec.has_objects:
                capacity = [own.get(name, 0) for own in max_agents]
                first = np.concatenate([[0], np.cumsum(capacity)[:-1]])
                behaviors.append(BehaviorLayout(name, spec, tuple(int(row) for row in first), tuple(capacity)))
        return cls(n_slots, len(max_agents), tuple(behaviors))


class Block:
    """The arrays of a layout, over the writable buffer ``memory``. If it is None, only sizes and offsets are usable."""

    def __init__(self, layout: BlockLayout, memory: Any = None) -> None:
        self.layout = layout
        self.memory = memory
        self._offset = 0
        behaviors, n_slots, n_counts = layout.behaviors, layout.n_slots, max(1, len(layout.behaviors))
        self.counts = self._array((n_slots, layout.n_workers, n_counts, 3), np.dtype(np.int32))
        shapes = [(n_slots, each.n_rows) for each in behaviors]
        columns = [{name: self._array(shape, dtype) for name, dtype in COLUMNS.items()} for shape in shapes]
        obs = [self._tree(each.spec.observation, *shape) for each, shape in zip(behaviors, shapes, strict=True)]
        self.finals_at = self._offset
        finals = [self._tree(each.spec.observation, n_slots, each.n_rows) for each in behaviors]
        self.actions_at = self._offset
        self.action_counts = self._array((layout.n_workers, n_counts), np.dtype(np.int32))
        actions = [self._tree(each.spec.action, each.n_rows) for each in behaviors]
        rows = [self._array((each.n_rows,), np.dtype(np.int64)) for each in behaviors]
        self.columns = {
            each.name: Columns(*parts)
            for each, *parts in zip(behaviors, columns, obs, finals, actions, rows, strict=True)
        }

    @classmethod
    def shared(cls, layout: BlockLayout, fd: int | str) -> Block:
        """Map the shared memory ``fd`` (on Windows its name), and return a block of ``layout`` over it."""
        return cls(layout, map_memory(fd, cls(layout).size_bytes))

    def make_private(self, fd: int) -> None:
        """Remap ``fd`` as copy-on-write in a forked process, so that its writes stay private. Raises OSError."""
        flags, address = mmap.MAP_PRIVATE | _MAP_FIXED, ctypes.addressof(self.memory)
        if _libc().mmap(address, len(self.memory), mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) != address:
            raise OSError(ctypes.get_errno(), "the shared memory cannot be replaced by a copy")

    @property
    def size_bytes(self) -> int:
        """Size in bytes of the layout, at least one page."""
        return max(self._offset, mmap.PAGESIZE)

    def _tree(self, spec: Tree, *leading: int) -> Tree:
        return map_tree(lambda leaf: self._array((*leading, *leaf.shape), leaf.dtype), spec)

    def _array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        start = self._offset
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._offset = -(-(start + size) // _ALIGNMENT) * _ALIGNMENT
        if self.memory is None or size == 0:
            return np.empty(shape if size == 0 else (0,), dtype)
        return np.frombuffer(self.memory, dtype, size // dtype.itemsize, start).reshape(shape)


@attrs.define(eq=False)
class Columns:
    """Arrays of all rows of one behavior, indexed ``[slot][row, …]``. ``action`` and ``row`` have no slots."""

    arrays: dict[str, np.ndarray]
    """Arrays of the fields in ``COLUMNS``, by name."""
    obs: Tree
    final_obs: Tree
    action: Tree
    row: np.ndarray

    def steps(self, slot: int, first: int, n: int, m: int, has_acting: bool) -> AgentSteps:
        """Return views of ``n`` rows and ``m`` final observations of ``slot``, both beginning at row ``first``."""
        own = slice(first, first + n)
        final = slice(first, first + m)
        arrays: dict[str, Any] = {name: array[slot, own] for name, array in self.arrays.items()}
        if not has_acting:
            arrays["acting"] = None
        return AgentSteps(
            obs=map_tree(lambda leaf: leaf[slot, own], self.obs),
            final_obs=map_tree(lambda leaf: leaf[slot, final], self.final_obs) if m else None,
            **arrays,
        )


_MAP_FIXED = 0x10
_PART_BYTES = 1 << 20


@functools.cache
def _libc() -> ctypes.CDLL:
    """Return the C library. It is loaded on first use, because ``CDLL(None)`` fails on Windows."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def map_memory(fd: int | str, size_bytes: int) -> Any:
    """Map the shared memory ``fd`` and return a buffer over it. Garbage collection of the buffer unmaps the memory.

    Raises UsageError on failure. On Windows ``fd`` is a name, and the memory exists as long as a process has it mapped.

    Elsewhere the C library's mmap is called, because ``make_private`` needs the address. Also, Python's mmap (up to
    3.12) would keep a descriptor open as long as the trainer holds a zero-copy array or the traceback of an error.
    """
    if isinstance(fd, str):
        try:
            return mmap.mmap(-1, size_bytes, tagname=fd)  # type: ignore[call-arg]
        except OSError as error:
            raise UsageError(f"{_readable(size_bytes)} of shared memory cannot be mapped: {error}.") from error
    address = _libc().mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        limit = " The limit of its address space (`ulimit -v`) may be too low." if number == errno.ENOMEM else ""
        raise UsageError(
            f"{_readable(size_bytes)} of shared memory cannot be mapped into this process: {os.strerror(number)}."
            f"{limit}"
        )
    memory = (ctypes.c_char * size_bytes).from_address(address)
    weakref.finalize(memory, _libc().munmap, address, size_bytes).atexit = False
    return memory


def allocate(fd: int | str, size_bytes: int, what: str = "the environments' observations and actions") -> None:
    """Allocate the shared memory ``fd``. Raises UsageError on failure; the message begins with ``what``, a plural noun.

    On Windows, where ``fd`` is a name, do nothing, because the memory is allocated when it is mapped.
    """
    if isinstance(fd, str):
        return
    needed = f"{what} need {_readable(size_bytes)} of shared memory"
    available = available_bytes()
    if size_bytes > available:
        raise UsageError(
            f"{needed}, but only {_readable(available)} are free on this machine. Run fewer environments, make "
            "observations smaller, or leave out zero_copy (which needs three times as much)."
        )
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size_bytes)
        else:
            with open(fd, "wb", closefd=False) as file:
                for start in range(0, size_bytes, _PART_BYTES):
                    file.write(bytes(min(_PART_BYTES, size_bytes - start)))
        os.lseek(fd, size_bytes, os.SEEK_SET)  # so that a stray write() of an environment changes no row
    except OSError as error:
        raise UsageError(f"{needed}, which the kernel refuses: {error.strerror}. {advice(error)}".rstrip()) from error


def _readable(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB" if size_bytes >= 2**20 else f"{size_bytes:,} bytes"


def available_bytes() -> int:
    """Return the machine's available memory in bytes, or its total memory if /proc/meminfo does not report it."""
    words = words_of("/proc/meminfo")
    if "MemAvailable:" in words:
        return int(words[words.index("MemAvailable:") + 1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE


class SharedRows:
    """One worker's part of the block, read and written by the worker and by its manager."""

    def __init__(self, block: Block, worker_id: int, env_ids: Sequence[int]) -> None:
        self.layout = block.layout
        self._block = block
        self._worker_id = worker_id
        self._behaviors = [
            (index, each) for index, each in enumerate(block.layout.behaviors) if each.capacity[worker_id]
        ]
        self._capacities = {each.name: each.capacity[worker_id] for _, each in self._behaviors}
        self.full: list[dict[str, AgentSteps]] = []
        """Views of all rows, by slot, as a step in which every agent is present and acts."""
        self._finals: list[dict[str, Tree]] = []
        """Views of all final observations, by slot."""
        self.buffers: list[RowBuffer | None] = []
        """Buffers, by slot, into which environments of one agent each write. None for other environments."""
        fixed_ids = only_agents(env_ids)  # agent ids of environments with one agent each, which are not in the block
        has_buffers = list(self._capacities.values()) == [len(env_ids)]
        for slot in range(block.layout.n_slots):
            full, finals = {}, {}
            for _, each in self._behaviors:
                n = each.capacity[worker_id]
                full[each.name] = self._steps(each, slot, n, 0)
                finals[each.name] = self._steps(each, slot, 0, n).final_obs
                if n == len(fixed_ids):
                    full[each.name].agent_id = fixed_ids
            self.full.append(full)
            self._finals.append(finals)
            (name, *_) = full or [""]
            self.buffers.append(RowBuffer(full[name], finals[name]) if has_buffers else None)
        columns = block.columns
        self.actions = {each.name: self._own(each, columns[each.name].action) for _, each in self._behaviors}
        """Views of the actions of all rows, by behavior."""
        self._row_numbers = {each.name: self._own(each, columns[each.name].row) for _, each in self._behaviors}
        self._plain_action: tuple[str, np.ndarray] | None = None
        """The behavior and its action array if there is exactly one of each (the usual case), else None."""
        if len(self.actions) == 1:
            ((name, action),) = self.actions.items()
            self._plain_action = (name, action) if action.__class__ is np.ndarray else None

    def _steps(self, each: BehaviorLayout, slot: int, n: int, m: int, has_acting: bool = False) -> AgentSteps:
        return self._block.columns[each.name].steps(slot, each.first[self._worker_id], n, m, has_acting)

    def _own(self, each: BehaviorLayout, column: Tree) -> Tree:
        first = each.first[self._worker_id]
        return take_rows(column, slice(first, first + each.capacity[self._worker_id]))

    # Steps.

    def put(self, slot: int, steps_by_behavior: Mapping[str, AgentSteps]) -> tuple[int, int]:
        """Copy steps into a slot, unless the environments have already written them there. Return the response's flags
        (0 if the steps do not fit) and the number of final observations (0 without FULL; the block then has it).
        """
        buffer = self.buffers[slot]
        if buffer is not None and len(steps_by_behavior) == 1:
            (steps,) = steps_by_behavior.values()
            if steps.reward is buffer.steps.reward and steps.acting is None:
                return IN_MEMORY | FULL, 0 if steps.final_obs is None else int(np.count_nonzero(steps.ended))
        if any(steps.agent_id.size > self._capacities.get(name, -1) for name, steps in steps_by_behavior.items()):
            return 0, 0
        self._block.counts[slot, self._worker_id] = 0
        for index, each in self._behaviors:
            if each.name in steps_by_behavior:
                self._write(slot, index, each, steps_by_behavior[each.name])
        return IN_MEMORY, 0

    def _write(self, slot: int, index: int, each: BehaviorLayout, steps: AgentSteps) -> None:
        m = 0 if steps.final_obs is None else int(np.count_nonzero(steps.ended))
        into = self._steps(each, slot, len(steps), m, steps.acting is not None)
        for name in COLUMNS:
            source = getattr(steps, name)
            if source is not None:
                getattr(into, name)[...] = source
        _copy_tree_into(into.obs, steps.obs)
        if m:
            _copy_tree_into(into.final_obs, steps.final_obs)
        self._block.counts[slot, self._worker_id, index] = (len(steps), m, steps.acting is not None)

    def read(self, slot: int, flags: int, n_ended: int) -> dict[str, AgentSteps]:
        """Return views of the steps in a slot, by behavior. ``flags`` and ``n_ended`` come from ``put``."""
        if flags & FULL:
            if not n_ended:
                return self.full[slot]
            ((name, full),) = self.full[slot].items()  # only a worker of one behavior has full steps
            ends = full.reward, full.terminated, full.truncated, take_rows(self._finals[slot][name], slice(n_ended))
            return {name: AgentSteps(full.agent_id, full.obs, *ends)}
        found = {}
        for index, each in self._behaviors:
            n, m, has_acting = self._block.counts[slot, self._worker_id, index].tolist()
            if n:
                found[each.name] = self._steps(each, slot, n, m, bool(has_acting))
        return found

    # Actions.

    def write_actions(self, actions: Mapping[str, Tree], rows: np.ndarray | None = None) -> int:
        """Write actions for ``rows``, by default all. Return the command's flags, or 0 if the actions do not fit."""
        plain = self._plain_action
        if plain is not None and rows is None and len(actions) == 1:
            action = actions.get(plain[0])
            if action.__class__ is np.ndarray and len(action) == len(plain[1]):
                plain[1][...] = action
                return IN_MEMORY | FULL
        if rows is not None and not len(actions) == len(self._row_numbers) == 1:
            return 0
        for name, action in actions.items():
            if _n_rows(action) > self._capacities.get(name, -1):
                return 0
        for index, each in self._behaviors:
            n = -1
            if each.name in actions:
                action, own = actions[each.name], self.actions[each.name]
                n = _n_rows(action)
                for target, source in zip(leaves(own), leaves_like(own, action), strict=True):
                    target[:n] = source
                if rows is not None:
                    self._row_numbers[each.name][:n] = rows
            self._block.action_counts[self._worker_id, index] = n
        return IN_MEMORY

    def read_payload(self, name: CommandName, flags: int) -> Any:
        """Return a command's actions by behavior, as views of the block. For STEP_ROWS, return (rows, actions)."""
        if flags & FULL:
            return self.actions
        found, n = {}, 0
        for index, each in self._behaviors:
            n = int(self._block.action_counts[self._worker_id, index])
            if n == each.capacity[self._worker_id]:
                found[each.name] = self.actions[each.name]
            elif n >= 0:
                found[each.name] = take_rows(self.actions[each.name], slice(n))
        if name is CommandName.STEP:
            return found
        (row_numbers,) = self._row_numbers.values()
        return row_numbers[:n].copy(), found


_UNKNOWN = 2**32
"""Row count of a tree without leaves (an empty Dict). It exceeds every capacity, so such actions are sent pickled."""


def _n_rows(tree: Tree) -> int:
    if tree.__class__ is np.ndarray:
        return len(tree)
    columns = leaves(tree)
    return len(columns[0]) if columns else _UNKNOWN


def _copy_tree_into(target: Tree, source: Tree) -> None:
    for into, values in zip(leaves(target), leaves_like(target, source), strict=True):
        into[...] = values
