"""The manager's side of one engine: commands become frames, answers and what its scripts print become responses."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from envmanager.data.seeding import derive_seeds
from envmanager.data.steps import CommandName, EnvironmentResponse
from envmanager.errors import EnvManagerError
from envmanager.godot.attached import AttachedGame, open_lobby
from envmanager.godot.channel import TICKETS, EngineChannel
from envmanager.godot.codec import encode_step
from envmanager.godot.decoding import EngineDecoder
from envmanager.godot.engine_log import EngineLog
from envmanager.godot.frames import HEADER, BadFrame, Kind
from envmanager.godot.launch import EnginePlan, launch
from envmanager.godot.lobby import Lobby
from envmanager.godot.messages import call_body, configure_body, reset_body
from envmanager.hosts.link import Link
from envmanager.hosts.wire import Message
from envmanager.observe.events import EventLog, Note
from envmanager.observe.timing import WorkerTimes
from envmanager.options import ResetConfig

_VERBS: dict[CommandName, Any] = {
    CommandName.CALL: "method",
    CommandName.GET_ATTR: "get",
    CommandName.SET_ATTR: "set",
    CommandName.RENDER: "render",
}


class EngineLink(Link):
    """An engine: ``send`` commands, ``recv`` responses; the responses to steps come out of the step queue."""

    FAILED = Kind.ERROR
    decoder: EngineDecoder
    channel: EngineChannel

    def __init__(self, plan: EnginePlan, events: EventLog, times: WorkerTimes) -> None:
        """WorkerError when the engine cannot be started."""
        channel = EngineChannel(max_frame_bytes=plan.options.max_frame_mb << 20)
        super().__init__(plan, channel, events, times)
        channel.on_busy, channel.on_note = self._extend, self._note
        self.decoder = EngineDecoder(plan.worker_id, plan.env_ids, infos=plan.infos, check_values=plan.check_values)
        self._plan = plan
        is_attached = plan.options.attach is not None
        self._log = EngineLog(None if is_attached else plan.log_dir, plan.worker_id, plan.generation)
        try:
            lobby = open_lobby(plan.options.address) if is_attached else Lobby(plan.options.address)
            try:
                self.process = self._attach(channel) if is_attached else launch(plan, lobby, self._log)
            except BaseException:
                lobby.close()
                raise
        except BaseException:
            self._log.close()
            raise
        finally:
            self._log.started()
        channel.await_engine(lobby, self.process.pidfd)

    def _attach(self, channel: EngineChannel) -> AttachedGame:
        game = AttachedGame()
        channel.on_arrived = game.arrived
        return game

    # Out.

    def encode(self, ticket: int, command: CommandName, payload: Any) -> bytes:
        if command is CommandName.STEP:
            kind, body = Kind.STEP, encode_step(self.decoder.specs, payload, self.decoder.acting)
        elif command is CommandName.START:
            kind, body = Kind.CONFIGURE, self._configure_body()
        elif command is CommandName.RESET:
            kind, body = Kind.RESET, self._reset_body(ResetConfig.of(payload))
        elif command is CommandName.CLOSE:
            kind, body = Kind.CLOSE, b""
        else:
            kind, body = Kind.CALL, self._call_body(command, payload)
        self.channel.last_ticket = ticket
        return HEADER.pack(len(body), kind, 0, 0, ticket % TICKETS) + body

    def _configure_body(self) -> bytes:
        options = self._plan.options
        return configure_body(
            arenas=len(self.env_ids),
            ticks_per_action=options.ticks_per_action,
            seed=self._plan.seed,
            isolate=options.isolate,
            shown=options.shown,
            infos=self._plan.infos,
            scene=options.scene,
            may_spin=self._plan.may_spin,
        )

    def _reset_body(self, config: ResetConfig) -> bytes:
        seeds = derive_seeds(config.seed, self.env_ids, self.generation)
        return reset_body(seeds, {**self._plan.options.parameters, **(config.options or {})})

    def _call_body(self, command: CommandName, payload: Any) -> bytes:
        name: str | None = None
        args: Any = ()
        kwargs: Mapping[str, Any] = {}
        if command is CommandName.RENDER:
            rows = payload
        elif command is CommandName.GET_ATTR:
            name, rows = payload
        elif command is CommandName.SET_ATTR:
            name, args, rows = payload
        else:
            name, args, rows, kwargs = payload
        self.decoder.asked_rows = rows
        return call_body(_VERBS[command], name, rows, args, kwargs)

    def ask_to_close(self) -> None:
        super().ask_to_close()
        if isinstance(self.process, AttachedGame):
            self.process.asked_to_close()

    # In.

    def _response(self, message: Message) -> EnvironmentResponse:
        try:
            return self._after_look_at_log(super()._response(message), self._asked)
        except BadFrame as error:
            return self._refuse(error, self._asked)

    def step_response(self, message: Message) -> EnvironmentResponse:
        try:
            response = self.decoder.response(message, CommandName.STEP)
        except BadFrame as error:
            return self._refuse(error, CommandName.STEP)
        self._note_step(self.decoder.busy_us * 1000, message.ended_ns)
        return self._after_look_at_log(response, CommandName.STEP)

    def _refuse(self, error: BadFrame, asked: CommandName) -> EnvironmentResponse:
        self.channel.broken, self.channel.hung_up = error.reason, True
        return self.decoder.failed(self.broke_protocol(asked))

    def _after_look_at_log(self, response: EnvironmentResponse, asked: CommandName) -> EnvironmentResponse:
        """The response, unless a script has raised meanwhile: Godot goes on with null after that.

        The bridge answers with an error when that null comes to it, and then what was printed says where it came from.
        """
        printed = self._log.new_error()
        said = self.decoder.error if response.name is CommandName.FAILED else None
        if printed is None or (response.name is CommandName.FAILED and (said is None or said.line is not None)):
            return response
        env_ids = None if said is None else self.decoder.env_ids_of(said)
        return self.decoder.failed(self.decoder.raised(printed, asked, env_ids))

    def timed_out(self, during: CommandName) -> EnvManagerError:
        """Return the error of a missing answer: that of a script, if one was raised; else as for every worker."""
        error = self._log.new_error()
        if error is not None:
            self.kill()
            return self.decoder.raised(error, during)
        return super().timed_out(during)

    def _extend(self, ticket: int) -> None:
        """Give the engine as long again: it is busy, and will answer."""
        if ticket not in (self.step_ticket, self.asked_ticket):
            return
        awaited = self._asked if self.awaited is None else self.awaited
        until = time.monotonic() + self._timeouts_s[awaited]
        self._deadline = max(self._deadline, until)
        if self.awaited is not None:
            self.due_at = max(self.due_at, until)

    def _note(self, name: str, data: Mapping[str, Any]) -> None:
        self._events.add(Note(worker_id=self.worker_id, generation=self.generation, name=name, data=data))

    # The end.

    def release(self) -> None:
        super().release()
        self._log.close()

    def last_words(self) -> str:
        if isinstance(self.process, AttachedGame) and self.channel.hello is None:
            return f"no game has connected to {self._plan.options.attach}: play it with ENVMANAGER_ADDRESS set to that"
        return self._log.tail()
