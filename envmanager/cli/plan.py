"""The options of ``envmanager run``, and their checks.

The options are checked before the run starts, so that a mistake such as a missing directory is reported at once.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from envmanager.adapters.names import find_callable
from envmanager.data.specs import BehaviorSpec, describe_value
from envmanager.errors import ConfigError, UsageError
from envmanager.options import a_mapping, at_least, plain_numbers
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
    """The table ``run`` of a config file: number of environment steps, seed, policy, options of resets.

    ``seed`` seeds environments and random actions; None means a random seed. ``policy`` is ``"module:callable"``. The
    callable receives a behavior's name and spec, and returns a policy. If ``policy`` is None, actions are random.
    """

    steps: int = attrs.field(default=10_000, validator=at_least(1))
    seed: int | None = attrs.field(default=None, validator=attrs.validators.optional(at_least(0)))
    policy: str | None = None
    options: Mapping[str, Any] | None = attrs.field(default=None, validator=attrs.validators.optional(a_mapping))
    """Options of every reset, which the environments receive."""


@attrs.frozen
class Plan:
    """The checked options of a run. ``out``: file for the summary. ``serve``: port and host of the page."""

    manager: ManagerOptions
    steps: int
    seed: int | None = None
    policy: Any = None
    out: Path | None = None
    serve: tuple[int, str] | None = None
    options: Mapping[str, Any] | None = None
    explain: bool = False
    """Whether to show how the placement is chosen."""

    @classmethod
    def parse(
        cls,
        manager: Mapping[str, Any],
        run: Mapping[str, Any],
        *,
        out: Path | None = None,
        serve: str | None = None,
        explain: bool = False,
    ) -> Plan:
        """Check two tables of a config and the flags, and return a Plan. Raises UsageError or ImportFailed."""
        run_options = structure(RunOptions, run, where="run")
        seed = run_options.seed
        manager_options = structure(ManagerOptions, {"seed": seed, **manager}, where="manager")
        if manager_options.env is None and manager_options.kind != "replay":
            raise ConfigError("There is no environment: pass --env, or name it as `env` in the config's manager table.")
        if explain and "auto" not in (manager_options.kind, manager_options.n_workers, manager_options.local_envs):
            raise ConfigError("--explain is for a placement that a probe chooses: --manager auto, or --workers auto.")
        check_out(out, ".json")
        policy, text = None, run_options.policy
        if text is not None:
            policy = find_callable(text, f"policy {text!r}", "a callable with a name and a spec").load()
        return cls(
            manager_options, run_options.steps, seed, policy, out, address_of(serve), run_options.options, explain
        )

    def make_policy(self, behavior: str, spec: BehaviorSpec) -> Policy:
        """Return a policy for ``behavior``, by default a RandomPolicy. Raises UsageError if the policy is not valid."""
        if self.policy is None:
            return RandomPolicy(spec, secrets.randbits(32) if self.seed is None else self.seed)
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


def address_of(serve: str | None, option: str = "--serve") -> tuple[int, str] | None:
    """Return the port and host of an option such as ``--serve``: ``"8000"`` or ``"0.0.0.0:8000"``."""
    if serve is None:
        return None
    host, _, port = serve.rpartition(":")
    if not port.isdecimal() or len(port) > 5:
        raise ConfigError(f"{option} takes PORT or HOST:PORT, not {serve!r}.")
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
