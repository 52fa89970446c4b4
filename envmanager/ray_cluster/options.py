"""Options about a cluster, ``cluster:`` in a config. They are checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from envmanager.errors import UsageError
from envmanager.options import LocalCount, ProcessOptions, StartMethod, at_least
from envmanager.structuring import structure

_RESOURCES = ("num_cpus", "num_gpus", "memory", "custom")
PLACEMENTS = ("pack", "spread")


def _amount(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise UsageError(f"{name} must be a number from 0 up, not {value!r}.")
    return value


def _by_rays_names(value: Any) -> dict[str, float]:
    """Return the amounts of one worker by Ray's own names; UsageError for an amount that cannot be."""
    if value is None:
        return {"CPU": 1.0}
    if not isinstance(value, Mapping):
        raise UsageError(f"resources must be a mapping of amounts, not {value!r}.")
    unknown = [key for key in value if key not in _RESOURCES]
    if unknown:
        raise UsageError(f"resources knows {', '.join(_RESOURCES)}, not {', '.join(map(repr, unknown))}.")
    custom = value.get("custom") or {}
    if not isinstance(custom, Mapping):
        raise UsageError(f"resources.custom must be a mapping of amounts, not {custom!r}.")
    amounts = {"CPU": _amount("resources.num_cpus", value.get("num_cpus", 1))}
    for key, name in (("num_gpus", "GPU"), ("memory", "memory")):
        if value.get(key):
            amounts[name] = _amount(f"resources.{key}", value[key])
    for name, amount in custom.items():
        amounts[str(name)] = _amount(f"resources.custom.{name}", amount)
    return {name: float(amount) for name, amount in amounts.items()}


def _resources(_: Any, __: attrs.Attribute[Any], value: Any) -> None:
    _by_rays_names(value)


def _placement(_: Any, __: attrs.Attribute[Any], value: Any) -> None:
    if value in PLACEMENTS:
        return
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(each, str) for each in value):
        raise UsageError(f'placement must be "pack", "spread" or a list of nodes, one per worker, not {value!r}.')


def _optional_address(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise UsageError(f'{attribute.name} must be a text such as "auto" or "10.0.0.1:6379", or None, not {value!r}.')


def _optional_mapping(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise UsageError(f"{attribute.name} must be a mapping or None, not {type(value).__name__}.")


@attrs.frozen(kw_only=True)
class ClusterOptions:
    """The cluster, and the resources and nodes on it that workers take.

    ``address``: of the cluster; None is what Ray finds by itself (``RAY_ADDRESS``, a cluster on this machine), else a
    new one of this machine alone. ``resources``: what each worker takes: ``num_cpus`` (1), ``num_gpus``, ``memory`` in
    bytes, ``custom`` by name. ``placement``: "pack" fills a node until half of it is taken, "spread" deals the workers
    to all nodes; a list names a node for each worker, by id, name or address, where it has room and is there.
    ``runtime_env``: Ray's, for what a worker's node must have. ``envs_per_worker``: instead of ``n_workers``.
    """

    address: str | None = attrs.field(default=None, validator=_optional_address)
    resources: Mapping[str, Any] | None = attrs.field(default=None, validator=_resources)
    placement: Any = attrs.field(default="pack", validator=_placement)
    runtime_env: Mapping[str, Any] | None = attrs.field(default=None, validator=_optional_mapping, repr=False)
    envs_per_worker: int | None = attrs.field(default=None, validator=attrs.validators.optional(at_least(1)))

    @property
    def amounts(self) -> dict[str, float]:
        """The amounts that each worker takes, by Ray's names: ``CPU``, ``GPU``, ``memory``, and the custom ones."""
        return _by_rays_names(self.resources)

    @classmethod
    def of(cls, options: ClusterOptions | Mapping[str, Any] | None) -> ClusterOptions:
        """Make options of None, ClusterOptions, or a mapping as in a config; ConfigError names mistakes."""
        if isinstance(options, ClusterOptions):
            return options
        return structure(cls, options or {}, where="cluster")


def _means_nothing(why: str) -> Any:
    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value:
            raise UsageError(
                f"{attribute.name}={value!r} means nothing to the manager kind 'ray': {why}. Leave it out."
            )

    return check


_SINGLE = ("envs_per_worker", "resources", "placement", "address", "runtime_env")
"""The fields of ClusterOptions that RayEnvManager takes one by one too."""


@attrs.frozen(kw_only=True)
class RayOptions(ProcessOptions):
    """The options of RayEnvManager."""

    envs_per_worker: int | None = None
    resources: Mapping[str, Any] | None = None
    placement: Any = None
    address: str | None = None
    runtime_env: Mapping[str, Any] | None = attrs.field(default=None, repr=False)
    cluster: ClusterOptions | Mapping[str, Any] | None = attrs.field(default=None, repr=False)
    local_envs: LocalCount = attrs.field(default=0, validator=_means_nothing("the trainer's process hosts none"))
    start_method: StartMethod | None = attrs.field(default=None, validator=_means_nothing("Ray starts its processes"))
    zero_copy: bool = attrs.field(default=False, validator=_means_nothing("no memory is shared between machines"))

    @property
    def on_cluster(self) -> ClusterOptions:
        """The options about the cluster. Raises UsageError when they are given in two ways."""
        given = {name: getattr(self, name) for name in _SINGLE if getattr(self, name) is not None}
        if self.cluster is not None and given:
            raise UsageError(f"{', '.join(given)} and cluster are both given: put all of it into one of them.")
        return ClusterOptions.of(given if self.cluster is None else self.cluster)
