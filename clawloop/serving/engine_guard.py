"""A guard in front of vLLM's routes, because vLLM's own key protects only some of them.

vLLM takes it as `--middleware clawloop.serving.engine_guard.EngineGuard`. This file needs no other package, so a stock
image of vLLM takes it too: mount it into a folder on PYTHONPATH, `--middleware engine_guard.EngineGuard`.

It reads these variables of the engine's environment:

- `CLAWLOOP_ENGINE_SECRET`: what every request but `GET /health` must send as `Authorization: Bearer …`.
- `CLAWLOOP_ENGINE_SECRET_FILE`: a file with one such secret a line, all of which are accepted; it is read again when it
  was changed. It or the variable above is required.
- `CLAWLOOP_ENGINE_ADAPTERS`: the only folder that adapters are loaded from. Without it no adapter can be loaded.
- `CLAWLOOP_ENGINE_HOSTS`: host names that the engine answers to, separated by commas, besides addresses and localhost.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

# Routes of gateways, judges and agents. Other routes pause the engine, change its weights or its cache, or read files.
_ROUTES = {
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/version"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
}
# Probes of supervisors and Kubernetes have no secret, and it says nothing but that the engine runs.
_OPEN = ("GET", "/health")
_LOAD = "/v1/load_lora_adapter"
# A name and a path.
_LOAD_BYTES = 64 * 1024


class EngineGuard:
    """ASGI middleware that refuses what a stranger on the engine's machine or network might ask for.

    Raises:
        RuntimeError: the environment has no secret, or everybody on the machine may read the file that has it.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._secrets = _Secrets(
            os.environ.get("CLAWLOOP_ENGINE_SECRET", ""), os.environ.get("CLAWLOOP_ENGINE_SECRET_FILE", "")
        )
        if self._secrets.are_public():
            raise RuntimeError("everybody on this machine may read CLAWLOOP_ENGINE_SECRET_FILE: chmod 600 it")
        if not self._secrets.now():
            raise RuntimeError("CLAWLOOP_ENGINE_SECRET is not set: the engine would answer to everyone")
        adapters = os.environ.get("CLAWLOOP_ENGINE_ADAPTERS")
        self._adapters = None if not adapters else Path(adapters).resolve()
        names = os.environ.get("CLAWLOOP_ENGINE_HOSTS", "").split(",")
        self._hosts = {"localhost"} | {name.strip().lower() for name in names if name.strip()}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # vLLM's websockets
            await send({"type": "websocket.close", "code": 1008})
            return
        refusal = self._refusal(scope)
        if refusal is None and scope["path"] == _LOAD:
            body = await _read(receive)
            refusal = self._load_refusal(body)
            receive = _replay(body, receive)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await _answer(send, *refusal)

    def _refusal(self, scope: Message) -> tuple[int, str] | None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        route = scope["method"], scope["path"]
        host = _hostname(headers.get(b"host", b"").decode("latin-1"))
        if host is None or not (host in self._hosts or _is_address(host)):
            return 421, "This engine does not answer to this host name. Allow it in CLAWLOOP_ENGINE_HOSTS."
        if route == _OPEN:
            return None
        given = headers.get(b"authorization", b"")
        if not any(hmac.compare_digest(given, b"Bearer " + secret) for secret in self._secrets.now()):
            return 401, "This engine answers to Clawloop alone: send its CLAWLOOP_ENGINE_SECRET as Bearer."
        if route not in _ROUTES:
            return 403, f"Clawloop does not use {scope['method']} {scope['path']}, so this engine does not answer it."
        return None

    def _load_refusal(self, body: bytes | None) -> tuple[int, str] | None:
        try:
            asked = json.loads(body or b"")
            name, path = asked["lora_name"], Path(asked["lora_path"])
        except (ValueError, LookupError, TypeError):
            return 400, "Send `lora_name` and `lora_path` as JSON."
        if asked.get("load_inplace"):
            return 403, "An adapter is never replaced in place: requests in flight would mix two versions."
        if self._adapters is None:
            return 403, "No adapter can be loaded: CLAWLOOP_ENGINE_ADAPTERS is not set."
        try:
            inside = path.is_absolute() and path.resolve().is_relative_to(self._adapters)
        except (OSError, ValueError):  # the latter: a null byte
            inside = False
        if not inside or not isinstance(name, str):
            return 403, f"Adapters are loaded from {self._adapters} alone."
        return None


class _Secrets:
    """The secret of the environment, and those of a file as it is now."""

    def __init__(self, own: str, file: str) -> None:
        self._own = [own.encode()] if own else []
        self._file = Path(file) if file else None
        self._seen: tuple[int, int, int, int] | None = None
        self._listed: list[bytes] = []

    def are_public(self) -> bool:
        try:
            return self._file is not None and bool(self._file.stat().st_mode & 0o004)
        except OSError:
            return False

    def now(self) -> list[bytes]:
        if self._file is not None:
            try:
                state = self._file.stat()
                if (seen := (state.st_mtime_ns, state.st_ino, state.st_size, state.st_mode)) != self._seen:
                    lines = self._file.read_bytes().splitlines()
                    if not self.are_public():  # else another user may have read them already
                        self._listed = [line.strip() for line in lines if line.strip()]
                    self._seen = seen
            except OSError:
                pass  # the file is being replaced; the old secrets are still valid
        return self._own + self._listed


async def _read(receive: Receive) -> bytes | None:
    """The request's body; None if it is larger than a name and a path."""
    content = bytearray()
    while True:
        message = await receive()
        content += message.get("body", b"")
        if len(content) > _LOAD_BYTES:
            return None
        if not message.get("more_body"):
            return bytes(content)


def _replay(body: bytes | None, receive: Receive) -> Receive:
    """A `receive` that gives a body that was read already, then what comes after it."""
    waiting: list[Message] = [{"type": "http.request", "body": body or b"", "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed


async def _answer(send: Send, status: int, message: str) -> None:
    body = json.dumps({"error": {"message": message, "type": "engine_guard", "param": None, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _hostname(header: str) -> str | None:
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
