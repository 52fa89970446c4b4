"""The web server of a manager: one page, its data, and the metrics for Prometheus. It answers GET requests alone.

::

    GET /         the page, with its style and script in it
    GET /data     what it shows, as JSON
    GET /metrics  for Prometheus

One thread accepts connections, and takes the samples of the watch in between; each request has a thread of its own. All
of them end with the manager.

The rule: nothing is answered without the token, nor under a name that is not this machine's (a page of somebody else
could otherwise have the name of its server lead here, and read what is served).
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import secrets
import socket
import socketserver
import sys
import threading
import time
import weakref
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from envmanager.errors import MissingExtra, UsageError
from envmanager.observe.files import json_safe
from envmanager.serving.watch import SAMPLE_S, Watch
from envmanager.system.interrupts import defer_interrupts
from envmanager.system.machine import after_fork_in_child

_MOST_CONNECTIONS = 32
"""Number of connections beyond which the oldest is closed, so that no client can keep another out."""
_LONGEST_S = 20.0
"""Seconds after which a connection is closed, whatever it still sends or takes."""
_LEAVE_S = 1.0
"""Seconds that ``close`` waits for the thread of the server."""
_logger = logging.getLogger("envmanager")
_listening: weakref.WeakSet[_Http] = weakref.WeakSet()

_PARTS = {
    "PLOT STYLE": "uplot/uPlot.min.css",
    "STYLE": "page.css",
    "PLOT": "uplot/uPlot.iife.min.js",  # github.com/leeoniya/uPlot, 1.6.32; its licence is beside it
    "SCRIPT": "page.js",
}

_Answer = tuple[HTTPStatus, str, bytes]


class Server:
    """A server that shows a manager at work, until ``close`` or the end of the manager. ``EnvManager.serve`` makes it.

    ``url``: the address of the page, with the ``token``. ``figures`` takes figures of learning.
    """

    def __init__(self, watch: Watch, port: int, host: str, token: str | None) -> None:
        """Listen, and answer in a thread. Raises UsageError if that is not possible."""
        self.token = checked_token(token) or secrets.token_urlsafe(16)
        self.watch = watch
        """What is shown."""
        self.figures = watch.figures
        """Figures of learning to show, by behavior: ``server.figures["default"] = {"loss": 0.1}``."""
        self.facts = watch.facts
        """Further texts to show, by name: ``server.facts["goal"] = "1,000,000 steps"``."""
        self._owner_pid = os.getpid()
        try:
            self._http = _Http(watch, port, host, self.token)
        except (OSError, OverflowError, TypeError) as error:
            raise cannot_listen(port, host, error) from error
        self.port: int = self._http.server_address[1]
        """Port on which the server listens."""
        self.url = f"http://{shown_host(host)}:{self.port}/?token={quote(self.token, safe='')}"
        self._thread = threading.Thread(target=self._http.run, name=f"envmanager-serve-{self.port}", daemon=True)
        _listening.add(self._http)
        self._thread.start()

    def close(self) -> None:
        """End the server and all its connections. May be called repeatedly; does nothing in a forked process."""
        if os.getpid() != self._owner_pid:
            return
        with defer_interrupts():
            self._http.end()
            if threading.current_thread() is not self._thread:
                self._thread.join(_LEAVE_S)

    def __repr__(self) -> str:
        state = "answers" if self._thread.is_alive() else "closed"
        return f"<{type(self).__name__}: port {self.port}, {state}>"  # without the token


def checked_token(token: Any) -> str | None:
    """Return a token unchanged. Raises UsageError if it is neither None nor ASCII text."""
    if token is not None and not (isinstance(token, str) and token.isascii() and token):
        raise UsageError("the token of a server must be ASCII text, or None for one that is made by chance.")
    return token


def cannot_listen(port: Any, host: Any, error: Exception) -> UsageError:
    """Return the error to raise for a server that cannot listen because of ``error``."""
    reason = str(error).rstrip(".")
    return UsageError(f"cannot listen on port {port} of {host!r}: {reason}. Port 0 takes a free one.")


def shown_host(host: str) -> str:
    """Return the name or address by which a server that listens on ``host`` can be reached, for a URL."""
    return socket.gethostname() if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host


def names_of(host: str) -> set[str]:
    """Return the names of this machine, beside its addresses, for a server that listens on ``host``."""
    return {"localhost", host.lower(), socket.gethostname().lower()} - {""}


def is_own(header: str, names: set[str]) -> bool:
    """Return whether a header ``Host`` is in ``names`` or an address, which cannot be led elsewhere, as a name can."""
    with contextlib.suppress(ValueError):
        name = urlsplit(f"//{header}").hostname or ""
        if name in names:
            return True
        ipaddress.ip_address(name)
        return True
    return False


@after_fork_in_child
def _close_in_child() -> None:
    """Close the sockets that a forked process has inherited, so that the port does not stay taken."""
    for http in list(_listening):
        for each in [http.socket, *http.connections]:
            each.close()


class _Http(socketserver.ThreadingTCPServer):
    """The server's sockets. ``run`` answers until ``end``."""

    daemon_threads = True
    allow_reuse_address = sys.platform != "win32"  # where it would let another program take the port
    request_queue_size = 16

    def __init__(self, watch: Watch, port: int, host: str, token: str) -> None:
        self.watch, self.token = watch, token.encode()
        self.connections: dict[socket.socket, float] = {}
        """Open connections, the oldest first, and when each began, by ``time.monotonic``."""
        self._is_ending = threading.Event()
        if not isinstance(host, str):
            raise TypeError("the host must be a text, such as 127.0.0.1")
        self.names = names_of(host)
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def run(self) -> None:
        """Answer requests and take samples."""
        due_s = 0.0
        while not self._is_ending.is_set():
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + SAMPLE_S
                try:
                    self.watch.sample(time.perf_counter_ns())
                except Exception:  # the run must not end because of those who watch it
                    _logger.debug("a sample for the page failed", exc_info=True)
            self.timeout = max(0.0, due_s - time.monotonic())
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                self.handle_request()
            for connection, began_s in list(self.connections.items()):
                if time.monotonic() - began_s > _LONGEST_S:
                    self._end(connection)
        self.server_close()
        for connection in list(self.connections):
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # its thread closes it
            connection.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Make ``run`` return, and wake it where the system can."""
        self._is_ending.set()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            connection, address = super().get_request()
        except OSError:  # as without descriptors: not at once again
            self._is_ending.wait(SAMPLE_S)
            raise
        for oldest in list(self.connections)[: len(self.connections) - _MOST_CONNECTIONS + 1]:
            self._end(oldest)
        self.connections[connection] = time.monotonic()
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.connections.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _logger.debug("a request for the page failed", exc_info=True)

    def answer(self, target: str, headers: Message, nonce: str) -> _Answer:
        """Return status, type and body for the GET request of ``target``."""
        url = urlsplit(target)
        query = parse_qs(url.query)
        if not is_own(headers.get("Host", ""), self.names):
            return _text(HTTPStatus.FORBIDDEN, "This server does not answer under that name.")
        given = query.get("token", [headers.get("Authorization", "").removeprefix("Bearer ")])[0]
        if not secrets.compare_digest(given.encode(), self.token):
            return _text(
                HTTPStatus.UNAUTHORIZED, "The token is missing or wrong: use the address that the run printed."
            )
        if url.path == "/":
            return HTTPStatus.OK, "text/html; charset=utf-8", _page(nonce)
        if url.path == "/data":
            after = query.get("after", ["0"])[0]
            data = self.watch.data(int(after) if after.isdecimal() and len(after) < 16 else 0)
            try:
                text = json.dumps(data, allow_nan=False)
            except ValueError:
                text = json.dumps(json_safe(data))
            return HTTPStatus.OK, "application/json", text.encode()
        if url.path == "/metrics":
            try:
                from envmanager.serving.prometheus import Collector
            except MissingExtra as error:
                return _text(HTTPStatus.NOT_IMPLEMENTED, str(error))
            return HTTPStatus.OK, *Collector(self.watch).exposed(headers.get("Accept", ""))
        return _text(HTTPStatus.NOT_FOUND, "There is /, /data and /metrics.")


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: _Http
    timeout = 10.0
    server_version, sys_version = "envmanager", ""

    def do_GET(self) -> None:
        nonce = secrets.token_urlsafe(16)
        try:
            status, content_type, body = self.server.answer(self.path, self.headers, nonce)
        except Exception:
            _logger.debug("a request for the page failed", exc_info=True)
            status, content_type, body = _text(HTTPStatus.INTERNAL_SERVER_ERROR, "This failed; the run goes on.")
        own = f"'nonce-{nonce}'"
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header(
            "Content-Security-Policy",
            f"default-src 'none'; script-src {own}; style-src {own}; img-src data:; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        )
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing: the requests have the token in them."""


def _text(status: HTTPStatus, text: str) -> _Answer:
    return status, "text/plain; charset=utf-8", f"{text}\n".encode()


def _page(nonce: str) -> bytes:
    """Return the page, with all styles and scripts in it. ``nonce`` allows the browser to use them."""
    parts = files("envmanager.serving")
    page = parts.joinpath("page.html").read_text("utf-8").replace("NONCE", nonce)
    for mark, name in _PARTS.items():
        page = page.replace(f"/* {mark} */", parts.joinpath(name).read_text("utf-8"))
    return page.encode()
