"""Environment parameters of a training: constants, samplers and lessons, which reach the environments as reset options.

::

    training.parameters ── parse ──▶ Curriculum ── next_task ──▶ Task(options={"gravity": 9.3, "wall": 0.5})
                                         ▲                              │ env.reset(options=…)
                                         └──────── ended(result) ───────┘   a lesson ends when its measure is reached

The rule: the values of task k depend only on the seed, k and the lessons, not on which environment plays it, or when.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.adapters.other_names import other_names
from envmanager.errors import ConfigError, UsageError
from envmanager.importing import nearest
from envmanager.options import at_least, must_be, plain, plain_numbers
from envmanager.structuring import make_converter, structured
from envmanager.tasks import Task, TaskResult

MEASURES = REWARD, PROGRESS = "reward", "progress"
"""Measures that every environment has."""
_logger = logging.getLogger("envmanager")

_positive = must_be("a number above 0", lambda value: isinstance(value, int | float) and 0 < value < math.inf)


class Sampler:
    """The base class of samplers, which give a parameter's value for each episode."""

    other_names = staticmethod(other_names)

    def draw(self, rng: np.random.Generator) -> Any:
        """Return a value, drawn with ``rng``."""
        raise NotImplementedError


@attrs.frozen(kw_only=True, field_transformer=plain_numbers)
class Uniform(Sampler):
    """Numbers between ``min`` and ``max``, each as likely as any other."""

    min: float
    max: float

    def __attrs_post_init__(self) -> None:
        if self.max < self.min:
            raise UsageError(f"max is {self.max:g}, which is below min, {self.min:g}.")

    def draw(self, rng: np.random.Generator) -> float:
        return float(rng.uniform(self.min, self.max))


@attrs.frozen(kw_only=True, field_transformer=plain_numbers)
class LogUniform(Uniform):
    """Numbers between ``min`` and ``max`` whose logarithm is uniform: from 0.1 to 10, half are below 1."""

    min: float = attrs.field(validator=_positive)

    def draw(self, rng: np.random.Generator) -> float:
        return float(np.exp(rng.uniform(np.log(self.min), np.log(self.max))))


_are_ranges = must_be(
    "pairs [min, max]", lambda value: len(value) > 0 and all(-math.inf < low < high < math.inf for low, high in value)
)


@attrs.frozen(kw_only=True)
class MultiRangeUniform(Sampler):
    """Numbers in any of ``ranges``, pairs of a minimum and a maximum, each as likely as any other."""

    ranges: tuple[tuple[float, float], ...] = attrs.field(validator=_are_ranges)

    def draw(self, rng: np.random.Generator) -> float:
        widths = np.array([high - low for low, high in self.ranges])
        return float(rng.uniform(*self.ranges[rng.choice(len(widths), p=widths / widths.sum())]))


@attrs.frozen(kw_only=True, field_transformer=plain_numbers)
class Normal(Sampler):
    """Normally distributed numbers with the mean ``mean`` and the standard deviation ``std``."""

    mean: float
    std: float = attrs.field(validator=_positive)

    def draw(self, rng: np.random.Generator) -> float:
        return float(rng.normal(self.mean, self.std))


@attrs.frozen(kw_only=True)
class Choice(Sampler):
    """One of ``values``, each as likely as any other."""

    values: Sequence[Any] = attrs.field(
        validator=must_be("a list of values", lambda value: isinstance(value, list | tuple) and len(value) > 0)
    )

    def draw(self, rng: np.random.Generator) -> Any:
        return self.values[int(rng.integers(len(self.values)))]


SAMPLERS: dict[str, type[Sampler]] = {
    "uniform": Uniform,
    "normal": Normal,
    "log_uniform": LogUniform,
    "multi_range_uniform": MultiRangeUniform,
    "choice": Choice,
}
"""Samplers by their name in a config."""


@attrs.frozen(kw_only=True, field_transformer=plain_numbers)
class Until:
    """The end of a lesson: ``measure`` has reached ``threshold``, and ``episodes`` episodes of the lesson have ended.

    ``measure``: ``"reward"`` is the mean return of the lesson's last ``episodes`` episodes, ``"progress"`` the share of
    the training's steps that was taken. Any other name is a number in the environment's info at the end of an episode,
    of which the mean is taken too; this needs ``infos=True``. ``behavior``: the one whose agents count; all if None.
    ``episodes``: 100 by default, and 1 for ``"progress"``.
    """

    other_names = staticmethod(other_names)

    measure: str
    threshold: float
    episodes: int = attrs.field(validator=at_least(1))
    behavior: str | None = None

    @property
    def what(self) -> str:
        """Text that says what is measured, and of whom."""
        return self.measure if self.behavior is None else f"{self.measure} of {self.behavior}"

    @episodes.default
    def _enough(self) -> int:
        return 1 if self.measure == PROGRESS else 100


@attrs.frozen(kw_only=True)
class Lesson:
    """A part of a curriculum, in which a parameter has the values of one sampler. The last one has no ``until``."""

    other_names = staticmethod(other_names)

    value: Sampler
    until: Until | None = None
    name: str | None = None


@attrs.frozen
class Lessons:
    """The values of one parameter over a training. A parameter without lessons of its own has one."""

    lessons: tuple[Lesson, ...] = attrs.field()

    @lessons.validator
    def _check(self, _: Any, lessons: tuple[Lesson, ...]) -> None:
        missing = [number for number, lesson in enumerate(lessons[:-1]) if lesson.until is None]
        if missing:
            raise UsageError(f"lessons[{missing[0]}].until is missing: without it, the next lesson never begins.")
        if not lessons or lessons[-1].until is not None:
            raise UsageError("lessons must end with a lesson that has no until.")


def _sampler(value: Any, _: Any) -> Sampler:
    if isinstance(value, Sampler):
        return value
    if not isinstance(value, Mapping):
        return Choice(values=(plain(value),))
    kind, options = value.get("sampler"), {name: own for name, own in value.items() if name != "sampler"}
    if not isinstance(kind, str) or kind not in SAMPLERS:
        what = (
            f"sampler is {kind!r}, which is not known"
            if "sampler" in value
            else "sampler is missing (a parameter with lessons has the key lessons)"
        )
        raise UsageError(f"{what}{nearest(str(kind), list(SAMPLERS))} Known samplers: {', '.join(SAMPLERS)}.")
    return _CONVERTER.structure(options, SAMPLERS[kind])


_CONVERTER = make_converter()
_CONVERTER.register_structure_hook_func(lambda wanted: wanted is Sampler, _sampler)


def parse(parameters: Any, *, where: str = "parameters") -> dict[str, Lessons]:
    """Convert the table ``training.parameters`` of a config to Lessons by name. Raises ConfigError for mistakes.

    A parameter is a constant, ``{"sampler": …}`` or ``{"lessons": […]}``. ``where`` prefixes the keys in messages.
    """
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"{where} should be a mapping of names to values, but is {parameters!r}.")
    parsed = {}
    for name, value in parameters.items():
        if isinstance(value, Mapping) and "lessons" in value:
            parsed[str(name)] = structured(_CONVERTER, Lessons, value, f"{where}.{name}")
        else:
            sampler: Sampler = structured(_CONVERTER, Sampler, value, f"{where}.{name}")
            parsed[str(name)] = Lessons((Lesson(value=sampler),))
    return parsed


def ends_of(parameters: Mapping[str, Lessons]) -> dict[str, Until]:
    """Return the ends of all lessons, by their path, such as ``wall.lessons[0].until``."""
    return {
        f"{name}.lessons[{number}].until": lesson.until
        for name, own in parameters.items()
        for number, lesson in enumerate(own.lessons)
        if lesson.until is not None
    }


@attrs.frozen(kw_only=True)
class LessonBegan:
    """A report that the lesson at index ``lesson`` of a parameter began, as ``text`` says.

    ``n_tasks``: number of tasks drawn before. ``n_steps``: agent steps of the training, 0 without one.
    """

    parameter: str
    lesson: int
    text: str
    n_tasks: int
    n_steps: int = 0


@attrs.define(kw_only=True)
class LessonState:
    """The present lesson of a parameter, by index, and the ``measures`` of its last episodes, which are ``of`` what."""

    lesson: int = attrs.field(default=0, validator=at_least(0))
    measures: Sequence[float] = ()
    of: str = ""


@attrs.frozen(kw_only=True)
class CurriculumState:
    """The state of a Curriculum, for a checkpoint. ``n_tasks``: number of tasks drawn."""

    n_tasks: int = attrs.field(default=0, validator=at_least(0))
    lessons: dict[str, LessonState] = attrs.field(factory=dict)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> CurriculumState:
        """Return the state that ``Curriculum.state`` has told. Raises ConfigError if it is none."""
        return structured(_CONVERTER, cls, told, "curriculum")


class Curriculum:
    """A TaskSource whose tasks have the values of ``parameters``, a table as in ``training.parameters``, as options.

    ``seed``: seed of all samples; None for a random one. ``progress`` returns the share of the training's steps taken,
    which lessons with that measure need. ``on_lesson`` is called with a LessonBegan when a lesson begins. Raises
    ConfigError for invalid parameters.
    """

    def __init__(
        self,
        parameters: Mapping[str, Any],
        *,
        seed: int | None = None,
        progress: Callable[[], float] | None = None,
        on_lesson: Callable[[LessonBegan], Any] | None = None,
    ) -> None:
        self.parameters = parse(parameters)
        self.n_tasks = 0
        """Number of tasks drawn."""
        self.values: dict[str, Any] = {}
        """Values of the last task drawn, by parameter."""
        self._entropy: Any = np.random.SeedSequence(seed).entropy
        self._progress, self._on_lesson = progress, on_lesson
        self._at = {name: LessonState() for name in self.parameters}
        self._untold: deque[LessonBegan] = deque()
        """Lessons that have begun, of which ``on_lesson`` does not know."""
        self._warned: set[str] = set()
        if progress is None and any(until.measure == PROGRESS for until in ends_of(self.parameters).values()):
            raise UsageError("a lesson's end by progress needs progress=, a function that returns the share of steps.")

    @property
    def lessons(self) -> dict[str, int]:
        """Number of the present lesson, counted from 1, of each parameter that has several."""
        return {name: at.lesson + 1 for name, at in self._at.items() if len(self.parameters[name].lessons) > 1}

    def next_task(self, env_id: int) -> Task:
        """Return the next task. Its ``id`` is the index of each parameter's lesson, in the order of parameters."""
        lessons = tuple(at.lesson for at in self._at.values())
        self.values = self._draw(self.n_tasks, lessons)
        self.n_tasks += 1
        return Task(options=self.values, id=lessons)

    def final_tasks(self, n: int) -> list[Task]:
        """Return ``n`` tasks with values of each parameter's last lesson, the same at each call, for an evaluation."""
        return [Task(options=self._draw(index, [-1] * len(self.parameters), stream=1)) for index in range(n)]

    def _draw(self, index: int, lessons: Iterable[int], stream: int = 0) -> dict[str, Any]:
        # The key has three numbers, because those of seeds (envmanager.data.seeding) have fewer.
        rng = np.random.default_rng(np.random.SeedSequence(self._entropy, spawn_key=(index, 0, stream)))
        pairs = zip(self.parameters.items(), lessons, strict=True)
        return {name: own.lessons[lesson].value.draw(rng) for (name, own), lesson in pairs}

    def ended(self, result: TaskResult) -> None:
        """Count an episode in the lessons in which it was drawn, and begin the next lesson of those that it ends.

        An error of ``on_lesson`` is raised when all is counted; the next call tells of the lessons that are left.
        """
        try:
            for name, lesson in zip(self.parameters, result.task.id, strict=True):
                self._count(name, lesson, result)
        finally:
            while self._untold and self._on_lesson is not None:
                self._on_lesson(self._untold.popleft())

    def _count(self, name: str, lesson: int, result: TaskResult) -> None:
        lessons, at = self.parameters[name].lessons, self._at[name]
        until = lessons[lesson].until
        measure = None if until is None or lesson != at.lesson else self._measure(until, result)
        if until is None or measure is None:
            return
        before = at.measures if at.of == until.what else ()  # a restored lesson may have measured something else
        at.measures, at.of = [*before, measure][-until.episodes :], until.what
        reached = measure if until.measure == PROGRESS else sum(at.measures) / len(at.measures)
        if len(at.measures) == until.episodes and reached >= until.threshold:
            self._at[name], following = LessonState(lesson=lesson + 1), lessons[lesson + 1].name
            text = f"{name}: lesson {lesson + 2} of {len(lessons)}"
            text += f"{'' if following is None else f' {following!r}'} begins after {until.measure} {reached:.4g}"
            _logger.info("%s", text)
            self._untold.append(LessonBegan(parameter=name, lesson=lesson + 1, text=text, n_tasks=self.n_tasks))

    def _measure(self, until: Until, result: TaskResult) -> float | None:
        """Return what an episode counts for, which is the mean over its agents, or None if it has none."""
        if until.measure == PROGRESS:
            assert self._progress is not None
            return self._progress()
        own = [each for each in result.episodes if until.behavior in (None, each.behavior)]
        if until.measure == REWARD:
            values = [each.total for each in own]
        else:
            values = [each.numbers[until.measure] for each in own if until.measure in each.numbers]
            if own and not values and until.measure not in self._warned:
                self._warned.add(until.measure)
                known = ", ".join(own[0].numbers) or "none"
                _logger.warning("an episode has no number %r in its info; it has: %s.", until.measure, known)
        return sum(values) / len(values) if values else None

    def figures(self) -> dict[str, float]:
        """Return the present lessons, counted from 1, and the last values that are numbers, as metrics by name."""
        lessons = {f"curriculum/{name}/lesson": float(number) for name, number in self.lessons.items()}
        values = {f"curriculum/{name}/value": own for name, own in self.values.items() if isinstance(own, int | float)}
        return {**lessons, **values}

    def describe(self) -> dict[str, str]:
        """Return the last value of each parameter as text, with its lesson if it has several."""
        texts = {name: f"{own:.4g}" if isinstance(own, float) else str(own) for name, own in self.values.items()}
        for name, number in self.lessons.items() if texts else ():
            texts[name] += f" (lesson {number}/{len(self.parameters[name].lessons)})"
        return texts

    def state(self) -> dict[str, Any]:
        """Return the state as plain data, for a checkpoint: the fields of a CurriculumState."""
        return {"n_tasks": self.n_tasks, "lessons": {name: attrs.asdict(at) for name, at in self._at.items()}}

    def restore(self, told: Mapping[str, Any] | CurriculumState) -> None:
        """Restore a state that ``state()`` returned. A parameter that has fewer lessons now is in its last one."""
        state = told if isinstance(told, CurriculumState) else CurriculumState.of(told)
        self.n_tasks = state.n_tasks
        for name in self.parameters.keys() & state.lessons.keys():
            last = LessonState(lesson=len(self.parameters[name].lessons) - 1)
            at = state.lessons[name]
            self._at[name] = attrs.evolve(at) if at.lesson <= last.lesson else last
