"""Calls of an MCP environment's tools in the forms of OpenEnv: its actions, its observations, and JSON-RPC."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from envmanager.adapters.mcp import text_of

PARSE_ERROR, INVALID_REQUEST, NO_METHOD, INVALID_PARAMS, INTERNAL_ERROR, SERVER_ERROR = (
    -32700, -32600, -32601, -32602, -32603, -32000,
)  # fmt: skip
"""Codes of JSON-RPC 2.0, of which the last is the servers' own."""


class RpcError(Exception):
    """Error of a request of JSON-RPC. ``args``: code and text."""


def parsed(body: bytes) -> tuple[str, dict[str, Any], Any]:
    """Return method, parameters and id of a request of JSON-RPC. Raises RpcError."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RpcError(PARSE_ERROR, f"Invalid JSON: {error}") from error
    given = asked if isinstance(asked, dict) else {}
    params = given.get("params") or {}
    if given.get("jsonrpc") != "2.0" or not isinstance(given.get("method"), str) or not isinstance(params, dict):
        raise RpcError(INVALID_REQUEST, 'A request is {"jsonrpc": "2.0", "method": …, "params": {…}, "id": …}')
    return given["method"], params, given.get("id")


def answered(number: Any, result: Any = None, error: RpcError | None = None) -> str:
    """Return the answer of JSON-RPC to request ``number``."""
    said = {"result": result} if error is None else {"error": dict(zip(("code", "message"), error.args, strict=True))}
    return json.dumps({"jsonrpc": "2.0", "id": number, **said})


def tools_of(obs: Any) -> list[Any] | None:
    """Return the descriptions of tools in the first observation of an MCP environment; None for other environments."""
    tools = obs.get("tools") if isinstance(obs, Mapping) else None
    is_list = isinstance(tools, Sequence) and all(isinstance(each, Mapping) and "name" in each for each in tools)
    return [{"description": "", **tool} for tool in tools] if is_list else None  # type: ignore[union-attr]


def call_of(action: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return OpenEnv's CallToolAction as an action of an MCP environment, or None if it is another action."""
    if action.get("type") != "call_tool" or "tool_name" not in action:
        return None
    return {"name": action["tool_name"], "arguments": action.get("arguments") or {}}


def with_data(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's result with the field ``data`` that OpenEnv's clients take out: its structured part, or text.

    FastMCP wraps what is no mapping as ``{"result": …}``.
    """
    structured = result.get("structuredContent")
    if isinstance(structured, Mapping):
        return {**result, "data": structured["result"] if structured.keys() == {"result"} else structured}
    return {**result, "data": text_of(result)}


def observed(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's result as OpenEnv's CallToolObservation."""
    if not result.get("isError"):
        return {"tool_name": name, "result": with_data(result), "error": None}
    return {
        "tool_name": name,
        "result": None,
        "error": {"error_type": "execution_error", "message": text_of(result)},
    }
