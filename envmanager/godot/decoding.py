"""The conversion of an engine's answers to responses, and the search for numbers that violate their spec.

An answer that breaks the protocol raises ``BadFrame``, and no part of it is returned. EngineLink converts the
exception to an error of the worker. Specs that are too large lead to a failed response instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envmanager.data.specs import ArraySpec, SpecMismatch, check_values
from envmanager.data.steps import CommandName, EnvironmentResponse, StartReport, Steps, phase_of
from envmanager.data.trees import leaves, leaves_like, paths
from envmanager.errors import EnvManagerError, EnvRaised
from envmanager.godot.codec import StepsDecoder
from envmanager.godot.frames import BadFrame, Kind, TooLarge
from envmanager.godot.messages import EngineError, EngineSpecs, read_error, read_specs, read_values
from envmanager.hosts.wire import Message, describe_failure

_ANSWERS = {CommandName.START: Kind.SPECS, CommandName.RESET: Kind.STEPS, CommandName.STEP: Kind.STEPS}
"""Kind of the frame that answers a command if it succeeds. Commands that are not listed get a VALUE frame."""
_STEP, _RESET, _ERROR, _VALUE = CommandName.STEP, CommandName.RESET, Kind.ERROR, Kind.VALUE
_REWARD = ArraySpec()


class EngineDecoder:
    """A converter of one engine's answer frames to responses. It keeps the engine's specs and last error."""

    def __init__(self, worker_id: int, env_ids: tuple[int, ...], *, infos: bool, check_values: bool) -> None:
        self.steps = StepsDecoder(EngineSpecs((), {}), env_ids, infos=infos)
        """Decoder of steps frames. It has no specs until the engine has started."""
        self.error: EngineError | None = None
        """Last error that the engine reported."""
        self.asked_rows: Sequence[int] = ()
        """Arenas that the last call addressed. The answer to the call has one value per arena."""
        self._worker_id = worker_id
        self._env_ids = env_ids
        self._infos = infos
        self._check_values = check_values

    def failed(self, error: EnvManagerError) -> EnvironmentResponse:
        """Return the "failed" response that reports ``error``."""
        return EnvironmentResponse(CommandName.FAILED, self._worker_id, error)

    def response(self, message: Message, asked: CommandName, _: int = 0) -> EnvironmentResponse:
        """Convert a message to the response to the command ``asked``. Raises BadFrame for an invalid answer."""
        if message.code == _ERROR:
            error = self.error = read_error(message.data, len(self._env_ids))
            env_ids = self.env_ids_of(error)
            if error.broken is not None:
                return self._mismatched(env_ids, SpecMismatch(*error.broken), asked)
            return self.failed(self.raised(error, asked, env_ids))
        if message.code != _ANSWERS.get(asked, _VALUE):
            raise BadFrame(f"a {Kind(message.code).name.lower()} frame in answer to {asked}")
        if asked is _STEP or asked is _RESET:
            steps, busy_us = self.steps.decode(message.data, after_reset=asked is _RESET)
            message.busy_ns = busy_us * 1000
            return self._stepped(self.steps.specs, steps, asked)
        if asked is CommandName.START:
            try:
                specs = read_specs(message.data)
            except TooLarge as error:
                advice = "Observe less, or put fewer arenas into each engine: n_workers is the number of engines.\n"
                return self.failed(self.raised(EngineError(error.reason, type="TooLarge"), asked, advice=advice))
            self.steps = StepsDecoder(specs, self._env_ids, infos=self._infos)
            report = StartReport(specs.behavior_specs, specs.max_agents, partial_actions=True)
            return EnvironmentResponse(asked, self._worker_id, report)
        values = read_values(message.data, len(self.asked_rows))
        return EnvironmentResponse(asked, self._worker_id, None if asked is CommandName.SET_ATTR else values)

    def _stepped(self, specs: EngineSpecs, steps: Steps, asked: CommandName) -> EnvironmentResponse:
        """Return the response to a reset or step; if values are checked and one is invalid, a failed response."""
        bad = bad_numbers(specs, steps) if self._check_values else None
        if bad is not None:
            return self._mismatched(*bad, asked)
        said = specs.behavior_specs if asked is _RESET else None
        return EnvironmentResponse(asked, self._worker_id, steps, said)

    def _mismatched(self, env_ids: Sequence[int], mismatch: SpecMismatch, asked: CommandName) -> EnvironmentResponse:
        phase = phase_of(asked)
        return self.failed(describe_failure(mismatch, worker_id=self._worker_id, env_ids=env_ids, phase=phase))

    def env_ids_of(self, error: EngineError) -> tuple[int, ...]:
        """Return the env_id of the error's arena, or all env_ids of the engine if the error does not name an arena."""
        return self._env_ids if error.arena is None else (self._env_ids[error.arena],)

    def raised(
        self, error: EngineError, asked: CommandName | None, env_ids: Sequence[int] | None = None, *, advice: str = ""
    ) -> EnvRaised:
        """Return an EnvRaised that reports an engine's error. ``asked`` is the pending command, or None if idle."""
        traceback = error.traceback
        if error.script and not traceback:
            line = "" if error.line is None else f", line {error.line}"
            function = f", in {error.function}" if error.function else ""
            traceback = f'  File "{error.script}"{line}{function}\n{error.type}: {error.message}\n'
        return EnvRaised(
            worker_id=self._worker_id,
            env_ids=self._env_ids if env_ids is None else env_ids,
            phase="idle" if asked is None else phase_of(asked),
            type_name=error.type,
            cause=error.message if error.traceback else str(error),
            remote_traceback=traceback,
            advice=advice,
        )


def bad_numbers(specs: EngineSpecs, steps: Steps) -> tuple[tuple[int, ...], SpecMismatch] | None:
    """Search for an array with invalid numbers (NaN, infinite or out of bounds). Return None if there is none.

    For the first such array, return the env_ids of its invalid rows, and the mismatch.
    """
    for name, own in steps.items():
        spec = specs.behavior_specs[name].observation
        parts = [(spec, own.obs, "obs", own.env_id), (_REWARD, own.reward, "reward", own.env_id)]
        if own.final_obs is not None:
            parts.append((spec, own.final_obs, "final_obs", own.env_id[own.ended]))
        for tree_spec, tree, root, env_id in parts:
            found = zip(leaves(tree_spec), leaves_like(tree_spec, tree), paths(tree_spec, root), strict=True)
            for leaf_spec, leaf, path in found:
                mismatch = _mistake(leaf_spec, leaf, path)
                if mismatch is not None:
                    bad = [_mistake(leaf_spec, row, path) is not None for row in leaf]
                    return tuple(sorted(set(env_id[bad].tolist()))), mismatch
    return None


def _mistake(spec: ArraySpec, values: Any, path: str) -> SpecMismatch | None:
    try:
        check_values(spec, values, path)
    except SpecMismatch as mismatch:
        return mismatch
    return None
