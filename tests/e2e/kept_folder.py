"""A data folder that one version wrote, and that later ones must continue.

`python -m tests.e2e.kept_folder FOLDER` writes it, and uses the program from outside: commands, HTTP and Temporal.

    data.tar.xz        the folder, without logs, locks and addresses
    model.safetensors  weights of the demo model of that version, which its adapters belong to
    facts.json         ids and figures of what is in it

Temporal stores host names, and paths in stack traces. So a release's folder is made under `unshare --mount --uts`, with
a neutral host name and the repository mounted at a neutral path. It is never made again: what a later version writes
would not show that what this one wrote is still read.
"""

from __future__ import annotations

import asyncio
import io
import json
import lzma
import shutil
import signal
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import httpx
from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowHistory

from tests.e2e.up import Up, up

RECIPE = Path(__file__).with_name("kept.toml")
DEMO_MODEL = Path(__file__).parents[2] / "clawloop" / "app" / "demo" / "model"
# Rows, engines and adapters know the base model by the name of its folder, and must find it under the same name.
MODEL_NAME = "clawloop-demo"
ARCHIVE, WEIGHTS = "data.tar.xz", "model.safetensors"
MODEL_OPTIONS = ("--dtype", "float32", "--max-model-len", "2048")
# Judging or a step takes a second or two; this only ends a test that hangs.
WAIT_SECONDS = 600
# Of the same adapter on another CPU, in float32; two engines on one CPU agreed to 1e-5.
LOGPROB_TOLERANCE = 0.001

# Temporal writes the path of its database into the database, so the path must not tell of a machine.
WORKPLACE = Path("/tmp/clawloop-kept")
# The sessions that are left open must still be open years later.
NEVER_IDLE = {"CLAWLOOP_SESSION_IDLE_MINUTES": str(timedelta(days=7300) / timedelta(minutes=1))}
# What describes processes that have ended.
LEFT_OUT = {Path("data/logs"), Path("data/running.json"), Path("data/postgres/cluster/postmaster.opts")}
LOCKS = {"up.lock", "lock", "temporal.db-shm"}
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
}

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
    for part in ("vllm", "combined-worker", "trainer"):
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


def make(workplace: Path, kept: Path) -> None:
    """Write a folder to be kept.

    Args:
        workplace: an empty folder for what runs meanwhile.
        kept: the new folder.
    """
    data = workplace / "data"
    model = Path(shutil.copytree(DEMO_MODEL, workplace / MODEL_NAME))
    options = ("--model", str(model), *MODEL_OPTIONS)
    with up(data, workplace / "first.log", *options, "--recipe", str(RECIPE)) as started:
        with client_of(started) as client:
            train_two_steps(client)
            expired = open_session_that_expires(client)
        stop(started)
    with up(data, workplace / "second.log", *options, settings=NEVER_IDLE) as started:
        with client_of(started) as client:
            opened = open_sessions(client)
            use_admin_api(client)
            facts = {"open_sessions": opened, "expired_session": expired} | collect_samples(client, opened)
            facts["answer"] = distinctive_answer(client, f"default-v{facts['version']}")
            names = {session["id"]: session["external_id"] or "expired" for session in open_ones(client)}
            facts["workflows"] = asyncio.run(open_workflows(data, names))
        stop(started)
    kept.mkdir(parents=True)
    (kept / "facts.json").write_text(json.dumps(facts) + "\n")
    shutil.copy(model / WEIGHTS, kept / WEIGHTS)
    pack(data, kept / ARCHIVE)


def unpack(kept: Path, folder: Path) -> tuple[Path, Path]:
    """The data folder and the model that it knows, both in `folder`."""
    model = Path(shutil.copytree(DEMO_MODEL, folder / MODEL_NAME))
    shutil.copy(kept / WEIGHTS, model / WEIGHTS)
    with tarfile.open(kept / ARCHIVE) as archive:
        # The filter "data" would drop the modes of folders, and PostgreSQL refuses a cluster that others may read.
        archive.extractall(folder, filter="tar")
    return folder / "data", model


def talk(client: Client, session: str | None, *texts: str, done: bool = False) -> tuple[list[Message], list[Reply]]:
    """A conversation in which the user says these texts: its messages and the replies."""
    messages: list[Message] = []
    replies: list[Reply] = []
    for number, text in enumerate(texts, 1):
        messages.append({"role": "user", "content": text})
        replies.append(client.chat(messages, session, done=done and number == len(texts)))
        messages.append(replies[-1].message)
    return messages, replies


def train_two_steps(client: Client) -> None:
    """Closed sessions with turns of every kind, and at least two steps."""
    _, replies = talk(
        client,
        "rated",
        "Write a function that sorts a list.",
        "Perfect, thanks!\nWhat is a firewall?",
        "nope, shorter please\nWrite a note to Henry about the summer party.",
        "ok\nDescribe a loop please.",
        "Great job!\nWrite a function that swaps two values.",
    )
    for number, reply in enumerate(replies):
        client.rate(reply.id, rating="up" if number % 2 else "down")
    talk(
        client,
        "judged",
        "What is a password?",
        "Too long, keep it short please\nPlease write to Ben about the project plan.",
        "thanks, that was friendly!\nWrite a function that finds the absolute value.",
        "No, in Python please.\nWhat is glass?",
        "Perfect, thanks!\nSend Olga a message about the changed address.",
        done=True,
    )
    talk(client, "rated", "Describe a loop please.", done=True)
    _, replies = talk(client, "commented", "What is glass?", "ok\nWhat is a password?")
    client.rate(replies[0].id, text="Too long, I wanted it short.")
    question = [{"role": "user", "content": "What is glass?"}]
    client.complete(question, {"X-Session-Id": "commented", "X-Turn-Type": "side"})
    client.complete(question, {"X-Session-Id": "commented", "X-Session-Done": "true"}, tools=[TOOL])
    client.complete(question, {"X-Session-Id": "group", "X-Session-Done": "true"}, n=2)
    talk(client, "erased", "What is a firewall?", "No, shorter please.\nWhat is glass?", done=True)
    client.admin(f"sessions/{ids_by_name(client)['erased']}", "DELETE")
    while wait_for_training(client)["version"] < 2:
        _, replies = talk(client, "more", "Describe a loop please.", "thanks\nWhat is a firewall?", done=True)
        for reply in replies:
            client.rate(reply.id, rating="up")


def wait_for_training(client: Client) -> dict[str, Any]:
    """The state of training once it waits for samples and each turn but the last of its session is judged."""

    def look() -> tuple[int, dict[str, Any]]:
        turns = [client.main_turns(session["id"])[:-1] for session in client.sessions()]
        return sum(turn["outcome"] == "waiting" for earlier in turns for turn in earlier), client.admin("training")

    def done(found: tuple[int, dict[str, Any]]) -> bool:
        unjudged, training = found
        idle = training["state"] == "waiting" and training["ready"] < training["needed"]
        return unjudged == 0 and idle and training["version"] == training["head"]

    return wait_until(look, done)[1]


def open_session_that_expires(client: Client) -> str:
    """The id of a session whose idle deadline of 30 minutes passes while `up` does not run."""
    talk(client, None, "Please write to Ben about the project plan.")
    (session,) = open_ones(client)
    return str(session["id"])


def open_sessions(client: Client) -> dict[str, dict[str, Any]]:
    """Two sessions that stay open, by name; the last turn of each has no next state yet."""
    opened: dict[str, dict[str, Any]] = {}
    for name, rating in (("open", "up"), ("open_too", "down")):
        messages, replies = talk(client, name, "What is a firewall?", "hm\nWrite a function that swaps two values.")
        client.rate(replies[0].id, rating=rating, text="I mean the answer before the last.")
        opened[name] = {"id": ids_by_name(client)[name], "messages": messages, "last_reply": replies[-1].id}
    return opened


def use_admin_api(client: Client) -> None:
    """What an operator does to a session that stays open, and to training."""
    _, replies = talk(client, "operated", "What is a password?", "hm\nWhat is a firewall?", "ok\nWhat is glass?")
    wait_for_training(client)
    client.admin(f"turns/{replies[0].id}/judge", "POST")
    client.admin(f"turns/{replies[2].id}", "DELETE")
    client.admin("training/pause", "POST", reason="the machine is needed")
    client.admin("training/resume", "POST")


def collect_samples(client: Client, opened: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Chat until at least two samples wait, fewer than a batch; how many, and the version that answers."""
    session = opened["open"]
    while (training := wait_for_training(client))["ready"] < 2:
        session["messages"].append({"role": "user", "content": "thanks\nDescribe a loop please."})
        reply = client.chat(session["messages"], "open")
        client.rate(session["last_reply"], rating="up")
        session["messages"].append(reply.message)
        session["last_reply"] = reply.id
    return {"version": training["head"], "waiting_samples": training["ready"]}


def distinctive_answer(client: Client, version: str) -> dict[str, Any]:
    """The question at which the version differs most from the base model, with the version's answer."""
    asked = []
    for text in ("Write a function that finds the larger number.", "What is glass?", "What is a firewall?"):
        messages = [{"role": "user", "content": text}]
        base, answer = client.greedy_answer(messages, "default-v0"), client.greedy_answer(messages, version)
        difference = max(abs(one - other) for one, other in zip(base.logprobs, answer.logprobs, strict=False))
        asked.append((difference, {"messages": messages, "text": answer.text, "logprobs": answer.logprobs}))
    difference, answered = max(asked, key=lambda one: one[0])
    assert difference > 20 * LOGPROB_TOLERANCE, difference
    return answered


def open_ones(client: Client) -> list[dict[str, Any]]:
    return [session for session in client.sessions() if session["state"] == "open"]


def ids_by_name(client: Client) -> dict[str, str]:
    return {session["external_id"]: session["id"] for session in client.sessions() if session["external_id"]}


async def open_workflows(data: Path, names: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Of each open workflow, by id: what it is, its run, and the headings of its history.

    Args:
        names: of sessions, by id.
    """
    where = json.loads((data / "running.json").read_text())
    temporal = await TemporalClient.connect(where["temporal_address"])
    found: dict[str, dict[str, Any]] = {}
    async for workflow in temporal.list_workflows("ExecutionStatus = 'Running'"):
        kind, _, name = workflow.id.partition("/")
        if kind in {"session", "training", "engine"}:
            history = await temporal.get_workflow_handle(workflow.id, run_id=workflow.run_id).fetch_history()
            what = f"session {names[name]}" if kind == "session" else kind
            found[workflow.id] = {"what": what, "run": workflow.run_id, "events": headings(history)}
    return found


def headings(history: WorkflowHistory) -> list[list[str]]:
    """Number, type and time of each event."""
    events = json.loads(history.to_json())["events"]
    return [[event["eventId"], event["eventType"], event["eventTime"]] for event in events]


def stop(started: Up) -> None:
    started.process.send_signal(signal.SIGINT)
    assert started.process.wait(60) == 0


def pack(data: Path, archive_path: Path) -> None:
    """Write the archive; the same folder gives the same bytes."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in [data, *sorted(data.rglob("*"))]:
            name = path.relative_to(data.parent)
            if path.name in LOCKS or LEFT_OUT & {name, *name.parents}:
                continue
            member = archive.gettarinfo(path, name.as_posix())
            member.mtime = member.uid = member.gid = 0
            member.uname = member.gname = ""
            archive.addfile(member, io.BytesIO(path.read_bytes()) if member.isfile() else None)
    archive_path.write_bytes(lzma.compress(content.getvalue(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    WORKPLACE.mkdir()
    make(WORKPLACE, Path(sys.argv[1]))
