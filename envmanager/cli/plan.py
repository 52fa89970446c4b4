"""The options of ``envmanager run``, and their checks.

The options are checked before the run starts, so that a mistake such as a missing directory is reported at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from envmanager.adapters.names import find_callable
from envmanager.data.specs import BehaviorSpec, describe_value
from envmanager.errors import ConfigError, UsageError
from envmanager.options import at_least, plain_numbers
from envmanager.policy import Policy, RandomPolicy
from envmanager.registry import ManagerOptions, structure

if TYPE_CHECKING:
    from envmanager.env_manager import EnvManager
    from envmanager.observe.episodes import Episodes
    from envmanager.serving.server import Server

SERVE_TOKEN = "ENVMANAGER_SERVE_TOKEN"
"""Name of the environment variable with the token of ``--serve``, which a command line would show to other users."""


@attrs.frozen(kw_only=True, field_transformer=plain_numbers)
class RunOptions:
    """The table ``run`` of a config file: number of environment steps, seed, policy.

    ``seed`` seeds environments and random actions; None means a random seed. ``policy`` is ``"module:callable"``. The
    callable receives a behavior's name and spec, and returns a policy. If ``policy`` is None, actions are random.
    """

    steps: int = attrs.field(default=10_000, validator=at_least(1))
    seed: int | None = attrs.field(default=None, validator=attrs.validators.optional(at_least(0)))
    policy: str | None = None


RESTARTS = {"max_restarts": 100, "backoff_s": 0.0}
"""Defaults of ``restarts`` in ``envmanager run``. RestartPolicy's defaults end the run at a worker's fourth crash in a
minute; with these values the run goes on for longer and shows how often an environment crashes."""


def restarts_table(given: Any) -> Any:
    """Return the option ``restarts`` as a table: {} if unset, ``{"max_restarts": N}`` for a number, else unchanged."""
    if given is None:
        return {}
    return {"max_restarts": given} if isinstance(given, int) and not isinstance(given, bool) else given


@attrs.frozen
class Plan:
    """The checked options of a run. ``out``: file for the summary. ``serve``: port and host of the page."""

    manager: ManagerOptions
    steps: int
    seed: int | None = None
    policy: Any = None
    out: Path | None = None
    serve: tuple[int, str] | None = None
    policy_seed: int = attrs.field()

    @policy_seed.default
    def _seed_or_chance(self) -> int:
        return int(np.random.SeedSequence().generate_state(1)[0]) if self.seed is None else self.seed

    @classmethod
    def parse(
        cls, manager: Mapping[str, Any], run: Mapping[str, Any], *, out: Path | None = None, serve: str | None = None
    ) -> Plan:
        """Check two tables of a config, ``out`` and ``serve``, and return a Plan. Raises UsageError or ImportFailed."""
        run_options = structure(RunOptions, run, where="run")
        seed = run_options.seed
        restarts = restarts_table(manager.get("restarts"))
        if isinstance(restarts, Mapping):  # structure() refuses anything else
            restarts = {**RESTARTS, **restarts}
        manager_options = structure(ManagerOptions, {"seed": seed, **manager, "restarts": restarts}, where="manager")
        if manager_options.env is None:
            raise ConfigError("There is no environment: pass --env, or name it as `env` in the config's manager table.")
        check_out(out, ".json")
        policy, text = None, run_options.policy
        if text is not None:
            policy = find_callable(text, f"policy {text!r}", "a callable with a name and a spec").load()
        return cls(manager_options, run_options.steps, seed, policy, out, address_of(serve))

    def make_policy(self, behavior: str, spec: BehaviorSpec) -> Policy:
        """Return a policy for ``behavior``, by default a RandomPolicy. Raises UsageError if the policy is not valid."""
        if self.policy is None:
            return RandomPolicy(spec, self.policy_seed)
        policy: Policy = self.policy(behavior, spec)
        if not hasattr(policy, "get_action"):
            raise UsageError(f"--policy made {describe_value(policy)} for {behavior!r}, which has no get_action.")
        return policy


def set_policies(manager: EnvManager, make_policy: Callable[[str, BehaviorSpec], Policy], n_known: int) -> int:
    """Set a policy for each behavior except the first ``n_known``. Return the current number of behaviors."""
    specs = manager.behavior_specs
    if len(specs) > n_known:
        for behavior, spec in list(specs.items())[n_known:]:
            manager.set_policy(behavior, make_policy(behavior, spec))
    return len(specs)


def random_policy(_: str, spec: BehaviorSpec) -> Policy:
    return RandomPolicy(spec)


def address_of(serve: str | None) -> tuple[int, str] | None:
    """Return the port and host of the option ``--serve``, such as ``"8000"`` or ``"0.0.0.0:8000"``."""
    if serve is None:
        return None
    host, _, port = serve.rpartition(":")
    if not port.isdecimal() or len(port) > 5:
        raise ConfigError(f"--serve takes PORT or HOST:PORT, not {serve!r}.")
    return int(port), host.strip("[]") or "127.0.0.1"


def serve(manager: EnvManager, address: tuple[int, str], episodes: Episodes) -> Server:
    """Serve the page of a manager, with the token of the environment variable SERVE_TOKEN, if it is set."""
    return manager.serve(*address, os.environ.get(SERVE_TOKEN), episodes=episodes)


def check_out(out: Path | None, *suffixes: str) -> None:
    """Raise UsageError if ``out``, the file given as ``--out``, cannot be written or has none of ``suffixes``.

    None is accepted, and any suffix if no ``suffixes`` are given.
    """
    if out is None:
        return
    if out.is_dir():
        raise UsageError(f"--out {out} is a directory; name a file.")
    if suffixes and out.suffix.lower() not in suffixes:
        raise ConfigError(f"--out {out}: let its name end in {' or '.join(suffixes)}, which says what is written.")
    if out.exists() and not out.is_file():
        raise UsageError(f"--out {out} is no regular file, and would be replaced by one; name another.")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no directory {out.parent}; make it first.")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise UsageError(f"--out {out}: nothing can be written in {out.parent}.")
