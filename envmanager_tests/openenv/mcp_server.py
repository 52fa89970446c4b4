"""A server of MCP over stdio, of a few lines: ``python mcp_server.py``. It counts, and ignores the end of its input."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

TOOLS = {name: {"type": "object"} for name in ("add", "begin", "pid", "fail", "die", "score")}
total = 0


def call(name: str, number: int = 1, start: int = 0) -> object:
    global total
    if name == "add":
        total += number
        return total
    if name == "begin":
        if start < 0:
            raise ValueError("no such level")
        total = start
        return f"begun at {start}"
    if name == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "score":
        return {"reward": float(total), "done": total >= 3}
    if name == "pid":
        return os.getpid()
    raise ValueError("no page")


def answer(method: str, given: dict) -> dict:
    if method == "initialize":
        version, info = given["protocolVersion"], {"name": "counter", "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return {"tools": [{"name": name, "inputSchema": schema} for name, schema in TOOLS.items()]}
    try:
        result, is_error = json.dumps(call(given["name"], **given.get("arguments") or {})), False
    except ValueError as error:
        result, is_error = str(error), True
    return {"content": [{"type": "text", "text": result}], "isError": is_error}


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        reply = {
            "jsonrpc": "2.0",
            "id": request["id"],
            "result": answer(request["method"], request.get("params") or {}),
        }
        print(json.dumps(reply), flush=True)
while "--stubborn" in sys.argv:
    time.sleep(1)
