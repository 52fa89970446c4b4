"""Functions that make a worker's environments and carry out commands, in the worker's process or in the trainer's.

The table COMMANDS maps commands to the functions that carry them out. The command "close" is not in the table.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import CoroutineType, FunctionType
from typing import TYPE_CHECKING, Any

import attrs

from envmanager.adapters.choosing import build_group, holds_all_of
from envmanager.adapters.factories import call_factory
from envmanager.data.seeding import derive_seeds
from envmanager.data.specs import SpecMismatch
from envmanager.data.steps import CommandName, EnvironmentResponse, StartReport, phase_of
from envmanager.environment import EnvContext, EnvGroup
from envmanager.errors import EpisodeNotBegun, ImportFailed, UsageError, Where
from envmanager.hosts.wire import describe_failure, env_raised
from envmanager.importing import import_failure, is_missing
from envmanager.options import KindOptions, ResetConfig

if TYPE_CHECKING:
    from envmanager.kernel.table import Entry


def make_contexts(
    env_ids: Sequence[int],
    *,
    worker_id: int,
    generation: int,
    seed: int | None,
    log_dir: str | None,
    generation_of_seeds: int | None = None,
) -> list[EnvContext]:
    """Return one EnvContext per environment of a worker.

    ``generation_of_seeds``: an older generation that had the same seeds, if its episodes are kept.
    """
    seeds = derive_seeds(seed, env_ids, generation if generation_of_seeds is None else generation_of_seeds)
    return [
        EnvContext(env_id, worker_id, generation, seed=own_seed, log_dir=log_dir, n_envs=len(env_ids))
        for env_id, own_seed in zip(env_ids, seeds, strict=True)
    ]


@attrs.frozen
class GroupFactory:
    """A factory of one worker's EnvGroup. It makes all environments, or one vector environment that holds them all."""

    factories: Sequence[Any]
    contexts: Sequence[EnvContext]
    infos: bool
    check_values: bool
    script: Any = attrs.field(factory=lambda: FunctionType((lambda: 0).__code__, vars(sys.modules["__main__"])))
    """A function of the user's script. When unpickled, it shares the globals of the factories' functions."""
    kind: str = attrs.field(default="", kw_only=True)
    """The kind of its environments, after which their behaviors are called; "" if the manager has no kinds."""

    @classmethod
    def of(cls, factories: Sequence[Any], entry: Entry, options: KindOptions, **more: Any) -> GroupFactory:
        """Return the factory for a worker's current generation. ``factories``: all of the manager. ``more``: fields."""
        contexts = make_contexts(
            entry.env_ids,
            worker_id=entry.worker_id,
            generation=entry.generation,
            seed=options.seed,
            log_dir=options.log_dir,
            generation_of_seeds=entry.generation_of_seeds,
        )
        own = [factories[env_id] for env_id in entry.env_ids]
        return cls(own, contexts, options.infos, options.check_values, kind=entry.kind, **more)

    def fill_main(self) -> None:
        """Set what the factories use of the user's script in this process's ``__main__``, where pickles look it up."""
        names = {name: value for name, value in self.script.__globals__.items() if not name.startswith("__")}
        vars(sys.modules["__main__"]).update(names)

    def __call__(self) -> EnvGroup:
        """Make the environments and return their group. If this fails, close those already made and raise an error."""
        made: list[Any] = []
        env_ids: list[int] = []
        own_pid, is_making = os.getpid(), True
        try:
            for factory, context in zip(self.factories, self.contexts, strict=True):
                env_ids = [context.env_id]
                made.append(call_factory(factory, context))
                if holds_all_of(made[0], self.factories):
                    break
            env_ids, is_making = [context.env_id for context in self.contexts], False
            return self.build(made, env_ids)
        except BaseException as error:
            is_fork = os.getpid() != own_pid  # made by a factory; the parent closes the environments
            for environment in () if is_fork else made:
                try:
                    closing = getattr(environment, "close", lambda: None)()
                    if isinstance(closing, CoroutineType):
                        closing.close()  # never awaited, as the environment has never been used
                except (Exception, SystemExit):
                    traceback.print_exc()  # only the first error is raised
            is_of_environment = isinstance(error, Exception) or (isinstance(error, SystemExit) and not is_fork)
            if isinstance(error, UsageError | ImportFailed) or not is_of_environment:
                raise  # other errors of this library come from a manager inside the environment
            missing = is_making and is_missing(error) and import_failure(error, f"env {env_ids[0]}", extra=None)
            worker_id = self.contexts[0].worker_id
            described = describe_failure if isinstance(error, SpecMismatch) else env_raised
            raise missing or described(error, worker_id=worker_id, env_ids=env_ids, phase="start") from error

    def build(self, made: list[Any], env_ids: list[int]) -> EnvGroup:
        """Return the group of the environments that were ``made``."""
        group = build_group(made, env_ids, infos=self.infos, check_values=self.check_values)
        if self.kind:
            group.name_behaviors(self.kind)
        return group


def make_group(env_factory: Any, worker_id: int) -> EnvGroup:
    """Return a new EnvGroup. ``env_factory`` is a GroupFactory, or makes one environment with id ``worker_id``."""
    made = call_factory(env_factory, EnvContext(worker_id, worker_id))
    return made if isinstance(made, EnvGroup) else build_group([made], [worker_id])


def take_not_begun(group: EnvGroup, worker_id: int) -> dict[int, Any] | None:
    """Return the ``not_begun`` of the response to the last command. Forget it."""
    if not group.not_begun:
        return None
    taken, group.not_begun = group.not_begun, {}
    told: dict[int, Any] = {}
    for env_id, (begin, step, error) in taken.items():
        if isinstance(error, dict):
            told[env_id] = error
            continue
        where = Where(worker_id=worker_id, env_ids=(env_id,), phase="begin")
        failure = None if error is None else describe_failure(error, **where)
        told[env_id] = EpisodeNotBegun(task=begin.task, step=step, failure=failure, **where)
    return told


def _reset(group: EnvGroup, config: Any) -> Any:
    if config.__class__ is list:  # of Begin: from now on, episodes begin on demand
        return group.reset_on_demand(config)
    wanted = ResetConfig.of(config)
    seeds = derive_seeds(wanted.seed, group.env_ids, wanted.generation)
    return group.reset(seeds=seeds, options=wanted.options)


COMMANDS: dict[CommandName, Callable[[EnvGroup, Any], Any]] = {
    CommandName.START: lambda group, _: StartReport(
        dict(group.behavior_specs),
        dict(group.max_agents),
        *(getattr(group, flag.name) for flag in attrs.fields(StartReport)[2:]),
    ),
    CommandName.RESET: _reset,
    CommandName.STEP: lambda group, actions: group.step(actions),
    CommandName.STEP_ROWS: lambda group, payload: group.step(payload[1], payload[0]),
    CommandName.CALL: lambda group, payload: group.call(*payload),
    CommandName.GET_ATTR: lambda group, payload: group.get_attr(*payload),
    CommandName.SET_ATTR: lambda group, payload: group.set_attr(*payload),
    CommandName.RENDER: lambda group, rows: group.render(rows),
}


def failed(
    error: BaseException, name: CommandName, *, worker_id: int, env_ids: Sequence[int], group: EnvGroup | None
) -> EnvironmentResponse:
    """Return the "failed" response to a command that raised ``error``. The response names the env at fault if known."""
    if group is not None:
        group.not_begun = {}
        if group.current_env_id is not None:
            env_ids, group.current_env_id = (group.current_env_id,), None
    failure = describe_failure(error, worker_id=worker_id, env_ids=env_ids, phase=phase_of(name))
    return EnvironmentResponse(CommandName.FAILED, worker_id, failure)
