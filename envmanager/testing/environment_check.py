"""Finds what is wrong with an environment, and says so in plain words.

::

    env_factory ── first instance ──▶ play(seed), play(seed) again, play(another seed), close
                ── second instance ─▶ play(seed), close
                ── third instance ──▶ play(no seed), close

The rule: one Finding per question, each with what to do about it. A *problem* will cost a learner; a *note* is worth
knowing. The environment is tried in this process, through the same code as in a worker.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import attrs

from envmanager.adapters.choosing import build_group
from envmanager.adapters.factories import call_factory, resolve
from envmanager.data.fitting import Cast
from envmanager.data.seeding import derive_seed
from envmanager.data.specs import BehaviorSpecs, SpecMismatch
from envmanager.environment import EnvContext, EnvGroup
from envmanager.errors import UsageError
from envmanager.testing.playthrough import ArrayWatch, Mismatch, Phase, Playthrough, play

QUESTIONS = ("constructs", "reset", "steps", "episodes", "seeding", "arrays", "close")
"""What is asked of an environment, in the order in which findings are given."""

N_STEPS_OF_ANOTHER_SEED = 50
CANNOT_BE_SEEDED = ".*cannot be seeded"
"""What an adapter warns of when its environment takes no seed, as with dm_env."""


@attrs.frozen
class Finding:
    """The answer to one of QUESTIONS: ``text`` in one or two sentences, and what to do about it."""

    question: str
    outcome: Literal["ok", "problem", "note"]
    text: str
    advice: str = ""


def check_environment(env_factory: Any, *, n_steps: int = 500, seed: int = 0) -> list[Finding]:
    """What was found about the environment that ``env_factory`` makes, in the order of QUESTIONS.

    Takes about three times ``n_steps`` steps in this process. Raises UsageError when ``env_factory`` is none; whatever
    the environment itself raises is a finding.
    """
    factory = resolve(env_factory)
    findings = list(_Examination(factory, n_steps, seed).findings())
    return sorted(findings, key=lambda finding: QUESTIONS.index(finding.question))


@attrs.define
class _Instance:
    group: EnvGroup
    watch: ArrayWatch
    is_watched: bool
    specs: BehaviorSpecs


@attrs.frozen
class _Examination:
    factory: Any
    n_steps: int
    seed: int

    def findings(self) -> Iterator[Finding]:
        try:
            instance = self._make()
        except Exception as error:
            yield _construction_problem(error)
            return
        yield Finding("constructs", "ok", f"It can be made: {_describe(instance.specs)}.")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=CANNOT_BE_SEEDED)
            first = self._play(instance, self.seed)
        refusal = first.failure if isinstance(first.failure, UserWarning) and first.failed_in == "reset" else None
        if refusal is not None:  # look at the rest without a seed
            first = self._play(instance, None)
        again = other = None
        if first.failure is None and refusal is None:
            again = self._play(instance, self.seed)
            other = self._play(instance, self.seed + 1, n_steps=min(self.n_steps, N_STEPS_OF_ANOTHER_SEED))
        yield from _reset_findings(first)
        if first.failure is None or first.failed_in != "reset":
            yield from _step_findings(first, instance.group.casts)
            yield from _episode_findings(first)
            yield from _array_findings(instance)
        closing = _close(instance.group)
        if again is not None and other is not None:
            yield from self._seeding_findings(instance, first, again, other)
            yield from self._unseeded_findings()
        elif refusal is not None:
            yield Finding("seeding", "note", str(refusal))
        else:
            yield Finding("seeding", "note", "Not tried, because of the problem above.")
        yield closing

    def _unseeded_findings(self) -> Iterator[Finding]:
        """Whether a new one can begin without a seed; that it can be made has been seen by now."""
        try:
            fresh = self._make()
        except Exception:
            return  # already a finding
        played = self._play(fresh, None, n_steps=1)
        _close(fresh.group)
        if played.failure is not None and played.failed_in == "reset":
            yield Finding(
                "reset",
                "problem",
                f"reset() without a seed, in a new environment: {_describe_error(played.failure)}.",
                "A trainer need not give a seed: let the environment draw one then.",
            )

    def _make(self) -> _Instance:
        context = EnvContext(env_id=0, worker_id=0, seed=derive_seed(self.seed, 0))
        subject = call_factory(self.factory, context)
        watch = ArrayWatch()
        group = build_group([subject], [0])
        return _Instance(group, watch, watch.attach(subject), dict(group.behavior_specs))

    def _play(self, instance: _Instance, env_seed: int | None, *, n_steps: int | None = None) -> Playthrough:
        return play(
            instance.group,
            n_steps=self.n_steps if n_steps is None else n_steps,
            seed=self.seed,
            env_seed=env_seed,
            resets=lambda: instance.watch.n_resets,
        )

    def _seeding_findings(
        self, instance: _Instance, first: Playthrough, again: Playthrough, other: Playthrough
    ) -> Iterator[Finding]:
        problems = [*_repeat_problems(first, again, "after a second reset of the same environment")]
        try:
            second = self._make()
        except Exception as error:
            yield Finding(
                "constructs",
                "problem",
                f"It can be made once, but a second one cannot, though the first was closed: {_describe_error(error)}.",
                "Each worker makes its own, and a restarted one makes it anew: free in close() what only one can have.",
            )
        else:
            if second.specs != instance.specs:
                yield Finding(
                    "constructs",
                    "problem",
                    f"A second one has other specs: {_describe(second.specs)}.",
                    "All environments of a manager need the same spaces; do not let them depend on chance.",
                )
            problems += _repeat_problems(first, self._play(second, self.seed), "in a second, new environment")
            _close(second.group)
        yield from problems
        if not problems:
            yield Finding("seeding", "ok", f"The same seed and actions give the same {first.n_steps} steps.")
        if not problems and first.first_difference(other) is None:
            yield Finding(
                "seeding",
                "note",
                f"Another seed gives the same first {other.n_steps} steps with the same actions.",
                "Fine if nothing in it is random; otherwise reset(seed=…) is not used.",
            )


def _construction_problem(error: Exception) -> Finding:
    if isinstance(error, UsageError):
        return Finding("constructs", "problem", str(error))
    return Finding(
        "constructs", "problem", f"It cannot be made: {_describe_error(error)}.", "Nothing else could be tried."
    )


def _reset_findings(played: Playthrough) -> Iterator[Finding]:
    advice = "Make reset() return what the declared observation space says, or declare what it returns."
    if played.failure is not None and played.failed_in == "reset":
        yield Finding(
            "reset", "problem", f"reset(): {_describe_error(played.failure)}.", _advice(played.failure, advice)
        )
        return
    mismatches = _of_phases(played, "reset")
    for mismatch in mismatches:
        yield Finding("reset", "problem", f"After reset() {mismatch.error}.", advice)
    if not mismatches:
        yield Finding("reset", "ok", "reset() returns what its spec says.")


def _step_findings(played: Playthrough, casts: Sequence[Cast]) -> Iterator[Finding]:
    for cast in casts:
        yield Finding(
            "steps",
            "note",
            f"{cast.field} should be {cast.expected}, but is {cast.got}: it is cast in every step.",
            "Return what the declared space says; with check_values=True a manager refuses this.",
        )
    advice = "Make step() return what the declared observation space says, or declare what it returns."
    mismatches = _of_phases(played, "step")
    for mismatch in mismatches:
        yield Finding("steps", "problem", f"In step {mismatch.at_step} {mismatch.error}.", advice)
    if played.failure is not None and played.failed_in == "step":
        text = f"Step {played.n_steps + 1}: {_describe_error(played.failure)}."
        yield Finding("steps", "problem", text, _advice(played.failure, advice))
    elif not mismatches and not casts:
        text = f"{played.n_steps} steps with random actions gave what the spec says, finite and within its bounds."
        yield Finding("steps", "ok", text)


def _episode_findings(played: Playthrough) -> Iterator[Finding]:
    lengths = played.episode_lengths
    advice = "The reset() that follows an episode's end must return a first observation as the very first one does."
    if played.failure is not None and played.failed_in == "restart":
        text = f"reset() after an episode's end, in step {played.n_steps + 1}: {_describe_error(played.failure)}."
        yield Finding("episodes", "problem", text, advice)
        return
    mismatches = _of_phases(played, "restart")
    for mismatch in mismatches:
        text = f"The first observation after an episode's end does not fit (step {mismatch.at_step}): {mismatch.error}."
        yield Finding("episodes", "problem", text, advice)
    if len(lengths) > 2 and lengths[0] > 1 and set(lengths[1:]) == {1}:
        text = f"The first episode took {lengths[0]} steps, and each of the {len(lengths) - 1} after it only one."
        yield Finding("episodes", "problem", text, "reset() should clear what says that the episode is over.")
    elif not lengths:
        text = f"No episode ended within {played.n_steps} steps, so restarting was not tried."
        yield Finding("episodes", "note", text, "Try more steps (--steps), or check that episodes can end at all.")
    elif not mismatches:
        text = f"Ended episodes were followed by proper first observations ({len(lengths)} in {played.n_steps} steps)."
        yield Finding("episodes", "ok", text)


def _repeat_problems(first: Playthrough, later: Playthrough, where: str) -> Iterator[Finding]:
    advice = (
        "Pass the seed on with super().reset(seed=seed), draw random numbers from self.np_random only, and let reset() "
        "clear everything that an episode changes."
    )
    if later.failure is not None:
        yield Finding(
            "seeding", "problem", f"The same seed and actions failed {where}: {_describe_error(later.failure)}.", advice
        )
        return
    difference = first.first_difference(later)
    if difference is not None:
        at_step, names = difference
        place = "already at the reset" if at_step == 0 else f"from step {at_step} on"
        text = f"The same seed and actions gave something else {where}, {place}: {', '.join(names)}."
        yield Finding("seeding", "problem", text, advice)


def _array_findings(instance: _Instance) -> Iterator[Finding]:
    advice = "Nothing to do for envmanager, which copies at once; code that keeps observations needs copies."
    if not instance.is_watched:
        yield Finding("arrays", "note", "Whether it changes arrays that it has returned could not be seen.")
    elif instance.watch.changed:
        yield Finding("arrays", "note", "It changes observations that it has returned earlier.", advice)
    elif instance.watch.reused:
        yield Finding("arrays", "note", "It returns the same array object several times.", advice)
    else:
        yield Finding("arrays", "ok", "It leaves observations that it has returned as they are.")


def _close(group: EnvGroup) -> Finding:
    try:
        group.close()
    except Exception as error:
        return Finding("close", "problem", f"close(): {_describe_error(error)}.", "close() should never raise.")
    return Finding("close", "ok", "close() works.")


def _of_phases(played: Playthrough, phase: Phase) -> list[Mismatch]:
    return [mismatch for mismatch in played.mismatches.values() if mismatch.phase == phase]


def _advice(error: Exception, on_mismatch: str) -> str:
    if isinstance(error, SpecMismatch):
        return on_mismatch
    return "Mend it, or leave out the actions that it cannot take from its action space."


def _describe(specs: BehaviorSpecs) -> str:
    if len(specs) == 1:
        return str(next(iter(specs.values())))
    return "; ".join(f"behavior {behavior!r}: {spec}" for behavior, spec in specs.items())


def _describe_error(error: Exception) -> str:
    if isinstance(error, SpecMismatch):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return f"it raised {type(error).__name__}: {error}".rstrip(". ") + place
