"""A stand-in of the Hugging Face Hub: the two routes by which a model is listed and its files are read."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """
    Attributes:
        models: name → folder.
        commit: of all models.
        gated: names of models whose licence nobody accepted.
        cut_after: bytes of an answer to a request for weights after which the connection is cut, and the hub is out of
            order; None: never.
        out_of_order: it answers 500.
        damaged: weights are sent with another last byte.
        short: weights are sent without their last byte.
        goes_on: while it is not set, weights are not sent.
        requests: methods, paths and ranges.
    """

    url: str = ""
    models: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    commit: str = COMMIT
    cut_after: int | None = None
    out_of_order: bool = False
    damaged: bool = False
    short: bool = False
    goes_on: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)

    def read(self, file: str) -> list[str | None]:
        """The ranges in which a file was asked for."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith(f"/{file}")]


class _Server(ThreadingHTTPServer):
    def __init__(self, hub: Hub):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Nothing is written."""

    def _answer(self) -> None:
        self.server.hub.requests.append((self.command, self.path, self.headers.get("Range")))
        if self.server.hub.out_of_order:
            self._send(500, b"{}")
        elif listed := re.fullmatch(r"/api/models/([^/?]+/[^/?]+)(?:/revision/([^/?]+))?(?:\?.*)?", self.path):
            self._list(listed[1], listed[2])
        elif asked := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/([^/]+)", self.path):
            self._file(asked[1], asked[2])
        else:
            self._send(404, b"{}")

    def _list(self, name: str, revision: str | None) -> None:
        if name not in self.server.hub.models:
            self._send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        elif revision not in (None, "main", self.server.hub.commit):
            self._send(404, b'{"error": "Invalid rev id"}', {"X-Error-Code": "RevisionNotFound"})
        else:
            files = [_listed(path) for path in sorted(self.server.hub.models[name].iterdir())]
            self._send(
                200, json.dumps({"id": name, "sha": self.server.hub.commit, "siblings": files, "tags": []}).encode()
            )

    def _file(self, name: str, file: str) -> None:
        if name in self.server.hub.gated:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return
        if file.endswith(".safetensors"):
            self.server.hub.goes_on.wait(120)
        content = (self.server.hub.models[name] / file).read_bytes()
        if file.endswith(".safetensors") and (self.server.hub.damaged or self.server.hub.short):
            content = content[:-1] + (b"" if self.server.hub.short else bytes([content[-1] ^ 1]))
        etag = hashlib.sha256(content).hexdigest()
        described = {"ETag": f'"{etag}"', "X-Repo-Commit": self.server.hub.commit, "Accept-Ranges": "bytes"}
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if first:
            described["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        cut = self.server.hub.cut_after if file.endswith(".safetensors") and self.command == "GET" else None
        self._send(206 if first else 200, content[first:], described, cut)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, cut_after: int | None = None
    ) -> None:
        self.send_response(status)
        for header, value in (headers or {}).items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body if cut_after is None else body[:cut_after])
        if cut_after is not None:
            self.close_connection = self.server.hub.out_of_order = True


def _listed(path: Path) -> dict[str, object]:
    """A file as the Hub lists it: of large ones, as weights are, it knows the SHA-256."""
    size = path.stat().st_size
    if path.suffix != ".safetensors":
        return {"rfilename": path.name, "size": size}
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"rfilename": path.name, "size": size, "lfs": {"sha256": sha256, "size": size, "pointerSize": 134}}


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    hub.goes_on.set()
    server = _Server(hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.goes_on.set()
        server.shutdown()
        server.server_close()
        thread.join()
