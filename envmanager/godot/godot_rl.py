"""The link and the host for engines that run unmodified godot_rl_agents games, through that library's own protocol.

::

    game, its Sync node ── env_info, reset, step, call ──▶ trainer         u32 length | JSON
                        ◀── handshake, env_info, reset, action, call, close ──

An engine is one environment. The AIControllers in training mode are its agents, and their policy names are its
behaviors. The protocol has no tickets, so answers are matched to commands by their order. The protocol has no token, so
the first program that connects to an engine's port is accepted as the engine.
"""

from __future__ import annotations

import json
import logging
import math
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.adapters.rows import real_number
from envmanager.data.casting import cast_without_loss
from envmanager.data.specs import SpecMismatch, describe_value
from envmanager.data.steps import AgentSteps, CommandName, EnvironmentResponse, StartReport, only_agents
from envmanager.data.trees import Tree, leaves_like, take_rows
from envmanager.errors import UsageError
from envmanager.godot.channel import EngineChannel
from envmanager.godot.engine_host import EngineHost
from envmanager.godot.engine_link import EngineLink, EnginePlan
from envmanager.godot.frames import PROTOCOL, BadFrame, Frame, FrameReader, Kind, dump_json
from envmanager.godot.lobby import Arrival, Lobby
from envmanager.godot.messages import MAX_AGENTS, ArrayLayout, EngineError, EngineSpecs, Hello, listed, read_specs
from envmanager.hosts.wire import Message
from envmanager.options import ResetConfig
from envmanager.processes.starting import Process

_HANDSHAKE = {"type": "handshake", "major_version": "0", "minor_version": "7"}  # the plugin only warns if it differs
_ONE_POLICY = "shared_policy"  # the plugin's default; plugins before 0.7 send no names
_ANSWERS = {CommandName.START: "env_info"}  # type of the answer, if it is not the command's name
_MISFITS = (LookupError, TypeError, ValueError, OverflowError)  # raised for unexpected values in JSON
_CANNOT = "an engine with a game of godot_rl_agents"
_logger = logging.getLogger("envmanager")


class MessageReader(FrameReader):
    """A parser of godot_rl_agents messages. The header of such a message contains only the length of the body."""

    header = struct.Struct("<I")

    def _read_header(self, length: int, *_: int) -> tuple[int, Kind, int]:
        limit = self._limits[Kind.STEPS]
        if length > limit:
            raise BadFrame(f"a message of {length} bytes, where {limit} are the most (engine.max_frame_mb)")
        return length, Kind.STEPS, 0


class GodotRLLobby(Lobby):
    """A listener that accepts the first connection as the engine's, because the plugin sends no token."""

    how_to_play = "play it in the editor; its port is 11008 unless the project's Main Run Args have another --port=N"

    def look(self) -> Arrival | None:
        super().look()
        for fd in self._pending:
            self._forget(fd)
            return Arrival(fd, Hello(PROTOCOL, token=""))
        return None


class GodotRLChannel(EngineChannel):
    """An EngineChannel for messages without tickets, which matches answers to commands by their order."""

    reader_class = MessageReader

    def __init__(self, *, max_frame_bytes: int) -> None:
        super().__init__(max_frame_bytes=max_frame_bytes)
        self.asked: deque[int] = deque()  # tickets of the unanswered commands, oldest first

    def _ticket_of(self, frame: Frame) -> int:
        if not self.asked:
            raise BadFrame(f"a message of {len(frame.body)} bytes that answers no command")
        return self.asked.popleft()


@attrs.frozen(eq=False)
class Agents:
    """The agents of a game. ``rows`` maps a behavior to the indices of its agents in the game's list of agents."""

    n: int
    specs: EngineSpecs
    rows: Mapping[str, list[int]]

    @classmethod
    def of(cls, env_info: dict[str, Any]) -> Agents:
        """Build Agents from the ``env_info`` message of a game. Raises BadFrame if the message is invalid."""
        try:
            n = min(int(env_info["n_agents"]), MAX_AGENTS + 1)  # read_specs refuses more than MAX_AGENTS
            names = env_info.get("agent_policy_names") or [_ONE_POLICY] * n
            # Plugins before 0.7 send the spaces of one agent, which are those of all.
            spaces = [env_info[key] for key in ("observation_space", "action_space")]
            observations, actions = (each if isinstance(each, list) else [each] * n for each in spaces)
            rows: dict[str, list[int]] = {}
            described = []
            for index in range(n):
                rows.setdefault(names[index], []).append(index)
                first = rows[names[index]][0]
                if (observations[index], actions[index]) != (observations[first], actions[first]):
                    raise BadFrame(
                        f"agents {first} and {index} of policy {names[index]!r} with different spaces: give agents "
                        "with other spaces another policy_name"
                    )
                if first == index:
                    seen = [_observation(*each) for each in observations[index].items()]
                    done = [_action(*each) for each in actions[index].items()]
                    described.append({"name": names[index], "observations": seen, "actions": done})
            most = {name: len(own) for name, own in rows.items()}
            return cls(n, read_specs(dump_json({"behaviors": described, "max_agents": most})), rows)
        except (*_MISFITS, AttributeError) as error:
            raise BadFrame(f"an env_info that cannot be read: {type(error).__name__}: {error}") from error

    def steps(self, message: dict[str, Any], env_id: int, *, infos: bool) -> dict[str, AgentSteps]:
        """Return the steps of each behavior in ``message``, the answer to a reset or an action.

        Raises BadFrame for a malformed answer, and SpecMismatch for an observation that is missing or invalid.
        The answer has one observation per agent, which is both ``final_obs`` and the next ``obs`` if an episode ends.
        """
        is_step = message["type"] == "step"
        seen = self._listed(message, "obs")
        try:
            reward = np.array(self._listed(message, "reward") if is_step else [0.0] * self.n, np.float64)
            ended = np.array(self._listed(message, "done") if is_step else [False] * self.n, np.bool_)
            ended, numbers = ended.reshape(self.n), reward.reshape(self.n).tolist()
        except _MISFITS as error:
            raise BadFrame(f"rewards or dones that are no numbers: {error}") from error
        reward = np.array([real_number(number, "reward") for number in numbers], np.float32)
        given = self._listed(message, "info") if infos and "info" in message else [{}] * self.n
        first_id = only_agents([env_id])[0]
        found = {}
        for behavior in self.specs.behaviors:
            own = self.rows[behavior.name]
            arrays = {layout.name: _stacked(layout, seen, own) for layout in behavior.observations}
            obs: Tree = arrays if len(arrays) > 1 else next(iter(arrays.values()))
            own_ended = ended[own]
            n_ended = int(np.count_nonzero(own_ended))
            found[behavior.name] = AgentSteps(
                first_id + np.array(own, np.int64),
                obs,
                reward[own],
                own_ended,
                np.zeros(len(own), np.bool_),
                take_rows(obs, np.flatnonzero(own_ended)) if n_ended else None,
                info=[given[index] if isinstance(given[index], dict) else {} for index in own] if infos else None,
                reset_info=[{} for _ in range(n_ended)] if infos and n_ended else None,
            )
        return found

    def _listed(self, message: dict[str, Any], key: str) -> list[Any]:
        return listed(message.get(key), self.n, f"a message whose {key!r}")

    def actions(self, given: Mapping[str, Tree]) -> list[dict[str, Any]]:
        """Convert actions by behavior to a list with one dict of actions per agent, in the game's order of agents."""
        found: list[dict[str, Any]] = [{} for _ in range(self.n)]
        for behavior in self.specs.behaviors:
            trees = leaves_like(behavior.spec.action, given[behavior.name])
            for layout, leaf in zip(behavior.actions, trees, strict=True):
                for index, value in zip(self.rows[behavior.name], np.asarray(leaf).tolist(), strict=True):
                    found[index][layout.name] = value
        return found


def _observation(name: str, space: dict[str, Any]) -> dict[str, Any]:
    """Convert an observation space to a spec for ``read_specs``. "2d" in the name means an image, as in the plugin."""
    if space["space"] == "discrete":
        return {"name": name, "shape": [], "dtype": "int64", "low": 0, "high": space["size"] - 1}
    if space["space"] != "box":
        raise ValueError(f"observation {name!r} has the space {space['space']!r}, which is neither box nor discrete")
    if "2d" in name:
        return {"name": name, "shape": space["size"], "dtype": "uint8", "low": 0, "high": 255}
    bounds: dict[str, Any] = {key: space[key] for key in ("low", "high") if math.isfinite(space.get(key, math.inf))}
    return {"name": name, "shape": space["size"], "dtype": "float32", **bounds}


def _action(name: str, space: dict[str, Any]) -> dict[str, Any]:
    if space["action_type"] == "discrete":
        return {"name": name, "shape": [], "dtype": "int64", "low": 0, "high": space["size"] - 1}
    if space["action_type"] != "continuous":
        raise ValueError(f"action {name!r} is {space['action_type']!r}, which is neither continuous nor discrete")
    return {"name": name, "shape": [space["size"]], "dtype": "float32", "low": -1, "high": 1}


def _stacked(layout: ArrayLayout, seen: Sequence[Any], rows: Sequence[int]) -> np.ndarray:
    """Stack observation ``layout`` of agents at indices ``rows`` in an array. Raises SpecMismatch for a bad value."""
    try:
        return _array(layout, [seen[index][layout.name] for index in rows]).reshape(len(rows), *layout.shape)
    except _MISFITS:
        for index in rows:
            value = seen[index].get(layout.name) if isinstance(seen[index], dict) else None
            try:
                _array(layout, [value]).reshape(layout.shape)
            except _MISFITS as error:
                expected = f"{layout.dtype}{list(layout.shape)}"
                got = f"{len(value)} values ({error})" if isinstance(value, list) else describe_value(value)
                raise SpecMismatch(f"obs[{layout.name!r}] of agent {index}", expected, got) from error
        raise


def _array(layout: ArrayLayout, values: Sequence[Any]) -> np.ndarray:
    if layout.dtype == np.uint8:
        return np.array([np.frombuffer(bytes.fromhex(value), np.uint8) for value in values])
    if len({len(value) for value in values if isinstance(value, list)}) > 1:  # NumPy below 1.24 only warns
        raise ValueError("lists of different lengths")
    array = cast_without_loss(np.array(values), layout.dtype)
    if array is None:
        raise ValueError(f"not all are numbers that fit {layout.dtype}")
    return array


class GodotRLLink(EngineLink):
    """An EngineLink for a godot_rl_agents game. The engine receives its port and seed on the command line."""

    channel_class = GodotRLChannel
    lobby_class = GodotRLLobby
    channel: GodotRLChannel
    _agents = Agents(0, EngineSpecs((), {}), {})  # agents of the game; empty until the engine has started

    def launch(self, plan: EnginePlan, lobby: Lobby) -> Process:
        port = lobby.address.rpartition(":")[2]
        command = [*plan.command, f"--port={port}", f"--env_seed={plan.seed}"]
        return self.execute(attrs.evolve(plan, command=command))

    def encode(self, ticket: int, command: CommandName, payload: Any) -> bytes:
        messages: list[dict[str, Any]] = [{"type": _ANSWERS.get(command, str(command))}]
        if command is CommandName.START:
            messages.insert(0, _HANDSHAKE)
        elif command is CommandName.STEP:
            messages = [{"type": "action", "action": self._agents.actions(payload)}]
        elif command is CommandName.CALL:
            messages[0]["method"], args, _, kwargs = payload
            if args or kwargs:
                raise UsageError(
                    f"call({payload[0]!r}) with arguments is not possible in {_CANNOT}: name the method alone."
                )
        elif command not in (CommandName.RESET, CommandName.CLOSE):
            raise UsageError(f"{command}() is not possible in {_CANNOT}: its protocol has only call(method).")
        try:
            bodies = [dump_json(message) for message in messages]
        except ValueError as error:
            raise UsageError(f"an action cannot be sent to {_CANNOT}: {error}.") from error
        if command not in (CommandName.START, CommandName.CLOSE) and not self.channel.asked:
            self.channel.pump()  # refuses an answer too many, which would be taken for the answer to this command
        if command is not CommandName.CLOSE:
            self.channel.asked.append(ticket)
        return b"".join(MessageReader.header.pack(len(body)) + body for body in bodies)

    def _decoded(self, message: Message, asked: CommandName) -> EnvironmentResponse:
        try:
            answer = json.loads(str(message.data, "utf-8"))
        except (ValueError, RecursionError) as error:
            raise BadFrame(f"a message that is no JSON in UTF-8: {error}") from None
        kind = answer.get("type") if isinstance(answer, dict) else describe_value(answer)
        if kind != _ANSWERS.get(asked, str(asked)):
            raise BadFrame(f"a message of type {kind!r} in answer to {asked}")
        if asked is CommandName.START:
            self._agents = Agents.of(answer)
            specs = self._agents.specs
            report = StartReport(specs.behavior_specs, specs.max_agents, partial_actions=False)
            return EnvironmentResponse(asked, self.worker_id, report)
        if asked is CommandName.CALL:
            return EnvironmentResponse(asked, self.worker_id, [answer.get("returns")])
        try:
            steps = self._agents.steps(answer, self.env_ids[0], infos=self._plan.options.infos)
        except SpecMismatch as mismatch:
            self._of_null = EngineError(str(mismatch))  # an error that a script has printed is returned instead
            return self._mismatched(self.env_ids, mismatch, asked)
        return self._stepped(self._agents.specs, steps, asked)

    def output_tail(self) -> str:
        output = super().output_tail()
        if self.channel.hello is not None or self._plan.options.engine.attach:
            return output
        return f"the game has not connected: has its scene a Sync node, and agents to train?\n{output}"


class GodotRLHost(EngineHost):
    """A host of engines that run a godot_rl_agents game. Each engine is one environment."""

    link_class = GodotRLLink
    _has_warned = False

    def check_can_travel(self, payload: Any) -> None:
        super().check_can_travel(payload)
        if not isinstance(payload, list):
            config = ResetConfig.of(payload)
            if config.options:
                raise UsageError(
                    f"reset options cannot be sent to {_CANNOT}: what a game reads from its command line can be set "
                    "by engine.parameters."
                )
            if config.seed not in (None, self.options.seed) and not self._has_warned:
                self._has_warned = True
                _logger.warning(
                    "the seed of a reset does not reach games of godot_rl_agents: their engines are seeded once, when "
                    "they start, from the manager's seed"
                )
