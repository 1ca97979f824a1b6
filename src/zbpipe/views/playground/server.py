"""Serves the playground on this machine only."""

from __future__ import annotations

import json
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from zbpipe.views.playground.answers import Setting, answer_plan, answer_simulation
from zbpipe.views.playground.page import make_served_page

ADDRESS = "127.0.0.1"


def server(port: int = 0) -> ThreadingHTTPServer:
    """A server on this machine's loopback address, to be started by `serve_forever`. Port 0 takes a free one."""
    return ThreadingHTTPServer((ADDRESS, port), _Handler)


# Users move sliders back and forth. A few hundred answers have some megabytes.
_simulated, _planned = lru_cache(maxsize=256)(answer_simulation), lru_cache(maxsize=64)(answer_plan)


def answer(path: str, query: str) -> tuple[int, str, str]:
    """Status, content type and text for a request."""
    if path == "/":
        return 200, "text/html; charset=utf-8", make_served_page()
    if path not in ("/schedule", "/plan"):
        return _json(404, {"error": f"there is no {path} here: open /"})
    asked = dict(parse_qsl(query, keep_blank_values=True))
    try:
        name = asked.pop("name", "")
        setting = Setting.parse(asked)
        return _json(200, _planned(setting) if path == "/plan" else _simulated(setting, name))
    except ValueError as error:
        return _json(400, {"error": str(error)})


def _json(status: int, body: dict[str, Any]) -> tuple[int, str, str]:
    return status, "application/json", json.dumps(body)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests only."""

    def do_GET(self) -> None:
        # A page from another site may resolve its own name to this address. Host contains that name then.
        if (self.headers.get("Host") or "").rsplit(":", 1)[0] not in (ADDRESS, "localhost"):
            self._send(*_json(403, {"error": f"this server answers only at {ADDRESS} and localhost"}))
            return
        parts = urlsplit(self.path)
        self._send(*answer(parts.path, parts.query))

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal belongs to the user."""
