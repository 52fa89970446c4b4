"""Adapter for OpenEnv: environments in sessions on servers, reached by JSON messages over WebSockets.

::

    OpenEnv (a factory) ── a session each ──▶ OpenEnvSession ── one connection ──▶ ws://host:port/ws
                                               reset, step ──▶ {"type": "step", "data": …}
                                                            ◀── {"type": "observation", "data": …}

The rule: a session is one connection. A connection that was lost, or whose answer was not awaited, is never used or
opened again: the server makes a new environment for a new connection, and a late answer would be taken for the next.
Nor is one used on which an answer has come to no request, such as a second answer to a step.
Nothing here imports ``openenv``.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

import attrs
import numpy as np

from envmanager.adapters.rows import finite_number, flag
from envmanager.data.specs import describe_value
from envmanager.environment import EnvContext
from envmanager.errors import EnvManagerError, ServerFull, UsageError
from envmanager.importing import needed_by

_logger = logging.getLogger("envmanager")
_LARGEST_MESSAGE_BYTES = 100 << 20
"""Size above which a message of a server ends its session, as in OpenEnv's own client. Screenshots are large."""
_CLOSE_S = 5.0
"""Time that a server has to end a session on request."""
_BYE_S = 1.0
"""Time that a connection has to end once it has failed, as when a ping was not answered."""
_REFUSED_WITHIN_S = 2.0
"""Time in which a full server refuses a session. One that takes longer is making an environment."""
_HEALTH_S = 10.0
"""Time that a server has to say how many sessions it has."""
_SCHEMES = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_FULL = "CAPACITY_REACHED"
_LAST = ("FACTORY_ERROR", "SESSION_ERROR")
"""Codes of errors after which a server ends the session."""
_MAY_PASS = (408, 425, 429, 500, 502, 503, 504)
"""Statuses of HTTP that a server or a proxy before it sends while the server starts or has too much to do."""

Result = tuple[Any, float, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated, info."""


class OpenEnvError(EnvManagerError):
    """Error raised when a server reports one: its environment raised, say. ``code`` is the server's, such as
    ``"EXECUTION_ERROR"``, or ``""`` if the server violated the protocol, which ended the session.
    """

    def __init__(self, text: str, *, code: str = "") -> None:
        super().__init__(text)
        self.code = code


class OpenEnv:
    """A factory of sessions on OpenEnv servers, among which environments are spread by env_id."""

    def __init__(self, urls: str | Sequence[str]) -> None:
        """Take the addresses of servers, such as ``ws://localhost:8000``. Raises UsageError, and MissingExtra."""
        with needed_by("env: {openenv: …}", extra="openenv"):
            importlib.import_module("websockets")
        listed = [urls] if isinstance(urls, str) else urls
        if not isinstance(listed, list | tuple) or not listed:
            raise UsageError(f"env: {{openenv: …}} is an address or a list of them, not {describe_value(urls)}.")
        self._servers = [_Server(url) for url in listed]

    def __call__(
        self,
        context: EnvContext,
        *,
        encode: Callable[[Any], Any] | None = None,
        decode: Callable[[dict[str, Any]], Result] | None = None,
        headers: Mapping[str, str] | None = None,
        ping_s: float | None = 20.0,
    ) -> OpenEnvSession:
        """Return a session, which connects in its first reset.

        ``encode`` turns an action into JSON's types; by default it is a mapping of the fields of the server's action
        class, or an object with ``model_dump``. ``decode`` turns ``{"observation": …, "reward": …, "done": …}`` into
        observation, reward, terminated, truncated and info; it is also called for a reset. ``headers`` are sent with
        the request for a connection, such as a token. A server that leaves a ping unanswered for ``ping_s`` is gone.
        """
        server = self._servers[context.env_id % len(self._servers)]
        server.env_ids.add(context.env_id)
        return OpenEnvSession(server, context.env_id, encode or _encoded, decode or _decoded, headers, ping_s)

    def n_sessions(self, headers: Mapping[str, str] | None = None) -> int:
        """Return how many environments find a session: on each server as many as the one with the fewest has.

        Raises UsageError for a server that does not respond, or does not say how many sessions it has.
        """
        return len(self._servers) * min(server.n_sessions(headers) for server in self._servers)


class _Server:
    """A server, as far as all of its sessions need to know it."""

    def __init__(self, url: str) -> None:
        parts = SplitResult("", "", "", "", "")
        with contextlib.suppress(ValueError):  # of a port that is no number, or too large
            if isinstance(url, str) and urlsplit(url).port != 0:
                parts = urlsplit(url)
        if parts.scheme not in _SCHEMES or not parts.hostname:
            raise UsageError(f"{url!r} is no address of an OpenEnv server, such as ws://localhost:8000.")
        path = parts.path.rstrip("/")
        path = path if path.endswith("/ws") else f"{path}/ws"
        self._url = parts._replace(scheme=_SCHEMES[parts.scheme], path=path).geturl()
        self._is_local = parts.hostname in _LOOPBACK
        self.shown = f"{_SCHEMES[parts.scheme]}://{parts.netloc.rpartition('@')[2]}"
        """Address without a password or a token, for messages."""
        self.env_ids: set[int] = set()
        """Ids of the environments that have had a session here."""
        self._begun: set[int] | None = set()
        """Ids of those that have begun an episode; None once it was found out whether the server has room for more."""

    def n_sessions(self, headers: Mapping[str, str] | None) -> int:
        import urllib.request  # which on macOS asks the system for its proxies

        url = f"http{self._url.removeprefix('ws').removesuffix('/ws')}/health"
        opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if self._is_local else []))
        try:
            with opener.open(urllib.request.Request(url, headers=dict(headers or {})), timeout=_HEALTH_S) as answer:
                told = json.load(answer)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise UsageError(
                f'n_envs="auto": the OpenEnv server {self.shown} did not say how many sessions it has ({error}). Start '
                "it first, or give a number."
            ) from error
        n_sessions = told.get("max_sessions") if isinstance(told, dict) else None
        if not isinstance(n_sessions, int) or n_sessions < 1:
            raise UsageError(
                f'n_envs="auto": the OpenEnv server {self.shown} does not say how many sessions it has; servers of '
                "OpenEnv itself do not. Give a number, less than its max_concurrent_envs."
            )
        return n_sessions

    async def connect(self, headers: Mapping[str, str] | None, ping_s: float | None) -> Any:
        """Return a new connection. Raises ConnectionError if there is none to be had now, OpenEnvError if never."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidHandshake, InvalidStatus

        try:
            return await connect(
                self._url,
                additional_headers=headers,
                compression=None,  # it would take a third of a megabyte for each session
                max_size=_LARGEST_MESSAGE_BYTES,
                ping_interval=ping_s,
                ping_timeout=ping_s,
                close_timeout=_BYE_S,
                **({"proxy": None} if self._is_local else {}),
            )
        except (OSError, asyncio.TimeoutError, InvalidHandshake) as error:
            if isinstance(error, InvalidStatus) and error.response.status_code not in _MAY_PASS:
                raise OpenEnvError(
                    f"{self.shown} refused a session with HTTP {error.response.status_code}: is there an OpenEnv "
                    "server, and does it ask for headers?"
                ) from error
            said = f"{type(error).__name__}: {error}".rstrip(": ")
            raise ConnectionError(f"there is no connection to the OpenEnv server {self.shown}: {said}") from error

    async def begun(self, env_id: int, headers: Mapping[str, str] | None) -> None:
        """Take note that an environment has begun an episode. Once all have, find out whether there is room for more.

        A server says how many sessions it has only when it refuses one, so one more is asked for, and ended at once.
        """
        if self._begun is None:
            return
        self._begun.add(env_id)
        if self._begun < self.env_ids:
            return
        self._begun = None
        from websockets.exceptions import ConnectionClosed

        answer = ""
        with contextlib.suppress(ConnectionError, OpenEnvError):  # the sessions themselves say that
            connection = await self.connect(headers, None)
            try:
                with contextlib.suppress(ConnectionClosed):  # it says why before it closes
                    await connection.send('{"type": "close"}')
                with contextlib.suppress(ConnectionClosed, asyncio.TimeoutError):
                    answer = str(await asyncio.wait_for(connection.recv(), _REFUSED_WITHIN_S))
            finally:
                connection.transport.abort()
        if f'"{_FULL}"' in answer:
            _logger.warning(
                "The OpenEnv server %s has no session to spare for %s environments: one that is to be replaced has to "
                "wait until the server has ended its session, for ever if that hangs. Start the server with a larger "
                "max_concurrent_envs.",
                self.shown,
                len(self.env_ids),
            )


@attrs.define(eq=False, slots=False)
class OpenEnvSession:
    """An environment in a session of an OpenEnv server. Its methods are coroutines; one of them runs at a time."""

    _server: _Server
    _env_id: int
    _encode: Callable[[Any], Any]
    _decode: Callable[[dict[str, Any]], Result]
    _headers: Mapping[str, str] | None
    _ping_s: float | None
    _connection: Any = attrs.field(default=None, init=False)
    _has_begun: bool = attrs.field(default=False, init=False)
    _end: str = attrs.field(default="", init=False)
    """Reason why the session has ended for good, if it has."""

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode with ``options`` and the seed, which the server passes to its environment by name.

        Raises ConnectionError if there is no connection, or none any more; ServerFull if all sessions are taken; and
        OpenEnvError for an error that the server reports.
        """
        if self._connection is None and not self._end:
            self._connection = await self._server.connect(self._headers, self._ping_s)
        data = {**({} if seed is None else {"seed": seed}), **(options or {})}
        obs, _, _, _, info = self._decode(await self._ask("reset", data))
        self._has_begun = True
        await self._server.begun(self._env_id, self._headers)
        return obs, info

    async def step(self, action: Any) -> Result:
        """Take a step, and return its result. Raises the errors of ``reset``."""
        return self._decode(await self._ask("step", self._encode(action)))

    async def close(self) -> None:
        """End the session, and wait until the server has ended its own, so that another can have its place."""
        connection, self._connection = self._connection, None
        self._end = self._end or "it was closed"
        if connection is None:
            return
        from websockets.exceptions import ConnectionClosed

        try:
            with contextlib.suppress(ConnectionClosed, asyncio.TimeoutError):
                await connection.send('{"type": "close"}')
                await asyncio.wait_for(connection.wait_closed(), _CLOSE_S)
        finally:
            connection.transport.abort()

    async def _ask(self, kind: str, data: Any) -> dict[str, Any]:
        """Send a request, and return the ``data`` of its answer. If the answer is not awaited, end the session."""
        from websockets.exceptions import ConnectionClosed

        connection, what = self._connection, f"the OpenEnv server {self._server.shown}"
        if connection is None:
            raise ConnectionError(f"there is no session on {what}: {self._end or 'reset() makes one'}")
        message = json.dumps({"type": kind, "data": data}, default=json_form)
        reading = asyncio.ensure_future(connection.recv())
        try:
            await asyncio.sleep(0)
            is_early = reading.done()  # what has come before the request answers none
            if not is_early:
                with contextlib.suppress(ConnectionClosed):  # a server says why before it closes
                    await connection.send(message)
            text = await reading
        except ConnectionClosed as error:
            self._abandon(connection, f"it ended before {kind} was answered ({error})")
            raise ConnectionError(f"the session on {what} ended before {kind} was answered: {error}") from error
        except BaseException:
            reading.cancel()
            self._abandon(connection, f"{kind} was cancelled, and its answer would be taken for the next")
            raise
        try:
            answer = json.loads(text)
            answered, got = answer["type"], answer["data"]
            if answered not in ("observation", "error") or not isinstance(got, dict):
                raise ValueError(answered)
        except (ValueError, KeyError, TypeError) as error:
            self._abandon(connection, f"{kind} was answered by what the protocol does not allow")
            raise OpenEnvError(f"{what} answered {kind} by what is no observation: {text[:200]!r}") from error
        code, said = str(got.get("code", "")), str(got.get("message", "it says no more"))
        if is_early and code not in (_FULL, *_LAST):
            self._abandon(connection, "an answer came to no request")
            raise ConnectionError(
                f"{what} has sent an answer to no request, perhaps a second one to the last, so no answer of the "
                f"session can be trusted: {text[:200]!r}"
            )
        if answered == "observation":
            return got
        if code == _FULL:
            self._abandon(connection, "the server was full")
            raise ServerFull(
                f"{what} has no session to spare: {got.get('active_sessions', 'all')} of "
                f"{got.get('max_sessions', 'them')} are taken. It sets max_concurrent_envs."
            )
        if code in _LAST:
            self._abandon(connection, said)
        raise OpenEnvError(f"{what} answered {kind} by {code}: {said}{_details(got.get('errors'))}", code=code)

    def _abandon(self, connection: Any, reason: str) -> None:
        """Drop the connection at once. If an episode has begun in it, the session has ended for good."""
        connection.transport.abort()
        self._connection = None
        if self._has_begun:
            self._end = reason


def _encoded(action: Any) -> Any:
    if hasattr(action, "model_dump"):
        action = action.model_dump()
    if not isinstance(action, Mapping):
        raise TypeError(
            f"an action for OpenEnv is a mapping of the fields of the server's action class, not "
            f"{describe_value(action)}; or pass encode=…, a function that makes one of it."
        )
    return action


def _decoded(data: dict[str, Any]) -> Result:
    reward, done, truncated = data.get("reward"), data.get("done"), data.get("truncated") is True
    is_over = flag(done, "done") if done is not None else False
    return (
        data["observation"],
        finite_number(float(reward) if isinstance(reward, bool) else reward or 0.0, "reward"),
        is_over and not truncated,
        is_over and truncated,
        data.get("metadata") or {},
    )


def json_form(value: Any) -> Any:
    """Convert what JSON has no form for: NumPy's values, and objects of OpenEnv's classes. A default for json.dumps."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "model_dump"):
        return value.model_dump()
    raise TypeError(f"{describe_value(value)} cannot be sent by OpenEnv's protocol: JSON has no form for it")


def _details(errors: Any) -> str:
    """Return what a server says of the fields of an action that it refused."""
    if not isinstance(errors, list):
        return ""
    said = [
        f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}" for each in errors if isinstance(each, dict)
    ]
    return f" ({'; '.join(said)})" if said else ""
