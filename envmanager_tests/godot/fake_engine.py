"""A program that speaks the protocol of a Godot engine, and hosts environments written in Python.

::

    ENVMANAGER_ADDRESS=127.0.0.1:4321 ENVMANAGER_TOKEN=… python -m envmanager_tests.godot.fake_engine my_envs:make

Its argument, or else ENVMANAGER_FAKE_ENV, is the environment: any text that a manager accepts as ``env_factory``, or
the path of a file into which cloudpickle has written a factory, a list of one factory per environment, or the
``GroupFactory`` of a worker. ENVMANAGER_FAKE_CONTEXT, in JSON, has facts that a trainer does not send to an engine:
``worker_id``, ``env_ids`` (by default 0, 1, …), ``generation``. ENVMANAGER_FAKE_MODE makes it misbehave
(``engine_misbehaviour``).

The rule: an exception of an environment is reported in an error frame, and the engine goes on. It ends after a close
frame, or when the trainer closes the connection.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import cloudpickle
import numpy as np

from envmanager.adapters.factories import factories_for, resolve
from envmanager.data.specs import SpecConflict, SpecMismatch
from envmanager.data.steps import CommandName
from envmanager.environment import EnvGroup
from envmanager.errors import EnvRaised, UsageError
from envmanager.godot.frames import (
    FROM_TRAINER,
    PROTOCOL,
    BadFrame,
    Frame,
    FrameReader,
    Kind,
    dump_json,
    limit_of,
    pack,
    parse_json,
)
from envmanager.godot.messages import EngineSpecs, read_specs
from envmanager.hosts.hosting import COMMANDS, GroupFactory, make_contexts
from envmanager_tests.godot.engine_codec import (
    Call,
    Configure,
    StepsEncoder,
    plain,
    read_begins,
    read_call,
    read_configure,
    read_reset,
    read_step,
    specs_body,
)
from envmanager_tests.godot.engine_misbehaviour import Misbehaviour

TICKS_PER_SECOND = 60
_CONNECT_S = 60
_MOST_TRACEBACK = 100_000
"""Maximum length of a traceback in characters, since JSON frames have a limit."""
_ANY_LENGTH = (1 << 32) - 1
"""Maximum length of frames with arrays; the engine does not know the trainer's limit."""


@attrs.frozen
class Hosted:
    """The environment of an engine, before the number of arenas is known."""

    source: str
    context: Mapping[str, Any]

    def factory(self, configure: Configure) -> GroupFactory:
        """Return the factory of the environments, one for each requested arena."""
        loaded = self._loaded()
        if isinstance(loaded, GroupFactory):
            if len(loaded.contexts) != configure.arenas:
                raise UsageError(f"{configure.arenas} arenas were requested, but {len(loaded.contexts)} are hosted.")
            return attrs.evolve(loaded, infos=configure.infos)
        env_ids = self.context.get("env_ids", list(range(configure.arenas)))
        if len(env_ids) != configure.arenas:
            raise UsageError(f"{configure.arenas} arenas were requested, but env_ids has {len(env_ids)}.")
        contexts = make_contexts(
            env_ids,
            worker_id=self.context.get("worker_id", 0),
            generation=self.context.get("generation", 0),
            seed=configure.seed,
            log_dir=None,
        )
        return GroupFactory(_own_factories(loaded, env_ids), contexts, configure.infos, check_values=False)

    def _loaded(self) -> Any:
        path = Path(self.source)
        return cloudpickle.loads(path.read_bytes()) if path.is_file() else self.source


def _own_factories(loaded: Any, env_ids: Sequence[int]) -> list[Any]:
    if isinstance(loaded, list | tuple):
        return [resolve(loaded[env_id]) for env_id in env_ids]
    return factories_for(loaded, len(env_ids))


class FakeEngine:
    """A fake engine: its connection and, once configured, its environments."""

    def __init__(self, connection: socket.socket, hosted: Hosted, misbehaviour: Misbehaviour) -> None:
        self._connection = connection
        self._hosted = hosted
        self._misbehaviour = misbehaviour
        self._reader = FrameReader(FROM_TRAINER, max_frame_bytes=_ANY_LENGTH)
        self._group: EnvGroup | None = None
        self._env_ids: list[int] = []
        self._specs: EngineSpecs
        self._encoder: StepsEncoder
        self._n_steps = 0
        self._asked_ns = 0
        self._obey: dict[Kind, Callable[[Any], tuple[Kind, bytes]]] = {
            Kind.CONFIGURE: self._configure,
            Kind.RESET: self._reset,
            Kind.STEP: self._step,
            Kind.CALL: self._call,
        }

    def run(self, token: str) -> None:
        """Send hello, then answer requests until the trainer closes."""
        major = 2 if self._misbehaviour.is_at_start("other_major") else PROTOCOL[0]
        if self._misbehaviour.is_at_start("wrong_token"):
            token = "0" * len(token)
        if not self._misbehaviour.is_at_start("silent"):
            self._connection.sendall(pack(Kind.HELLO, 0, _hello(token, major)))
        while True:
            n_bytes = self._connection.recv_into(self._reader.space())
            self._reader.received(n_bytes)
            if not n_bytes:
                break
            while (frame := self._reader.next()) is not None:
                if frame.kind is Kind.CLOSE:
                    return
                if frame.kind is Kind.BEGIN:  # without an answer
                    group = self._configured
                    if group.on_demand is not None:
                        group.on_demand.add(read_begins(parse_json(frame.body).get("begins"), len(group.env_ids)))
                    continue
                self._answer(frame)

    def close(self) -> None:
        """Close the environments."""
        if self._group is not None:
            self._group.close()

    def _answer(self, frame: Frame) -> None:
        self._asked_ns = time.perf_counter_ns()
        if frame.kind is Kind.STEP:
            self._n_steps += 1
        try:
            kind, body = self._obey[frame.kind](frame.body)
            _check_length(kind, body)
        except BadFrame:
            raise  # a fault of the trainer, not of an environment
        except BaseException as error:  # SystemExit too, as in a worker process
            kind, body = Kind.ERROR, self._reported(error)
        answer = pack(kind, frame.ticket, body)
        if self._misbehaviour.strikes(frame.kind, self._n_steps):
            self._misbehaviour.send(self._connection, answer)
        else:
            self._connection.sendall(answer)

    def _configure(self, body: Any) -> tuple[Kind, bytes]:
        configure = read_configure(body)
        random.seed(configure.seed)
        np.random.seed(configure.seed % 2**32)
        factory = self._hosted.factory(configure)
        self._env_ids = [context.env_id for context in factory.contexts]
        group = factory()
        self._group = group
        said = specs_body(group.behavior_specs, group.max_agents, begins_on_demand=group.begins_on_demand)
        self._specs = read_specs(said)
        self._encoder = StepsEncoder(self._specs, group.env_ids)
        return Kind.SPECS, said

    def _reset(self, body: Any) -> tuple[Kind, bytes]:
        group = self._configured
        begins = parse_json(body).get("begins")
        if begins is not None:
            steps = group.reset_on_demand(read_begins(begins, len(group.env_ids)))
            return Kind.STEPS, self._encoder.encode(steps, busy_us=self._busy_us, after_reset=True)
        wanted = read_reset(body, len(group.env_ids))
        if wanted.arenas is not None and sorted(wanted.arenas) != list(range(len(group.env_ids))):
            raise UsageError("this engine resets all of its arenas or none.")
        order = range(len(wanted.seeds)) if wanted.arenas is None else wanted.arenas
        seeds = [seed for _, seed in sorted(zip(order, wanted.seeds, strict=True), key=lambda pair: pair[0])]
        steps = group.reset(seeds=seeds, options=wanted.options or None)
        return Kind.STEPS, self._encoder.encode(steps, busy_us=self._busy_us, after_reset=True)

    def _step(self, body: Any) -> tuple[Kind, bytes]:
        group = self._configured
        actions = read_step(self._specs, body, self._encoder.acting)
        steps = COMMANDS[CommandName.STEP](group, actions)
        return Kind.STEPS, self._encoder.encode(steps, busy_us=self._busy_us)

    def _call(self, body: Any) -> tuple[Kind, bytes]:
        group = self._configured
        return Kind.VALUE, dump_json({"values": plain(_carried_out(group, read_call(body, len(group.env_ids))))})

    @property
    def _configured(self) -> EnvGroup:
        if self._group is None:
            raise BadFrame("a request before configure, or after it has failed")
        return self._group

    @property
    def _busy_us(self) -> int:
        return (time.perf_counter_ns() - self._asked_ns) // 1000

    def _reported(self, error: BaseException) -> bytes:
        """Print the error as Godot prints it, and return the body of its error frame."""
        arena = self._arena_of(error)
        if isinstance(error, EnvRaised) and error.__cause__ is not None:  # the factory's error, wrapped by the library
            error = error.__cause__
        frames = traceback.extract_tb(error.__traceback__)
        last = frames[-1] if frames else None
        text = _text_of(error)
        message = f"{type(error).__qualname__}: {text}"
        script, line, function = (None, None, None) if last is None else (last.filename, last.lineno, last.name)
        with contextlib.suppress(OSError, ValueError):  # an environment may have closed it
            print(f"SCRIPT ERROR: {message}\n          at: {function} ({script}:{line})", file=sys.stderr)
            traceback.print_exception(type(error), error, error.__traceback__)
            sys.stderr.flush()
        report: dict[str, Any] = {"message": text, "script": script, "line": line, "function": function, "arena": arena}
        report["type"] = type(error).__qualname__
        report["traceback"] = "".join(traceback.format_exception(type(error), error, error.__traceback__))[
            -_MOST_TRACEBACK:
        ]
        if isinstance(error, SpecMismatch | SpecConflict):
            report["broken"] = [error.path, error.expected, error.got]
        return dump_json(report)

    def _arena_of(self, error: BaseException) -> int | None:
        """Return the arena whose code raised, or None."""
        env_id = None
        if self._group is not None:
            env_id, self._group.current_env_id = self._group.current_env_id, None
        elif isinstance(error, EnvRaised) and len(error.env_ids) == 1:
            env_id = error.env_ids[0]
        return None if env_id is None else self._env_ids.index(env_id)


def _check_length(kind: Kind, body: bytes) -> None:
    limit = limit_of(kind, _ANY_LENGTH)
    if len(body) > limit:
        raise UsageError(f"the answer has {len(body)} bytes, more than the limit of {limit}.")


def _hello(token: str, major: int) -> bytes:
    return dump_json(
        {
            "protocol": [major, PROTOCOL[1]],
            "token": token,
            "engine": "fake",
            "addon": "1.0.0",
            "ticks_per_second": TICKS_PER_SECOND,
        }
    )


def _carried_out(group: EnvGroup, call: Call) -> list[Any]:
    """Execute a call; return the value of each arena."""
    if call.what == "render":
        return group.render(call.arenas)
    if call.what == "get":
        return group.get_attr(str(call.name), call.arenas)
    if call.what == "set":
        group.set_attr(str(call.name), call.args, call.arenas)
        return [None] * len(call.arenas)
    return group.call(str(call.name), call.args, call.arenas, call.kwargs)


def _text_of(error: BaseException) -> str:
    try:
        text = str(error) or repr(error)
    except Exception as broken:  # a __str__ that raises must not hide the original error
        text = f"(its text cannot be shown: {type(broken).__name__})"
    return text.encode("utf-8", "backslashreplace").decode()


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run one engine until the trainer closes."""
    address, token = environ.get("ENVMANAGER_ADDRESS"), environ.get("ENVMANAGER_TOKEN", "")
    source = arguments[0] if arguments else environ.get("ENVMANAGER_FAKE_ENV")
    if not address or not source:
        sys.exit("usage: ENVMANAGER_ADDRESS=host:port ENVMANAGER_TOKEN=… python -m fake_engine ENV")
    host, _, port = address.rpartition(":")
    misbehaviour = Misbehaviour.from_environ(environ)
    stranger = _stranger(misbehaviour, (host, int(port)))
    connection = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    hosted = Hosted(source, json.loads(environ.get("ENVMANAGER_FAKE_CONTEXT", "{}")))
    engine = FakeEngine(connection, hosted, misbehaviour)
    try:
        engine.run(token)
    except ConnectionError:
        pass  # the trainer has ended
    finally:
        engine.close()
        connection.close()
        if stranger is not None:
            stranger.close()


def _stranger(misbehaviour: Misbehaviour, address: tuple[str, int]) -> socket.socket | None:
    """Open an unauthenticated connection before the engine's, if the mode is a stranger."""
    if misbehaviour.is_at_start("stranger") or misbehaviour.is_at_start("silent_stranger"):
        stranger = socket.create_connection(address, timeout=_CONNECT_S)
        if misbehaviour.mode == "stranger":
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return stranger
    return None


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
