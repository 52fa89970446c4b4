"""Frozen classes for the options of managers (waits, timeouts, restarts, resets, processes), and validators of options.

The constructors raise UsageError for invalid values, and for values that cannot be used together.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar, cast

import attrs

from envmanager.errors import UsageError

_optional = attrs.validators.optional
StartMethod = Literal["forkserver", "spawn"]
START_METHODS = ("forkserver", "spawn")
Transport = Literal["native", "portable"]
TRANSPORTS = ("native", "portable")

EpisodeStart = Literal["automatic", "on_demand"]
"""Whether an environment begins its next episode by itself, or rests until ``EnvManager.begin``."""
EnvCount = Annotated[int, "or auto"]
"""Number of environments. With ``"auto"`` their servers are asked for it."""
WorkerCount = int | Literal["auto"] | None
"""Number of workers. With ``"auto"`` the manager chooses. None is the kind's default, such as one per environment."""
LocalCount = int | Literal["auto"]
"""Number of environments that run in the trainer's process. With ``"auto"`` a probe chooses."""


def plain(value: Any) -> Any:
    """Return an integer or a number of NumPy as one of Python, and an array or a tensor as a list.

    The items of a list or a tuple are converted too. Any other object, such as a bool or a text, is returned unchanged.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def plain_numbers(_: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """Add the converter ``plain`` to the fields of an attrs class that hold numbers. A ``field_transformer``.

    A field for a float gets the validator ``finite`` unless it has another one.
    """

    def with_converter(field: attrs.Attribute[Any]) -> attrs.Attribute[Any]:
        def convert(value: Any) -> Any:
            return plain(value)

        convert.__annotations__["value"] = field.type  # shown in the constructor's signature
        of_float = (
            None if "float" not in str(field.type) else _optional(finite) if "None" in str(field.type) else finite
        )
        return field.evolve(converter=convert, validator=field.validator or of_float)

    holds_number = re.compile(r"\b(int|float|WorkerCount|LocalCount)\b")
    return [
        with_converter(field) if field.converter is None and holds_number.search(str(field.type)) else field
        for field in fields
    ]


def must_be(expected: str, accepts: Callable[[Any], bool], advice: str = "") -> Any:
    """Return an attrs validator that raises UsageError if ``accepts(value)`` is false. ``advice`` ends the message."""

    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not accepts(value):
            raise UsageError(f"{attribute.name} must be {expected}, not {value!r}.{advice}")

    return check


def _is_within(value: Any, low: float, high: float = sys.float_info.max, *, above: bool = False) -> bool:
    """Return whether ``value`` is a number, not NaN, from ``low`` (``above``: above it) to ``high``."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and low <= value <= high and not (above and value == low)


def seconds(*, unlimited: bool, zero: bool = False) -> Any:
    """Return an attrs validator that accepts positive numbers; with ``zero`` also 0, with ``unlimited`` math.inf."""
    least = "from 0 up" if zero else "above 0"
    limit = "(math.inf for no limit)" if unlimited else "and finite"

    return must_be(
        f"a number of seconds {least} {limit}",
        lambda value: _is_within(value, 0, above=not zero) or (unlimited and value == math.inf),
    )


def at_least(least: int, *, or_auto: bool = False) -> Any:
    """Return an attrs validator that accepts only ints of at least ``least`` and, with ``or_auto``, ``"auto"``."""
    return must_be(
        f"a whole number of at least {least}" + (', or "auto"' if or_auto else ""),
        lambda value: (isinstance(value, int) and _is_within(value, least, math.inf)) or (or_auto and value == "auto"),
    )


finite = must_be("a finite number", lambda value: isinstance(value, int | float) and math.isfinite(value))


def within(low: float, high: float = sys.float_info.max, *, above: bool = False, optional: bool = False) -> Any:
    """Return an attrs validator for numbers from ``low`` (``above``: above it) to ``high``; ``optional``: or None."""
    limit = "" if high >= sys.float_info.max else f" to {high:g}"
    end = f"{' or None' if optional else ''}{', and finite' if high == sys.float_info.max else ''}"

    return must_be(
        f"a number {'above' if above else 'from'} {low:g}{limit}{end}",
        lambda value: _is_within(value, low, high, above=above) or (optional and value is None),
    )


layer_sizes = must_be(
    "a list of sizes of at least 1",
    lambda sizes: (
        isinstance(sizes, list | tuple) and all(isinstance(size, int) and _is_within(size, 1) for size in sizes)
    ),
)


def count_or_auto(value: int | Literal["auto"]) -> int:
    """Return ``plain(value)``. A converter of fields whose ``"auto"`` a manager replaces by a number."""
    return cast(int, plain(value))


def one_of(*choices: object, advice: str = "") -> Any:
    """Return an attrs validator that raises UsageError for values not in ``choices``. ``advice`` ends the message."""
    return must_be(" or ".join(map(repr, choices)), lambda value: value in choices, advice)


flag = must_be("true or false", lambda value: isinstance(value, bool))
"""An attrs validator that accepts only bools."""


def _check_shares(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Raise UsageError unless ``value`` maps names to numbers above 0 that sum to 1."""
    a_mapping(_, attribute, value)
    for name, share in value.items():
        if not _is_within(share, 0, above=True):
            raise UsageError(f"shares must give {name!r} a number above 0, not {share!r}.")
    if abs(sum(value.values()) - 1) > 1e-3:  # three times 0.333 will do
        raise UsageError(f"shares must sum to 1, not to {sum(value.values()):g}.")


@attrs.frozen(field_transformer=plain_numbers)
class Wait:
    """The rules for how long a step waits, and how many responses it returns.

    Args:
        min_ready: Number of workers that must have responded, or all that are in flight if there are fewer.
        max_ready: Maximum number of workers whose responses are returned.
        timeout_s: Time after which the responses received so far are returned, perhaps none. Later calls return others.
        max_lead: Number of steps ahead of the slowest worker, since the reset, from which a worker is held back.
        shares: By the behavior of each of several kinds of environments, its share. A kind that is ahead of its share
            is held back, unless the others have failed. The shares must sum to 1, and ``min_ready`` be 1.
        shares_of: What is shared: "steps" of environments, or "time" in which they step.
    """

    min_ready: int = attrs.field(default=1, validator=at_least(1))
    max_ready: int | None = attrs.field(default=None, validator=_optional(at_least(1)))
    timeout_s: float | None = attrs.field(default=None, validator=_optional(seconds(unlimited=True, zero=True)))
    max_lead: int | None = attrs.field(default=None, validator=_optional(at_least(1)))
    shares: Mapping[str, float] | None = attrs.field(default=None, validator=_optional(_check_shares), hash=False)
    shares_of: Literal["steps", "time"] = attrs.field(default="steps", validator=one_of("steps", "time"))

    ALL = 2**31

    def __attrs_post_init__(self) -> None:
        if self.max_ready is not None and self.min_ready != self.ALL and self.max_ready < self.min_ready:
            raise UsageError(
                f"max_ready={self.max_ready} is below min_ready={self.min_ready}: no step could satisfy both."
            )
        if self.shares is None and self.shares_of != "steps":
            raise UsageError(f"shares_of={self.shares_of!r} says what is shared: give shares too.")
        if self.shares is not None and (self.min_ready != 1 or self.max_lead is not None):
            raise UsageError("shares hold kinds back, so a step waits for any worker: take min_ready=1, no max_lead.")

    @classmethod
    def any(cls, *, timeout_s: float | None = None, max_lead: int | None = None) -> Wait:
        """Return a Wait for at least one response. As soon as one is ready, a step returns all that are ready."""
        return cls(timeout_s=timeout_s, max_lead=max_lead)

    @classmethod
    def all(cls, *, timeout_s: float | None = None) -> Wait:
        """Return a Wait for all workers in flight. Without a timeout, all environments step together."""
        return cls(min_ready=cls.ALL, timeout_s=timeout_s)

    @classmethod
    def parse(cls, text: str | int | Wait) -> Wait:
        """Convert ``"any"``, ``"all"``, a number of workers or a Wait to a Wait. Raises UsageError for other values."""
        if isinstance(text, Wait):
            return text
        if isinstance(text, str) and text in _NAMED_WAITS:
            return _NAMED_WAITS[text]
        try:
            return cls(min_ready=int(text) if isinstance(text, str) else text)
        except (ValueError, UsageError):
            raise UsageError(f'wait must be "any", "all" or a number of workers from 1 up, not {text!r}.') from None


_NAMED_WAITS = {"any": Wait.any(), "all": Wait.all()}


@attrs.frozen(field_transformer=plain_numbers)
class Timeouts:
    """Time limits in seconds for workers in other processes. A worker that takes longer counts as hung and is killed.

    Args:
        start_s: For the start of a process in which the environments are made, also of a replacement.
        reset_s: For one reset. ``math.inf`` means no limit, here as elsewhere.
        step_s: For one step of a worker, from the action to the response.
        call_s: For ``call``, ``get_attr``, ``set_attr`` and ``render``.
        close_s: For all of ``close()``. Must be finite.
        restore_s: For all actions and calls that a worker repeats when its episodes go on in it, or begin amid their
            actions. None: ``step_s`` for each action, ``call_s`` for each call.
    """

    start_s: float = attrs.field(default=120.0, validator=seconds(unlimited=True))
    reset_s: float = attrs.field(default=120.0, validator=seconds(unlimited=True))
    step_s: float = attrs.field(default=60.0, validator=seconds(unlimited=True))
    call_s: float = attrs.field(default=60.0, validator=seconds(unlimited=True))
    close_s: float = attrs.field(default=5.0, validator=seconds(unlimited=False))
    restore_s: float | None = attrs.field(default=None, validator=_optional(seconds(unlimited=True)))


@attrs.frozen(field_transformer=plain_numbers)
class RestartPolicy:
    """The rules for whether, when and how often workers that fail are replaced.

    After a *fault* (a worker died, hung, or lost its connection, for example) only that worker is replaced.

    Args:
        max_restarts: Limit for one worker within ``within_s``. With 0 and ``then="raise"``, the fault itself is raised.
        within_s: Length of the window in seconds. Time spent waiting for a hung worker does not count.
        backoff_s: Seconds before the second restart in the window, doubled for each further one up to 30, and times a
            random factor from 0.5 to 1. No wait, and counted as the first again, if the worker has worked that long.
        on_exception: With "raise", EnvRaised and BadObservation are raised; with "restart", they are faults.
        then: If no restart is left, "raise" raises RestartsExhausted; "drop" goes on without the worker, if others are
            left.
        recycle_after_steps: Number of steps after which a healthy worker is replaced at the next end of an episode, for
            environments that leak memory. Its other episodes are lost, as after a fault; where episodes begin on
            demand it is replaced only when all its environments rest. With kept episodes at once, and none is lost.
        recycle_above_mb: Resident memory of a worker and its children, in MiB, above which it is replaced as after
            ``recycle_after_steps``. It is looked at when the worker responds, at most once a second. A worker that has
            that much to begin with is replaced only once its memory has grown by a quarter. Needs Linux, and workers
            that are processes of this machine.
        keep_episodes: Whether a replacement begins the worker's episodes again and repeats their actions, so that they
            go on. If an observation is not the one that was delivered last, that episode is lost; with "unchecked", it
            is not compared. With "if_possible", environments whose episodes cannot be repeated are not refused.
        keep_at_most: Number of steps, or of calls, from which on an episode is not kept.
    """

    max_restarts: int = attrs.field(default=3, validator=at_least(0))
    within_s: float = attrs.field(default=60.0, validator=seconds(unlimited=True))
    backoff_s: float = attrs.field(default=0.5, validator=seconds(unlimited=False, zero=True))
    on_exception: Literal["raise", "restart"] = attrs.field(default="raise", validator=one_of("raise", "restart"))
    then: Literal["raise", "drop"] = attrs.field(default="raise", validator=one_of("raise", "drop"))
    recycle_after_steps: int | None = attrs.field(default=None, validator=_optional(at_least(1)))
    recycle_above_mb: float | None = attrs.field(default=None, validator=within(0, above=True, optional=True))
    keep_episodes: Literal[False, True, "unchecked", "if_possible"] = attrs.field(
        default=False, validator=one_of(False, True, "unchecked", "if_possible")
    )
    keep_at_most: int = attrs.field(default=100_000, validator=at_least(1))


def a_mapping(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Raise UsageError unless ``value`` is a mapping. An attrs validator."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{attribute.name} must be a mapping of names to values, not {type(value).__name__}.")


def _seed(value: Any) -> int | list[int | None] | None:
    """Convert a seed to an int or None, or several seeds to a list. Raises UsageError if a seed is invalid."""
    seed = plain(value)
    if isinstance(seed, Sequence) and not isinstance(seed, str | bytes):
        return [_one_seed(each) for each in seed]
    return _one_seed(seed)


def _one_seed(seed: Any) -> int | None:
    if seed is not None and not (isinstance(seed, int) and _is_within(seed, 0, math.inf)):
        raise UsageError(f"a seed must be a whole number from 0 up, not {seed!r}.")
    return seed


@attrs.frozen
class ResetConfig:
    """The arguments of a reset. ``seed`` is None, an int, or a sequence with an int or None for each environment.

    ``generation``: set by managers for a worker's replacement, which gets seeds of its own; 0 for other workers.
    """

    seed: int | Sequence[int | None] | None = attrs.field(default=None, converter=_seed)
    options: Mapping[str, Any] | None = attrs.field(default=None, validator=_optional(a_mapping))
    generation: int = 0

    @classmethod
    def of(cls, config: Any, *, n_envs: int | None = None) -> ResetConfig:
        """Convert None, a mapping or a ResetConfig to a ResetConfig. Raises UsageError for bad keys or values.

        If ``n_envs`` is given, it also raises UsageError for a list of another number of seeds.
        """
        parsed = cls() if config is None else config
        if not isinstance(parsed, ResetConfig):
            if not isinstance(parsed, Mapping):
                raise UsageError(f"reset(config) takes a mapping with seed and options, not {type(parsed).__name__}.")
            unknown = [key for key in parsed if key not in ("seed", "options")]
            if unknown:
                raise UsageError(f"reset(config) knows seed and options, not {', '.join(map(repr, unknown))}.")
            parsed = cls(**parsed)
        if n_envs is not None and isinstance(parsed.seed, Sequence) and len(parsed.seed) != n_envs:
            raise UsageError(f"reset got {len(parsed.seed)} seeds for {n_envs} environments.")
        return parsed


def _texts_by_name(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Raise UsageError unless ``value`` maps str to str. The message omits values that may be secret."""
    expected = f"{attribute.name} must be a mapping of texts to texts"
    if not isinstance(value, Mapping):
        raise UsageError(f"{expected}, not {type(value).__name__}.")
    for key, text in value.items():
        if not isinstance(key, str):
            raise UsageError(f"{expected}, but {key!r} is not a text: write it in quotes.")
        if not isinstance(text, str):
            raise UsageError(f"{expected}, but the value of {key!r} is {type(text).__name__}: write it in quotes.")


_timeouts = must_be("a Timeouts(step_s=…, …)", lambda value: isinstance(value, Timeouts))
_restarts = must_be("a RestartPolicy(max_restarts=…, …)", lambda value: isinstance(value, RestartPolicy))
_start_method = one_of(*START_METHODS, advice=" Leave it out for the faster one that this system has.")


def _path_as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _directory(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{attribute.name} must be the path of a directory, not {value!r}.")
    if os.path.exists(value) and not os.path.isdir(value):
        raise UsageError(f"{attribute.name}={value!r} is not a directory: name one, or a path that does not exist yet.")


def _file(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, str) or not value or os.path.isdir(value):
        raise UsageError(f"{attribute.name} must be the path of a file, not {value!r}.")
    directory = os.path.dirname(value) or "."
    if not os.path.isdir(directory):
        raise UsageError(f"{attribute.name}={value!r}: there is no directory {directory}; make it first.")


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
        raise UsageError(f"measures must be a list of names in the environments' infos, not {value!r}.")
    columns = "agent attempts behavior checkpoint env_id error frozen id length options return run seed task terminated"
    if taken := {*columns.split()} & {*value}:
        raise UsageError(f"measures must not name {min(taken)!r}: tables and metrics have this name already.")
    return tuple(dict.fromkeys(value))


def _wait(value: Wait | str | int) -> Wait:
    return Wait.parse(value)


def _given_timeouts(value: Timeouts | None) -> Timeouts:
    return Timeouts() if value is None else value


def _given_restarts(value: RestartPolicy | None) -> RestartPolicy:
    return RestartPolicy() if value is None else value


@attrs.frozen(field_transformer=plain_numbers)
class KindOptions:
    """The options that all kinds of managers have in common."""

    n_envs: int = attrs.field(default=1, validator=at_least(1))
    n_workers: WorkerCount = attrs.field(default=None, validator=_optional(at_least(1, or_auto=True)), kw_only=True)
    wait: Wait = attrs.field(default="any", converter=_wait, kw_only=True)  # type: ignore[assignment]  # converted
    timeouts: Timeouts = attrs.field(default=None, converter=_given_timeouts, validator=_timeouts, kw_only=True)
    restarts: RestartPolicy = attrs.field(default=None, converter=_given_restarts, validator=_restarts, kw_only=True)
    infos: bool = attrs.field(default=False, validator=flag, kw_only=True)
    measures: Sequence[Any] = attrs.field(default=(), converter=_names, kw_only=True)
    check_values: bool = attrs.field(default=False, validator=flag, kw_only=True)
    seed: int | None = attrs.field(default=None, validator=_optional(at_least(0)), kw_only=True)
    start_at_most: int | None = attrs.field(default=None, validator=_optional(at_least(1)), kw_only=True)
    memory_limit_mb: float | None = attrs.field(
        default=None, validator=within(0, above=True, optional=True), kw_only=True
    )
    worker_env: Mapping[str, str] | None = attrs.field(
        default=None, validator=_optional(_texts_by_name), repr=False, kw_only=True
    )
    log_dir: str | None = attrs.field(
        default=None, converter=_path_as_text, validator=_optional(_directory), kw_only=True
    )
    trace: str | None = attrs.field(default=None, converter=_path_as_text, validator=_optional(_file), kw_only=True)
    record: str | None = attrs.field(default=None, converter=_path_as_text, validator=_optional(_file), kw_only=True)
    order: str | None = attrs.field(default=None, converter=_path_as_text, validator=_optional(_file), kw_only=True)
    record_observations: bool = attrs.field(default=True, validator=flag, kw_only=True)
    episodes: EpisodeStart = attrs.field(default="automatic", validator=one_of("automatic", "on_demand"), kw_only=True)

    def __attrs_post_init__(self) -> None:
        local_envs = getattr(self, "local_envs", 0)
        n_local = 0 if local_envs == "auto" else local_envs
        if isinstance(self.n_workers, int) and self.n_workers > self.n_envs - n_local:
            more = f"n_envs={self.n_envs}" + (f" without local_envs={n_local}" if n_local else "")
            raise UsageError(
                f"n_workers={self.n_workers} is more than {more}: a worker without an environment has nothing to do."
            )
        if self.measures:
            object.__setattr__(self, "infos", True)  # which they are read from
        if self.record and self.order and os.path.realpath(self.record) == os.path.realpath(self.order):
            raise UsageError(f"record and order are both {self.record!r}: name another file for the new recording.")

    @property
    def of_the_manager(self) -> dict[str, Any]:
        """The options of KindOptions that are also arguments of ``EnvManager.__init__``, by name."""
        names = (
            "wait", "seed", "restarts", "measures", "check_values", "trace", "record", "record_observations", "order",
            "episodes",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


@attrs.frozen(kw_only=True, field_transformer=plain_numbers)
class ProcessOptions(KindOptions):
    """The options that SubprocessEnvManager, SimpleEnvManager and RayEnvManager have beyond those of KindOptions."""

    local_envs: LocalCount = attrs.field(default=0, validator=at_least(0, or_auto=True))
    start_method: StartMethod | None = attrs.field(default=None, validator=_optional(_start_method))
    transport: Transport | None = attrs.field(default=None, validator=_optional(one_of(*TRANSPORTS)))
    zero_copy: bool = attrs.field(default=False, validator=flag)

    def __attrs_post_init__(self) -> None:
        if self.local_envs != "auto" and self.local_envs >= self.n_envs:
            raise UsageError(
                f"local_envs={self.local_envs} leaves none of n_envs={self.n_envs} to worker processes: take fewer, or "
                'kind="simple" for all of them in this process.'
            )
        super().__attrs_post_init__()
        self._check_start_method(self.transport)

    def _check_start_method(self, transport: str | None) -> None:
        if transport == "portable" and self.start_method == "forkserver":
            raise UsageError(
                'start_method="forkserver" needs transport="native", which needs Linux; transport="portable" starts '
                'each worker as a new Python: leave start_method out, or set it to "spawn".'
            )

    def chosen_transport(self) -> Transport:
        """Return ``choose_transport(self.transport)``. Also raises UsageError if ``start_method`` contradicts it."""
        chosen = choose_transport(self.transport)
        self._check_start_method(chosen)
        return chosen


def choose_transport(asked: Transport | None = None) -> Transport:
    """Return ``asked``, else the environment variable ENVMANAGER_TRANSPORT, else the default of this system.

    The default is "native" on Linux, else "portable". Raises UsageError for an unknown or unsupported transport.
    """
    is_linux = sys.platform == "linux"
    chosen = asked or os.environ.get("ENVMANAGER_TRANSPORT") or ("native" if is_linux else "portable")
    if chosen not in TRANSPORTS:
        raise UsageError(f"ENVMANAGER_TRANSPORT must be {' or '.join(map(repr, TRANSPORTS))}, not {chosen!r}.")
    if chosen == "native" and not is_linux:
        raise UsageError('transport="native" needs Linux (memfd and pidfd); leave it out for "portable".')
    return cast(Transport, chosen)


_P = ParamSpec("_P")
_Constructor = Callable[Concatenate[Any, Any, _P], None]
_Options = TypeVar("_Options", bound=KindOptions)


def takes(
    options_class: Callable[_P, _Options], count: Callable[[Any], int | None] = lambda _: None
) -> Callable[[Callable[[Any, Any, _Options], None]], _Constructor[_P]]:
    """Return a decorator that replaces a constructor's parameter ``options`` with the fields of ``options_class``.

    ``count``: returns the ``n_envs`` that ``env_factory`` itself tells, or None.
    """

    def decorate(constructor: Callable[[Any, Any, _Options], None]) -> _Constructor[_P]:
        @functools.wraps(constructor)
        def take(self: Any, env_factory: Any, *args: _P.args, **kwargs: _P.kwargs) -> None:
            n_envs = None if args else count(env_factory)
            given: Any = kwargs if n_envs is None else {"n_envs": n_envs, **kwargs}
            constructor(self, env_factory, options_class(*args, **given))

        own = list(inspect.signature(constructor).parameters.values())[:2]
        fields = list(inspect.signature(options_class).parameters.values())
        take.__signature__ = inspect.Signature([*own, *fields])  # type: ignore[attr-defined]
        return cast(_Constructor[_P], take)  # ``take`` also accepts env_factory by name

    return decorate
