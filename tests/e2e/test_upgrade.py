"""A data folder of version 0.1.0 under the present `clawloop up`: its rows, open workflows and adapters are used on."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.script import ScriptDirectory
from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowExecutionStatus

from tests.e2e.kept_folder import (
    FACTS,
    LOGPROB_TOLERANCE,
    MODEL_OPTIONS,
    Client,
    Message,
    client_of,
    copy_model,
    unpack,
    wait_until,
)
from tests.e2e.up import Up, up

# It waits for an engine, like the tests with an engine of their own.
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.postgres, pytest.mark.timeout(2700)]

ROOT = Path(__file__).parents[2]
HISTORIES = ROOT / "tests" / "replay" / "histories"
KEPT: dict[str, Any] = json.loads(FACTS.read_text())
HEAD, NEXT = KEPT["version"], KEPT["version"] + 1
# A question to a session that the test continues, or a step, gives these something to do.
CONTINUED = {"kept_session_open", "kept_session_open_too", "kept_session_expired", "kept_training"}
STILL_OPEN = {"kept_session_open", "kept_session_open_too", "kept_session_operated", "kept_training"}


@pytest.fixture
def kept_up(tmp_path: Path) -> Iterator[Up]:
    """`clawloop up` on the folder; not begun before the test, since tests beside it have limits of their own."""
    with up(unpack(tmp_path), tmp_path / "up.log", "--model", str(copy_model(tmp_path)), *MODEL_OPTIONS) as started:
        yield started


@pytest.fixture
def client(kept_up: Up) -> Iterator[Client]:
    with client_of(kept_up) as ready:
        yield ready


def test_a_folder_of_an_older_version_goes_on_learning(kept_up: Up, client: Client) -> None:
    running = json.loads((kept_up.data / "running.json").read_text())
    assert schema_revision(running["database_url"]) == newest_revision()
    training = client.admin("training")
    assert (training["version"], training["head"], training["ready"]) == (HEAD, HEAD, KEPT["waiting_samples"])
    answer = client.greedy_answer(KEPT["answer"]["messages"], "policy")
    assert answer.text == KEPT["answer"]["text"]
    assert answer.logprobs == pytest.approx(KEPT["answer"]["logprobs"], abs=LOGPROB_TOLERANCE)
    assert damage(kept_up.data) == []  # only now: until the new engine has loaded the active version, that is missing

    waiting = {turn["id"] for turn in main_turns(client) if turn["sample"] == "fresh"}
    assert len(waiting) == KEPT["waiting_samples"]
    rated = {continue_session(client, "open", "up"), continue_session(client, "open_too", "down")}
    learned = wait_until(lambda: client.admin("training"), lambda now: now["version"] == NEXT)
    assert learned["head"] == NEXT
    parents = {version["n"]: version["parent"] for version in client.admin("policies/default/versions")["versions"]}
    assert parents[NEXT] == HEAD
    assert {turn["id"] for turn in main_turns(client) if turn["step"] == NEXT} == waiting | rated
    reply = client.chat([{"role": "user", "content": "What is glass?"}], "new")
    assert reply.model == f"default-v{NEXT}"

    wait_until(lambda: session_state(client, KEPT["expired_session"]), lambda state: state == "closed")
    asyncio.run(check_that_workflows_continued(running["temporal_address"]))
    assert damage(kept_up.data) == []
    kept_up.process.send_signal(signal.SIGINT)
    assert kept_up.process.wait(60) == 0


def continue_session(client: Client, name: str, rating: str) -> str:
    """Send one more message, which has the last turn judged, and rate that turn; returns its id."""
    session = KEPT["open_sessions"][name]
    (waiting,) = (turn["id"] for turn in client.main_turns(session["id"]) if turn["outcome"] == "waiting")

    def judged_turn() -> dict[str, Any]:
        (found,) = (turn for turn in client.main_turns(session["id"]) if turn["id"] == waiting)
        return found

    message: Message = {"role": "user", "content": "ok\nWhat is a password?"}
    assert client.chat([*session["messages"], message], name).model == f"default-v{HEAD}"
    wait_until(judged_turn, lambda turn: turn["outcome"] != "waiting")
    client.rate(session["last_reply"], rating=rating)
    verdict = {"up": 1, "down": -1}[rating]
    wait_until(judged_turn, lambda turn: turn["verdict"] == verdict and turn["sample"] is not None)
    return str(waiting)


def main_turns(client: Client) -> list[dict[str, Any]]:
    return [turn for session in client.sessions() for turn in client.main_turns(session["id"])]


def session_state(client: Client, session_id: str) -> str:
    return str(client.admin(f"sessions/{session_id}")["session"]["state"])


def schema_revision(database_url: str) -> str | None:
    with psycopg.connect(database_url) as connection:
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return None if row is None else str(row[0])


def newest_revision() -> str | None:
    return ScriptDirectory(str(ROOT / "migrations")).get_current_head()


def damage(data: Path) -> Any:
    """What `clawloop check` finds."""
    command = [sys.executable, "-m", "clawloop.cli.main", "check", "--data", str(data), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)["violations"]


async def check_that_workflows_continued(address: str) -> None:
    """The workflows that were open have extended the histories that the old code wrote, in the same runs."""
    temporal = await TemporalClient.connect(address)
    seen = set()
    for path in HISTORIES.glob("kept_*.json"):
        old = json.loads(path.read_text())
        workflow_id = old["events"][0]["workflowExecutionStartedEventAttributes"]["workflowId"]
        seen.add(workflow_id)
        newest = await temporal.get_workflow_handle(workflow_id).describe()
        assert newest.run_id == KEPT["runs"][workflow_id], path.stem
        history = await temporal.get_workflow_handle(workflow_id, run_id=newest.run_id).fetch_history()
        old_events, events = headings(old), headings(json.loads(history.to_json()))
        assert events[: len(old_events)] == old_events, path.stem
        added = {kind for _, kind, _ in events[len(old_events) :]}
        assert path.stem not in CONTINUED or "EVENT_TYPE_ACTIVITY_TASK_COMPLETED" in added, path.stem
        assert path.stem not in STILL_OPEN or newest.status is WorkflowExecutionStatus.RUNNING, path.stem
    assert seen == KEPT["runs"].keys()


def headings(history: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Number, type and time of each event."""
    return [(event["eventId"], event["eventType"], event["eventTime"]) for event in history["events"]]
