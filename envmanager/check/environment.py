"""The check of an environment, with findings for its author. If no call fails, the check makes six instances.

::

    env_factory ── first instance ──▶ play with a seed, again with the seed, with another seed, close
                ── second instance ─▶ play with the seed, close
                ── third instance ──▶ reset without a seed, close
                ── two more ────────▶ play in turns in one process, close
                ── sixth instance ──▶ play with the seed in a new process with another hash seed, close

Each finding answers one question and may give advice. A *problem* harms training; a *note* is worth knowing. By default
the environment runs in a worker process, through the same code as in a manager. If it crashes, exits or hangs there,
the finding names the call that did not return, and the check goes on in a new worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import attrs

from envmanager.check.playthrough import Failure, Moment, Playthrough
from envmanager.check.trial import Facts, Trial
from envmanager.data.specs import BehaviorSpecs
from envmanager.options import ProcessOptions
from envmanager.placing.pair import OnePerProcess

QUESTIONS = ("constructs", "reset", "steps", "episodes", "seeding", "arrays", "close", "sharing", "repeats")
"""The questions about an environment, in the order of the findings."""

N_STEPS_OF_ANOTHER_SEED = 50
TIMES_LONGER, LONGER_S = 10, 20.0
"""Bounds of a playthrough in which no episode has ended yet: a multiple of the wanted steps, and seconds in all."""
_AGAIN = "after a second reset of the same environment"
_NEW = "in a second, new environment"
_APART = "in another process, with another hash seed"
_IF_SLOW = "If it is only slow, allow more time (--timeout; in a config `timeouts`)."


@attrs.frozen
class Finding:
    """The answer to a question about an environment or a game. ``text`` states the answer; ``advice`` may be empty.

    For an environment, ``question`` is in QUESTIONS. ``evidence``: the last output of an ended or killed process.
    """

    question: str
    outcome: Literal["ok", "problem", "note"]
    text: str
    advice: str = ""
    evidence: str = ""


def check_environment(
    env_factory: Any,
    *,
    n_steps: int = 500,
    seed: int = 0,
    timeout_s: float | None = None,
    in_process: bool = False,
    on_call: Callable[[str], Any] = str,
    on_finding: Callable[[Finding], Any] = repr,
    options: ProcessOptions | None = None,
) -> list[Finding]:
    """Check the environment that ``env_factory`` makes. Return the findings in the order of QUESTIONS.

    Raises UsageError or MissingExtra for a bad ``env_factory``.

    Args:
        env_factory: As for a manager.
        n_steps: About a quarter of the steps that the check takes. If no episode ends within them, up to ten times as
            many are taken until one does.
        seed: Seed of the first episode.
        timeout_s: Limit of a call, after which a finding says that it hung. By default ten times the longest of its
            kind so far, from 5 s to 60 s, and ``timeouts.start_s`` to make the environment.
        in_process: Whether to run the environment in the caller's process, without a time limit, for a debugger. A
            crash then ends that process.
        on_call: Receives a line of text before each call.
        on_finding: Receives each finding when it is known.
        options: Options of its manager: ``start_method``, ``transport``, ``worker_env`` and ``timeouts.start_s`` count.
    """
    findings = []
    with Trial(
        env_factory,
        seed=seed,
        timeout_s=timeout_s,
        in_process=in_process,
        on_call=on_call,
        options=options or ProcessOptions(n_envs=2),
    ) as trial:
        for finding in _Examination(trial, n_steps, seed).findings():
            on_finding(finding)
            findings.append(finding)
    return sorted(findings, key=lambda finding: QUESTIONS.index(finding.question))


@attrs.frozen
class _Examination:
    trial: Trial
    n_steps: int
    seed: int

    def findings(self) -> Iterator[Finding]:
        specs = self.trial.make()
        if isinstance(specs, Failure):
            yield _construction_problem(specs)
            return
        yield Finding("constructs", "ok", f"It can be made: {_describe(specs)}.")
        first = self._play(self.seed)
        refusal = first.failure if first.failure is not None and first.failure.kind == "not seeded" else None
        if refusal is not None:  # check the rest without a seed
            first = self._play(None)
        facts: Facts | None = None if first.ended_process else self.trial.ask("facts", "looking at its arrays")
        yield from _reset_findings(first)
        if first.failure is None or first.failure.phase != "reset":
            yield from _step_findings(first, facts)
            yield from _episode_findings(first, facts)
            if facts is not None:
                yield from _array_findings(facts)
        again = other = None
        later: dict[str, Playthrough] = {}
        drawn: list[str] = []
        if first.failure is None and refusal is None:
            later[_AGAIN] = again = self._play(self.seed, n_steps=first.n_steps)
            if not again.ended_process:
                drawn = self.trial.ask("drawn", "looking at its random generators")
            play_other = self._play_new if again.ended_process else self._play
            other = play_other(self.seed + 1, n_steps=min(self.n_steps, N_STEPS_OF_ANOTHER_SEED))
        is_gone = any(played is not None and played.ended_process for played in (first, again, other))
        yield from self._closing_findings(is_gone=is_gone)
        can_be_made = True
        if again is not None:
            for finding in self._seeding_findings(specs, first, later, other):
                yield finding
                can_be_made &= finding.question != "constructs"
        elif first.ended_process and refusal is None:
            yield from self._repeated_end_findings(first)
        elif refusal is not None:
            yield Finding("seeding", "note", refusal.text)
        else:
            yield Finding("seeding", "note", "Not tried, because of the problem above.")
        if refusal is None and (first.failure is None or first.ended_process):
            yield from self._unseeded_findings(first.failure)
        if can_be_made and all(played is None or played.failure is None for played in (first, again, other)):
            yield from self._sharing_findings()
        if again is not None:
            yield from self._repeat_findings(first, later, drawn)

    def _play(self, env_seed: int | None, *, n_steps: int | None = None) -> Playthrough:
        """Reset with ``env_seed``, then take steps until one returns a Failure. Return the data.

        ``n_steps``: number of steps, or None for the wanted number, and more until an episode has ended.
        """
        played, length, until = Playthrough(), 0, time.monotonic() + LONGER_S
        for at_step in range((self.n_steps * TIMES_LONGER if n_steps is None else n_steps) + 1):
            if n_steps is None and at_step > self.n_steps and (played.episode_lengths or time.monotonic() > until):
                break
            call = ("advance", f"step {at_step:,}") if at_step else ("begin", "reset", self.seed, env_seed)
            moment: Moment | Failure = self.trial.ask(*call)
            if isinstance(moment, Failure):
                played.failure = moment
                break
            for mismatch in moment.mismatches:
                known = any(mismatch.is_like(earlier) for _, earlier in played.mismatches.values())
                mismatch = attrs.evolve(mismatch, is_known=known)
                played.mismatches.setdefault((mismatch.phase, mismatch.path), (at_step, mismatch))
            played.data.append(moment.data)
            played.infos.append(moment.infos)
            length += at_step > 0
            if moment.has_ended:
                played.episode_lengths.append(length)
                length = 0
        return played

    def _play_new(self, env_seed: int | None, *, n_steps: int | None = None) -> Playthrough | None:
        """Make an environment, play with it and close it. Return the Playthrough, or None if it cannot be made."""
        if isinstance(self.trial.make(), Failure):
            return None
        played = self._play(env_seed, n_steps=n_steps)
        if not played.ended_process:
            self.trial.ask("finish", "close")
        return played

    def _closing_findings(self, *, is_gone: bool) -> Iterator[Finding]:
        if is_gone and isinstance(self.trial.make(), Failure):
            return
        failure: Failure | None = self.trial.ask("finish", "close")
        if failure is None:
            yield Finding("close", "ok", "close() works.")
        else:
            advice = "close() should never raise, and always return."
            yield Finding("close", "problem", f"close(): {failure.text}.", advice, failure.evidence)

    def _unseeded_findings(self, known: Failure | None) -> Iterator[Finding]:
        """Reset a new environment without a seed. Yield a finding if that fails, unless ``known`` has the same text."""
        played = self._play_new(None, n_steps=0)
        failure = None if played is None else played.failure
        if failure is not None and (known is None or known.text != failure.text):
            yield Finding(
                "reset",
                "problem",
                f"reset() without a seed, in a new environment: {failure.text}.",
                "A trainer need not give a seed: let the environment draw one then.",
                failure.evidence,
            )

    def _sharing_findings(self) -> Iterator[Finding]:
        try:
            if self.trial.try_two():
                yield Finding("sharing", "ok", "A process can hold two, which do not change each other.")
        except OnePerProcess as error:
            trouble = str(error)
            advice = "Give each a worker of its own: kind: subprocess, with n_workers = n_envs. kind: auto does so."
            yield Finding("sharing", "note", f"{trouble[0].upper()}{trouble[1:]}.", advice)

    def _seeding_findings(
        self, specs: BehaviorSpecs, first: Playthrough, later: dict[str, Playthrough], other: Playthrough | None
    ) -> Iterator[Finding]:
        """Play in a second environment, which is added to ``later``. Yield the failures that the first did not have."""
        second_specs = self.trial.make()
        if isinstance(second_specs, Failure):
            yield Finding(
                "constructs",
                "problem",
                f"It can be made once, but a second one cannot, though the first was closed: {second_specs.text}.",
                "Each worker makes its own, and a restarted one does so again: free in close() what only one can have.",
                second_specs.evidence,
            )
        else:
            if second_specs != specs:
                yield Finding(
                    "constructs",
                    "problem",
                    f"A second one has other specs: {_describe(second_specs)}.",
                    "All environments of a manager need the same spaces; do not let them depend on chance.",
                )
            later[_NEW] = self._play(self.seed, n_steps=first.n_steps)
            if not later[_NEW].ended_process:
                self.trial.ask("finish", "close")
        problems = [_late_failure(played, where) for where, played in later.items() if played.failure is not None]
        if other is not None and other.failure is not None:
            problems.append(_late_failure(other, "with another seed"))
        yield from problems
        if not problems and other is not None and first.first_difference(other) is None:
            yield Finding(
                "seeding",
                "note",
                f"Another seed gives the same first {other.n_steps} steps with the same actions.",
                "Fine if nothing in it is random; otherwise reset(seed=…) is not used.",
            )
        elif not problems:
            yield Finding("seeding", "ok", "It takes a seed, and another seed gives other steps.")

    def _repeat_findings(
        self, first: Playthrough, later: dict[str, Playthrough], drawn: list[str]
    ) -> Iterator[Finding]:
        """Play in another process. Yield whether the same seed and actions give the same steps there and in ``later``.

        ``drawn``: see Subject. If the steps differ, a third process with the hash seed of the second says why.
        """
        plays = {where: later[where] for where in (_NEW, _AGAIN) if where in later}
        is_by_hash = False
        if not self.trial.in_process:
            apart = self._play_apart(first)
            if apart.failure is not None:
                yield _late_failure(apart, _APART)
            elif first.first_difference(apart) is not None:
                again = self._play_apart(first)
                is_by_hash = again.failure is None and apart.first_difference(again) is None
            plays = {_APART: apart, **plays}
        texts = _differences(first, plays, "data")
        if texts:
            text = f"Not repeatable: the same seed and actions gave something else {next(iter(texts.values()))}. "
            is_lasting = _APART not in texts and (_APART in plays or len(texts) == 1)
            cause = _cause_of(next(iter(texts)), drawn, is_lasting=is_lasting, is_by_hash=is_by_hash)
            yield Finding("repeats", "note", text + cause, _NOT_HELD)
        elif all(played.failure is None for played in plays.values()):
            places = "a new and a used environment" + (f", and {_APART}" if _APART in plays else "")
            yield Finding(
                "repeats", "ok", f"The same seed and actions give the same {first.n_steps} steps in {places}."
            )
            for text in list(_differences(first, plays, "infos").values())[:1]:
                yield Finding("repeats", "note", f"The infos differ {text}.", "Only what reads the infos may differ.")

    def _play_apart(self, first: Playthrough) -> Playthrough:
        self.trial.move()
        made = self.trial.make()
        if isinstance(made, Failure):
            return Playthrough(failure=attrs.evolve(made, text=f"it cannot be made: {made.text}"))
        return self._play(self.seed, n_steps=first.n_steps)

    def _repeated_end_findings(self, first: Playthrough) -> Iterator[Finding]:
        """Repeat the steps that ended the process, then try another seed, in new environments. Yield the findings."""
        again, other = self._play_new(self.seed), self._play_new(self.seed + 1)
        if again is not None and again.ended_process and again.n_steps == first.n_steps:
            text = f"With the same seed and actions it ends again in {_place(again)}."
            yield Finding("seeding", "note", text, f"So you can look for it with --seed {self.seed}.")
        elif again is not None:
            advice = "So they alone are not the cause: think of time, threads, memory, and other programs."
            yield Finding("seeding", "note", f"With the same seed and actions it {_outcome(again)}.", advice)
        if other is not None:
            yield Finding("seeding", "note", f"With another seed it {_outcome(other)}.")


def _outcome(played: Playthrough) -> str:
    return f"ends in {_place(played)}" if played.ended_process else f"takes {played.n_steps} steps"


def _place(played: Playthrough) -> str:
    assert played.failure is not None
    step = f"step {played.n_steps + 1}"
    places = {"reset": "reset()", "step": step, "restart": f"{step}, in the reset() of the next episode"}
    return places[played.failure.phase]


def _construction_problem(failure: Failure) -> Finding:
    text = failure.text if failure.kind == "refused" else f"It cannot be made: {failure.text}"
    advice = "" if failure.kind == "refused" else "Nothing else could be tried."
    if failure.kind == "timed out":
        advice = f"{_IF_SLOW} {advice}"
    return Finding("constructs", "problem", f"{text}.", advice, failure.evidence)


def _reset_findings(played: Playthrough) -> Iterator[Finding]:
    if played.failure is not None and played.failure.phase == "reset":
        yield _failure_finding(played, "reset()", _fitting(played.failure.path))
        return
    mismatches = played.of_phase("reset")
    for _, mismatch in mismatches:
        yield Finding("reset", "problem", f"After reset() {mismatch.text}.", _fitting(mismatch.path))
    if not mismatches:
        yield Finding("reset", "ok", "reset() returns what its spec says.")


def _step_findings(played: Playthrough, facts: Facts | None) -> Iterator[Finding]:
    casts = [] if facts is None else facts.casts
    for cast in casts:
        yield Finding(
            "steps",
            "note",
            f"{cast.field} should be {cast.expected}, but is {cast.got}: it is cast in every step.",
            f"{_fitting(cast.field)} With check_values=True a manager refuses this.".strip(),
        )
    mismatches, failure = played.of_phase("step"), played.failure
    for at_step, mismatch in mismatches:
        if not mismatch.is_known:
            yield Finding("steps", "problem", f"In step {at_step} {mismatch.text}.", _fitting(mismatch.path))
    if failure is not None and failure.phase == "step":
        yield _failure_finding(played, f"Step {played.n_steps + 1}", _fitting(failure.path))
    elif not mismatches and not casts:
        text = f"{played.n_steps} steps with random actions gave what the spec says, finite and within its bounds."
        yield Finding("steps", "ok", text)


def _fitting(path: str) -> str:
    """Return advice about the value at ``path``, which does not fit. The mismatch says all about most values."""
    if path.startswith("reward"):
        return "A step has one reward, a finite number."
    if path.startswith(("obs", "final_obs")):
        return "Return what the declared observation space says, or declare what is returned."
    return ""


def _episode_findings(played: Playthrough, facts: Facts | None) -> Iterator[Finding]:
    lengths, failure = played.episode_lengths, played.failure
    advice = "The reset() that follows an episode's end must return a first observation as the very first one does."
    if failure is not None and failure.phase == "restart":
        yield _failure_finding(played, f"reset() after an episode's end, in step {played.n_steps + 1}", advice)
        return
    mismatches = played.of_phase("restart")
    for at_step, mismatch in mismatches:
        if not mismatch.is_known:
            text = f"The first observation after an episode's end does not fit (step {at_step}): {mismatch.text}."
            yield Finding("episodes", "problem", text, advice)
    if facts is not None and facts.assumes_mode:
        text = "It declares no autoreset_mode, so that NEXT_STEP is assumed: the step after an end ignores its action."
        yield Finding("episodes", "note", text, "Declare a gymnasium.vector.AutoresetMode in its metadata.")
    if facts is not None and facts.earned_at_restart is not None:
        text = f"The step after an end, whose action is ignored, had a reward of {facts.earned_at_restart:g}."
        yield Finding("episodes", "note", text, "Managers drop it. If it was earned, the autoreset_mode is another.")
    if facts is not None and facts.lingering:
        text = f"These agents ended in several steps in a row: {', '.join(facts.lingering)}."
        advice = "Take an agent that ended from `agents`. One that stays plays on, here in episodes of one step each."
        yield Finding("episodes", "problem", text, advice)
    elif len(lengths) > 2 and lengths[0] > 1 and set(lengths[1:]) == {1}:
        text = f"The first episode took {lengths[0]} steps, and each of the {len(lengths) - 1} after it only one."
        yield Finding("episodes", "problem", text, "reset() should clear what says that the episode is over.")
    elif not lengths:
        text = f"No episode ended within {played.n_steps} steps, so restarting was not tried."
        more = "Try more steps (--steps), or check that episodes can end at all." if failure is None else ""
        yield Finding("episodes", "note", text, more)
    elif not mismatches:
        text = f"Ended episodes were followed by proper first observations ({len(lengths)} in {played.n_steps} steps)."
        yield Finding("episodes", "ok", text)


_NOT_HELD = (
    "Training works. What begins an episode again elsewhere does not hold: kept episodes, positions, live replays, and "
    "resumes that are equal to the bit."
)


def _differences(first: Playthrough, plays: dict[str, Playthrough], part: str) -> dict[str, str]:
    """Return a text about each of ``plays`` that differs from ``first``."""
    texts = {}
    for where, played in plays.items():
        found = first.first_difference(played, part)
        if found is not None:
            at_step, (difference, *others) = found
            place = "already at the reset" if at_step == 0 else f"from step {at_step} on"
            also = f" (also: {', '.join(each.path for each in others)})" if others else ""
            texts[where] = f"{where}, {place}: {difference}{also}"
    return texts


def _cause_of(where: str, drawn: list[str], *, is_lasting: bool, is_by_hash: bool) -> str:
    """Return the likely cause of a difference ``where``. ``is_lasting``: whether new processes do not differ."""
    if is_by_hash:
        return "Likely cause: the order of a set, or hash(), which follow PYTHONHASHSEED. Sort it, or set that."
    if drawn:
        return f"Likely cause: it draws from {' and '.join(drawn)}, which reset(seed=…) does not seed."
    if not is_lasting:
        return "Likely causes: the time, a generator that the seed does not reach, a thread, uninitialised memory."
    if where == _NEW:
        return "Likely cause: something outlives an environment, such as a class attribute or a module's variable."
    return "Likely cause: something outlives an episode, such as a world that is reused, or a counter."


def _late_failure(played: Playthrough, where: str) -> Finding:
    """Return the finding for the failure of ``played``, which did not occur in the first playthrough."""
    return _failure_finding(played, f"{_place(played).replace('step', 'Step', 1)} {where}", "")


def _array_findings(facts: Facts) -> Iterator[Finding]:
    advice = "Nothing to do for envmanager, which copies at once; code that keeps observations needs copies."
    if not facts.is_watched:
        yield Finding("arrays", "note", "Whether it changes arrays that it has returned could not be seen.")
    elif facts.changed:
        yield Finding("arrays", "note", "It changes observations that it has returned earlier.", advice)
    elif facts.reused:
        yield Finding("arrays", "note", "It returns the same array object several times.", advice)
    else:
        yield Finding("arrays", "ok", "It leaves observations that it has returned as they are.")


def _failure_finding(played: Playthrough, place: str, on_mismatch: str) -> Finding:
    """Return the finding for the failure of ``played`` at ``place``. ``on_mismatch``: advice if a value did not fit."""
    failure = played.failure
    assert failure is not None
    question = {"reset": "reset", "step": "steps", "restart": "episodes"}[failure.phase]
    advice = "Mend it, or leave out the actions that it cannot take from its action space."
    if failure.kind == "mismatch":
        advice = on_mismatch
    elif failure.kind == "timed out":
        advice = f"{_IF_SLOW} A run replaces its worker."
    elif failure.kind == "died":
        advice = "A run replaces its worker, and the episode is lost; the option `restarts` says how often."
    elif failure.phase != "step":
        advice = "Mend it: every episode begins with a reset()."
    return Finding(question, "problem", f"{place}: {failure.text}.", advice, failure.evidence)


def _describe(specs: BehaviorSpecs) -> str:
    if len(specs) == 1:
        return str(next(iter(specs.values())))
    return "; ".join(f"behavior {behavior!r}: {spec}" for behavior, spec in specs.items())
