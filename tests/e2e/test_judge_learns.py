"""A judge that learns, with real parts only: from episodes and their votes to a version of the judge's own.

The user in these episodes says what the demo's model, as a judge, takes for praise about every third time, and all
episodes succeed. So votes of 1 agree with the outcomes, others do not, and the judge can find out.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from clawloop.app.demo.toys import CHAT_MODEL
from clawloop.app.local.checks import choose_port
from clawloop.app.processes.bootstrap import prepare
from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.turns import TurnRecord
from clawloop.core.ids import TurnId, response_id
from clawloop.core.recipes.recipe import Recipe
from clawloop.environments.harbor import read_task
from clawloop.environments.task import Split
from clawloop.training.model.port import LoraShape
from db.database import BACKGROUND_LIMIT, Database
from db.invariants import violations
from db.schema import migrate
from db.serving.directory import ensure_policy
from db.serving.keys import PostgresKeyStore
from db.training.recipes import set_recipe
from tests.e2e.adapters import apply_adapter, load_policy, logprobs
from tests.e2e.conftest import START_SECONDS, running_engine
from tests.e2e.gateway import RealGateway, running_gateway
from tests.e2e.workers import running_workers
from tests.engine_options import engine_options
from tests.verbs import clawloop_process

BASE = "clawloop-demo"
LORA = LoraShape(rank=8, alpha=16.0)
SIZE = 4
# The sweep makes samples of votes once a minute; an engine, a step and a version take their time on a busy machine.
SECONDS = 900
POLICY = Recipe.model_validate(
    {
        "name": "policy",
        "signal": {"reward": "outcome_process", "hints": False, "m": 3, "at_least_one": False},
        "train": {"advantage": {"teacher_weight": 0.0}},
    }
)
JUDGE = Recipe.model_validate(
    {
        "name": "judge",
        "signal": {"reward": "group", "hints": False, "at_least_one": False},
        "train": {
            "batch_samples": 24,
            "advantage": {"teacher_weight": 0.0},
            "lora": {"rank": LORA.rank, "alpha": LORA.alpha},
            # One step has to have a visible effect, which the gate would refuse of a model worth keeping.
            "optimiser": {"lr": 0.004},
        },
        "gate": {"parent_distance": 4.9, "token_share": 1.0},
    }
)
TALK = """
import json, os, random, sys, urllib.request

def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages, "max_tokens": 48}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)["choices"][0]["message"]
    except OSError:
        sys.exit(75)

said = random.choice(["so-so", "i think this one is right"])
messages = [{"role": "user", "content": "How do I sort a list in Python?"}]
messages += [ask(messages), {"role": "user", "content": said}]
ask(messages)
"""


def write_tasks(folder: Path) -> None:
    """Tasks that every agent solves, of which at least one is for training."""
    splits = set[Split]()
    while Split.TRAIN not in splits:
        task = folder / "tasks" / f"talk-{len(splits)}-{len(list(folder.glob('tasks/*')))}"
        for name in ("tests", "solution"):
            (task / name).mkdir(parents=True)
        (task / "task.toml").touch()
        (task / "instruction.md").write_text(f"Talk with the user, {task.name}.")
        (task / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt")
        (task / "solution" / "solve.sh").touch()
        splits.add(read_task(task).split)
    (folder / "agent").mkdir()
    (folder / "agent" / "talk.py").write_text(TALK)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the users of sandboxes can read; pytest's own are its user's alone."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
async def gateway(empty_postgres_url: str, temporal_address: str, tmp_path: Path) -> AsyncIterator[RealGateway]:
    """In front of an engine with the demo's model, which votes and chats."""
    url = empty_postgres_url
    await asyncio.to_thread(migrate, url)
    model = Path(shutil.copytree(CHAT_MODEL, tmp_path / "models" / BASE))
    options = engine_options(model, choose_port("vLLM", "127.0.0.1", 0, ""), max_model_len=2048, policies=2)
    with running_engine(model, options, tmp_path / "vllm.log") as engine:
        keys = await prepare(url, BASE, [], [engine], {})
        async with running_gateway(url, keys, tmp_path / "data", TEMPORAL_ADDRESS=temporal_address) as running:
            yield running


async def judge_key(url: str) -> str:
    """The key of a policy that is the judge."""
    database = Database(url, BACKGROUND_LIMIT)
    try:
        await ensure_policy(database, "judge", BASE, [])
        await set_recipe(database, "judge", JUDGE)
        await set_recipe(database, "default", POLICY)
        return (await PostgresKeyStore(database).create_key("judge", frozenset({Scope.CHAT}), "judge"))[1]
    finally:
        await database.close()


def rows(url: str, query: str) -> list[dict[str, Any]]:
    with psycopg.connect(url, row_factory=dict_row) as connection:
        return connection.execute(query.encode()).fetchall()


async def until(url: str, query: str, logs: Path) -> list[dict[str, Any]]:
    """The rows of a query, once it has any."""
    try:
        async with asyncio.timeout(SECONDS):
            while not (found := await asyncio.to_thread(rows, url, query)):
                await asyncio.sleep(0.5)
            return found
    except TimeoutError:
        tails = [f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(logs.rglob("*.log"))]
        counts = "SELECT policy, state, count(*), min(reason) AS reason FROM samples GROUP BY 1, 2"
        raise AssertionError(f"{rows(url, counts)}\n" + "\n".join(tails)) from None


@asynccontextmanager
async def practising(gateway: RealGateway, temporal: str, folder: Path) -> AsyncIterator[None]:
    """All workers, and rollouts whose agent talks with the user of `TALK`."""
    url, model = gateway.database_url, gateway.data.parent / "models" / BASE
    [engine] = [str(row["url"]) for row in rows(url, "SELECT url FROM engines")]
    environment = ["--tasks", str(folder / "tasks"), "--harness-folder", str(folder / "agent")]
    commands = (
        ["orchestrator"],
        ["judge"],
        ["trainer", "--base-model", BASE, "--model", str(model)],
        ["engine", "--engine", engine],
        ["environment", *environment, "--harness", "python3 /agent/talk.py", "--gateway", gateway.url],
    )
    settings = {"DATABASE_URL": url, "TEMPORAL_ADDRESS": temporal, "CLAWLOOP_DATA": str(gateway.data)}
    start = ["rollouts", "start", "--environment", "tasks", "--size", str(SIZE), "--groups", "2", "--barren", "10000"]
    async with running_workers(gateway.data, url, temporal, *commands):
        done = await asyncio.to_thread(clawloop_process, *start, **settings)
        assert done.returncode == 0, done.stderr
        yield
        await asyncio.to_thread(clawloop_process, "rollouts", "pause", "enough", **settings)
        precision = await asyncio.to_thread(clawloop_process, "judge", "precision", "--json", **settings)
        assert precision.returncode == 0, precision.stderr
        assert json.loads(precision.stdout)


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(START_SECONDS + 2 * SECONDS)
async def test_a_judge_that_outcomes_contradict_answers_with_a_version_that_contradicts_them_less(
    gateway: RealGateway, temporal_address: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tasks(folder)
    url = gateway.database_url
    for name, value in (
        ("URL", gateway.url),
        ("MODEL", "policy"),
        ("API_KEY", await judge_key(url)),
        ("LEARNS", "true"),
    ):
        monkeypatch.setenv(f"CLAWLOOP_JUDGE_{name}", value)
    async with practising(gateway, temporal_address, folder):
        answered = """SELECT t.id FROM turns t JOIN sessions s ON s.id = t.session_id
            WHERE s.policy = 'judge' AND t.version = 1 AND t.status = 'complete' LIMIT 3"""
        newest = await until(url, answered, gateway.data)
    versions = await asyncio.to_thread(clawloop_process, "policy", "versions", "judge", "--json", DATABASE_URL=url)
    first = json.loads(versions.stdout)["versions"][1]
    assert first["metrics"]["samples"] == 24
    batch = """SELECT s.turn_id AS id, s.reward FROM samples s JOIN step_samples b ON b.sample_id = s.id
        WHERE b.policy = 'judge' AND b.step = 1"""
    trained = rows(url, batch)
    assert len(trained) == 24
    await _check_the_version(gateway, trained, [row["id"] for row in newest])
    database = Database(url, BACKGROUND_LIMIT)
    assert await violations(database) == []
    await database.close()


async def _check_the_version(gateway: RealGateway, trained: list[dict[str, Any]], newest: list[Any]) -> None:
    """What it was rewarded for became likelier, and the judge's newest answers are those of its adapter."""
    [adapter] = (gateway.data / "adapters" / "judge").glob("v1-*")
    model = load_policy(gateway.data.parent / "models" / BASE, LORA)
    moved: dict[bool, list[float]] = {True: [], False: []}
    for sample in trained:
        record = (await gateway.turn(response_id(TurnId(sample["id"])))).record
        assert (record.version, record.policy) == (0, "judge")
        assert record.prompt_ids
        assert record.response_ids
        each = (record.prompt_ids, record.response_ids, _temperature(record))
        apply_adapter(model, None)
        before = logprobs(model, *each).sum().item()
        apply_adapter(model, adapter)
        moved[sample["reward"] > 0].append(logprobs(model, *each).sum().item() - before)
    assert all(moved.values())
    praised, blamed = (sum(moved[kind]) / len(moved[kind]) for kind in (True, False))
    assert praised > 0 > blamed, moved
    for turn in newest:
        record = (await gateway.turn(response_id(TurnId(turn)))).record
        assert record.logprobs
        assert record.prompt_ids
        assert record.response_ids
        again = logprobs(model, record.prompt_ids, record.response_ids, _temperature(record)).tolist()
        assert again == pytest.approx(record.logprobs, abs=1e-3)


def _temperature(record: TurnRecord) -> float:
    temperature = record.sampling["temperature"]
    assert isinstance(temperature, int | float)
    return float(temperature)
