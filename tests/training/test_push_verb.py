"""`clawloop adapter export --push`: what reaches a hub, which stands in for the real one."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.verbs import clawloop_process

FILES = {
    "adapter_config.json": b'{"r": 4}\n',
    "adapter_model.safetensors": b"weights",
    "base_model.json": b"{}",
    "training_state.safetensors": b"moments",
}


class Hub(ThreadingHTTPServer):
    """Takes models as the Hugging Face Hub does.

    Attributes:
        made: bodies of requests to make a model.
        committed: content by path.
        refuses: the status of each answer; 0: it takes them.
    """

    def __init__(self, refuses: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.made: list[dict[str, Any]] = []
        self.committed: dict[str, bytes] = {}
        self.refuses = refuses

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.refuses or self.headers.get("Authorization") != "Bearer hf_test":
            self._write(self.server.refuses or 401, {"error": "not allowed"})
        elif self.path == "/api/repos/create":
            self.server.made.append(json.loads(body))
            self._write(200, {"url": f"{self.server.url}/me/mine", "name": "me/mine"})
        elif "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self._write(200, {"files": files})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.committed[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._write(200, {"commitUrl": f"{self.server.url}/me/mine/commit/1", "commitOid": "1", "success": True})
        else:
            self._write(404, {"error": self.path})

    def do_GET(self) -> None:
        self._write(200, {"id": "me/mine", "siblings": [], "sha": "0"})

    def _write(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(refuses: int = 0) -> Iterator[Hub]:
    hub = Hub(refuses)
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def pushed(adapter: Path, url: str, *more: str, to: str = "me/mine") -> Any:
    variables = {
        "HF_ENDPOINT": url,
        "HF_TOKEN": "hf_test",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    return clawloop_process("adapter", "export", "--adapter", str(adapter), "--push", to, *more, **variables)


def test_config_and_weights_are_pushed_and_nothing_else(adapter: Path) -> None:
    with serving() as hub:
        done = pushed(adapter, hub.url)
        assert (done.returncode, done.stdout) == (0, f"{hub.url}/me/mine/commit/1\n"), done.stderr
        assert hub.committed == {name: FILES[name] for name in ("adapter_config.json", "adapter_model.safetensors")}
        assert hub.made[0].get("private", hub.made[0].get("visibility")) in (True, "private")


def test_what_cannot_be_pushed_is_one_line(adapter: Path) -> None:
    with serving(refuses=403) as hub:
        refused = pushed(adapter, hub.url)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (1, 1), refused.stderr
        assert f"{hub.url} did not take me/mine" in refused.stderr
        assert "--push ../x" in pushed(adapter, hub.url, to="../x").stderr
    assert "did not take" in pushed(adapter, "http://127.0.0.1:9").stderr
    (adapter / "adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors" in pushed(adapter, "http://127.0.0.1:9").stderr
