"""A data folder written by version 0.1.0, and a client of the `clawloop up` that runs on it.

    kept_data/data.tar.xz        the folder, without logs, locks and addresses
    kept_data/model.safetensors  weights of the demo model of that version, which its adapters belong to
    kept_data/facts.json         ids and figures of what is in it
    kept_data/kept.toml          the recipe that its policy learns by

make_kept_data.py wrote all but the recipe; test_upgrade.py starts the present code on the folder. Both use the program
from outside: commands, HTTP and Temporal.
"""

from __future__ import annotations

import json
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tests.e2e.up import Up

KEPT = Path(__file__).with_name("kept_data")
ARCHIVE, WEIGHTS = KEPT / "data.tar.xz", KEPT / "model.safetensors"
FACTS, RECIPE = KEPT / "facts.json", KEPT / "kept.toml"
DEMO_MODEL = Path(__file__).parents[2] / "clawloop" / "demo" / "model"
# Rows, engines and adapters know the base model by the name of its folder, and must find it under the same name.
MODEL_NAME = "clawloop-demo"
MODEL_OPTIONS = ("--dtype", "float32", "--max-model-len", "2048")
# Judging or a step takes a second or two; this only ends a test that hangs.
WAIT_SECONDS = 600
# Of the same adapter on another CPU, in float32; two engines on one CPU agreed to 1e-5.
LOGPROB_TOLERANCE = 0.001

Message = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Reply:
    """
    Args:
        model: the name under which an engine serves the version that answered.
    """

    id: str
    model: str
    message: Message


@dataclass(frozen=True)
class GreedyAnswer:
    """The most likely tokens of a version's answer, with the log-prob of each."""

    text: str
    logprobs: list[float]


class Client:
    """Chats through the gateway and asks its admin API."""

    def __init__(self, url: str, keys: dict[str, str]) -> None:
        self._chat = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {keys['chat']}"}, timeout=180)
        self._admin = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {keys['admin']}"}, timeout=60)

    def close(self) -> None:
        self._chat.close()
        self._admin.close()

    def complete(self, messages: Sequence[Message], headers: dict[str, str], **fields: Any) -> Any:
        """The body of a chat completion."""
        body = {"model": "policy", "messages": list(messages), "max_tokens": 100} | fields
        answer = self._chat.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, messages: Sequence[Message], session: str | None, *, done: bool = False) -> Reply:
        """A main turn.

        Args:
            session: the client's name of the session; None: the gateway finds it by the conversation.
            done: the session ends with this turn.
        """
        headers = {} if session is None else {"X-Session-Id": session}
        body = self.complete(messages, headers | ({"X-Session-Done": "true"} if done else {}), temperature=1.0)
        content = body["choices"][0]["message"]["content"]
        return Reply(body["id"], body["model"], {"role": "assistant", "content": content})

    def greedy_answer(self, messages: Sequence[Message], model: str) -> GreedyAnswer:
        """The first tokens of an answer at temperature 0, as a side turn."""
        side = {"X-Session-Id": "aside", "X-Turn-Type": "side"}
        body = self.complete(messages, side, model=model, temperature=0, max_tokens=12, logprobs=True)
        (choice,) = body["choices"]
        return GreedyAnswer(choice["message"]["content"], [token["logprob"] for token in choice["logprobs"]["content"]])

    def rate(self, reply: str, **feedback: str) -> None:
        answer = self._chat.post("/v1/feedback", json={"response_id": reply} | feedback)
        assert answer.status_code == 202, answer.text

    def admin(self, path: str, verb: str = "GET", **fields: str) -> Any:
        """What the admin API answers."""
        answer = self._admin.request(verb, f"/admin/v1/{path}", json=fields or None)
        assert answer.is_success, answer.text
        return answer.json()

    def sessions(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.admin("sessions?limit=500")["sessions"]
        return found

    def main_turns(self, session: str) -> list[dict[str, Any]]:
        return [turn for turn in self.admin(f"sessions/{session}")["turns"] if turn["kind"] == "main"]


@contextmanager
def client_of(started: Up) -> Iterator[Client]:
    """A client, as soon as the engine and all workers are ready."""
    url = started.line(r"gateway +(http://127\.0\.0\.1:\d+)/v1$")
    for part in ("vllm", "orchestrator", "judge", "trainer", "engine-agent"):
        started.line(f"({part} ready) at ")
    client = Client(url, json.loads((started.data / "keys.json").read_text()))
    try:
        yield client
    finally:
        client.close()


def wait_until(look: Callable[[], T], done: Callable[[T], bool]) -> T:
    """The first result of `look` that `done` accepts."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not done(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    return found


def copy_model(folder: Path) -> Path:
    """The demo's model as it was, under the name by which the data folder knows it."""
    copied = Path(shutil.copytree(DEMO_MODEL, folder / MODEL_NAME))
    shutil.copyfile(WEIGHTS, copied / WEIGHTS.name)
    return copied


def unpack(folder: Path) -> Path:
    """The data folder, extracted into `folder`."""
    with tarfile.open(ARCHIVE) as archive:
        # The filter "data" would drop the modes of folders, and PostgreSQL refuses a cluster that others may read.
        archive.extractall(folder, filter="tar")
    return folder / "data"
