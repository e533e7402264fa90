"""Keeps what clients wrote out of vLLM's log.

vLLM and its libraries quote requests in warnings and errors: a regular expression that xgrammar only half understands,
the name of a tool, a schema in a traceback. This program runs vLLM and writes its output without such text. It needs
no other package, so a stock image of vLLM takes it: `python engine_log.py python -m vllm.entrypoints.openai.api_server
…`. The engine takes the program's place, with its process id, its signals and its exit code.

Until the engine serves, all lines pass. From then on lines pass whose shape says that they quote nothing: vLLM's INFO
records, uvicorn's, and of tracebacks where they were and what kind of error it was. Of others the level, the time and
the place in vLLM's code remain.

`CLAWLOOP_ENGINE_LOG=whole` in the engine's environment lets everything pass.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import BinaryIO

VARIABLE = "CLAWLOOP_ENGINE_LOG"
WITHHELD = "(text withheld)"
_FILTER = "--filter"
# Read in pieces of this size where a line is longer.
_LINE_BYTES = 64 * 1024

_RECORD = re.compile(
    r"(?P<head>(?:\([\w.:+ -]+ pid=\d+\) )?(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[(?P<file>[\w./-]+):\d+\]) ?"
    r"(?P<text>.*)"
)
_UVICORN = re.compile(r"(?P<head>INFO|WARNING|ERROR): {4,8}(?P<text>.*)")
_ACCESS = re.compile(r'(?P<request>\S+ - "[A-Z]+ [^\s"?]+)(?:\?[^\s"]*)?(?P<rest> HTTP/[\d.]+" \d{3}.*)')
_LIFE = re.compile(
    r"(Started|Finished) server process \[\d+\]|(Waiting for|Application) [\w ()]+\.|Shutting down"
    r"|Uvicorn running on .*|Exception in ASGI application"
    r"|Invalid HTTP request received\.|Unsupported upgrade request\."
)
_SERVES = re.compile(r'Starting vLLM server on|Application startup complete|Uvicorn running on|" 200 OK$')
# Files of vLLM that log requests at INFO, if an option asks for it.
_QUOTING_FILES = frozenset({"request_logger.py", "log_response.py"})
# Warnings and errors that quote nothing of a request.
_PLAIN = re.compile(
    r"\[shutdown\] .*|AsyncLLM output_handler failed\.|EngineCore (encountered a fatal error|failed to start)\."
    r"|Engine core proc \w+ died unexpectedly, shutting down client\.|Failed to compile grammar for request [\w-]+"
    r"|Received a request with trace context but tracing is disabled|Error in \w+ completion stream generator\."
    r"|Exception caught\. Request id: [\w-]+"
)
_FRAME = re.compile(r'[\s|+]*File "[^"]+", line \d+(?:, in [\w<>.]+)?')
_CHAIN = re.compile(
    r"[\s|+]*(?:Traceback|Exception Group Traceback) \(most recent call last\):"
    r"|During handling of the above exception, another exception occurred:"
    r"|The above exception was the direct cause of the following exception:"
    r"|[\s|+]*\[Previous line repeated \d+ more times\]"
)
_ERROR = re.compile(
    r"[\s|+]*(?P<kind>(?:(?:vllm|torch|xgrammar|llguidance|outlines_core|tvm|fastapi|starlette|uvicorn|pydantic|pydantic_core"
    r"|jinja2|json|regex|zmq|msgspec|asyncio|anyio|transformers|tokenizers|safetensors|numpy)\.[\w.]*|[A-Z]\w*)"
    r"(?:Error|Exception|Exit|Interrupt|Group|Warning))(?::.*)?"
)
# Errors that an operator has to see whole: memory, the device, and a dead engine.
_PLAIN_ERROR = re.compile(
    r"[\s|+]*(?:torch\.(?:\w+\.)*OutOfMemoryError|vllm\.v1\.engine\.exceptions\.EngineDeadError|MemoryError"
    r"|(?:RuntimeError|torch\.AcceleratorError): (?:CUDA|NCCL|HIP|CUBLAS|cuDNN)\b)(?::.*|.*)"
)
# The pattern stands behind it.
_REGEX_LIMIT = re.compile(r"[\s|+]*(?P<said>ValueError: Regex compilation timed out after \d+s\.).*")


class LogFilter:
    """Decides line by line; one for each start of an engine."""

    def __init__(self) -> None:
        self._serves = False
        self._in_frame = False
        self._withheld: str | None = None

    def line(self, line: str) -> str | None:
        """The line as it may be written; None: it is dropped."""
        if not self._serves:
            self._serves = _SERVES.search(line) is not None
            return line
        record = _RECORD.fullmatch(line) or _UVICORN.fullmatch(line)
        head, text = (record["head"], record["text"]) if record else ("", line)
        if record is not None and record.re is _UVICORN:
            head += ":    "
        passing = self._passing(record, text)
        if passing is not None:
            self._withheld = None
            return f"{head} {passing}" if head else passing
        if self._in_frame and text.startswith("    "):
            return None  # the line of code below a frame
        if self._withheld == head:
            return None  # as the line before
        self._withheld = head
        return f"{head} {WITHHELD}" if head else WITHHELD

    def _passing(self, record: re.Match[str] | None, text: str) -> str | None:
        """The part of a line's text that may be written; None: nothing."""
        if not text.strip():
            return text
        if _FRAME.fullmatch(text):
            self._in_frame = True
            return text
        if self._in_frame and text.startswith("    "):
            return None
        self._in_frame = False
        if _CHAIN.fullmatch(text) or _PLAIN_ERROR.fullmatch(text):
            return text
        if limit := _REGEX_LIMIT.fullmatch(text):
            return limit["said"]
        if (error := _ERROR.fullmatch(text)) and (record is None or record["head"] != "INFO"):
            return str(error["kind"])
        if record is None:
            return None
        if record.re is _UVICORN:
            if access := _ACCESS.fullmatch(text):
                return f"{access['request']}{access['rest']}"
            return text if _LIFE.fullmatch(text) else None
        if record["level"] == "INFO":
            return None if record["file"].rpartition("/")[2] in _QUOTING_FILES else text
        return text if _PLAIN.fullmatch(text) else None


def run_filtered(command: list[str]) -> None:
    """Become the command, whose output goes through a filter in a process of its own. Returns if that is impossible."""
    if os.environ.get(VARIABLE) != "whole":
        _filter_output()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot run {command[0]}: {error.strerror}\n".encode())


def _filter_output() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # Twice, so that the filter is no child of the engine: a stopping vLLM kills all of its children.
        if os.fork() == 0:
            os.dup2(reading, 0)
            os.close(writing)
            # The filter ends when the last process of the engine has closed its output.
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            # With a command line of its own, so that it is not taken for the engine.
            os.execv(sys.executable, [sys.executable, __file__, _FILTER])
        os._exit(0)
    os.waitpid(child, 0)
    os.close(reading)
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(writing)


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    lines = LogFilter()
    while raw := source.readline(_LINE_BYTES):
        line = lines.line(raw.decode("utf-8", "replace").rstrip("\n"))
        if line is not None:
            target.write(f"{line}\n".encode())
            target.flush()


if __name__ == "__main__":
    if sys.argv[1:] == [_FILTER]:
        _copy(sys.stdin.buffer, sys.stdout.buffer)
        sys.exit(0)
    if len(sys.argv) < 2:
        sys.exit("usage: engine_log.py COMMAND…")
    run_filtered(sys.argv[1:])
    sys.exit(127)
