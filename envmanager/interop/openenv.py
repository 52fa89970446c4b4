"""A server of a manager's environments by OpenEnv's protocol, for the trainers that speak it.

::

    a client ── ws://host:port/ws ──▶ a session ── reset ── pool.begin ──▶ an environment of the manager
                                                ── step ─── episode.step ▶
    POST /reset, /step ── an episode each, which ends with the answer
    POST /mcp ── tools of an MCP environment, in a session that has an id
    GET /health, /schema, /state, /metrics

One thread runs the event loop of the sessions and their pool.

The rule: an environment that crashes, hangs or raises ends the episode of its session, whose client receives an error
with a code of OpenEnv. The session goes on, and its next reset begins in a fresh environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import threading
import time
import uuid
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from envmanager.adapters.mcp import text_of
from envmanager.env_manager import EnvManager
from envmanager.errors import (
    BadAction,
    BadObservation,
    EnvManagerError,
    EnvRaised,
    LostEpisode,
    ManagerClosed,
    MissingExtra,
    UsageError,
)
from envmanager.importing import needed_by
from envmanager.interop.openenv_fields import action_of, as_json, fields_of, schemas_of
from envmanager.interop.openenv_tools import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    NO_METHOD,
    SERVER_ERROR,
    RpcError,
    answered,
    call_of,
    observed,
    parsed,
    tools_of,
    with_data,
)
from envmanager.kernel.pool import Episode, Pool
from envmanager.options import RestartPolicy
from envmanager.registry import make_manager
from envmanager.serving.server import cannot_listen, checked_token, is_own, names_of, shown_host
from envmanager.tasks import Task

with needed_by("a server by OpenEnv's protocol", extra="openenv"):
    from websockets.asyncio.server import ServerConnection, serve
    from websockets.exceptions import ConnectionClosed

if TYPE_CHECKING:
    from typing_extensions import Self

RESTARTS: Mapping[str, Any] = {"max_restarts": 1000, "within_s": 3600, "on_exception": "restart", "then": "drop"}
"""RestartPolicy of served environments: what one client does to its environment takes none from the others."""
_CONNECTIONS: Mapping[str, Any] = {
    "compression": None,  # it would take a third of a megabyte for each session
    "max_size": 16 << 20,  # as in servers of OpenEnv
    "open_timeout": None,  # a step by HTTP may take longer; connections that are silent are closed by _Connection
    "ping_timeout": 120,  # a trainer may be too busy to answer
    "close_timeout": 1,
    "backlog": 1024,  # trainers open all their sessions at once
    "server_header": "envmanager",
}
_OPEN_S = 10.0
"""Time that a connection has to send its request."""
_IDLE_S = 600.0
"""Time without a request after which a session of /mcp ends that no WebSocket is attached to."""
_LARGEST_HEAD_BYTES = 64 << 10
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,18})[ \t]*(?=\r\n|$)", re.IGNORECASE)
_TEXT, _JSON = "text/plain; charset=utf-8", "application/json"
_NEW_STATE: Mapping[str, Any] = {"episode_id": None, "step_count": 0}
_STATUSES = {"EXECUTION_ERROR": 500, "SESSION_ERROR": 503, "CAPACITY_REACHED": 503}
"""Statuses of HTTP by the code of an error. Other errors are the client's."""
_logger = logging.getLogger("envmanager")
_log = logging.getLogger("websockets.envmanager")
_log.setLevel(logging.CRITICAL)  # else each request that opens no WebSocket is an error with a traceback


def serve_env(config: Mapping[str, Any], env_factory: Any = None, **server: Any) -> EnvServer:
    """Make a manager as ``make_manager`` does, and an EnvServer for it with the other arguments.

    ``n_envs`` is the number of sessions. Environments that raise are replaced, unless ``restarts`` says otherwise, and
    infos are sent. All agents of a PettingZoo environment that is named are played by one client; see ``Together``.
    """
    given = config.get("restarts")
    own = {"max_restarts": given} if isinstance(given, int) else given or {}
    options = {"infos": True, **config}
    if config.get("kind") == "godot":
        options.setdefault("n_workers", config.get("n_envs", 1))  # arenas of one engine move together
    options["restarts"] = given if isinstance(given, RestartPolicy) else {**RESTARTS, **own}
    if isinstance(config.get("env"), str) and config.get("kind") not in ("godot", "replay"):
        options["wrappers"] = [*(config.get("wrappers") or ()), "envmanager.adapters.together:if_several"]
    manager = make_manager(options, env_factory)
    try:
        return EnvServer(manager, **server)
    except BaseException:
        manager.close()
        raise


class EnvServer:
    """A server of a manager's environments by OpenEnv's protocol, in a thread, until ``close``. A context manager."""

    def __init__(
        self,
        manager: EnvManager,
        port: int = 8000,
        host: str = "127.0.0.1",
        token: str | None = None,
        names: Iterable[str] = (),
    ) -> None:
        """Make the pool of ``manager``, and serve it. Raises UsageError if the server cannot listen.

        The environments begin on demand, and have one agent each; ``close`` closes the manager too. ``port``: 0 means a
        free one. ``host``: the address to listen on; ``"0.0.0.0"`` lets other machines in. ``token``: ASCII text that
        each request needs, as ``Authorization: Bearer …`` or as the first part of its path; if None, one is made by
        chance, and on a loopback address none is needed. ``names``: host names under which the server answers, beside
        those of this machine.
        """
        is_local = host in ("localhost", "127.0.0.1", "::1")
        self.token = checked_token(token) or (None if is_local else secrets.token_urlsafe(16))
        self.manager = manager
        self.n_sessions = self.n_refused = 0
        """Numbers of sessions that are open, and that were refused because as many were open as there may be."""
        self._sessions: dict[str, _Session] = {}
        """Sessions of /mcp, by id."""
        self._names = names_of(host) | {name.lower() for name in names}
        self._pool: Pool = manager.pool()
        self._watch = manager.watched()
        self._owner_pid = os.getpid()
        self._over: asyncio.Task[None]
        listening: Future[int] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(host, port, listening)), name="envmanager-serve-env", daemon=True
        )
        self._thread.start()
        self.port = listening.result()
        path = "" if self.token is None else f"/{quote(self.token, safe='')}"
        self.url = f"ws://{shown_host(host)}:{self.port}{path}"
        """Address for clients, which contains the token if there is one."""

    @property
    def max_sessions(self) -> int:
        """Number of environments that were not given up, and so of sessions at once."""
        return sum(len(entry.env_ids) for entry in self._watch.table.entries if not entry.is_given_up)

    def wait(self) -> None:
        """Return when the server has ended, because it or its manager was closed."""
        self._thread.join()

    def close(self) -> None:
        """End all sessions, the server and its manager. May be called repeatedly; does nothing in a forked process."""
        if os.getpid() != self._owner_pid:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._over.get_loop().call_soon_threadsafe(self._over.cancel)
        self._thread.join()
        self.manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: port {self.port}, {self.n_sessions} of {self.max_sessions} sessions>"

    async def _run(self, host: str, port: int, listening: Future[int]) -> None:
        try:
            self._over = asyncio.ensure_future(self._pool.until_over())  # with it, failures at rest are noticed too
            own = {"process_request": self._answer, "create_connection": _Connection, "logger": _log}
            server = await serve(self._serve, host, port, **own, **_CONNECTIONS)
        except Exception as error:
            listening.set_exception(cannot_listen(port, host, error))
            return
        async with server:
            listening.set_result(next(iter(server.sockets)).getsockname()[1])
            with contextlib.suppress(asyncio.CancelledError, ManagerClosed, UsageError):
                await self._over

    async def _answer(self, connection: Any, request: Any) -> Any:
        """Return the response to a request of HTTP, or None for one that may open a WebSocket."""
        prefix, _, name = urlsplit(request.path).path.rpartition("/")
        headers, method = request.headers, getattr(request, "method", "GET") if connection.posted is None else "POST"
        asked = method, name if self.token is not None or not prefix else ""
        given = unquote(prefix[1:]) or headers.get("Authorization", "").removeprefix("Bearer ")
        if not is_own(headers.get("Host", ""), self._names) or "Origin" in headers:
            # any web page could otherwise open a session, from a browser of this machine
            answer = 403, _TEXT, "This server answers neither under that name nor to web pages.\n"
        elif self.token is not None and not secrets.compare_digest(given.encode(), self.token.encode()):
            answer = 401, _TEXT, "The token is missing or wrong.\n"
        elif asked == ("GET", "ws"):
            return None
        elif asked in (("POST", "reset"), ("POST", "step")):
            answer = await self._answer_posted(connection, name)
        elif asked == ("POST", "mcp"):
            answer = 200, _JSON, await self._answer_rpc(connection)
        else:
            answer = self._page(asked[1] if method == "GET" else "", headers)
        status, content_type, text = answer
        response = connection.respond(status, text)
        del response.headers["Content-Type"]
        response.headers["Content-Type"] = content_type
        return response

    def _page(self, name: str, headers: Mapping[str, str]) -> tuple[int, str, str]:
        """Return status, type and text of what is no session."""
        if name == "health":
            status, said = (200, "healthy") if self.max_sessions else (503, "unhealthy")
            known = {"status": said, "active_sessions": self.n_sessions, "max_sessions": self.max_sessions}
            return status, _JSON, json.dumps(known)
        if name == "schema":
            return 200, _JSON, json.dumps(schemas_of(_spec_of(self.manager)))
        if name == "state":
            return 200, _JSON, json.dumps(_NEW_STATE)  # without a session, nothing has begun
        if name == "metrics":
            try:
                from envmanager.serving.prometheus import Collector
            except MissingExtra as error:
                return 501, _TEXT, f"{error}\n"
            self._watch.sample(time.perf_counter_ns())
            more = {"sessions": self.n_sessions, "sessions_max": self.max_sessions, "sessions_refused": self.n_refused}
            content_type, body = Collector(self._watch, more).exposed(headers.get("Accept", ""))
            return 200, content_type, body.decode()
        there_is = "GET /health, /schema, /state and /metrics, and POST /reset, /step and /mcp"
        return 404, _TEXT, f"Sessions are at /ws; and there is {there_is}.\n"

    async def _answer_posted(self, connection: Any, name: str) -> tuple[int, str, str]:
        """Return status, type and text of the answer to POST /reset or /step, which has an environment of its own."""
        text = self._refusal()
        if not text:
            posted = _Session(self.manager, self._pool).answer_posted(name, connection.posted)
            ended = _error("SESSION_ERROR", "The server has ended.")
            text = await self._until_ended(posted, connection.wait_closed(), asyncio.shield(self._over)) or ended
        answer = json.loads(text)
        if answer["type"] == "observation":
            return 200, _JSON, json.dumps(answer["data"])
        status = _STATUSES.get(answer["data"]["code"], 422)
        return status, _JSON, json.dumps({"detail": answer["data"]["message"]})

    async def _answer_rpc(self, connection: Any) -> str:
        """Return the answer to POST /mcp."""
        number = None
        try:
            method, params, number = parsed(connection.posted)
            session_id = str(params.get("session_id"))
            if method == "openenv/session/create":
                if self._refusal():
                    raise RpcError(SERVER_ERROR, f"Server at capacity: {self.n_sessions} sessions active")
                session_id, session = str(uuid.uuid4()), _Session(self.manager, self._pool)
                self._sessions[session_id] = session
                session.ending = asyncio.ensure_future(self._end_when_idle(session_id, session))
                self.n_sessions += 1
                return answered(number, {"session_id": session_id})
            if method not in ("openenv/session/close", "tools/list", "tools/call"):
                raise RpcError(NO_METHOD, f"Method not found: {method}")
            found = self._sessions.get(session_id)
            if found is None:
                text = f"Unknown session_id: {session_id}; openenv/session/create makes one"
                raise RpcError(INVALID_PARAMS, text)
            if method == "openenv/session/close":
                found.is_to_end = True
                await self._end_if_left(session_id, found)
                return answered(number, {"session_id": session_id, "closed": not found.is_attached})
        except RpcError as error:
            return answered(number, error=error)
        asked = found.answer_rpc(method, params, number)
        over = answered(number, error=RpcError(SERVER_ERROR, "The server has ended."))
        ends = connection.wait_closed(), asyncio.shield(self._over)
        return await self._until_ended(asked, *ends, counts=False) or over

    async def _end_when_idle(self, session_id: str, session: _Session) -> None:
        """End a session of /mcp once it has been idle for long."""
        while session.is_attached or time.monotonic() < session.used_at + _IDLE_S:
            await asyncio.sleep(max(1.0, session.used_at + _IDLE_S - time.monotonic()))
        session.is_to_end, session.ending = True, None
        await self._end_if_left(session_id, session)

    async def _end_if_left(self, session_id: str, session: _Session) -> None:
        """End a session of /mcp if it is to end and has no WebSocket."""
        if session.is_to_end and not session.is_attached and self._sessions.pop(session_id, None) is not None:
            self.n_sessions -= 1
            if session.ending is not None:
                session.ending.cancel()
            await session.leave()

    async def _serve(self, connection: Any) -> None:
        """Serve a session until its client or the server ends it. A step in flight is cancelled then."""
        asked = parse_qs(urlsplit(connection.request.path).query).get("session_id")
        session = self._sessions.get(asked[0]) if asked else None
        if asked and (session is None or session.is_attached):
            why = "is unknown" if session is None else "has a WebSocket already"
            await connection.send(_error("SESSION_ERROR", f"Session {asked[0]} {why}"))
        elif asked and session is not None:
            session.is_attached = True
            try:
                await self._until_ended(session.play(connection), connection.wait_closed(), counts=False)
            finally:
                session.is_attached, session.used_at = False, time.monotonic()
                await self._end_if_left(asked[0], session)
        elif refusal := self._refusal():
            await connection.send(refusal)
        else:
            await self._until_ended(_Session(self.manager, self._pool).play(connection), connection.wait_closed())

    def _refusal(self) -> str:
        """Return the error for a session for which there is no room, or an empty text."""
        limit = self.max_sessions
        if self.n_sessions < limit:
            return ""
        self.n_refused += 1
        text = f"Server at capacity: {self.n_sessions}/{limit} sessions active"
        return _error("CAPACITY_REACHED", text, active_sessions=self.n_sessions, max_sessions=limit)

    async def _until_ended(self, session: Coroutine[Any, Any, Any], *ends: Any, counts: bool = True) -> Any:
        """Return the result of a session, or None if it failed, or if one of the awaitables ``ends`` ended it.

        ``counts``: whether it is a session more.
        """
        self.n_sessions += counts
        ending = [asyncio.ensure_future(each) for each in (session, *ends)]
        try:
            await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in ending:
                each.cancel()
            (result, *_) = await asyncio.gather(*ending, return_exceptions=True)
            self.n_sessions -= counts
            if isinstance(result, Exception) and not isinstance(result, ConnectionClosed):
                _logger.error("a session of %r failed", self, exc_info=result)
        return None if isinstance(result, BaseException) else result


class _Connection(ServerConnection):  # type: ignore[misc]
    """A connection that may begin with a POST, whose body ``websockets`` refuses: it is taken out of the request."""

    posted: bytes | None = None
    """Body of a POST. The request itself is passed on as a GET without a body."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._received: bytearray | None = bytearray()
        self.loop.call_later(_OPEN_S, lambda: transport.abort() if self.request is None else None)

    def data_received(self, data: bytes) -> None:
        if self._received is not None:
            received = self._received
            received += data
            if received.startswith(b"POST "[: len(received)]):
                head, end, body = received.partition(b"\r\n\r\n")
                length = _LENGTH.search(head)
                n_bytes = int(length[1]) if length else 0
                if max(len(head) - _LARGEST_HEAD_BYTES, n_bytes - _CONNECTIONS["max_size"]) > 0:
                    self.transport.abort()
                    return
                if not end or len(body) < n_bytes:
                    return
                self.posted, data = bytes(body[:n_bytes]), b"GET" + _LENGTH.sub(b"", head)[4:] + end
            else:
                data = bytes(received)
            self._received = None
        super().data_received(data)


class _Refused(Exception):
    """Error of a message that is answered without the environment. ``args``: OpenEnv's code, and a text."""


class _Session:
    """A session of a client: one episode after the other."""

    def __init__(self, manager: EnvManager, pool: Pool) -> None:
        self._manager, self._pool = manager, pool
        self._episode: Episode | None = None
        self._state = dict(_NEW_STATE)
        self._tools: list[Any] | None = None
        """The tools of an MCP environment, once an episode has begun."""
        self.is_attached = self.is_to_end = False
        """Whether a WebSocket plays a session of /mcp, and whether the session is to end when none does."""
        self.used_at = time.monotonic()
        self.ending: asyncio.Future[None] | None = None

    async def play(self, connection: Any) -> None:
        """Answer the messages of a connection."""
        try:
            async for message in connection:
                answer = await self._answer(message)
                if answer is None:
                    break
                await connection.send(answer)
        finally:
            await self.leave()

    async def answer_posted(self, name: str, body: bytes) -> str:
        """Return the answer to a request of HTTP: to a reset, or to the first step after one without arguments."""
        try:
            data = json.loads(body or b"{}")
            if name == "step":
                begun = await self._answer('{"type": "reset"}')
                if self._episode is None:
                    return str(begun)
                data = data.get("action") if isinstance(data, dict) else None
            return str(await self._answer(json.dumps({"type": name, "data": data})))
        except (ValueError, RecursionError) as error:
            return _error("INVALID_JSON", f"Invalid JSON: {error}")
        finally:
            await self.leave()

    async def _answer(self, message: str | bytes) -> str | None:
        """Return the answer to a message, or None if it ends the session."""
        try:
            try:
                asked = json.loads(message)
            except (ValueError, RecursionError) as error:
                raise _Refused("INVALID_JSON", f"Invalid JSON: {error}") from error
            kind, data = (asked.get("type", ""), asked.get("data", {})) if isinstance(asked, dict) else ("", {})
            if kind == "close":
                return None
            if kind == "state":
                return as_json({"type": "state", "data": self._state})
            if kind not in ("reset", "step"):
                raise _Refused("UNKNOWN_TYPE", f"Unknown message type: {kind}")
            if not isinstance(data, dict):
                raise _Refused("VALIDATION_ERROR", f"Invalid message: the data of {kind} is no mapping")
            obs = await (self._reset(data) if kind == "reset" else self._step(data))
            return as_json({"type": "observation", "data": obs})
        except _Refused as refused:
            return _error(*refused.args)
        except BadAction as error:
            return _error("VALIDATION_ERROR", str(error))
        except LostEpisode as lost:
            is_own = isinstance(lost.cause, EnvRaised | BadObservation)
            why = getattr(lost.cause, "headline", "") or str(lost.cause)
            text = f"{why.rstrip('.')}. The episode is lost; reset begins one in a fresh environment."
            return _error("EXECUTION_ERROR" if is_own else "SESSION_ERROR", text)
        except EnvManagerError as error:
            return _error("SESSION_ERROR", str(error))
        except (TypeError, ValueError) as error:
            return _error("EXECUTION_ERROR", str(error))

    async def _reset(self, data: dict[str, Any]) -> dict[str, Any]:
        """Begin an episode. ``data``: a seed, an id for the state, and options for the environment's reset."""
        await self.leave()
        options = dict(data)
        episode_id, seed = options.pop("episode_id", None), options.pop("seed", None)
        try:
            task = Task(seed=seed, options=options or None)
        except UsageError as error:
            raise _Refused("VALIDATION_ERROR", str(error)) from error
        self._state = {"episode_id": episode_id or str(uuid.uuid4()), "step_count": 0}
        episode = self._pool.begin(task)
        await episode.__aenter__()
        self._episode, self._tools = episode, tools_of(episode.obs)
        return _observation(episode, None)

    async def _step(self, data: dict[str, Any]) -> dict[str, Any]:
        episode = self._episode
        if episode is None or episode.is_over:
            raise _Refused("EXECUTION_ERROR", "There is no episode, or it is over: reset begins one.")
        call = None if self._tools is None else call_of(data)
        if self._tools is not None and data.get("type") == "list_tools":
            return {"observation": {"tools": self._tools}, "reward": None, "done": False}
        action = action_of(data, _spec_of(self._manager)) if call is None else call
        obs, reward, _, truncated, _ = await episode.step(action)
        self._state["step_count"] += 1
        told = {**_observation(episode, reward), **({"truncated": True} if truncated else {})}
        return told if call is None else {**told, "observation": observed(call["name"], obs)}

    async def answer_rpc(self, method: str, params: Mapping[str, Any], number: Any) -> str:
        """Return the answer to a request of JSON-RPC about the tools."""
        self.used_at = time.monotonic()
        try:
            if self._episode is None:
                await self._reset({})
            if self._tools is None or self._episode is None:
                raise RpcError(INTERNAL_ERROR, "Environment does not support MCP")
            if method == "tools/list":
                return answered(number, {"tools": self._tools})
            if not isinstance(params.get("name"), str):
                raise RpcError(INVALID_PARAMS, "Missing 'name' in params")
            await self._step({"name": params["name"], "arguments": params.get("arguments") or {}})
            if self._episode.obs.get("isError"):
                raise RpcError(INTERNAL_ERROR, text_of(self._episode.obs))
            return answered(number, with_data(self._episode.obs))
        except RpcError as error:
            return answered(number, error=error)
        except _Refused as refused:
            return answered(number, error=RpcError(SERVER_ERROR, refused.args[1]))
        except (EnvManagerError, TypeError, ValueError) as error:
            return answered(number, error=RpcError(INTERNAL_ERROR, str(error)))

    async def leave(self) -> None:
        """End the episode, whose environment is free then."""
        episode, self._episode = self._episode, None
        if episode is not None:
            await episode.__aexit__(None, None, None)


def _observation(episode: Episode, reward: float | None) -> dict[str, Any]:
    data = {"observation": fields_of(episode.obs), "reward": reward, "done": episode.is_over}
    return {**data, "metadata": episode.info} if episode.info else data


def _error(code: str, text: str, **more: Any) -> str:
    return json.dumps({"type": "error", "data": {"message": text, "code": code, **more}})


def _spec_of(manager: EnvManager) -> Any:
    """Return the spec of the environments' one behavior, or None if it is not known yet."""
    return next(iter(manager.behavior_specs.values()), None)
