"""Creation of managers from configs (mappings of option names to values), and the registry of kinds of managers.

::

    mapping ── structure ──▶ ManagerOptions ── kind ──▶ KINDS, or an entry point ──▶ EnvManager

The config is checked as ManagerOptions before the chosen kind is called. Errors name unknown keys and the nearest known
ones. This module reads no config files.

A package adds a kind with an entry point in its ``pyproject.toml``::

    [project.entry-points."envmanager.managers"]
    cluster = "my_package.managers:ClusterEnvManager"

The entry point is a callable that takes the arguments of a manager: ``ClusterEnvManager(env_factory, n_envs, …)``.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from envmanager.adapters import recipes
from envmanager.adapters.factories import count_envs
from envmanager.adapters.kinds import count_kinds
from envmanager.adapters.other_names import other_names
from envmanager.adapters.recipes import RECIPE_OPTIONS, EnvRecipe, with_recipe
from envmanager.errors import ConfigError
from envmanager.importing import Plugins, nearest
from envmanager.options import EnvCount, ProcessOptions, a_mapping, at_least, count_or_auto, plain_numbers
from envmanager.structuring import structure

if TYPE_CHECKING:
    from envmanager.env_manager import EnvManager

__all__ = ["ENTRY_POINT_GROUP", "KINDS", "PROCESS_OPTIONS", "known_kinds", "make_manager", "structure"]

KINDS = {
    "asyncio": "envmanager.coroutines.manager:AsyncioEnvManager",
    "auto": "envmanager.auto_env_manager:auto_env_manager",
    "godot": "envmanager.godot.manager:GodotEnvManager",
    "replay": "envmanager.replay_env_manager:ReplayEnvManager",
    "ray": "envmanager.ray_cluster.manager:RayEnvManager",
    "simple": "envmanager.simple_env_manager:SimpleEnvManager",
    "subprocess": "envmanager.subprocess_env_manager:SubprocessEnvManager",
}
"""Import path of each kind in this library. A kind is imported when it is chosen."""

ENTRY_POINT_GROUP = "envmanager.managers"
_ADDED = Plugins(ENTRY_POINT_GROUP, "manager kind")

PROCESS_OPTIONS = frozenset(
    {
        "n_workers", "local_envs", "start_method", "transport", "timeouts", "restarts", "worker_env", "log_dir",
        "start_at_most", "memory_limit_mb",
    }
)  # fmt: skip
"""Options about worker processes. Kinds of manager without these parameters ignore them."""

OF_ONE_KIND = frozenset({"engine", "cluster", "recording", "strict", "trust"})
"""Options passed only to kinds that declare the parameter, not to kinds that merely take ``**options``."""


def _as_recipes(env: Any) -> Any:
    """Convert the mappings in a list of kinds of environments to EnvRecipes. An attrs converter."""
    if not isinstance(env, list | tuple):
        return env
    is_kind = [isinstance(each, Mapping) and not {"env", "behavior"}.isdisjoint(each) for each in env]
    parts = enumerate(zip(env, is_kind, strict=True))
    return [structure(EnvRecipe, each, where=f"env[{place}]") if is_one else each for place, (each, is_one) in parts]


@attrs.frozen(kw_only=True, field_transformer=plain_numbers)
class ManagerOptions(ProcessOptions):
    """The table ``manager`` of a config: the kind of manager and its options.

    ``n_envs="auto"``: as many as ``env: {openenv: …}`` finds sessions; the servers are asked.
    With ``"auto"`` as ``kind``, ``n_workers`` or ``local_envs``, a probe of the first environment chooses the value.
    But ``kind="godot"`` derives ``n_workers`` from ``n_envs`` and the number of cores. ``kind="simple"`` accepts but
    ignores ``n_workers``, ``local_envs``, ``start_method``, ``transport``, ``timeouts`` and ``worker_env``, so that one
    can switch to it by changing ``kind`` alone. ``kind="asyncio"`` ignores ``local_envs``, ``start_method``,
    ``transport`` and ``worker_env``, and accepts no ``n_workers`` but ``"auto"`` and ``n_envs``. In this library
    only ``kind="godot"`` accepts the mapping ``engine``, and only ``kind="ray"`` accepts ``cluster``. ``kind="replay"``
    needs ``recording``, and ignores all others but ``strict``, ``trust``, ``wait`` and
    ``trace``.

    ``env_kwargs``, ``wrappers``, ``render_mode`` and ``imports`` say how to make each environment; see EnvRecipe.
    ``kind="godot"`` refuses them, because its engine makes the game.
    """

    other_names = staticmethod(other_names)

    n_envs: EnvCount = attrs.field(default=1, converter=count_or_auto, validator=at_least(1, or_auto=True))
    kind: str = "subprocess"
    env: Any = attrs.field(default=None, converter=_as_recipes)
    env_kwargs: Mapping[str, Any] | None = attrs.field(default=None, validator=recipes.check_kwargs)
    wrappers: Sequence[Any] = attrs.field(default=(), converter=recipes.as_tuple, validator=recipes.check_wrappers)
    render_mode: str | None = attrs.field(default=None, validator=recipes.check_name)
    imports: Sequence[Any] = attrs.field(default=(), converter=recipes.as_tuple, validator=recipes.check_modules)
    engine: Mapping[str, Any] | None = attrs.field(default=None, validator=attrs.validators.optional(a_mapping))
    cluster: Mapping[str, Any] | None = attrs.field(
        default=None, validator=attrs.validators.optional(a_mapping), repr=False
    )
    recording: str | None = None
    strict: bool = True
    trust: bool = False

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.n_envs, int):
            object.__setattr__(self, "n_envs", count_envs(self.env, self.env_kwargs))
        elif self.n_envs == 1:
            object.__setattr__(self, "n_envs", count_kinds(self.env) or 1)
        super().__attrs_post_init__()
        recipes.check_render_mode(self.env_kwargs, self.render_mode)

    @property
    def env_name(self) -> str:
        """The name of the environment in output, such as ``"CartPole-v1"`` or ``"vector ALE/Pong-v5"``."""
        named = self.env.items() if isinstance(self.env, Mapping) else ()
        name = self.recording if self.env is None else self.env
        if count_kinds(self.env):
            return ", ".join(f"{each.n} {each.behavior}" for each in self.env if isinstance(each, EnvRecipe))
        return " ".join(f"{kind} {name}" for kind, name in named) or str(name)


def make_manager(config: Mapping[str, Any] | ManagerOptions, env_factory: Any = None) -> EnvManager:
    """Start and return a manager for a config such as ``{"kind": "subprocess", "n_envs": 8, "env": "CartPole-v1"}``.

    Raises ConfigError for a mistake in the config, and MissingExtra for a known kind whose optional dependencies are
    not installed.

    Args:
        config: Fields of :class:`ManagerOptions`; ``wait``, ``timeouts`` and ``restarts`` may be mappings of theirs.
        env_factory: The environments, in place of ``config["env"]``. ``env_kwargs``, ``wrappers``, ``render_mode`` and
            ``imports`` apply to either.
    """
    options = config if isinstance(config, ManagerOptions) else structure(ManagerOptions, config)
    kind, is_replay = options.kind, options.kind == "replay"  # all but how to replay is as in the recorded run
    if (options.env is None) == (env_factory is None) and not (is_replay and env_factory is None):
        found = "neither is given" if env_factory is None else "both are given"
        raise ConfigError(f"The environment is either the config's `env` or the argument env_factory; {found}.")
    make: Callable[..., Any] | None = pkgutil.resolve_name(KINDS[kind]) if kind in KINDS else _ADDED.load(kind)
    if make is None:
        kinds = known_kinds()
        raise ConfigError(f"There is no manager kind {kind!r}{nearest(kind, kinds)} Known kinds: {', '.join(kinds)}.")
    parameters = inspect.signature(make).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    defaults, chosen = ManagerOptions(), {}
    for field in attrs.fields(ManagerOptions):
        value = getattr(options, field.name)
        if field.name in ("kind", "env", "n_envs", *RECIPE_OPTIONS):
            continue
        if field.name in parameters or (takes_all and field.name not in OF_ONE_KIND):
            chosen[field.name] = value
        elif not is_replay and field.name not in PROCESS_OPTIONS and value != getattr(defaults, field.name):
            raise ConfigError(f"The manager kind {kind!r} has no option {field.name}; it was set to {value!r}.")
    made_of = with_recipe(options.env if env_factory is None else env_factory, options)
    n_envs = count_kinds(made_of) if options.n_envs == 1 else None
    manager: EnvManager = make(made_of, n_envs or options.n_envs, **chosen)
    return manager


def live(options: ManagerOptions) -> ManagerOptions:
    """Return ``options``, of a replay those with which its environments run, by the kind that was recorded."""
    if options.kind != "replay" or options.recording is None:
        return options
    recorded = pkgutil.resolve_name("envmanager.recording.data:about")(options.recording)["kind"]
    kind = next((kind for kind, path in KINDS.items() if path.endswith(f":{recorded}")), "subprocess")
    return attrs.evolve(options, kind=kind, recording=None, strict=True, trust=False)


def known_kinds() -> list[str]:
    """Return the sorted names of all kinds of managers, including those that other packages add."""
    return _ADDED.names_with(KINDS)
