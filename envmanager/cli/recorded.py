"""The command ``envmanager replay``: what a recording holds, and what happened around a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from envmanager.cli.output import PlainOutput
from envmanager.data.steps import CommandName
from envmanager.errors import UsageError
from envmanager.importing import needed_by

with needed_by("envmanager replay", extra="record"):
    from envmanager.recording.codec import Apart
    from envmanager.recording.data import about, episodes, facts
    from envmanager.recording.file import parts_of

_AROUND = 5


def show_recording(path: Path, output: PlainOutput, worker: int | None, step: int | None, *, trust: bool) -> None:
    """Print what a recording holds or, if ``step`` is given, what happened around that step of a worker (0: None).

    ``trust``: whether to unpickle the objects of classes that are shown.
    """
    if step is not None:
        told = _told(path, worker or 0, step, Apart.load if trust else Apart.leave)
        _show_around(told, output, path, worker or 0, step)
    elif worker is None:
        _summarize(path, output)
    else:
        raise UsageError(f"--worker {worker} needs --step, the number of the step of that worker to show.")


def _summarize(path: Path, output: PlainOutput) -> None:
    first = about(path)
    returns: list[float] = []
    lost: Counter[tuple[int, str]] = Counter()
    n_cut = n_of_agents = 0
    for each in episodes(path):
        n_of_agents += each.length
        n_cut += each.is_cut
        if each.error is not None:
            lost[each.worker_id, str(each.error).partition("\n")[0]] += 1
        elif not each.is_cut:
            returns.append(each.total)
    parts = parts_of(path)
    n_steps = Counter(fact.worker_id for part in parts for fact in facts(part) if fact.what == "step")
    n_workers = len(first["env_ids"])
    per_worker = ", ".join(f"{n_steps[worker_id]:,}" for worker_id in range(n_workers))
    pairs = [
        ("recording", f"{', '.join(parts)}: {first['kind']}, {first['n_envs']} environments, {n_workers} workers"),
        ("steps", f"{sum(n_steps.values()):,} of workers ({per_worker}), {n_of_agents:,} of agents"),
        ("episodes", f"{len(returns):,} finished, {sum(lost.values()):,} lost, {n_cut:,} cut"),
    ]
    if returns:
        pairs += [("return", f"{np.mean(returns):.4g} in the mean, {min(returns):.4g} to {max(returns):.4g}")]
    pairs += [("lost", f"{number} in worker {worker_id}: {text}") for (worker_id, text), number in lost.items()]
    output.pairs(pairs)


def _show_around(told: Iterator[tuple[str, bool]], output: PlainOutput, path: Path, worker: int, step: int) -> None:
    lines: list[tuple[str, bool]] = []
    for text, is_wanted in told:
        lines.append((text, is_wanted))
        wanted = [place for place, (_, each) in enumerate(lines) if each]
        if not wanted:
            del lines[:-_AROUND]
        elif len(lines) - wanted[-1] > _AROUND:
            break
    if not any(is_wanted for _, is_wanted in lines):
        raise UsageError(f"worker {worker} has no step {step} in {path}.")
    for text, is_wanted in lines:
        output.line(("▶ " if is_wanted else "  ") + text)


def _told(path: Path, worker: int, step: int, read_apart: Callable[[Apart], Any]) -> Iterator[tuple[str, bool]]:
    """Yield a line for each fact that tells something, and whether it is of the step."""
    sent: Counter[int] = Counter()
    began_ns = 0
    for fact in facts(path):
        what, worker_id, content = fact.what, fact.worker_id, fact.content(read_apart)
        if what == "step":
            number = sent[worker_id]
            sent[worker_id] += 1
            _, actions, _, of_policies = content
            versions = f", policy version {of_policies}" if of_policies else ""
            yield (
                f"worker {worker_id} step {number}: actions {_short(actions)}{versions}",
                (worker_id, number) == (worker, step),
            )
        elif what == "again":
            yield f"worker {worker_id} step {sent[worker_id] - 1}: sent again", False
        elif what in ("take", "get"):
            time_ns, responses = content
            began_ns = began_ns or time_ns
            for response in responses:
                number = sent[response.worker_id] - 1
                yield (
                    f"{(time_ns - began_ns) * 1e-9:9.4f} s  worker {response.worker_id} {_of(response, number)}",
                    (response.worker_id, number) == (worker, step),
                )
        elif what == "launch":
            generation, _, error = content
            failed = "" if error is None else f" failed: {error}"
            yield f"worker {worker_id}: start of generation {generation}{failed}", False
        elif what == "send":
            yield f"worker {worker_id}: {content[0]} {_short(content[1])}", False


def _of(response: Any, number: int) -> str:
    if response.name is CommandName.FAILED:
        return f"step {number}: failed: {str(response.payload).partition(chr(10))[0]}"
    parts = []
    for behavior, steps in response.payload.items():
        ended = sorted(set(steps.env_id[steps.ended].tolist()))
        ends = f", ended in env {', '.join(map(str, ended))}" if ended else ""
        parts.append(f"{behavior}: reward {_short(steps.reward)}{ends}")
    what = "first observations" if response.name is CommandName.RESET else f"step {number} arrived"
    return f"{what}: {'; '.join(parts)}"


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_short(each)}" for key, each in value.items())
    text = np.array2string(value, threshold=8, edgeitems=3) if isinstance(value, np.ndarray) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 100 else text[:99] + "…"
