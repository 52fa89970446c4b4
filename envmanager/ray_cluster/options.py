"""Options for a Ray cluster (``cluster:`` in a config), and functions that describe resources in messages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from envmanager.errors import UsageError
from envmanager.options import (
    LocalCount,
    ProcessOptions,
    StartMethod,
    a_mapping,
    at_least,
    flag,
    plain,
    plain_numbers,
    seconds,
)
from envmanager.structuring import structure

_optional = attrs.validators.optional
_RAYS_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
_NOT_ASKED_FOR = ("node:", "object_store_memory")
"""Prefixes of the names of resources that Ray lists but workers do not request."""


def why_no_room(wanted: Mapping[str, float], nodes: Sequence[Mapping[str, float]], free: Mapping[str, float]) -> str:
    """Return the part of an error message that explains why no node has room for a worker.

    ``wanted``: resources of one worker. ``nodes``: total resources per node. ``free``: the cluster's unused resources.
    """
    for name, amount in wanted.items():
        most = max((node.get(name, 0.0) for node in nodes), default=0.0)
        if most < amount:
            has = f"the most that one has is {most:g}" if most else "no node has any"
            return f"no node has {amount:g} {name} ({has})"
    if not any(all(node.get(name, 0.0) >= amount for name, amount in wanted.items()) for node in nodes):
        return f"no node has all of {in_words(wanted)}"
    taken = [name for name, amount in wanted.items() if free.get(name, 0.0) < amount]
    if taken:
        left = in_words({name: free.get(name, 0.0) for name in taken})
        return f"all {' and '.join(taken)} is taken, but for {left}"
    return f"no node has {in_words(wanted)} free at once, or the one that has is slow to start a process"


def in_words(resources: Mapping[str, float]) -> str:
    """Return resources in words, such as ``"12 CPU, 2 license"``. Omit resources that workers never request."""
    told = [
        f"{amount / 2**30:.3g} GiB memory" if name == "memory" else f"{amount:g} {name}"
        for name, amount in resources.items()
        if not name.startswith(_NOT_ASKED_FOR)
    ]
    return ", ".join(told) or "nothing"


def _check_placement(_: Any, __: attrs.Attribute[Any], value: Any) -> None:
    if value in ("pack", "spread"):
        return
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(each, str) for each in value):
        raise UsageError(f'placement must be "pack", "spread" or a list of nodes, one per worker, not {value!r}.')


def _check_address(_: Any, __: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise UsageError(f'address must be a text such as "auto" or "10.0.0.1:6379", or None, not {value!r}.')


@attrs.frozen(kw_only=True, field_transformer=plain_numbers)
class ClusterOptions:
    """The address of a cluster, and the resources and nodes of its workers.

    ``address``: as for ``ray.init``, such as "10.0.0.1:6379". With None, Ray uses ``RAY_ADDRESS`` or a cluster on this
    machine, and starts one if there is none. ``resources``: amounts per worker, with the keys ``num_cpus`` (default 1),
    ``num_gpus``, ``memory`` (bytes) and ``custom`` (a mapping). ``placement``: "pack" uses one node until half of its
    resources are in use; "spread" uses many nodes; a list names each worker's preferred node by id, name or address.
    ``squeeze``: whether a worker for which no node has had room for a quarter of ``place_s`` seconds shares the CPUs of
    others until one has, so that it is back within ``place_s``. ``min_nodes``: number of nodes for which the start
    waits, up to ``Timeouts.start_s``. ``runtime_env``: Ray's option, such as packages and files for the workers.
    ``envs_per_worker``: maximum number of environments per worker, given instead of ``n_workers``.
    """

    address: str | None = attrs.field(default=None, validator=_check_address)
    resources: Mapping[str, Any] | None = attrs.field(default=None, validator=lambda options, *_: options.amounts)
    placement: Any = attrs.field(default="pack", validator=_check_placement)
    runtime_env: Mapping[str, Any] | None = attrs.field(default=None, validator=_optional(a_mapping), repr=False)
    envs_per_worker: int | None = attrs.field(default=None, validator=_optional(at_least(1)))
    squeeze: bool = attrs.field(default=True, validator=flag)
    place_s: float = attrs.field(default=10.0, validator=seconds(unlimited=False))
    min_nodes: int = attrs.field(default=1, validator=at_least(1))

    @property
    def amounts(self) -> dict[str, float]:
        """Nonzero amounts that a worker requests, keyed by Ray's names: ``CPU``, ``GPU``, ``memory``, and custom names.

        Raises UsageError if ``resources`` is not a mapping, a key is unknown, or an amount is not a finite number >= 0.
        """
        if self.resources is not None and not isinstance(self.resources, Mapping):
            raise UsageError(f"resources must be a mapping of amounts, not {self.resources!r}.")
        given = {"num_cpus": 1, **(self.resources or {})}
        custom = given.pop("custom", None) or {}
        unknown = [key for key in given if key not in _RAYS_NAMES]
        if unknown:
            raise UsageError(f"resources knows {', '.join(_RAYS_NAMES)}, custom, not {', '.join(map(repr, unknown))}.")
        if not isinstance(custom, Mapping):
            raise UsageError(f"resources.custom must be a mapping of amounts, not {custom!r}.")
        amounts = {}
        for key, amount in {**given, **{f"custom.{name}": amount for name, amount in custom.items()}}.items():
            if not isinstance(plain(amount), int | float) or isinstance(amount, bool) or not 0 <= amount < math.inf:
                raise UsageError(f"resources.{key} must be a number from 0 up, not {amount!r}.")
            if amount:
                amounts[_RAYS_NAMES.get(key, key.removeprefix("custom."))] = float(amount)
        return amounts

    @classmethod
    def of(cls, options: ClusterOptions | Mapping[str, Any] | None) -> ClusterOptions:
        """Convert ``options`` to ClusterOptions; None means the defaults. Raises ConfigError if they are invalid."""
        return options if isinstance(options, ClusterOptions) else structure(cls, options or {}, where="cluster")


def _means_nothing(why: str) -> Any:
    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value:
            raise UsageError(
                f"{attribute.name}={value!r} means nothing to the manager kind 'ray': {why}. Leave it out."
            )

    return check


@attrs.frozen(kw_only=True, field_transformer=plain_numbers)
class RayOptions(ProcessOptions):
    """The options of RayEnvManager: ProcessOptions, and ``cluster`` or the fields of ClusterOptions."""

    envs_per_worker: int | None = None
    resources: Mapping[str, Any] | None = None
    placement: Any = None
    address: str | None = None
    runtime_env: Mapping[str, Any] | None = attrs.field(default=None, repr=False)
    squeeze: bool | None = None
    place_s: float | None = None
    min_nodes: int | None = None
    cluster: ClusterOptions | Mapping[str, Any] | None = attrs.field(default=None, repr=False)
    local_envs: LocalCount = attrs.field(default=0, validator=_means_nothing("the trainer's process hosts none"))
    start_method: StartMethod | None = attrs.field(default=None, validator=_means_nothing("Ray starts its processes"))
    start_at_most: int | None = attrs.field(
        default=None, validator=_means_nothing("a node starts as many actors as its resources allow")
    )
    memory_limit_mb: float | None = attrs.field(
        default=None, validator=_means_nothing("resources: {memory: …} asks for memory, and Ray watches its nodes")
    )
    zero_copy: bool = attrs.field(default=False, validator=_means_nothing("no memory is shared between machines"))

    @property
    def on_cluster(self) -> ClusterOptions:
        """The ClusterOptions given as ``cluster`` or as separate options. Raises UsageError for invalid options."""
        names = [field.name for field in attrs.fields(ClusterOptions)]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.cluster is not None and given:
            raise UsageError(f"{', '.join(given)} and cluster are both given: put all of it into one of them.")
        return ClusterOptions.of(given if self.cluster is None else self.cluster)
