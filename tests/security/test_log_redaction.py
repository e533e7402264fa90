"""No logger of a process writes keys, passwords or what somebody wrote, whoever logs and however."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from clawloop.core.settings import Settings
from clawloop.core.telemetry.logs import redact

KEY = "cl-0a1b2c3d-" + "K" * 43
EPISODE_KEY = "ce_" + "0" * 40 + "cG9saWN5." + "M" * 43
# In a process of its own: it changes how the whole process logs.
PROGRAM = """
import asyncio, gc, importlib, logging, pathlib, pkgutil, sys, tempfile, threading, warnings

from clawloop.core.telemetry.logs import configure_logging

configure_logging("DEBUG", secrets=["engine-s3cret", "passw0rd"])

for package in ("api", "db", "activities", "workflows", "clawloop.app.processes", "clawloop.operations"):
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not found.name.startswith("clawloop.app.processes.trainer"):
            importlib.import_module(found.name)
for module in (
    "aiohttp.client", "alembic.runtime.migration", "httpx", "psycopg", "sqlalchemy.pool", "temporalio.activity",
    "temporalio.worker", "temporalio.workflow", "uvicorn.server", "uvicorn.protocols.http.httptools_impl",
):
    importlib.import_module(module)

import psycopg
import pydantic
from clawloop.serving.engine_secret import SecretFile

with tempfile.TemporaryDirectory() as folder:  # read after logging was set up, as by a process that runs
    secret_file = pathlib.Path(folder) / "engine-secret"
    secret_file.write_text("file-s3cret\\nolder-s3cret\\n")
    secret_file.chmod(0o600)
    SecretFile(secret_file)
from sqlalchemy.exc import DBAPIError, StatementError

from clawloop.core.errors import RecordUnusable, RequestRejected


class Strict(pydantic.BaseModel):
    n: int


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return caught


def errors():
    try:
        Strict(n="PLANTED")
    except pydantic.ValidationError as error:
        yield error
    yield raised(ValueError("PLANTED"))
    yield raised(KeyError("PLANTED"))
    yield raised(UnicodeEncodeError("ascii", "PLANTED", 0, 1, "PLANTED"))
    yield raised(psycopg.errors.CheckViolation("new row violates\\nDETAIL: Failing row contains (PLANTED)"))
    yield raised(DBAPIError("INSERT PLANTED", {"a": "PLANTED"}, ValueError("PLANTED")))
    yield raised(StatementError("PLANTED", "INSERT", {}, ValueError("PLANTED")))
    yield raised(RequestRejected("the model PLANTED does not exist"))
    yield raised(ExceptionGroup("PLANTED", [ValueError("PLANTED"), raised(KeyError("PLANTED"))]))
    yield raised(RuntimeError("postgresql://user:passw0rd@host/name"))
    chained = raised(RecordUnusable("refused"))
    chained.__cause__ = raised(ValueError("PLANTED"))
    yield chained


def log_with(logger):
    for error in errors():
        logger.error("failed: %s", "no reason", exc_info=error)
        if logger.name.split(".")[0] not in ("clawloop", "api", "db", "activities", "workflows"):
            logger.warning("failed: %r and %s", error, error)
    logger.info("a key %s, %s", KEY, EPISODE_KEY)
    logger.info("Authorization: Bearer some.other.token password=hunter22 engine-s3cret")
    logger.info("it refused file-s3cret, and older-s3cret too")
    logger.warning("cannot connect to postgresql://user:passw0rd@host:5432/name", extra={"why": f"key {KEY}"})


names = sorted(name for name, one in logging.root.manager.loggerDict.items() if isinstance(one, logging.Logger))
for name in [*names, "root"]:
    logger = logging.getLogger(None if name == "root" else name)
    own = [handler for handler in logger.handlers if not isinstance(handler, logging.NullHandler)]
    assert not own or name == "root", (name, own)
    logger.setLevel(logging.DEBUG)
    log_with(logger)


async def fail():
    raise ValueError("PLANTED")


async def forget():
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(fail())
    await asyncio.sleep(0)
    del task
    loop.call_exception_handler({"message": "a transport failed", "exception": ValueError("PLANTED"), "x": "PLANTED"})

    def callback():
        raise ValueError("PLANTED")

    loop.call_soon(callback)
    await asyncio.sleep(0)


asyncio.run(forget())
gc.collect()


class Unraisable:
    def __del__(self):
        raise ValueError("PLANTED")


Unraisable()
warnings.simplefilter("always")
warnings.warn("PLANTED", UserWarning)
Strict.model_construct(n="PLANTED").model_dump_json()


def end_thread():
    raise ValueError("PLANTED")


thread = threading.Thread(target=end_thread)
thread.start()
thread.join()
print(len(names))
raise ValueError("PLANTED")
"""


def test_no_logger_of_any_library_writes_secrets_or_content() -> None:
    program = f"KEY, EPISODE_KEY = {KEY!r}, {EPISODE_KEY!r}\n{textwrap.dedent(PROGRAM)}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    lines = ended.stderr.splitlines()
    assert ended.returncode == 1, ended.stderr[-2000:]
    assert int(ended.stdout) > 50  # loggers
    for planted in (
        "PLANTED",
        "K" * 43,
        "M" * 43,
        "some.other.token",
        "hunter22",
        "passw0rd",
        "engine-s3cret",
        "file-s3cret",
        "older-s3cret",
    ):
        assert [line for line in lines if planted in line][:1] == []
    records = [json.loads(line) for line in lines]  # nothing but JSON, so nothing past the formatter
    messages = {record["message"] for record in records}
    assert {
        "Task exception was never retrieved",
        "a transport failed",
        "a thread ended with an error",
        "an error that could not be raised",
        "the process ends with an error",
    } <= messages
    assert any(record["logger"] == "py.warnings" and "UserWarning" in record["message"] for record in records)
    assert {"sqlalchemy", "temporalio", "uvicorn", "asyncio", "psycopg", "httpx", "alembic", "aiohttp"} <= {
        record["logger"].split(".")[0] for record in records
    }
    last = records[-1]
    assert last["level"] == "CRITICAL"
    assert last["exc_info"].endswith("ValueError")
    assert 'File "<string>"' in last["exc_info"]


@pytest.mark.parametrize(
    "harmless",
    [
        "cl-0a1b2c3d",
        "no secret: none",
        "http://127.0.0.1:8100/v1",
        "engine e0 refuses this gateway's CLAWLOOP_ENGINE_SECRET",
        "sk-learn",
        '{"key_id": "01981234-0000-7000-8000-000000000000"}',
    ],
)
def test_what_is_no_secret_stays(harmless: str) -> None:
    assert redact(harmless).replace("(redacted)", "none") == harmless


def test_the_secrets_of_the_settings_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "DATABASE_URL": "postgresql://user:passw0rd@host/name",
        "CLAWLOOP_ENGINE_SECRET": "engine-s3cret",
        "CLAWLOOP_JUDGE_API_KEY": "judge-s3cret",
        "CLAWLOOP_JUDGE_URL": "https://me:in-the-address@judge/v1",
        "CLAWLOOP_ENGINES": "http://a:8100,http://me:engine-passw0rd@b:8100",
    }.items():
        monkeypatch.setenv(name, value)
    assert sorted(Settings().secrets) == [
        "engine-passw0rd",
        "engine-s3cret",
        "in-the-address",
        "judge-s3cret",
        "passw0rd",
    ]
