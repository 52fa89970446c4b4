"""Adapter for MCP: the tools of a server are an environment's actions.

::

    Mcp (a factory) ── an episode each ──▶ McpEnvironment ── stdio ──▶ a process of the command
                                            step ── tools/call ──▶    or a session at the URL

The connection is entered by ``reset`` and left by the next one or by ``close``, in a task of its own: where a server is
gone, ``mcp`` cancels the task that has entered. The end of a server is a ConnectionError, so that the episode is lost
and the environment replaced. ``mcp`` is imported where it is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from envmanager.adapters.rows import finite_number, flag
from envmanager.data.specs import describe_value
from envmanager.environment import EnvContext
from envmanager.errors import UsageError
from envmanager.importing import needed_by
from envmanager.system.guard import guarded

_CONNECTION_CLOSED = -32000
_INVALID_REQUEST = -32600
"""Code of the error if a server at the URL, such as one that was started again, does not know the session."""

Reward = Callable[[Mapping[str, Any], Mapping[str, Any]], Any] | str | None


class Mcp:
    """A factory of environments whose actions are calls of the tools of an MCP server."""

    def __init__(self, server: str | Sequence[str]) -> None:
        """Take a command (a text or a list) or a URL that begins with http. Raises UsageError, and MissingExtra."""
        with needed_by("env: {mcp: …}", extra="mcp"):
            importlib.import_module("mcp")
        is_url = isinstance(server, str) and server.startswith(("http://", "https://"))
        words = [server] if is_url else shlex.split(server) if isinstance(server, str) else server
        if not isinstance(words, list | tuple) or not words or not all(isinstance(word, str) for word in words):
            raise UsageError(f"env: {{mcp: …}} is a command or a URL, not {describe_value(server)}.")
        self._server, self._is_url = list(words), is_url

    def __call__(
        self,
        context: EnvContext,
        *,
        reward: Reward = None,
        reset: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> McpEnvironment:
        """Return an environment, which connects in ``reset``.

        ``reward``: a function of the action and the result, or the name of a tool, which is called without arguments
        after each step. Either returns a number, or a pair of it and of whether the episode is over; a tool also a
        mapping with ``reward`` and ``done``. ``reset``: the name of a tool with which an episode begins, and whose
        arguments are the options of the episode; without it, each episode has a new session, with a new process.
        ``env`` and ``cwd`` are those of the process.
        """
        del context
        return McpEnvironment(self._server, self._is_url, reward, reset, {"env": env and dict(env), "cwd": cwd})


@attrs.define(eq=False, slots=False)
class McpEnvironment:
    """An environment in a session with an MCP server. An observation is a result of a tool, as a mapping.

    The first one has ``tools`` too, the descriptions of all. An action is ``{"name": …, "arguments": {…}}``.
    """

    _server: list[str]
    _is_url: bool
    _reward: Reward
    _reset_tool: str | None
    _process: dict[str, Any]
    _keeper: asyncio.Task[None] | None = attrs.field(default=None, init=False)
    """Task that has entered the connection."""
    _over: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)
    _session: Any = attrs.field(default=None, init=False)
    _tools: list[Any] = attrs.field(factory=list, init=False)

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        """Begin an episode: in a new session, or by the tool that ``reset`` names. The seed is not used."""
        del seed
        if self._session is None or self._reset_tool is None:
            await self.close()
            await self._connect()
        begun = {} if self._reset_tool is None else await self._call(self._reset_tool, dict(options or {}))
        if begun.get("isError"):
            raise ValueError(f"the tool {self._reset_tool} could not begin an episode: {text_of(begun)}")
        return {**begun, "tools": self._tools}, {}

    async def step(self, action: Mapping[str, Any]) -> Any:
        """Call a tool, and return its result as the observation."""
        if not isinstance(action, Mapping) or not isinstance(action.get("name"), str):
            raise TypeError(f'an action for MCP is {{"name": …, "arguments": {{…}}}}, not {describe_value(action)}')
        result = await self._call(action["name"], dict(action.get("arguments") or {}))
        given: Any = 0.0
        if isinstance(self._reward, str):
            scored = await self._call(self._reward, {})
            given = scored.get("structuredContent") or json.loads(text_of(scored))
            if isinstance(given, Mapping):
                given = given.get("reward", given.get("result")), given.get("done", False)
        elif self._reward is not None:
            given = self._reward(action, result)
            given = await given if inspect.isawaitable(given) else given
        reward, is_over = given if isinstance(given, tuple) else (given, False)
        return result, finite_number(reward, "reward"), flag(is_over, "done"), False, {}

    async def close(self) -> None:
        """End the session, and its process."""
        keeper, self._keeper, self._session = self._keeper, None, None
        if keeper is not None:
            self._over.set()
            await asyncio.gather(keeper, return_exceptions=True)

    async def _connect(self) -> None:
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._over.clear()
        keeper = self._keeper = asyncio.ensure_future(self._keep(opened))
        try:
            await asyncio.wait([opened, keeper], return_when=asyncio.FIRST_COMPLETED)
            if keeper.done():
                keeper.result()  # raises what is wrong with the command
            await self._asked(opened.result().initialize())
            listed = await self._asked(opened.result().list_tools())
        except BaseException:
            await self.close()
            raise
        self._session, self._tools = opened.result(), [_plain(tool) for tool in listed.tools]

    async def _keep(self, opened: asyncio.Future[Any]) -> None:
        """Enter the connection, and leave it once it is over."""
        mcp = importlib.import_module("mcp")
        async with contextlib.AsyncExitStack() as exits:
            if self._is_url:
                http = importlib.import_module("mcp.client.streamable_http")
                streams = await exits.enter_async_context(http.streamable_http_client(self._server[0]))
            else:
                command, *args = guarded(self._server)
                given = mcp.StdioServerParameters(command=command, args=args, **self._process)
                streams = await exits.enter_async_context(mcp.stdio_client(given))
            opened.set_result(await exits.enter_async_context(mcp.ClientSession(*streams[:2])))
            await self._over.wait()

    async def _call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if self._session is None:
            raise ConnectionError("there is no session with the MCP server: reset() makes one")
        return _plain(await self._asked(self._session.call_tool(name, arguments)))

    async def _asked(self, request: Any) -> Any:
        """Await the answer to a request. Raises ConnectionError if the server has ended."""
        asking, keeper = asyncio.ensure_future(request), self._keeper
        assert keeper is not None
        try:
            await asyncio.wait([asking, keeper], return_when=asyncio.FIRST_COMPLETED)
        finally:
            asking.cancel()
        answer: Any = (await asyncio.gather(asking, return_exceptions=True))[0]
        if not isinstance(answer, BaseException):
            return answer
        lost = (_CONNECTION_CLOSED, _INVALID_REQUEST) if self._is_url else (_CONNECTION_CLOSED,)
        is_lost = isinstance(answer, importlib.import_module("mcp").MCPError) and answer.code in lost
        if not is_lost and not keeper.done():
            raise answer
        raise ConnectionError(f"the MCP server {self._server[0]} has ended, or there is none") from answer


def _plain(value: Any) -> dict[str, Any]:
    return value.model_dump(mode="json", by_alias=True, exclude_none=True)  # type: ignore[no-any-return]


def text_of(result: Mapping[str, Any]) -> str:
    """Return the text of a tool's result."""
    return "\n".join(each["text"] for each in result.get("content", ()) if each.get("type") == "text")
