"""The link to an engine. It sends commands as frames, and converts the engine's answers to responses.

An answer that breaks the protocol becomes an error of the worker, and no part of it is returned. An error that one of
the engine's scripts prints usually becomes a failed response. Creating a link does not wait for the engine, which
connects to the link's Lobby, a listening socket, when it is ready.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs

from envmanager.data.seeding import derive_seeds
from envmanager.data.specs import SpecMismatch
from envmanager.data.steps import STEPPING, Begin, CommandName, EnvironmentResponse, StartReport, Steps, phase_of
from envmanager.data.trees import leaves, take_rows
from envmanager.errors import EnvManagerError, EnvRaised, EpisodeNotBegun, Where
from envmanager.godot import messages
from envmanager.godot.channel import EngineChannel
from envmanager.godot.codec import StepsDecoder, bad_numbers, encode_step
from envmanager.godot.engine_log import EngineLog
from envmanager.godot.frames import BadFrame, Frame, Kind, TooLarge, pack
from envmanager.godot.lobby import Lobby
from envmanager.godot.messages import EngineError, EngineSpecs
from envmanager.godot.options import GodotOptions
from envmanager.hosts import descriptors
from envmanager.hosts.life import WorkerPlan
from envmanager.hosts.link import Link
from envmanager.hosts.wire import Message, describe_failure
from envmanager.observe.events import EventLog, Note
from envmanager.observe.timing import WorkerTimes
from envmanager.options import ResetConfig
from envmanager.processes.starting import Process, execute

ADDRESS, TOKEN = "ENVMANAGER_ADDRESS", "ENVMANAGER_TOKEN"
"""Environment variables with the trainer's address and the token to send. Without ADDRESS a game plays by heuristic."""
_START, _STEP, _RESET, _FAILED = CommandName.START, CommandName.STEP, CommandName.RESET, CommandName.FAILED
_ANSWERS = {_START: Kind.SPECS, _RESET: Kind.STEPS, _STEP: Kind.STEPS}  # kinds of frames; any other answer is a VALUE
_CALLS: dict[CommandName, Callable[..., tuple[Any, ...]]] = {
    CommandName.CALL: lambda name, args, rows, kwargs: ("method", name, rows, args, kwargs),
    CommandName.GET_ATTR: lambda name, rows: ("get", name, rows),
    CommandName.SET_ATTR: lambda name, values, rows: ("set", name, rows, values),
    CommandName.RENDER: lambda *rows: ("render", None, rows),
}  # from the payload of a command to the arguments of ``call_body``
_FORGIVE = "If the game plays on after it, engine.script_errors: warn makes such an error a warning.\n"
_logger = logging.getLogger("envmanager")
_MOST_BUSY = 10  # number of busy frames that may extend the deadline of one request; further ones are ignored


@attrs.frozen(kw_only=True)
class EnginePlan(WorkerPlan):
    """The parameters with which an EngineLink starts one engine, or waits for a game that the user starts."""

    options: GodotOptions = attrs.field(repr=False)  # may hold secrets, as environ may
    command: Sequence[str]
    """Command line that starts the game; empty for a game that the user starts."""
    environ: Mapping[str, str] = attrs.field(repr=False)
    cores: set[int]
    seed: int
    may_spin: bool
    """Whether the engine may spin for a moment while it waits for the next request."""
    told: set[str] = attrs.field(factory=set)
    """Subjects of the warnings that were logged, such as places of script errors. The engines of a host share it."""


class AttachedGame:
    """A stand-in for the process of a game that the user plays in the editor. Only the game's connection is known.

    No signal is sent to the game. A closed connection, or a call of ``signal``, marks the game as ended.
    """

    pid = None

    def __init__(self, channel: EngineChannel) -> None:
        self.pidfd = descriptors.register(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        channel.on_hung_up = self.signal

    def signal(self, _: int = 0) -> None:
        """Mark the game as ended, without sending a signal. The game notices when its connection is closed."""
        if self.pidfd != descriptors.CLOSED:
            os.eventfd_write(self.pidfd, 1)

    def exit_name(self) -> str:
        return "EOF"

    def release(self) -> None:
        self.pidfd = descriptors.close(self.pidfd)


class EngineLink(Link):
    """The manager's link to one engine. It sends commands and receives responses as frames over one connection."""

    FAILED = Kind.ERROR
    PROTOCOL_ADVICE = (
        "The game's addon may be of another version than this library: if it is this library's, `envmanager godot "
        "install-addon` installs the one that fits."
    )
    channel_class: ClassVar[type[EngineChannel]] = EngineChannel
    lobby_class: ClassVar[type[Lobby]] = Lobby
    channel: EngineChannel

    def __init__(self, plan: EnginePlan, events: EventLog, times: WorkerTimes) -> None:
        """Start the engine, or listen for an attached game. Raises WorkerError or UsageError if that fails."""
        options, engine = plan.options, plan.options.engine
        channel = self.channel_class(max_frame_bytes=engine.max_frame_mb << 20)
        super().__init__(plan, channel, events, times)
        channel.on_aside, channel.fails_to_start = self._take_aside, self._fails_to_start
        self.decoder = self
        self._plan = plan
        self._steps = StepsDecoder(EngineSpecs((), {}), plan.env_ids)
        """Decoder of steps frames. It has no specs until the engine has started."""
        self._of_null: EngineError | None = None
        """Error in the last answer if a script's null may be its cause, else None."""
        self.declared: Mapping[str, Any] = {}  # what the scene declares about its training, once the engine has started
        self._n_called = self._n_busy = 0
        self._again: Begin | None = None  # episode that the engine begins again, with the actions that are left
        self._is_repeating = False  # whether the answer to a "reset" is that to such an action
        with contextlib.ExitStack() as undo:
            self._log = EngineLog(None if engine.attach else options.log_dir, plan.worker_id, plan.generation)
            undo.callback(self._log.close)
            lobby = self.lobby_class(engine.attach)
            undo.callback(lobby.close)
            lobby.watch_writes(self._log.write_fd)
            self.process = AttachedGame(channel) if engine.attach else self.launch(plan, lobby)
            self._log.started()
            undo.pop_all()
        channel.await_engine(lobby, self.process.pidfd)

    def launch(self, plan: EnginePlan, lobby: Lobby) -> Process:
        """Start the engine with the address and token of ``lobby``. Return the engine's process."""
        return self.execute(attrs.evolve(plan, environ={**plan.environ, ADDRESS: lobby.address, TOKEN: lobby.token}))

    def execute(self, plan: EnginePlan) -> Process:
        """Start the plan's command and return the process. Raises WorkerError if the process cannot be started."""
        deadline = time.monotonic() + plan.timeouts.start_s
        try:
            return execute(plan.command, plan.environ, self._log.write_fd, plan.cores, deadline)
        except OSError as error:
            raise plan.not_started("engine", error, f"The command was: {' '.join(plan.command)}.") from error

    # Commands.

    def announce(self, begins: Sequence[Begin]) -> None:
        body = messages.begin_body(begins, self._plan.options.engine.parameters)
        self.channel.push(pack(Kind.BEGIN, 0, body), time.monotonic() + self._timeouts_s[_STEP])

    def encode(self, ticket: int, command: CommandName, payload: Any) -> bytes:
        if command in STEPPING:
            actions = payload if command is _STEP else {}  # some rows are none: all arenas move together
            kind, body = Kind.STEP, encode_step(self._steps.specs, actions, self._steps.acting)
        elif command is _START:
            plan, kind = self._plan, Kind.CONFIGURE
            body = messages.configure_body(
                plan.options, arenas=len(plan.env_ids), seed=plan.seed, may_spin=plan.may_spin
            )
        elif command is _RESET:
            parameters, kind = self._plan.options.engine.parameters, Kind.RESET
            self._again, self._is_repeating = None, False
            if payload.__class__ is list:  # of Begin: from now on, episodes begin on demand
                self._again = next((begin for begin in payload if begin.actions is not None), None)
                body = messages.begin_body(payload, parameters, seeds=None, arenas=None)
            else:
                config = ResetConfig.of(payload)
                seeds = derive_seeds(config.seed, self.env_ids, config.generation)
                body = messages.reset_body(seeds, {**parameters, **(config.options or {})})
        elif command is CommandName.CLOSE:
            kind, body = Kind.CLOSE, b""
        else:
            what, name, rows, *args = _CALLS[command](*payload)
            self._n_called = len(rows)
            kind, body = Kind.CALL, messages.call_body(what, name, rows, *args)
        self.channel.last_ticket = ticket
        self._n_busy = 0
        return pack(kind, ticket, body)

    def ask_to_close(self) -> None:
        super().ask_to_close()
        if isinstance(self.process, AttachedGame) and self.channel.hello is None:  # no game has connected
            self.process.signal()

    # Responses.

    def first_response(self, response: EnvironmentResponse) -> EnvironmentResponse | None:
        """Repeat the actions of a kept episode, one after the other, before the first response of a replacement."""
        again, steps = self._again, response.payload
        if again is None or response.name is not _RESET:
            return super().first_response(response)
        acting = {name: n for name, each in steps.items() if (n := len(each.acting_rows))}
        actions = again.actions or {}
        own = {name: take_rows(actions[name], slice(n)) for name, n in acting.items() if name in actions}
        if again.n_repeated and acting:
            if {name: len(leaves(tree)[0]) for name, tree in own.items()} == acting:
                rest = {name: take_rows(tree, slice(acting.get(name, 0), None)) for name, tree in actions.items()}
                self._again, self._is_repeating = again._replace(actions=rest), True
                self.send(_STEP, own)
                self.await_response(self.ticket, _RESET, self.awaited.deadline)
                return None
            response.payload = {}  # other agents act: it is another episode
        elif acting:
            response.payload = {name: each.as_first() for name, each in steps.items()}
        else:
            where = Where(worker_id=self.worker_id, env_ids=self.env_ids, phase="begin")
            ended = EpisodeNotBegun(task=again.task, step=again.n_repeated, **where)
            response.payload, response.not_begun = {}, {self.env_ids[0]: ended}
        return super().first_response(response)

    def response(self, message: Message, asked: CommandName, slot: int = 0) -> EnvironmentResponse:
        """Decode a message. Return the response, or a failure if a script printed an error or the message is invalid.

        After an error in a script, Godot continues with null. When the addon receives that null, it answers with an
        error. The printed error is returned instead, because it says where the null came from.
        """
        self._of_null = None
        try:
            response = self._decoded(message, asked)
        except BadFrame as error:
            self.channel.refuse(str(error))
            return self.failed(self.broke_protocol(asked))
        printed, of_null = self._new_error(asked), self._of_null
        if printed is None or (response.name is _FAILED and (of_null is None or printed.line is None)):
            return response
        arena = None if of_null is None else of_null.arena
        return self.failed(self._raised(attrs.evolve(printed, arena=arena), asked))

    def _forgives(self, during: CommandName | None) -> bool:
        forgives = self._plan.options.forgives
        return forgives == "all" or (forgives == "start" and during is _START)

    def _new_error(self, during: CommandName | None) -> EngineError | None:
        """Return the first script error printed since the last call. Errors that are forgiven are logged instead."""
        errors = self._log.new_errors()
        if not self._forgives(during):
            return errors[0] if errors else None
        for error in errors:
            place = f"{error.script}:{error.line}" if error.line else str(error)
            self._warn(place, f"a script error, after which the game goes on (told once for each line): {error}")
        return None

    def _warn(self, about: str, text: str) -> None:
        if about not in self._plan.told:
            self._plan.told.add(about)
            _logger.warning("worker %d: %s", self.worker_id, text)

    def _fails_to_start(self) -> bool:
        """Return whether a script has printed an error that ends the start. The error stays unread."""
        return self._log.has_error() and not (self._forgives(_START) and self._new_error(_START) is None)

    def _decoded(self, message: Message, asked: CommandName) -> EnvironmentResponse:
        """Convert a message to the response to the command ``asked``. Raises BadFrame for an invalid answer."""
        if message.code == Kind.ERROR:
            error = messages.read_error(message.data, len(self.env_ids))
            if error.broken is not None:
                return self._mismatched(self._env_ids_of(error), SpecMismatch(*error.broken), asked)
            self._of_null = None if error.traceback else error
            return self.failed(self._raised(error, asked))
        if message.code != _ANSWERS.get(asked, Kind.VALUE):
            raise BadFrame(f"a {Kind(message.code).name.lower()} frame in answer to {asked}")
        if asked is _STEP or asked is _RESET:
            steps, busy_us = self._steps.decode(message.data, after_reset=asked is _RESET and not self._is_repeating)
            message.busy_ns = busy_us * 1000
            return self._stepped(self._steps.specs, steps, asked)
        if asked is _START:
            try:
                specs = messages.read_specs(message.data)
            except TooLarge as too_large:
                advice = "Observe less, or put fewer arenas into each engine: n_workers is the number of engines.\n"
                return self.failed(self._raised(EngineError(str(too_large), type="TooLarge"), asked, advice))
            self._steps = StepsDecoder(specs, self.env_ids, infos=self._plan.options.infos)
            self.declared = specs.declared
            if hint := self._log.hint():
                self._warn(hint, hint)
            report = StartReport(
                specs.behavior_specs, specs.max_agents, partial_actions=True, begins_on_demand=specs.begins_on_demand
            )
            return EnvironmentResponse(asked, self.worker_id, report)
        values = messages.read_values(message.data, self._n_called)
        return EnvironmentResponse(asked, self.worker_id, None if asked is CommandName.SET_ATTR else values)

    def _stepped(self, specs: EngineSpecs, steps: Steps, asked: CommandName) -> EnvironmentResponse:
        """Return the response to a reset or step; if values are checked and one is invalid, a failed response."""
        bad = bad_numbers(specs, steps) if self._plan.options.check_values else None
        if bad is not None:
            return self._mismatched(*bad, asked)
        return EnvironmentResponse(asked, self.worker_id, steps, specs.behavior_specs if asked is _RESET else None)

    def _mismatched(self, env_ids: Sequence[int], mismatch: SpecMismatch, asked: CommandName) -> EnvironmentResponse:
        phase = phase_of(asked)
        return self.failed(describe_failure(mismatch, worker_id=self.worker_id, env_ids=env_ids, phase=phase))

    def _env_ids_of(self, error: EngineError) -> tuple[int, ...]:
        return self.env_ids if error.arena is None else (self.env_ids[error.arena],)

    def _raised(self, error: EngineError, asked: CommandName | None, advice: str = "") -> EnvRaised:
        """Return an EnvRaised that reports an engine's error. ``asked`` is the pending command, or None if idle."""
        traceback = error.traceback
        if asked is _START:
            advice += "\n".join(filter(None, (self._log.hint(), _FORGIVE if error.line else "")))
        if error.script and not traceback:
            line = "" if error.line is None else f", line {error.line}"
            function = f", in {error.function}" if error.function else ""
            traceback = f'  File "{error.script}"{line}{function}\n{error.type}: {error.message}\n'
        return EnvRaised(
            worker_id=self.worker_id,
            env_ids=self._env_ids_of(error),
            phase="idle" if asked is None else phase_of(asked),
            type_name=error.type,
            cause=error.message if error.traceback else str(error),
            remote_traceback=traceback,
            advice=advice,
        )

    def timed_out(self, during: CommandName) -> EnvManagerError:
        """Kill an engine that did not respond in time. Return the script error that it printed, else WorkerTimedOut."""
        return self._printed_error(during) or super().timed_out(during)

    def broke_protocol(self, during: CommandName | None) -> EnvManagerError:
        """Kill an engine that broke the protocol. Return the script error that it printed, else ProtocolError."""
        return self._printed_error(during) or super().broke_protocol(during)

    def _printed_error(self, during: CommandName | None) -> EnvManagerError | None:
        """If a script has printed a new error, kill the engine and return the error; else return None."""
        error = self._new_error(during)
        if error is None:
            return None
        self.kill()
        return self._raised(error, during)

    def _take_aside(self, frame: Frame, ticket: int) -> None:
        """Record a note frame as an event. Restart a pending command's timeout at each of its first ten busy frames."""
        if frame.kind is Kind.NOTE:
            name, data = messages.read_note(frame.body)
            self._events.add(Note(worker_id=self.worker_id, generation=self.generation, name=name, data=data))
        elif ticket in (self.awaited.ticket, self.asked.ticket) and self._n_busy < _MOST_BUSY:
            self._n_busy += 1
            for each in (self.awaited, self.asked):
                command = each.command  # read once: close() pumps in another thread
                if command is not None and each.ticket == ticket:
                    each.deadline = max(each.deadline, time.monotonic() + self._timeouts_s[command])

    # Release and output.

    def release(self) -> None:
        super().release()
        self._log.close()

    def output_tail(self) -> str:
        if isinstance(self.process, AttachedGame) and self.channel.hello is None:
            return f"no game has connected to {self._plan.options.engine.attach}: {self.lobby_class.how_to_play}"
        return f"{self._log.tail()}\n{self._log.hint()}".strip()
