"""Makes the data folder that test_upgrade.py starts from: `python -m tests.e2e.make_kept_data`.

The archive was made by the code of version 0.1.0 as it was on main before the large renaming. It is never made again,
because it tests nothing once the code that it is tested with has written it. Later versions add folders of their own.

Temporal stores host names, and paths in stack traces. So this ran under `unshare --mount --uts`, with a neutral host
name and the repository mounted at a neutral path.
"""

from __future__ import annotations

import asyncio
import io
import json
import lzma
import signal
import tarfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from temporalio.client import Client as TemporalClient

from tests.e2e.kept_folder import (
    ARCHIVE,
    FACTS,
    LOGPROB_TOLERANCE,
    MODEL_OPTIONS,
    RECIPE,
    Client,
    Message,
    Reply,
    client_of,
    copy_model,
    wait_until,
)
from tests.e2e.up import Up, up
from tests.replay.record import keep

# Temporal writes the path of its database into the database, so the path must not tell of a machine.
FOLDER = Path("/tmp/clawloop-kept")
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


def main() -> None:
    FOLDER.mkdir()
    data = FOLDER / "data"
    options = ("--model", str(copy_model(FOLDER)), *MODEL_OPTIONS)
    with up(data, FOLDER / "first.log", *options, "--recipe", str(RECIPE)) as started:
        with client_of(started) as client:
            train_two_steps(client)
            expired = open_session_that_expires(client)
        stop(started)
    with up(data, FOLDER / "second.log", *options, settings=NEVER_IDLE) as started:
        with client_of(started) as client:
            opened = open_sessions(client)
            use_admin_api(client)
            facts = {"open_sessions": opened, "expired_session": expired} | collect_samples(client, opened)
            facts["answer"] = distinctive_answer(client, f"default-v{facts['version']}")
            names = {session["id"]: session["external_id"] or "expired" for session in open_ones(client)}
            facts["runs"] = asyncio.run(export_histories(data, names))
        stop(started)
    FACTS.write_text(json.dumps(facts, indent=2) + "\n")
    pack(data)


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


async def export_histories(data: Path, names: dict[str, str]) -> dict[str, str]:
    """Write the histories of all open workflows for the replay test; returns their run ids by workflow id.

    Args:
        names: of sessions, by id.
    """
    where = json.loads((data / "running.json").read_text())
    temporal = await TemporalClient.connect(where["temporal_address"])
    runs: dict[str, str] = {}
    async for workflow in temporal.list_workflows("ExecutionStatus = 'Running'"):
        kind, _, name = workflow.id.partition("/")
        if kind in {"session", "training", "engine"}:
            runs[workflow.id] = workflow.run_id
            history = await temporal.get_workflow_handle(workflow.id, run_id=workflow.run_id).fetch_history()
            keep(f"kept_session_{names[name]}" if kind == "session" else f"kept_{kind}", history)
    return runs


def stop(started: Up) -> None:
    started.process.send_signal(signal.SIGINT)
    assert started.process.wait(60) == 0


def pack(data: Path) -> None:
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
    ARCHIVE.write_bytes(lzma.compress(content.getvalue(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main()
