"""A real server of MCP over streamable HTTP, made with its library: ``python mcp_http_server.py PORT``."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from mcp.server.mcpserver import Context, MCPServer

totals: dict[str | None, int] = {}
server = MCPServer("counter")


def session_of(context: Context) -> str | None:
    return context.headers.get("mcp-session-id") if context.headers else None


@server.tool()
def begin(context: Context, start: int = 0) -> int:
    if start < 0:
        raise ValueError("no such level")
    totals[session_of(context)] = start
    return os.getpid()


@server.tool()
async def add(context: Context, number: int, sleep_s: float = 0.0) -> int:
    await asyncio.sleep(sleep_s)
    session = session_of(context)
    totals[session] = totals.get(session, 0) + number
    return totals[session]


@server.tool()
def score(context: Context) -> dict[str, float | bool]:
    total = totals[session_of(context)]
    return {"reward": float(total), "done": total >= 3}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    server.run(transport="streamable-http", port=int(sys.argv[1]))
