"""The `clawloop` program as people and process supervisors run it."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import typer
from pydantic import ValidationError
from typer.testing import CliRunner

from clawloop.app.cli.chat import address_of
from clawloop.app.cli.main import app
from clawloop.app.cli.openclaw_config import configuration, merged
from clawloop.app.cli.terminal import _READING
from clawloop.app.demo.demo_folder import Address
from clawloop.app.local import parts
from clawloop.app.local.checks import lock_data_folder
from clawloop.app.local.parts import Deployment, JudgeEngine
from clawloop.app.local.plan import UpOptions
from clawloop.app.processes.bootstrap import create_default_policy, prepare
from clawloop.app.processes.endpoints import (
    RuntimeAddresses,
    read_runtime_file,
    running_data,
    workflow_links,
    write_runtime_file,
)
from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.turns import SessionEvidence, SessionSource, TurnKind, TurnRecord, TurnStatus
from clawloop.core.errors import RecipeRejected, SetupError
from clawloop.core.ids import ApiKeyId, response_id
from clawloop.core.recipes.recipe import DEFAULT_RECIPE, WITHOUT_JUDGE, Recipe, load_recipe
from clawloop.core.settings import Settings, read_settings
from clawloop.operations.workflow_links import NO_LINKS, WorkflowLinks
from db.database import BACKGROUND_LIMIT, Database
from db.judging.feedback import PostgresFeedbackStore
from db.serving.engines import add_engine, list_engines
from db.serving.keys import PostgresKeyStore
from db.turns.insert import PostgresTurnStore
from tests.conftest import execute
from tests.fakes.model_server import model_server
from tests.records import turn_record
from tests.rules.tables import COMMANDS
from tests.unit.layout.folders import write_folder
from tests.verbs import clawloop, clawloop_process, refusal

# The `clawloop` program as people and process supervisors run it.


def test_migrate_with_a_base_model_prepares_a_deployment(empty_postgres_url: str, tmp_path: Path) -> None:
    here = {"DATABASE_URL": empty_postgres_url, "CLAWLOOP_DATA": str(tmp_path)}
    assert clawloop("migrate", **here).returncode == 0
    assert "clawloop migrate --base-model" in refusal(clawloop("key", "create", **here))

    migrate = ["migrate", "--base-model", "Qwen/Qwen3-4B", "--alias", "small", "--engine", "http://gpu:8100"]
    assert clawloop_process(*migrate, **here).returncode == 0
    assert clawloop_process("key", "create", **here).stdout.startswith("cl-")
    with psycopg.connect(empty_postgres_url) as connection:
        assert connection.execute("SELECT id, base_model, aliases FROM policies").fetchall() == [
            ("default", "Qwen/Qwen3-4B", ["small"])
        ]
        assert connection.execute("SELECT id FROM engines").fetchall() == [("gpu:8100",)]

    assert clawloop_process("engine", "remove", "gpu:8100", "--yes", **here).stdout == "gpu:8100 is removed.\n"
    assert "no engine 'gpu:8100'" in refusal(clawloop("engine", "remove", "gpu:8100", "--yes", **here))
    assert clawloop("migrate", "--alias", "small", **here).returncode == 2


def test_an_engine_of_another_model_is_refused_and_a_silent_one_added(empty_postgres_url: str, tmp_path: Path) -> None:
    here = {"DATABASE_URL": empty_postgres_url, "CLAWLOOP_DATA": str(tmp_path)}
    folder = write_folder(tmp_path / "Qwen3-4B")  # with 100 token ids
    with (
        model_server("Qwen3-4B", vocab=100) as same,
        model_server("Qwen3-4B", vocab=101) as larger,
        model_server("Qwen3-4B", vocab=99) as smaller,
        model_server("Llama") as other,
    ):
        migrate = ["migrate", "--base-model", "Qwen3-4B"]
        said = refusal(clawloop(*migrate, "--engine", other, **here))
        assert f"engine {other} serves Llama, the policies are of Qwen3-4B: give an engine of that model" in said
        done = clawloop(*migrate, "--engine", same, "--engine", "http://127.0.0.1:1", **here)
        assert (done.returncode, done.stderr) == (
            0,
            "engine http://127.0.0.1:1 does not answer yet; its model was not compared.\n",
        )
        for verb in (("engine", "add"), (*migrate, "--engine")):
            assert f"engine {other} serves Llama" in refusal(clawloop(*verb, other, **here))
            with_model = here | {"CLAWLOOP_MODEL": str(folder)}
            assert clawloop(*verb, same, **with_model).returncode == 0
            assert "with more token ids than the trainer's 100" in refusal(clawloop(*verb, larger, **with_model))
            assert "with fewer token ids than the trainer's 100" in refusal(clawloop(*verb, smaller, **with_model))
        assert f"{same} does not require authentication" in clawloop("engine", "add", same, **here).stderr
        refused = refusal(clawloop("engine", "add", same, "--require-guard", **here))
        assert "start it with the engine guard, or leave out --require-guard" in refused
        with psycopg.connect(empty_postgres_url) as connection:
            stored = connection.execute("SELECT url FROM engines ORDER BY url").fetchall()
    assert {url for (url,) in stored} == {same, "http://127.0.0.1:1"}


def test_a_drained_engine_stays_drained_when_a_deployment_migrates_again(
    empty_postgres_url: str, tmp_path: Path
) -> None:
    here = {"DATABASE_URL": empty_postgres_url, "CLAWLOOP_DATA": str(tmp_path)}
    migrate = ["migrate", "--base-model", "Qwen3-4B", "--engine", "http://127.0.0.1:1"]
    assert clawloop(*migrate, **here).returncode == 0
    assert clawloop("engine", "drain", "127.0.0.1:1", "--yes", **here).returncode == 0
    assert clawloop(*migrate, "--engine", "http://127.0.0.1:2", **here).returncode == 0
    with psycopg.connect(empty_postgres_url) as connection:
        stored = connection.execute("SELECT id, draining FROM engines ORDER BY id").fetchall()
    assert stored == [("127.0.0.1:1", True), ("127.0.0.1:2", False)]


def test_a_gateway_whose_port_is_in_use_reports_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refusal(
            clawloop_process(
                "gateway", "--port", str(port), "--data", str(tmp_path), DATABASE_URL="postgresql://me@127.0.0.1:1/x"
            )
        )
    assert f"port {port} for the gateway is in use" in line
    assert "--port" in line


def test_a_gateway_whose_data_folder_is_a_file_reports_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = clawloop(
        "gateway", "--port", "0", "--data", str(tmp_path / "file"), DATABASE_URL="postgresql://me@127.0.0.1:1/x"
    )
    assert f"cannot write to {tmp_path / 'file'}" in refusal(done)


def send_two_requests(port: int) -> None:
    """Send two requests over one connection, 6 s apart: clients keep an idle connection for 5 s (httpx)."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    while True:
        try:
            connection.connect()
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    connection.auto_open = 0  # the second request must not open a new connection
    for pause in (6, 0):
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        time.sleep(pause)
    connection.close()


async def test_a_gateway_adds_configured_engines_and_keeps_connections_alive(postgres_url: str, tmp_path: Path) -> None:
    database = Database(postgres_url, BACKGROUND_LIMIT)
    await add_engine(database, "http://127.0.0.1:1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = {"DATABASE_URL": postgres_url, "CLAWLOOP_ENGINES": "http://127.0.0.1:2", "CLAWLOOP_DATA": str(tmp_path)}
    with (tmp_path / "log").open("w") as log:
        gateway = subprocess.Popen(
            [sys.executable, "-m", "clawloop.app.cli.main", "gateway", "--port", str(port)],
            env=dict(os.environ) | given,
            stdout=log,
            stderr=log,
        )
    try:
        async with asyncio.timeout(180):  # most of it is the start of the process
            while len(await list_engines(database)) < 2:
                assert gateway.poll() is None, (tmp_path / "log").read_text()
                await asyncio.sleep(0.1)
            await asyncio.to_thread(send_two_requests, port)
    finally:
        gateway.terminate()
        gateway.wait(60)
        await database.close()


def test_up_passes_allowed_hosts_to_the_gateway(tmp_path: Path) -> None:
    deployment = Deployment(
        tmp_path, "postgresql://x", "x:1", (), "tiny", (), {}, allowed_hosts=("clawloop.lan", "box")
    )
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        for gateway in parts.gateways(deployment, listener, 2, {}):
            assert gateway.prepare().command[-2:] == ("--allowed-host=clawloop.lan", "--allowed-host=box")


def test_up_gives_each_gateway_its_share_of_an_engine_and_a_persons_own_comes_first(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, "postgresql://x/y", "127.0.0.1:1", (), "tiny", (), {}, engine_chats=28)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        given = [
            parts.gateways(each, listener, 1, environment)[0].prepare().environment.get("CLAWLOOP_ENGINE_CHATS")
            for each, environment in (
                (deployment, {}),
                (deployment, {"CLAWLOOP_ENGINE_CHATS": "9"}),
                (replace(deployment, engine_chats=None), {}),
            )
        ]
    assert given == ["28", "9", None]


def test_up_gives_the_judge_worker_the_probes_that_an_engine_is_asked_at_once(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, "postgresql://x/y", "127.0.0.1:1", (), "tiny", (), {}, probes=4)

    def given(deployment: Deployment, environment: Mapping[str, str]) -> list[str | None]:
        return [
            part.prepare().environment.get("CLAWLOOP_PROBES_AT_ONCE") for part in parts.workers(deployment, environment)
        ]

    assert given(deployment, {}) == ["4"]
    assert given(deployment, {"CLAWLOOP_PROBES_AT_ONCE": "9"}) == ["9"]
    assert given(replace(deployment, probes=None), {}) == [None]
    several = replace(deployment, engines=("http://127.0.0.1:1", "http://127.0.0.1:2"))
    assert given(several, {}) == [None, "4"]


def test_up_shares_the_grammars_that_an_engine_compiles_among_its_gateways(tmp_path: Path) -> None:
    name = "CLAWLOOP_CHAT_BOUNDS__STRUCTURED_REQUESTS_TOGETHER"
    deployment = Deployment(tmp_path, "postgresql://x/y", "127.0.0.1:1", (), "tiny", (), {}, grammars=2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        given = [
            parts.gateways(each, listener, 1, environment)[0].prepare().environment.get(name)
            for each, environment in (
                (deployment, {}),
                (deployment, {name: "9"}),
                (replace(deployment, grammars=None), {}),
            )
        ]
    assert given == ["2", "9", None]


def test_gateway_and_judge_worker_ask_the_judge_engine_that_is_started_here(tmp_path: Path) -> None:
    judge = JudgeEngine("http://127.0.0.1:9", "judge", secret="s3cret")
    deployment = Deployment(tmp_path, "postgresql://x/y", "127.0.0.1:1", (), "tiny", (), {}, judge=judge)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        [gateway] = parts.gateways(deployment, listener, 1, {})
        orchestrator, worker = parts.separate_workers(deployment, {"CLAWLOOP_JUDGE_FORM": "free"})
        [combined] = parts.workers(deployment, {"CLAWLOOP_JUDGE_FORM": "free"})
        variables = [part.prepare().environment for part in (gateway, worker, orchestrator)]
    urls = [given.get("CLAWLOOP_JUDGE_URL") for given in variables]
    assert urls == ["http://127.0.0.1:9", "http://127.0.0.1:9", None]
    assert [given.get("CLAWLOOP_JUDGE_FORM") for given in variables] == ["auto", "free", "free"]
    assert [given.get("CLAWLOOP_JUDGE_API_KEY") for given in variables] == ["s3cret", "s3cret", None]
    assert combined.prepare().environment == worker.prepare().environment


def test_every_verb_reports_a_shadowed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "db").mkdir()
    (tmp_path / "db" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    done = clawloop_process("key", "list", DATABASE_URL="postgresql://me@127.0.0.1:1/x")
    assert f"{tmp_path}/db shadows" in refusal(done)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("CLAWLOOP_SESSION_IDLE_MINUTES", "soon", "input should be a valid number"),
        ("CLAWLOOP_SESSION_IDLE_MINUTES", "0", "input should be greater than 0"),
        ("CLAWLOOP_MAX_LORA_RANK", "7", "engines take one of 1, 8, 16"),
        ("CLAWLOOP_JUDGE_FORM", "secret", "input should be 'auto', 'free', 'grammar' or 'examples'"),
    ],
)
def test_an_invalid_setting_is_one_line_with_its_name(
    name: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SetupError) as raised:
        read_settings()
    message = str(raised.value)
    assert message.startswith(f"{name}: {expected}")
    assert message.endswith("; correct it or unset it")
    assert "\n" not in message
    assert "secret" not in message


def test_a_verb_reports_an_invalid_setting() -> None:
    line = refusal(clawloop_process("session", "list", CLAWLOOP_SESSION_IDLE_MINUTES="soon"))
    assert "CLAWLOOP_SESSION_IDLE_MINUTES" in line


# What `session list`, `session show`, `why`, `key` and `engine` print, at 80 and 120 columns.

TITLE = "Please write me a very long poem about a fox that wanders through an endless forest, and about its friends"
CODE = "def f(a):\n    return a"


def chat(key: ApiKeyId, session: str, *texts: str) -> list[TurnRecord]:
    """Turns of one session, each of which continues the one before."""
    messages: list[dict[str, Any]] = []
    turns = []
    for minute, text in enumerate(texts):
        messages.append({"role": "user", "content": text})
        reply = {"role": "assistant", "content": f"reply to {text[:20]}"}
        record = turn_record(
            api_key_id=key,
            evidence=SessionEvidence(SessionSource.HEADER, session),
            messages=list(messages),
            response=reply,
        )
        turns.append(replace(record, started_at=record.started_at - timedelta(minutes=30 - minute)))
        messages.append(reply)
    return turns


@pytest.fixture
def here(postgres_url: str, tmp_path: Path) -> dict[str, str]:
    asyncio.run(create_default_policy(postgres_url, "tiny", [], []))
    return {"DATABASE_URL": postgres_url, "CLAWLOOP_DATA": str(tmp_path), "TEMPORAL_ADDRESS": "127.0.0.1:1"}


@pytest.fixture
def turns(here: dict[str, str]) -> list[TurnRecord]:
    """Two sessions of a person, one of side turns."""

    async def insert() -> list[TurnRecord]:
        database = Database(here["DATABASE_URL"], BACKGROUND_LIMIT)
        key, _ = await PostgresKeyStore(database).create_key("default", {Scope.CHAT}, "test")
        other = chat(key.id, "other", "hello", "no")
        side = replace(chat(key.id, "side", "beat")[0], kind=TurnKind.SIDE, kind_reason="heartbeat")
        mine = chat(key.id, "mine", TITLE, f"shorter\n{CODE}", "and \x1b[31mred")
        mine[2] = replace(mine[2], status=TurnStatus.ABORTED, finish_reason=None)
        store = PostgresTurnStore(database)
        for record in (*other, side, *mine):
            await store.insert(record)
        await PostgresFeedbackStore(database).give(key.id, mine[0].turn_id, -1.0, "too long")
        await database.close()
        return mine

    return asyncio.run(insert())


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.long)])
def test_lists_fit_the_terminal_and_their_ids_are_taken(
    columns: int, here: dict[str, str], turns: list[TurnRecord]
) -> None:
    here = here | {"COLUMNS": str(columns)}
    listed = clawloop("session", "list", **here).stdout.splitlines()
    assert max(map(len, listed)) <= columns
    assert listed[0].split() == ["id", "age", "state", "turns", "learned", "title"]
    assert listed[1].split("  ")[-1].startswith("Please write me a very long poem")
    assert listed[-1] == "1 session of a single turn or of side turns alone left out, --all"
    short = listed[1].split()[0]
    whole = json.loads(clawloop("session", "list", "--all", "--json", **here).stdout)
    assert (whole["total"], len(whole["sessions"]), whole["sessions"][0]["short_id"]) == (3, 3, short)
    assert clawloop("session", "list", "--limit", "1", **here).stdout.splitlines()[-2] == "1 of 2, --more"
    assert len(clawloop("session", "list", "--limit", "1", "--more", **here).stdout.splitlines()) == 4
    for reference in (short, "mine", "last", response_id(turns[0].turn_id)):
        shown = json.loads(clawloop("session", "show", reference, "--json", **here).stdout)
        assert shown["session"]["external_id"] == "mine"


def test_sessions_are_found_by_what_was_said_and_decided(here: dict[str, str], turns: list[TurnRecord]) -> None:
    def found(*options: str) -> list[str]:
        page = json.loads(clawloop("session", "list", "--json", *options, **here).stdout)
        assert page["total"] is None
        return [session["external_id"] for session in page["sessions"]]

    assert found("--text", "SHORTER") == ["mine"]
    assert found("--kind", "side") == ["side"]
    assert sorted(found("--version", str(turns[0].version), "--kind", "main", "--limit", "1", "--more")) == [
        "mine",
        "other",
    ]
    assert found("--verdict", "1") == []
    everything = json.loads(clawloop("session", "list", "--json", "--all", **here).stdout)
    assert found("--text", " SHORTER ", "--unjudged") == ["mine"]
    assert found("--judged") == []
    assert json.loads(clawloop("session", "list", "--json", "--all", "--text", " ", **here).stdout) == everything
    newest = clawloop("session", "list", "--kind", "main", "--limit", "1", **here).stdout.splitlines()
    assert newest[-1] == "the newest 1, --more"
    odd = clawloop_process("session", "list", "--outcome", "odd", **here)
    assert (odd.returncode, "use waiting" in odd.stderr) == (2, True)


@pytest.mark.parametrize("columns", [80, 120])
def test_a_session_reads_as_a_conversation(columns: int, here: dict[str, str], turns: list[TurnRecord]) -> None:
    here = here | {"COLUMNS": str(columns)}
    lines = clawloop("session", "show", "mine", **here).stdout.splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(" ".join(lines).split())
    first, second, third = text.split("-- turn ")[1:]
    assert "user: Please write me" in first
    assert "assistant: reply to Please" in first
    assert "rated -1 too long (amends)" in first
    assert "Please write me" not in second
    assert "user: shorter" in second
    assert f"user: shorter\n{CODE}\n" in "\n".join(lines)
    assert "why waits for" in second
    assert "\N{REPLACEMENT CHARACTER}[31mred" in third
    assert "aborted" in third
    assert "the client went away before the reply ended; waits for" in third
    partly = clawloop("session", "show", "mine", "--limit", "1", **here).stdout
    assert partly.endswith("the newest 1 of 3 turns, --more\n")


def test_why_takes_what_session_show_prints_and_is_never_empty(here: dict[str, str], turns: list[TurnRecord]) -> None:
    short = clawloop("session", "show", "mine", **here).stdout.split("-- turn 2 · ")[1].split()[0]
    why = json.loads(clawloop("why", short, "--json", **here).stdout)
    assert (why["id"], why["number"]) == (str(turns[1].turn_id), 2)
    for reference in ("last", "mine:3", str(turns[2].turn_id), response_id(turns[2].turn_id)):
        assert "why        the client went away" in clawloop("why", reference, **here).stdout
    assert "There is no turn 'mine:4'" in refusal(clawloop("why", "mine:4", **here))
    assert "There is no session 'nobody'" in refusal(clawloop("session", "show", "nobody", **here))


def test_before_the_first_chat_the_last_reply_is_said_to_be_missing(here: dict[str, str]) -> None:
    assert refusal(clawloop("why", "last", **here)) == "clawloop: There is no reply yet: nobody has chatted."
    shown = refusal(clawloop("session", "show", "last", **here))
    assert shown == "clawloop: There is no session yet: nobody has chatted."


def test_workflows_are_linked_where_temporals_ui_is_known(here: dict[str, str], turns: list[TurnRecord]) -> None:
    known = here | {"CLAWLOOP_TEMPORAL_UI": "http://127.0.0.1:8233"}
    shown = json.loads(clawloop("session", "show", "mine", "--json", **known).stdout)["session"]
    link = f"http://127.0.0.1:8233/namespaces/default/workflows/session%2F{shown['id']}"
    assert shown["workflow_url"] == link
    assert f"link       {link}\n" in clawloop("why", "last", **known).stdout
    assert json.loads(clawloop("why", "last", "--json", **known).stdout)["workflow_url"] == link
    training = "http://127.0.0.1:8233/namespaces/default/workflows/training%2Fdefault"
    assert f"workflow   training/default  {training}\n" in clawloop("training", "status", **known).stdout
    status = json.loads(clawloop("status", "--json", **known).stdout)
    assert (status["temporal_ui"], status["workflows"]) == ("http://127.0.0.1:8233", {"training/default": training})
    unknown = json.loads(clawloop("status", "--json", **here).stdout)
    assert (unknown["temporal_ui"], unknown["workflows"]) == (None, {})
    assert "link" not in clawloop("why", "last", **here).stdout


def test_why_shows_a_replys_tokens(here: dict[str, str], turns: list[TurnRecord]) -> None:
    lines = clawloop("why", "mine:1", "--tokens", **here, COLUMNS="80").stdout.splitlines()
    assert lines[0].split() == ["id", "log-prob", "advantage", "token"]
    assert [line.split()[0] for line in lines[1:-1]] == [str(token) for token in turns[0].response_ids or ()]
    assert lines[-1] == "no step has trained it by advantages; no engine told the texts of the tokens"
    shown = json.loads(clawloop("why", "mine:1", "--tokens", "--json", **here).stdout)
    assert shown["response_ids"] == list(turns[0].response_ids or ())
    assert (shown["advantages"], shown["step"]) == (None, None)


def test_keys_are_listed_shown_again_and_revoked_by_name(here: dict[str, str], tmp_path: Path) -> None:
    made = json.loads(clawloop("key", "create", "--name", "phone", "--json", **here).stdout)
    assert made["key"].startswith(made["prefix"])
    listed = clawloop("key", "list", **here, COLUMNS="80").stdout
    assert made["prefix"] in listed
    assert clawloop("key", "revoke", "phone", "--json", **here).stdout.strip() == f'{{"prefix":"{made["prefix"]}"}}'
    assert "There is no such key 'phone'" in refusal(clawloop("key", "revoke", "phone", **here))
    assert "keys.json has no keys" in refusal(clawloop("key", "show", **here))
    (tmp_path / "keys.json").write_text('{"chat": "ck-1", "admin": "ak-1"}')
    assert clawloop("key", "show", **here).stdout.split() == ["chat", "ck-1", "admin", "ak-1"]


def test_draining_the_only_engine_asks_first(here: dict[str, str]) -> None:
    execute(here["DATABASE_URL"], "INSERT INTO engines (id, url) VALUES ('127.0.0.1:1', 'http://127.0.0.1:1')")
    (line,) = clawloop("engine", "list", **here).stdout.splitlines()[1:]
    assert line.split()[:3] == ["127.0.0.1:1", "silent", "yes"]
    asked = clawloop_process("engine", "drain", "127", **here)
    assert asked.returncode == 1
    assert "127.0.0.1:1 is the only engine that takes requests" in asked.stderr
    assert clawloop("engine", "drain", "127", "--yes", **here).stdout == "127.0.0.1:1 gets no new requests.\n"
    undone = json.loads(clawloop("engine", "drain", "127", "--undo", "--json", **here).stdout)
    assert (undone["draining"], undone["healthy"]) == (False, False)


def test_titles_and_ids_of_many_sessions_stay_short(here: dict[str, str]) -> None:
    execute(
        here["DATABASE_URL"],
        "INSERT INTO api_keys (id, policy, name, prefix, secret_sha256, scopes)"
        " VALUES (gen_random_uuid(), 'default', 'k', 'cl-1', '', '{chat}');"
        "INSERT INTO sessions (id, policy, api_key_id, identified_by, state, last_turn_at)"
        " SELECT gen_random_uuid(), 'default', (SELECT id FROM api_keys LIMIT 1), 'conversation', 'open', now()"
        " FROM generate_series(1, 2000)",
    )
    listed = clawloop("session", "list", "--all", **here, COLUMNS="80").stdout.splitlines()
    assert listed[-1] == "20 of 2000, --more"
    assert {len(line.split()[0]) for line in listed[1:-1]} == {8}


def test_the_status_has_ten_lines_at_most(here: dict[str, str], turns: list[TurnRecord]) -> None:
    execute(here["DATABASE_URL"], "UPDATE turns SET entered_at = now() - interval '1 hour'")
    lines = clawloop("status", **here).stdout.splitlines()
    assert len(lines) <= 10
    assert lines[0] == "engines    0 of 0 take requests"
    assert lines[1].startswith("default    v0 answers; waiting: 0 of 16 samples")
    assert lines[2].startswith("sessions   2, 2 not closed yet; the newest turn 2")
    assert "problem    there is no engine: `clawloop engine add URL`" in lines
    assert any("were not notified for over two minutes" in line for line in lines)
    assert json.loads(clawloop("status", "--json", **here).stdout)["sessions"] == 2
    assert clawloop("--version", **here).stdout.startswith("clawloop 0.")


# `clawloop training`, `policy` and `recipe` on real PostgreSQL, without Temporal.

QUANTISED = Path(__file__).parents[2] / "deploy" / "recipes" / "quantised.toml"


def output_of(*arguments: str, here: dict[str, str]) -> Any:
    done = clawloop(*arguments, "--json", **here)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_pause_and_resume_without_temporal(here: dict[str, str]) -> None:
    status = output_of("training", "status", here=here)
    assert (status["state"], status["ready"], status["needed"], status["version"]) == ("waiting", 0, 16, 0)
    paused = clawloop_process("training", "pause", "the machine is needed", **here)
    assert paused.returncode == 0
    assert "paused: the machine is needed" in paused.stdout
    assert "The change holds; the training workflow sees it when it reads the ledger next" in paused.stderr
    assert output_of("training", "status", here=here)["state"] == "paused"
    assert output_of("training", "resume", here=here)["state"] == "waiting"
    assert "no policy 'nobody'" in refusal(clawloop("training", "status", "--policy", "nobody", **here))
    assert clawloop("training", "pause", " ", **here).returncode == 2


def test_versions_are_listed_rolled_back_and_pinned(here: dict[str, str]) -> None:
    with psycopg.connect(here["DATABASE_URL"]) as connection:
        for n in (1, 2):
            connection.execute(
                "INSERT INTO versions (policy, n, parent, path, sha256) VALUES ('default', %s, %s, %s, %s)",
                (n, n - 1, f"default/v{n}-0123456789ab", b"\1" * 32),
            )
        connection.execute("UPDATE policies SET head = 2")
    listed = json.loads(clawloop_process("policy", "versions", "--json", **here).stdout)
    assert [(row["n"], row["state"]) for row in listed["versions"]] == [
        (0, "active, on the path"),
        (1, "on the path"),
        (2, "head"),
    ]
    pinned = output_of("policy", "pin", "1", here=here)
    assert (pinned["version"], pinned["pinned"]) == (0, 1)  # no engine has it yet
    assert "unpin first" in refusal(clawloop("policy", "roll-back", "0", **here))
    assert output_of("policy", "pin", "--none", here=here)["version"] == 0
    recipe = Path(here["CLAWLOOP_DATA"]) / "binary.toml"
    recipe.write_text('name = "binary"\ntrain.batch_samples = 4\n')
    told = clawloop("policy", "roll-back", "0", **here).stdout.splitlines()
    assert told[0] == "Training of default goes on from version 0, which answers now."
    back = output_of("policy", "roll-back", "1", "--recipe", str(recipe), here=here)
    assert (back["head"], back["needed"]) == (1, 4)
    assert "clawloop policy versions --policy default" in refusal(clawloop("policy", "roll-back", "7", **here))
    assert clawloop("policy", "pin", **here).returncode == 2
    (policy,) = output_of("policy", "list", here=here)["policies"]
    assert (policy["policy"], policy["base_model"], policy["training"]["head"]) == ("default", "tiny", 1)


def test_a_shown_recipe_can_be_edited_and_set(here: dict[str, str], tmp_path: Path) -> None:
    shown = clawloop_process("recipe", "show", **here).stdout
    file = tmp_path / "combined.toml"
    file.write_text(shown)
    assert load_recipe(file) == DEFAULT_RECIPE
    file.write_text(shown.replace("train.batch_samples = 16", "train.batch_samples = 4"))
    done = clawloop_process("recipe", "set", str(file), **here)
    assert done.returncode == 0
    assert "The change holds; the training workflow sees it when it reads the ledger next" in done.stderr
    assert output_of("recipe", "show", here=here)["train"]["batch_samples"] == 4
    assert output_of("training", "status", here=here)["needed"] == 4
    file.write_text("name = 'combined'\ntrain.batch_sample = 4\n")
    assert "batch_samples" in refusal(clawloop("recipe", "set", str(file), **here))
    assert "no policy 'nobody'" in refusal(clawloop("recipe", "show", "--policy", "nobody", **here))


def test_a_rank_above_the_engines_limit_is_rejected(here: dict[str, str], tmp_path: Path) -> None:
    large = Recipe.model_validate({"name": "large", "train": {"lora": {"rank": 32}}})
    file = tmp_path / "large.toml"
    file.write_text("name = 'large'\ntrain.lora.rank = 32\n")
    line = refusal(clawloop("recipe", "set", str(file), **here))
    assert "train.lora.rank: 32, but engines take 16 at most" in line
    assert "CLAWLOOP_MAX_LORA_RANK" in line
    with pytest.raises(ValidationError, match="engines take one of 1, 8, 16, 32"):
        Settings(max_lora_rank=17)
    url = here["DATABASE_URL"]
    with pytest.raises(RecipeRejected, match="engines take 16"):
        asyncio.run(prepare(url, "tiny", [], [], {}, recipe=large))
    assert output_of("recipe", "show", here=here)["name"] == "hybrid"
    wide = here | {"CLAWLOOP_MAX_LORA_RANK": "32"}
    assert clawloop("recipe", "set", str(file), **wide).returncode == 0
    # A later start with the default limit could not load adapters of that recipe.
    with pytest.raises(RecipeRejected, match="engines take 16"):
        asyncio.run(prepare(url, "tiny", [], [], {}))
    asyncio.run(prepare(url, "tiny", [], [], {}, max_lora_rank=32))


def test_with_quantised_weights_a_start_needs_a_decoupled_recipe(postgres_url: str) -> None:
    asyncio.run(prepare(postgres_url, "tiny", [], [], {}))
    with pytest.raises(RecipeRejected, match=r"set \"decoupled\" in a recipe and start once with --recipe FILE"):
        asyncio.run(prepare(postgres_url, "tiny", [], [], {}, quantised=True))
    decoupled = load_recipe(QUANTISED)
    asyncio.run(prepare(postgres_url, "tiny", [], [], {}, recipe=decoupled, quantised=True))
    # The stored recipe is enough from then on.
    asyncio.run(prepare(postgres_url, "tiny", [], [], {}, quantised=True))


def test_an_invalid_stored_recipe_is_reported_with_a_remedy(here: dict[str, str]) -> None:
    url = here["DATABASE_URL"]
    older = "UPDATE recipes SET content = jsonb_set(content::jsonb, '{train,train_thinking}', 'false')::json"
    execute(url, older)
    line = refusal(clawloop("recipe", "show", **here))
    assert line.startswith("clawloop: Policy 'default': its recipe cannot be used any more: train.train_thinking")
    assert "set another with `clawloop recipe set`" in line
    with pytest.raises(SetupError, match=r"recipe of policy 'default' .*train\.train_thinking.*--recipe FILE"):
        asyncio.run(prepare(url, "tiny", [], [], {}))
    asyncio.run(prepare(url, "tiny", [], [], {}, recipe=Recipe(name="other")))
    asyncio.run(prepare(url, "tiny", [], [], {}))


# `clawloop probe` on real PostgreSQL.


@pytest.fixture
def at_home(postgres_url: str, tmp_path: Path) -> dict[str, str]:
    asyncio.run(create_default_policy(postgres_url, "tiny", [], []))
    return {"DATABASE_URL": postgres_url, "CLAWLOOP_DATA": str(tmp_path)}


def test_probes_come_and_go(at_home: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "probes.jsonl"
    # As some editors write it: with a mark of the byte order.
    file.write_text('{"prompt": "2 + 2?", "contains": "4"}\n\n{"prompt": "Say hello."}\n', encoding="utf-8-sig")
    added = clawloop_process("probe", "add", str(file), **at_home)
    assert (added.returncode, added.stdout) == (0, "2 added; the next version is asked\n")
    assert clawloop("probe", "add", "--prompt", "3 + 3?", "--regex", r"\b6\b", **at_home).returncode == 0
    rows = json.loads(clawloop("probe", "list", "--json", **at_home).stdout)["probes"]
    asked = [(row["messages"][-1]["content"], row["contains"], row["regex"]) for row in rows]
    assert asked == [("2 + 2?", ["4"], None), ("Say hello.", [], None), ("3 + 3?", [], r"\b6\b")]
    listed = clawloop("probe", "list", **at_home, COLUMNS="80").stdout.splitlines()
    assert [line.split("  ")[-1].strip() for line in listed[1:3]] == ["contains '4'", "compared by the judge"]
    assert max(map(len, listed)) <= 80
    assert clawloop("probe", "remove", rows[0]["id"], **at_home).stdout == "removed\n"
    gone = refusal(clawloop("probe", "remove", rows[0]["id"], **at_home))
    assert gone == f"clawloop: policy 'default' has no probe {rows[0]['id']}; `clawloop probe list` shows them"


def test_lessons_come_go_and_are_forgotten(at_home: dict[str, str]) -> None:
    added = clawloop_process("lesson", "add", "Answer in one sentence.", **at_home)
    assert added.returncode == 0
    assert added.stdout.splitlines()[0].endswith(" is active")
    assert "Lessons are off" in added.stdout
    (row,) = json.loads(clawloop("lesson", "list", "--json", **at_home).stdout)["lessons"]
    assert (row["text"], row["state"], row["in_prompt"]) == ("Answer in one sentence.", "active", False)
    assert clawloop("lesson", "off", row["short_id"], **at_home).stdout == f"lesson {row['short_id']} is off\n"
    assert clawloop("lesson", "on", row["short_id"], **at_home).stdout == f"lesson {row['short_id']} is active\n"
    other = clawloop("lesson", "add", "Answer in two.", "--instead-of", row["id"], "--json", **at_home)
    listed = clawloop("lesson", "list", **at_home, COLUMNS="100").stdout.splitlines()
    assert [("superseded" in line, "Answer in" in line) for line in listed[1:3]] == [(True, True), (False, True)]
    assert "Lessons are off" in listed[-2] + listed[-1]
    assert clawloop("lesson", "forget", row["id"], **at_home).stdout == "forgotten, with the prompts of 0 turns\n"
    (left,) = json.loads(clawloop("lesson", "list", "--json", **at_home).stdout)["lessons"]
    assert left["id"] == json.loads(other.stdout)["id"]
    gone = refusal(clawloop("lesson", "forget", row["id"], **at_home))
    assert gone == f"clawloop: policy 'default' has no lesson {row['id']}; `clawloop lesson list` shows them"
    assert "has 10000 characters" in refusal(clawloop("lesson", "add", "x" * 10_000, **at_home))
    assert "There is no policy 'other'" in refusal(clawloop("lesson", "list", "--policy", "other", **at_home))


def test_a_file_with_bad_lines_names_them_and_adds_none(at_home: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "probes.jsonl"
    file.write_text('{"prompt": "fine"}\n{"promt": "a"}\nnothing\n')
    said = refusal(clawloop("probe", "add", str(file), **at_home))
    assert "none was added, because 2 cannot be used: line 2: unknown key 'promt'" in said
    assert "; line 3: not JSON" in said
    file.write_text("\n")
    assert "has no probe: write one JSON object a line" in refusal(clawloop("probe", "add", str(file), **at_home))
    assert json.loads(clawloop("probe", "list", "--json", **at_home).stdout) == {"probes": []}
    assert "There is no policy 'other'" in refusal(clawloop("probe", "list", "--policy", "other", **at_home))
    assert clawloop("probe", "add", **at_home).returncode == 2


# What OpenClaw gets from us: its configuration and a skill.

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "openclaw"
GATEWAY = "http://127.0.0.1:30000"


def kept(name: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((FOLDER / name).read_text())
    return parsed


def test_the_configuration_is_the_file_that_is_documented() -> None:
    assert configuration(GATEWAY, "YOUR_CHAT_KEY", 32768, 8192) == kept("openclaw.json")


def test_merging_keeps_what_is_not_ours_and_replaces_a_provider_that_leads_here() -> None:
    own = kept("original.json")
    own["models"]["providers"]["other"] = {"baseUrl": "http://elsewhere/v1", "models": []}
    own |= {"channels": {"telegram": {"enabled": True}}}
    own["agents"] = {"defaults": {"model": {"primary": "qwen/qwen3-4b", "fallbacks": ["other/x"]}, "workspace": "~/w"}}
    before = json.dumps(own)
    made = merged(own, configuration(GATEWAY, "k", 40960, 4096), GATEWAY)
    assert json.dumps(own) == before
    assert set(made["models"]["providers"]) == {"other", "clawloop"}
    assert made["models"]["providers"]["clawloop"]["models"][0]["contextWindow"] == 40960
    assert made["channels"] == own["channels"]
    assert made["agents"]["defaults"]["model"] == {"primary": "clawloop/policy", "fallbacks": ["other/x"]}
    assert made["agents"]["defaults"]["workspace"] == "~/w"
    assert merged(made, configuration(GATEWAY, "k", 40960, 4096), GATEWAY) == made


def test_the_command_takes_the_key_of_the_data_folder(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(json.dumps({"chat": "cl-mine", "admin": "cl-other"}))
    own = tmp_path / "openclaw.json"
    own.write_text(json.dumps(kept("original.json")))
    run = ["openclaw-config", "--data", str(tmp_path), "--merge", str(own), "--url", "http://127.0.0.1:4000/v1"]
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 0
    provider = json.loads(result.output)["models"]["providers"]["clawloop"]
    assert (provider["baseUrl"], provider["apiKey"]) == ("http://127.0.0.1:4000/v1", "cl-mine")


def test_address_and_limits_are_those_of_up_on_the_data_folder(tmp_path: Path) -> None:
    write_runtime_file(tmp_path, RuntimeAddresses("postgresql://x", "x:7233", None, "http://127.0.0.1:4000", 16384))
    result = CliRunner().invoke(app, ["openclaw-config", "--data", str(tmp_path), "--key", "k"])
    provider = json.loads(result.output)["models"]["providers"]["clawloop"]
    assert provider["baseUrl"] == "http://127.0.0.1:4000/v1"
    assert {(model["contextWindow"], model["maxTokens"]) for model in provider["models"]} == {(16384, 4096)}
    given = ["--url", GATEWAY, "--context", "65536", "--max-tokens", "100"]
    result = CliRunner().invoke(app, ["openclaw-config", "--data", str(tmp_path), "--key", "k", *given])
    provider = json.loads(result.output)["models"]["providers"]["clawloop"]
    assert (provider["baseUrl"], provider["models"][0]["maxTokens"]) == (f"{GATEWAY}/v1", 100)


@pytest.mark.parametrize(("content", "said"), [("{not json", "cannot be read"), ("[]", "no JSON object")])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "openclaw.json").write_text(content)
    run = ["openclaw-config", "--key", "k", "--merge", str(tmp_path / "openclaw.json")]
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 1
    assert said in result.stderr


def test_each_command_of_the_skill_is_one() -> None:
    text = (FOLDER / "SKILL.md").read_text()
    front = re.match(r"---\nname: clawloop\ndescription: (.{20,160})\nversion: [\d.]+\nmetadata: (\{.*\})\n---\n", text)
    assert front is not None
    assert json.loads(front[2])["openclaw"]["requires"] == {"bins": ["clawloop"]}
    commands = re.findall(r"`clawloop ([^`]+)`", text)
    assert len(commands) >= 10
    group = typer.main.get_command(app)
    for command in commands:
        words = shlex.split(command)
        at: Any = group
        while words and words[0] in getattr(at, "commands", {}):
            at = at.commands[words.pop(0)]
        assert not hasattr(at, "commands"), command
        options = {option for parameter in at.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options


# Links into Temporal's UI: where its address comes from, and what a link is.

UI = "http://127.0.0.1:8233"


def test_a_link_is_one_segment_of_the_address_whatever_the_id_holds() -> None:
    links = WorkflowLinks(UI)
    assert links.of("session/0b1") == f"{UI}/namespaces/default/workflows/session%2F0b1"
    assert (
        links.of("engine/127.0.0.1:8100?x#y") == f"{UI}/namespaces/default/workflows/engine%2F127.0.0.1%3A8100%3Fx%23y"
    )
    assert links.named("training/default") == f"training/default  {UI}/namespaces/default/workflows/training%2Fdefault"
    assert (NO_LINKS.of("session/0b1"), NO_LINKS.named("session/0b1")) == (None, "session/0b1")


def test_the_setting_comes_before_what_up_started_and_another_temporal_has_no_ui_of_ups(tmp_path: Path) -> None:
    def ui(**given: str) -> str | None:
        return workflow_links(Settings.model_validate({"data": tmp_path} | given)).ui

    assert ui() is None
    write_runtime_file(tmp_path, RuntimeAddresses("postgresql://me@here/x", "here:7233", UI, None, None))
    assert ui() == UI
    assert ui(temporal_ui="https://temporal.example.test/") == "https://temporal.example.test"
    assert ui(TEMPORAL_ADDRESS="elsewhere:7233") is None
    write_runtime_file(tmp_path, RuntimeAddresses("postgresql://me@here/x", "here:7233", None, None, None))
    assert ui() is None
    (tmp_path / "running.json").write_text('{"database_url": "x", "temporal_address": "y", "temporal_ui": 7}')
    with pytest.raises(SetupError, match="is damaged"):
        read_runtime_file(tmp_path)


def test_an_address_that_a_browser_would_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAWLOOP_TEMPORAL_UI", "javascript:alert(1)")
    with pytest.raises(SetupError, match=r"CLAWLOOP_TEMPORAL_UI: it must begin with http:// or https://"):
        read_settings()
    monkeypatch.setenv("CLAWLOOP_TEMPORAL_UI", "")
    assert read_settings().temporal_ui is None


def test_up_tells_its_gateways_and_workers_where_the_ui_is(tmp_path: Path) -> None:
    deployment = Deployment(
        data=tmp_path,
        database_url="postgresql://me@here/x",
        temporal_address="127.0.0.1:7233",
        engines=(),
        base_model="tiny",
        aliases=(),
        keys={},
    )
    for given, told in ((deployment, None), (replace(deployment, temporal_ui=UI), UI)):
        for part in parts.workers(given, {}):
            assert part.prepare().environment.get("CLAWLOOP_TEMPORAL_UI") == told


def test_the_runtime_file_has_it_for_other_commands(tmp_path: Path) -> None:
    write_runtime_file(tmp_path, RuntimeAddresses("postgresql://me@here/x", "here:7233", UI, None, None))
    assert json.loads((tmp_path / "running.json").read_text())["temporal_ui"] == UI
    assert read_runtime_file(tmp_path) == RuntimeAddresses("postgresql://me@here/x", "here:7233", UI, None, None)


# The instance that a command means.


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's home, and a working folder in it in which nothing runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    for name in ("DATABASE_URL", "CLAWLOOP_DATA"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@contextmanager
def runs(data: Path, url: str) -> Iterator[None]:
    data.mkdir(exist_ok=True)
    with lock_data_folder(data):
        write_runtime_file(data, RuntimeAddresses(url, "127.0.0.1:1", None, "http://127.0.0.1:4000", 16384))
        yield


def test_a_command_without_data_means_what_runs(nowhere: Path, here: dict[str, str]) -> None:
    url, using = here["DATABASE_URL"], "clawloop: using the instance in {}\n"
    assert "no database" in refusal(clawloop("policy", "list"))
    with runs(nowhere / "demo", url):
        found = clawloop("policy", "list")
        assert (found.returncode, found.stderr) == (0, using.format(nowhere / "demo"))
        with runs(nowhere / "other", url):
            assert clawloop("policy", "list").stderr == using.format(nowhere / "other")  # the newest
            assert clawloop("openclaw-config", "--key", "k").returncode == 0
            both = refusal(clawloop("training", "resume"))
            assert f"--data {nowhere / 'other'}, --data {nowhere / 'demo'}" in both
            assert clawloop("policy", "list", "--data", "demo").stderr == ""
            with runs(nowhere / ".clawloop", url):
                assert clawloop("training", "resume").stderr.startswith(using.format(".clawloop"))
    # An installation that was stopped is still the one of its folder.
    assert clawloop("policy", "list").stderr == ""


# Last words of commands that change something, or are not about what runs.
_OTHERS = frozenset(
    {"add", "again", "chat", "combined", "create", "drain", "engine", "environment", "erase", "evaluate", "feedback",
     "fetch", "forget", "gateway", "history", "judge", "limit", "migrate", "off", "on", "orchestrator", "pause", "pin",
     "plan", "recover", "release", "remove", "renew-secret", "renew-signing", "resume", "retire", "revoke", "roll-back",
     "rotate", "run", "set", "start", "trainer", "try", "up"}
)  # fmt: skip


def test_of_each_command_it_is_known_whether_it_only_reads() -> None:
    verbs = {name.rpartition(" ")[2] for name, command in COMMANDS.items() if "--data" in command.options}
    assert verbs - _OTHERS == _READING
    assert verbs >= _OTHERS


def test_what_still_starts_is_not_taken_for_what_never_ran(nowhere: Path) -> None:
    data = nowhere / "starts"
    data.mkdir()
    with lock_data_folder(data):
        assert f"`clawloop up` still starts on {data}" in refusal(clawloop("policy", "list", "--data", str(data)))
        with pytest.raises(SetupError, match="still starts"):
            address_of(None, None, None, data)
    with pytest.raises(SetupError, match="nothing has run"):
        address_of(None, None, None, data)


def test_notes_of_folders_that_are_gone_are_removed(nowhere: Path) -> None:
    notes = nowhere / "state" / "clawloop" / "instances"
    for name in ("gone", "stopped"):
        with runs(nowhere / name, "postgresql://x"):
            pass
    with runs(nowhere / "running", "postgresql://x"):
        shutil.rmtree(nowhere / "gone")
        assert running_data() == [nowhere / "running"]
        assert {note.read_text().strip() for note in notes.iterdir()} == {
            str(nowhere / "running"),
            str(nowhere / "stopped"),
        }


def test_a_chat_with_url_and_key_asks_nothing_of_what_runs(nowhere: Path) -> None:
    with runs(nowhere / "one", "postgresql://x"), runs(nowhere / "other", "postgresql://x"):
        assert address_of("http://far:1/v1", "k", None, None) == Address("http://far:1", "k", None)
        assert address_of("http://far:1/v1", "k", "a", None) == Address("http://far:1", "k", "a")
        with pytest.raises(SetupError, match="several instances run"):
            address_of(None, "k", None, None)
        with pytest.raises(SetupError, match="keys of what runs here are not sent to another gateway"):
            address_of("http://far:1/v1", None, None, None)


def test_the_only_policy_with_sessions_is_the_one_meant(turns: list[TurnRecord], here: dict[str, str]) -> None:
    assert output_of("training", "status", here=here)["policy"] == "default"
    made = clawloop("policy", "create", "mine", **here).stdout
    assert made.endswith("a chat key for it: clawloop key create --policy mine\n")
    assert "`clawloop policy list` shows those" in refusal(clawloop("key", "create", "--policy", "mina", **here))
    assert "`clawloop policy list` shows those" in refusal(clawloop("training", "status", "--policy", "mina", **here))
    with psycopg.connect(here["DATABASE_URL"]) as connection:
        connection.execute("UPDATE sessions SET policy = 'mine'")
    for command in (("training", "status"), ("recipe", "show"), ("policy", "versions"), ("probe", "list")):
        output_of(*command, here=here)
    assert output_of("training", "status", here=here)["policy"] == "mine"
    assert output_of("training", "status", "--policy", "default", here=here)["policy"] == "default"
    paused = clawloop("training", "pause", "a holiday", "--json", **here)
    assert json.loads(paused.stdout)["policy"] == "mine"
    assert paused.stderr.startswith("clawloop: policy mine, the only one with chats\n")
    assert output_of("training", "status", "--policy", "default", here=here)["state"] != "paused"


def test_a_recipe_without_a_name_has_that_of_its_file(here: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "Slow-and steady.toml"
    file.write_text("train.batch_samples = 4\n")
    assert clawloop("recipe", "set", str(file), **here).returncode == 0
    assert output_of("recipe", "show", here=here)["name"] == "slow_and_steady"


def test_a_chat_without_a_terminal_is_refused(here: dict[str, str]) -> None:
    assert refusal(clawloop("chat", **here)) == "clawloop: a chat needs a terminal; programs can use the HTTP API"


@pytest.mark.parametrize(
    ("arguments", "variables", "first"),
    [
        ([], {}, "hindsight"),
        (["--model", "FOLDER"], {}, "hybrid"),
        (["--judge-model", "FOLDER"], {}, "hybrid"),
        (["--judge-gpus", "1"], {}, "hybrid"),
        ([], {"CLAWLOOP_JUDGE_URL": "http://127.0.0.1:9"}, "hybrid"),
        ([], {"CLAWLOOP_ENGINES": "http://127.0.0.1:9"}, "hybrid"),
    ],
    ids=["alone", "model", "judge model", "judge GPUs", "judge elsewhere", "engines"],
)
def test_the_model_that_comes_along_learns_without_a_judge_unless_one_is_named(
    arguments: list[str], variables: dict[str, str], first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "model")
    given: list[UpOptions] = []

    async def run(options: UpOptions, *_: object) -> None:
        given.append(options)

    monkeypatch.setattr("clawloop.app.local.up.run", run)
    monkeypatch.setattr("clawloop.app.cli.up.model_folder", lambda *_: folder)
    words = ["up", "--data", str(tmp_path / "data"), *arguments]
    done = CliRunner().invoke(app, [str(folder) if word == "FOLDER" else word for word in words], env=variables)
    assert done.exit_code == 0, done.output
    (options,) = given
    assert (options.recipe, options.first_recipe.name) == (None, first)


async def test_a_first_recipe_is_for_a_policy_that_has_none(empty_postgres_url: str) -> None:
    await prepare(empty_postgres_url, "tiny", [], [], {}, first_recipe=WITHOUT_JUDGE)
    await prepare(empty_postgres_url, "tiny", [], [], {}, first_recipe=DEFAULT_RECIPE)
    with psycopg.connect(empty_postgres_url) as connection:
        used = "SELECT r.name FROM policies p JOIN recipes r ON r.hash = p.recipe_hash"
        assert connection.execute(used).fetchall() == [("hindsight",)]
