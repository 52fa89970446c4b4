"""A manager's state as plain data, and a manager that goes on from it.

::

    state_of ── dicts, lists, numbers, text, arrays ──▶ a file of the trainer's
                                                            │
    the rows delivered last ◀── compared, as after a failure ── each worker begins and repeats ◀── restore

A state holds the environments by env_id, so that other workers may take them. Each worker is asked for the episodes
of its environments as the replacement of a failed one is; see ``Keeper``. What cannot go on is lost in the same way:
the next step with an action for it tells so.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.data.specs import describe_value
from envmanager.data.steps import (
    AGENT_BITS,
    ActionInfo,
    AgentSteps,
    Begin,
    Call,
    CommandName,
    StepInfo,
    Transitions,
    concat_steps,
)
from envmanager.data.trees import concat_rows, snapshot, take_rows
from envmanager.errors import EnvManagerError, UsageError, WorkerError
from envmanager.keeping.keeper import Keeper, SeedSource
from envmanager.kernel.collecting import Collector
from envmanager.kernel.recovery import Recovery
from envmanager.kernel.seats import Drawn, Seat, SeatState
from envmanager.kernel.table import Entry, Replacement, Restore, WorkerState, WorkerTable
from envmanager.kernel.tasks import TaskBook
from envmanager.observe.episodes import FinishedEpisode
from envmanager.options import ResetConfig
from envmanager.tasks import ExactTask, Task, TaskResult, is_plain

VERSION = 2
"""Number of the form of states. One of another form is refused."""
_KINDS = (ActionInfo, AgentSteps, Begin, Call, Drawn, ExactTask, FinishedEpisode, Task, TaskResult, Transitions)
_BY_NAME: dict[str, Any] = {kind.__name__: kind for kind in _KINDS}
_KIND = "__class__"
"""Key of the name of the class of what is told as a dict of its fields."""
_OF_KEEPER = ("seed", "n_resets", "n_kept", "n_diverged", "n_repeated")
_OF_SEAT = ("playing", "next", "is_laid", "is_new", "told", "begun", "ended")


def told(value: Any) -> Any:
    """Return a copy of what a manager holds as dicts, lists, numbers, text and arrays. ``read`` reads it."""
    kind = next((each for each in type(value).__mro__ if each in _KINDS), None)
    if kind is not None:
        own: Any = value
        fields = own._asdict() if isinstance(value, tuple) else attrs.asdict(own, recurse=False)
        if kind is FinishedEpisode:
            fields = {**fields, "task": value.task, "numbers": value.numbers}
        return {_KIND: kind.__name__, **{name: told(own) for name, own in fields.items()}}
    if isinstance(value, Exception):
        return {_KIND: "error", "text": str(value)}
    if isinstance(value, Mapping):
        return {key: told(own) for key, own in value.items()}
    return type(value)(map(told, value)) if value.__class__ in (list, tuple) else snapshot(value)


def read(value: Any) -> Any:
    """Return what ``told`` has told. Errors are EnvManagerErrors now."""
    if isinstance(value, list | tuple):
        return type(value)(map(read, value))
    if not isinstance(value, Mapping):
        return value
    fields = {key: read(own) for key, own in value.items() if key != _KIND}
    if _KIND not in value:
        return fields
    if value[_KIND] == "error":
        return EnvManagerError(fields["text"])
    more = {name: fields.pop(name) for name in ("task", "numbers") if value[_KIND] == "FinishedEpisode"}
    made = _BY_NAME[value[_KIND]](**fields)
    for name, own in more.items():
        setattr(made, name, own)
    return made


_ARRAY, _TUPLE, _PAIRS = "<array>", "<tuple>", "<pairs>"
"""Keys of what JSON lacks: arrays, by name, tuples, and mappings with other keys than text."""


def packed(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Return nested dicts, lists, numbers and text as JSON data. Arrays are put into ``arrays``; ``unpacked`` joins.

    Raises UsageError for anything else.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        name = str(len(arrays))
        arrays[name] = value
        return {_ARRAY: name}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("<") for key in value):
            return {key: packed(own, arrays) for key, own in value.items()}
        return {_PAIRS: [[packed(key, arrays), packed(own, arrays)] for key, own in value.items()]}
    if isinstance(value, list | tuple):
        parts = [packed(own, arrays) for own in value]
        return {_TUPLE: parts} if isinstance(value, tuple) else parts
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str | int | float):
        return value
    raise UsageError(f"{describe_value(value)} has no place in a checkpoint.")


def unpacked(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return what ``packed`` has packed. The arrays are copies."""
    if isinstance(value, list):
        return [unpacked(own, arrays) for own in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        return np.array(arrays[value[_ARRAY]])
    if _TUPLE in value:
        return tuple(unpacked(own, arrays) for own in value[_TUPLE])
    if _PAIRS in value:
        return {unpacked(key, arrays): unpacked(own, arrays) for key, own in value[_PAIRS]}
    return {key: unpacked(own, arrays) for key, own in value.items()}


def checksum_of(content: Any) -> int:
    """Return a checksum of JSON data, or of the dtype, shape and values of a contiguous array.

    A checksum finds damage, not forgery. CRC-32 is four times as fast as SHA-256, and a replay has gigabytes.
    """
    if isinstance(content, np.ndarray):
        return zlib.crc32(content.data, zlib.crc32(f"{content.dtype.str}{content.shape}".encode()))
    return zlib.crc32(json.dumps(content).encode())


def state_of(table: WorkerTable, recovery: Recovery) -> dict[str, Any]:
    """Return the state of a manager between two calls."""
    book, keeper, config = table.book, recovery.keeper, recovery.last_config
    envs: list[dict[str, Any]] = []
    rows: dict[str, list[AgentSteps]] = {}
    sent, waiting, workers, attributes = [], [], [], []
    for entry in table.entries:
        is_gone = entry.error is not None or (entry.replacement is not None and not entry.is_kept)
        is_step = not entry.outbox or entry.outbox[0].name is CommandName.STEP
        is_sent = not is_gone and entry.state in (WorkerState.IN_FLIGHT, WorkerState.READY) and is_step
        envs += [_env(entry, book, seat, is_gone, is_sent) for seat in book.seats.of_worker[entry.worker_id]]
        info = entry.previous_step
        if info is not None:
            for name, steps in keeper.last(entry).items():
                rows.setdefault(name, []).append(attrs.evolve(steps, info=None, reset_info=None))
            for name in info.current:
                info.keep_waiting(name)
            waiting += [[name, own] for name, own in info.still_waiting.items()]
        if is_sent:
            assert entry.log is not None
            own = {"taken": entry.log.last(), "actions": entry.actions, "n_envs": entry.n_envs_in_flight}
            sent.append({"env_ids": list(entry.env_ids), **own})
        workers.append([list(entry.env_ids), entry.steps, entry.restarts])
        for name, values, own_rows in entry.attributes.values():
            attributes.append([name, [entry.env_ids[row] for row in own_rows], list(values)])
    state = {
        "version": VERSION,
        "seed": config.seed,
        "options": config.options,
        "keeper": {name: getattr(keeper, name) for name in _OF_KEEPER},
        "envs": envs,
        "rows": {name: concat_steps([each for each in own if len(each)] or own[:1]) for name, own in rows.items()},
        "waiting": waiting,
        "in_flight": sent,
        "attributes": attributes,
        "tasks": {"kind": kind_of(book), **book.state()},
        "episodes": None if book.episodes is None else book.episodes.state(),
        "env_steps": table.env_steps,
        "steps_lost": recovery.steps_lost,
        "workers": workers,
        "kinds": [entry.kind for entry in table.entries for _ in entry.env_ids],
    }
    return told(state)  # type: ignore[no-any-return]


def kind_of(book: TaskBook) -> str:
    """Return the name of what begins the episodes of a book."""
    return "SEEDS" if isinstance(book.given, SeedSource) else book.kind.name


def _env(entry: Entry, book: TaskBook, seat: Seat, is_gone: bool, is_sent: bool) -> dict[str, Any]:
    """Return what one environment does."""
    log, row = entry.log, seat.row
    assert log is not None
    log.tidy()
    was_lost = is_gone or (entry.restore is not None and row in entry.restore.lost)
    stop = log.stop(row, is_sent=is_sent)
    is_late = is_sent and log.is_called_after(row)
    if is_late and seat.state is SeatState.SENT:
        raise UsageError(
            f"a call came after the beginning of the episode in env {seat.env_id}, whose first observation is not "
            "delivered: receive it before state()."
        )
    calls = log.calls_of(row, stop, seat.begun or Begin(row, True, None, None))
    is_lost = was_lost or row in log.unkept or not all(is_plain(tuple(call)) for call in calls)
    is_lost = is_lost or (is_late and stop < log.n_steps)
    return {
        "generation": entry.generation_of_seeds,
        "number": log.numbers[row] - was_lost,
        "is_lost": is_lost,
        "actions": None if is_lost else log.actions_of(row, stop),
        "calls": calls if not is_lost else [],
        "state": seat.state.name,
        "seat": None if book.is_automatic else {name: getattr(seat, name) for name in _OF_SEAT},
    }


def require_fits(state: Mapping[str, Any], entries: Sequence[Entry], keeper: Keeper | None) -> None:
    """Raise UsageError unless a manager with workers ``entries`` can go on from ``state``."""
    n_envs = sum(len(entry.env_ids) for entry in entries)
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        raise UsageError("reset(state=…) takes what EnvManager.state() of this version of the library has returned.")
    if keeper is None:
        raise UsageError(
            "reset(state=…) needs a manager that repeats actions: restarts=RestartPolicy(keep_episodes=True)."
        )
    if len(state["envs"]) != n_envs:
        raise UsageError(f"the state is of {len(state['envs'])} environments, and this manager has {n_envs}.")
    kinds = [entry.kind for entry in entries for _ in entry.env_ids]
    if state["kinds"] != kinds:
        raise UsageError(f"the state is of environments of the kinds {state['kinds']}, and this manager has {kinds}.")
    for entry in entries:
        if entry.is_dropped:
            entry.require_alive()


def restore(
    state: Mapping[str, Any], table: WorkerTable, recovery: Recovery, collector: Collector, book: TaskBook
) -> list[StepInfo]:
    """Let the workers go on from ``state``. Return the StepInfos of those that wait for an action.

    ``book``: a new one for the kind of source that the state has. Raises UsageError if it is of another.
    """
    if state["tasks"]["kind"] != kind_of(book):
        raise UsageError(
            f"the episodes of the state were begun by {state['tasks']['kind']}, those of this manager are by "
            f"{kind_of(book)}: pass tasks= if there were tasks, and make the manager with the same option episodes."
        )
    collector.drain()
    try:
        return _gone_on(read(state), table, recovery, collector, book)
    except BaseException:
        for entry in table.entries:
            if entry.is_kept:  # so that the next reset waits for no response to what was not asked
                recovery.replace_once_more(entry)
        raise


def _gone_on(
    state: Mapping[str, Any], table: WorkerTable, recovery: Recovery, collector: Collector, book: TaskBook
) -> list[StepInfo]:
    host, keeper = recovery.host, recovery.keeper
    for name in _OF_KEEPER:
        setattr(keeper, name, state["keeper"][name])
    _prepare(state, table, recovery, book)
    asked = []
    for entry in table.entries:
        is_usable = not (entry.is_kept or entry.error is not None or host.is_gone(entry.worker_id))
        is_usable &= not host.repeats_one  # then only the replacement of a worker repeats actions
        recovery.take_back(entry)
        generation = max(state["envs"][env_id]["generation"] for env_id in entry.env_ids)
        is_usable &= generation == entry.generation_of_seeds
        entry.generation_of_seeds = generation
        _place(state, table, recovery, entry)
        if is_usable:
            asked.append(entry)
        else:
            recovery.replace_once_more(entry)
    for entry in asked:
        worker = host.workers[entry.worker_id]
        for payload in entry.attributes.values():
            worker.send(CommandName.SET_ATTR, payload)
            response = worker.recv()
            if response.name is CommandName.FAILED:
                raise response.payload
        worker.send(CommandName.RESET, keeper.begins_of(entry))
    for entry in asked:
        recovery.arrive(host.workers[entry.worker_id].recv())
    collector.await_replacements(table.entries)
    if table.failures:
        first = next(iter(table.failures))
        error = first.outbox[0].payload
        table.delivered([first])
        raise error
    table.begin_counting()
    collector.shares = None
    idle = [entry for entry in table.entries if entry.state is WorkerState.IDLE]
    return [entry.previous_step for entry in idle if entry.previous_step is not None]


def _prepare(state: Mapping[str, Any], table: WorkerTable, recovery: Recovery, book: TaskBook) -> None:
    """Restore what belongs to no single worker."""
    recovery.last_config = ResetConfig(state["seed"], state["options"])
    table.env_steps, recovery.steps_lost = state["env_steps"], state["steps_lost"]
    counts = {tuple(env_ids): own for env_ids, *own in state["workers"]}
    for seat in book.seats.all if not book.is_automatic else ():
        env = state["envs"][seat.env_id]
        fields = dict(env["seat"])
        begins = {name: fields[name] and fields[name]._replace(row=seat.row) for name in ("told", "begun")}
        book.seats.place(seat, SeatState[env["state"]], **{**fields, **begins})
    book.restore(state["tasks"])
    if state["episodes"] is not None and book.episodes is not None:
        book.episodes.restore(state["episodes"])
    for entry in table.entries:
        entry.steps, entry.restarts = counts.get(entry.env_ids, (0, 0))
        entry.actions, entry.batches, entry.ignores_action, entry.is_old = None, (), False, False
        entry.attributes = {}
        for name, env_ids, values in state["attributes"]:
            own = [
                (entry.env_ids.index(env_id), value)
                for env_id, value in zip(env_ids, values, strict=True)
                if env_id in entry.env_ids
            ]
            if own:
                entry.remember(name, [value for _, value in own], [row for row, _ in own])


def _place(state: Mapping[str, Any], table: WorkerTable, recovery: Recovery, entry: Entry) -> None:
    """Put one worker's rows, actions and step in flight where they were, as if it was being replaced."""
    keeper: Keeper = recovery.keeper
    entry.previous_step = info = StepInfo(None, _rows_of(state, entry), None, entry.worker_id, None, table.specs)
    info.still_waiting = _waiting_of(state, entry)
    keeper.begin_log(entry, is_seeded=True)
    assert entry.log is not None
    text = f"worker {entry.worker_id} goes on from a state"
    cause = WorkerError(text, worker_id=entry.worker_id, env_ids=(), phase="reset", cause="restored")
    entry.restore, entry.replacement = Restore(cause, recovery.host.now()), Replacement(cause, True, keeps=True)
    own = [state["envs"][env_id] for env_id in entry.env_ids]
    for row, env in enumerate(own):
        entry.log.numbers[row] = env["number"]
        if env["actions"] is not None:
            entry.log.before[row] = env["actions"]
        if env["calls"]:
            entry.log.calls_before[row] = env["calls"]
    sent = [each for each in state["in_flight"] if set(each["env_ids"]) & set(entry.env_ids)]
    if sent:
        if sent[0]["env_ids"] != list(entry.env_ids):
            raise UsageError(
                "steps were in flight when the state was taken, so it needs the same workers: "
                f"worker {entry.worker_id} has the environments {list(entry.env_ids)}, not {sent[0]['env_ids']}."
            )
        entry.log.keep(*sent[0]["taken"])
        entry.actions, entry.n_envs_in_flight = sent[0]["actions"], sent[0]["n_envs"]
        table.move([entry], WorkerState.IN_FLIGHT, ())
    keeper.lose(entry, [row for row, env in enumerate(own) if env["is_lost"]], cause)


def _rows_of(state: Mapping[str, Any], entry: Entry) -> dict[str, AgentSteps]:
    of = {
        name: steps.take(np.flatnonzero(np.isin(steps.env_id, entry.env_ids))) for name, steps in state["rows"].items()
    }
    return {name: steps for name, steps in of.items() if len(steps)}


def _waiting_of(state: Mapping[str, Any], entry: Entry) -> dict[str, Transitions]:
    parts: dict[str, list[Transitions]] = {}
    for name, made in state["waiting"]:
        own = np.flatnonzero(np.isin(made.agent_id >> AGENT_BITS, entry.env_ids))
        if len(own):
            parts.setdefault(name, []).append(Transitions(*(take_rows(each, own) for each in made)))
    return {
        name: Transitions(*(concat_rows(list(each)) for each in zip(*own, strict=True))) for name, own in parts.items()
    }
