"""A data folder that another version wrote, or this one, under the present `clawloop up`: its rows, open workflows and
adapters are used on."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowExecutionStatus

from db.schema import revisions
from tests.e2e.kept_folder import (
    LOGPROB_TOLERANCE,
    MODEL_OPTIONS,
    Client,
    Message,
    client_of,
    headings,
    make,
    unpack,
    wait_until,
)
from tests.e2e.up import Up, up

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(5400)]

KEPT = sorted(Path(__file__).with_name("kept_data").glob("*"))  # of releases
# A question to a session that the test continues, or a step, gives these something to do.
CONTINUED = {"session open", "session open_too", "session expired", "training"}
STILL_OPEN = {"session open", "session open_too", "session operated", "training"}


@dataclass(frozen=True)
class Continued:
    """
    Args:
        facts: of the kept folder.
        is_old: the idle time of its session that expires has passed.
    """

    up: Up
    client: Client
    facts: dict[str, Any]
    is_old: bool


@pytest.fixture(params=[*KEPT, None], ids=lambda kept: "this version" if kept is None else kept.name)
def continued(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Continued]:
    """`clawloop up` on the folder."""
    kept: Path | None = request.param
    if kept is None:
        (tmp_path / "made").mkdir()
        make(tmp_path / "made", kept := tmp_path / "kept")
    facts = json.loads((kept / "facts.json").read_text())
    data, model = unpack(kept, tmp_path)
    with up(data, tmp_path / "up.log", "--model", str(model), *MODEL_OPTIONS) as started, client_of(started) as client:
        yield Continued(started, client, facts, is_old=request.param is not None)


def test_a_kept_folder_goes_on_learning(continued: Continued) -> None:
    client, facts, data = continued.client, continued.facts, continued.up.data
    head, new = facts["version"], facts["version"] + 1
    running = json.loads((data / "running.json").read_text())
    assert schema_revision(running["database_url"]) == revisions()[0]
    training = client.admin("training")
    assert (training["version"], training["head"], training["ready"]) == (head, head, facts["waiting_samples"])
    answer = client.greedy_answer(facts["answer"]["messages"], "policy")
    assert answer.text == facts["answer"]["text"]
    assert answer.logprobs == pytest.approx(facts["answer"]["logprobs"], abs=LOGPROB_TOLERANCE)
    assert damage(data) == []  # only now: until the new engine has loaded the active version, that is missing

    waiting = {turn["id"] for turn in main_turns(client) if turn["sample"] == "fresh"}
    assert len(waiting) == facts["waiting_samples"]
    rated = {continue_session(client, facts, "open", "up"), continue_session(client, facts, "open_too", "down")}
    learned = wait_until(lambda: client.admin("training"), lambda now: now["version"] == new)
    assert learned["head"] == new
    parents = {version["n"]: version["parent"] for version in client.admin("policies/default/versions")["versions"]}
    assert parents[new] == head
    assert {turn["id"] for turn in main_turns(client) if turn["step"] == new} == waiting | rated
    reply = client.chat([{"role": "user", "content": "What is glass?"}], "new")
    assert reply.model == f"default-v{new}"

    if continued.is_old:
        wait_until(lambda: session_state(client, facts["expired_session"]), lambda state: state == "closed")
    asyncio.run(check_that_workflows_continued(running["temporal_address"], continued))
    assert damage(data) == []
    continued.up.process.send_signal(signal.SIGINT)
    assert continued.up.process.wait(60) == 0


def continue_session(client: Client, facts: dict[str, Any], name: str, rating: str) -> str:
    """Send one more message, which has the last turn judged, and rate that turn; returns its id."""
    session = facts["open_sessions"][name]
    (waiting,) = (turn["id"] for turn in client.main_turns(session["id"]) if turn["outcome"] == "waiting")

    def judged_turn() -> dict[str, Any]:
        (found,) = (turn for turn in client.main_turns(session["id"]) if turn["id"] == waiting)
        return found

    message: Message = {"role": "user", "content": "ok\nWhat is a password?"}
    assert client.chat([*session["messages"], message], name).model == f"default-v{facts['version']}"
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


def damage(data: Path) -> Any:
    """What `clawloop check` finds."""
    command = [sys.executable, "-m", "clawloop.app.cli.main", "check", "--data", str(data), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)["violations"]


async def check_that_workflows_continued(address: str, continued: Continued) -> None:
    """The workflows that were open have extended the histories that they had, in the same runs."""
    temporal = await TemporalClient.connect(address)
    expected = CONTINUED if continued.is_old else CONTINUED - {"session expired"}
    assert {of["what"] for of in continued.facts["workflows"].values()} >= CONTINUED | STILL_OPEN
    for workflow_id, kept in continued.facts["workflows"].items():
        newest = await temporal.get_workflow_handle(workflow_id).describe()
        assert newest.run_id == kept["run"], kept["what"]
        history = await temporal.get_workflow_handle(workflow_id, run_id=newest.run_id).fetch_history()
        old_events, events = kept["events"], headings(history)
        assert events[: len(old_events)] == old_events, kept["what"]
        added = {kind for _, kind, _ in events[len(old_events) :]}
        assert kept["what"] not in expected or "EVENT_TYPE_ACTIVITY_TASK_COMPLETED" in added, kept["what"]
        assert kept["what"] not in STILL_OPEN or newest.status is WorkflowExecutionStatus.RUNNING, kept["what"]
