"""What of vLLM's output reaches its log: shapes seen of vLLM 0.32 and xgrammar 0.2."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clawloop.serving import engine_log
from clawloop.serving.engine_log import VARIABLE, WITHHELD, LogFilter

SERVES = "INFO:     Application startup complete."
HEAD = "(APIServer pid=7) WARNING 11-23 06:01:54 [chat_utils.py:2199]"


def filtered(*lines: str) -> list[str]:
    serving = LogFilter()
    serving.line(SERVES)
    return [kept for line in lines if (kept := serving.line(line)) is not None]


@pytest.mark.parametrize(
    "line",
    [
        "[13:10:01] /project/cpp/json_schema_converter.cc:1499: Warning: URI should be '#' but got SECRET",
        "Regex parsing warning at position 3: the character is ignored: SECRET",
        "SECRET",
        "SECRETError: of a client",
        "prompt: SECRET",
        f'{HEAD} Tool call "SECRET" has arguments that are not valid JSON',
        "(EngineCore pid=9) ERROR 11-23 06:01:54 [x.py:1] SECRET",
        "(EngineCore pid=9) DEBUG 11-23 06:01:54 [x.py:1] SECRET",
        "(APIServer pid=9) INFO 11-23 06:01:54 [request_logger.py:65] Received request: SECRET",
        "(APIServer pid=9) INFO 11-23 06:01:54 [entrypoints/serve/utils/request_logger.py:65] Received: SECRET",
        "ERROR:    SECRET",
        "INFO:     SECRET",
        "RuntimeError: SECRET",
        "vllm.exceptions.VLLMValidationError: SECRET",
        'INFO:     127.0.0.1:1 - "GET /health?SECRET HTTP/1.1" 200 OK',
        '{"message": "SECRET"}',
    ],
)
def test_what_may_quote_a_request_is_withheld(line: str) -> None:
    assert not any("SECRET" in kept and kept != "SECRETError" for kept in filtered(line, ""))


@pytest.mark.parametrize(
    "line",
    [
        "(APIServer pid=7) INFO 11-23 06:01:54 [loggers.py:271] Engine 000: Avg prompt throughput: 1.0 tokens/s",
        'INFO:     127.0.0.1:60336 - "POST /v1/chat/completions HTTP/1.1" 400 Bad Request',
        "INFO:     Shutting down",
        "(APIServer pid=7) WARNING 11-23 06:01:54 [utils.py:648] [shutdown] Process manager: force killing",
        "(EngineCore pid=7) ERROR 11-23 06:01:54 [core.py:1512] EngineCore encountered a fatal error.",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "(EngineCore pid=7) ERROR 11-23 06:01:54 [core.py:1512] RuntimeError: CUDA error: an illegal access",
    ],
)
def test_what_an_operator_needs_stays(line: str) -> None:
    assert filtered(line) == [line]


def test_of_a_traceback_the_places_and_the_kind_stay() -> None:
    head = "(EngineCore pid=9) ERROR 11-23 06:01:54 [core.py:1512]"
    frame = '  File "/x/xgrammar/compiler.py", line 3, in compile_json_schema'
    lines = [
        "Traceback (most recent call last):",
        frame,
        "    compile(SECRET)",
        "            ^^^^^^",
        "ValueError: SECRET",
    ]
    shown = ["Traceback (most recent call last):", frame, "ValueError"]
    assert filtered(*lines) == shown
    assert filtered(*(f"{head} {line}" for line in lines)) == [f"{head} {line}" for line in shown]


def test_many_lines_of_one_text_are_one() -> None:
    assert filtered(f"{HEAD} SECRET", f"{HEAD} SECRET", "a", "b", f"{HEAD} SECRET") == [
        f"{HEAD} {WITHHELD}",
        WITHHELD,
        f"{HEAD} {WITHHELD}",
    ]


def test_the_start_of_an_engine_is_shown_whole() -> None:
    starting = LogFilter()
    assert starting.line("ValueError: the model has no config.json") == "ValueError: the model has no config.json"


PROGRAM = f"""
import os, signal, sys, time
print({SERVES!r}, flush=True)
os.write(2, b"SECRET of a client\\n")
print("pid", os.getpid(), file=open(sys.argv[1], "w"), flush=True)
signal.sigwait({{signal.SIGUSR1}})
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("whole", [False, True])
def test_the_engine_is_the_process_that_was_started(tmp_path: Path, whole: bool) -> None:
    command = [
        sys.executable,
        "-m",
        engine_log.__name__,
        sys.executable,
        "-c",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n" + PROGRAM,
        str(tmp_path / "pid"),
    ]
    log = tmp_path / "log"
    with log.open("wb") as output:
        started = subprocess.Popen(command, stdout=output, stderr=output, env={VARIABLE: "whole"} if whole else {})
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("\n"):
        assert started.poll() is None
        time.sleep(0.01)
    assert (tmp_path / "pid").read_text() == f"pid {started.pid}\n"
    started.send_signal(signal.SIGUSR1)
    assert started.wait() == -signal.SIGTERM
    wanted = f"{SERVES}\n" + ("SECRET of a client\n" if whole else f"{WITHHELD}\n")
    deadline = time.monotonic() + 60  # the filter writes the last line after the end of the engine
    while log.read_text() != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert log.read_text() == wanted


def test_a_command_that_cannot_run_says_so() -> None:
    command = [sys.executable, "-m", engine_log.__name__, "/no/such/program"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout + ended.stderr) == (
        127,
        "cannot run /no/such/program: No such file or directory\n",
    )
