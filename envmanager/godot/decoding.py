"""Makes responses of what an engine answers.

The rule: whatever does not fit is a ``BadFrame``, which the worker turns into a ProtocolError; nothing of such an
answer is handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envmanager._workers.channel import Message
from envmanager.data.specs import SpecMismatch
from envmanager.data.steps import CommandName, EnvironmentResponse, StartReport, phase_of
from envmanager.errors import BadObservation, EnvManagerError, EnvRaised
from envmanager.godot.codec import Acting, StepsDecoder
from envmanager.godot.engine_specs import EngineSpecs, read_specs
from envmanager.godot.frames import BadFrame, Kind
from envmanager.godot.messages import EngineError, read_error, read_values
from envmanager.godot.value_checks import bad_numbers

_ANSWERS = {CommandName.START: Kind.SPECS, CommandName.RESET: Kind.STEPS, CommandName.STEP: Kind.STEPS}
"""With which kind of frame a command is answered; any other with a value."""


class EngineDecoder:
    """Makes responses of one engine's answers."""

    def __init__(self, worker_id: int, env_ids: tuple[int, ...], *, infos: bool, check_values: bool) -> None:
        self.specs = EngineSpecs((), {})
        """What the engine says that it has, once it is there."""
        self.busy_us = 0
        """How long the engine took for the last step."""
        self.error: EngineError | None = None
        """What the engine said last that went wrong."""
        self.asked_rows: Sequence[int] = ()
        """Of which arenas the last call wants values."""
        self._steps = StepsDecoder(self.specs, env_ids, infos=infos)
        self._worker_id = worker_id
        self._env_ids = env_ids
        self._infos = infos
        self._check_values = check_values

    @property
    def acting(self) -> dict[str, Acting]:
        """Of which agents of each behavior the engine wants actions."""
        return self._steps.acting

    def failed(self, error: EnvManagerError) -> EnvironmentResponse:
        """The response that reports this error."""
        return EnvironmentResponse(CommandName.FAILED, self._worker_id, error)

    def response(self, message: Message, asked: CommandName) -> EnvironmentResponse:
        """The response to what was ``asked``; BadFrame when it is none."""
        if message.code == Kind.ERROR:
            return self._raised(message, asked)
        if message.code != _ANSWERS.get(asked, Kind.VALUE):
            raise BadFrame(f"a {Kind(message.code).name.lower()} frame in answer to {asked}")
        if asked is CommandName.START:
            return EnvironmentResponse(asked, self._worker_id, self._report(message.data))
        if asked is CommandName.RESET or asked is CommandName.STEP:
            return self._decoded(message.data, asked)
        values = read_values(message.data, len(self.asked_rows))
        return EnvironmentResponse(asked, self._worker_id, None if asked is CommandName.SET_ATTR else values)

    def _report(self, body: Any) -> StartReport:
        self.specs = read_specs(body)
        self._steps = StepsDecoder(self.specs, self._env_ids, infos=self._infos)
        return StartReport(self.specs.behavior_specs, self.specs.max_agents, partial_actions=True)

    def _decoded(self, body: Any, asked: CommandName) -> EnvironmentResponse:
        decoded = self._steps.decode(body, after_reset=asked is CommandName.RESET)
        self.busy_us = decoded.busy_us
        if self._check_values:
            bad = bad_numbers(self.specs, decoded.steps)
            if bad is not None:
                return self.failed(self._bad_observation(*bad, asked))
        specs = self.specs.behavior_specs if asked is CommandName.RESET else None
        return EnvironmentResponse(asked, self._worker_id, decoded.steps, specs)

    def _bad_observation(self, env_ids: Sequence[int], mismatch: SpecMismatch, asked: CommandName) -> BadObservation:
        return BadObservation(
            worker_id=self._worker_id,
            env_ids=env_ids,
            phase=phase_of(asked),
            path=mismatch.path,
            expected=mismatch.expected,
            got=mismatch.got,
        )

    def _raised(self, message: Message, asked: CommandName) -> EnvironmentResponse:
        error = self.error = read_error(message.data, len(self._env_ids))
        env_ids = self.env_ids_of(error)
        if error.broken is not None:
            return self.failed(self._bad_observation(env_ids, SpecMismatch(*error.broken), asked))
        return self.failed(self.raised(error, asked, env_ids))

    def env_ids_of(self, error: EngineError) -> tuple[int, ...]:
        """Whose error it is, as far as the engine knows."""
        return self._env_ids if error.arena is None else (self._env_ids[error.arena],)

    def raised(self, error: EngineError, asked: CommandName | None, env_ids: Sequence[int] | None = None) -> EnvRaised:
        """An error in an engine as the library's."""
        return EnvRaised(
            worker_id=self._worker_id,
            env_ids=self._env_ids if env_ids is None else env_ids,
            phase="idle" if asked is None else phase_of(asked),
            type_name=error.type,
            cause=error.message if error.traceback else str(error),
            remote_traceback=error.traceback or _as_traceback(error),
        )


def _as_traceback(error: EngineError) -> str:
    if not error.script:
        return ""
    return f'  File "{error.script}", line {error.line}, in {error.function or "?"}\n{error.type}: {error.message}\n'
