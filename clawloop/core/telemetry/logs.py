"""Logging as JSON lines, which hold ids and never the content of a message, a key or a password.

Errors of libraries quote what they were given: pydantic a request's values, PostgreSQL a row, asyncio the error of a
task. So of an error that is not Clawloop's own the log has only its type and where it was raised.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from pythonjsonlogger.json import JsonFormatter

from clawloop.core.errors import AmbiguousId, ClawloopError, NotFound, RequestRejected, ValueRejected

REDACTED = "(redacted)"
# Their messages are written in code, about types, names, memory and sockets. Others quote values.
_PLAIN_ERRORS = (
    ClawloopError,
    OSError,
    MemoryError,
    ImportError,
    AttributeError,
    TypeError,
    RuntimeError,
    AssertionError,
    NotImplementedError,
)
# Errors that quote the caller's own words to the caller.
_QUOTING_ERRORS = (RequestRejected, ValueRejected, NotFound, AmbiguousId)
# Clawloop's keys, those of other APIs, passwords in addresses, and headers that carry one.
_SECRETS = re.compile(
    r"(?P<key>\b(?:cl-[0-9a-f]{8}[-.]|ce_[0-9a-f]{40}|sk-)[A-Za-z0-9_.-]{16,})|(?P<scheme>\b[a-z][a-z0-9+]*://[^\s:/@\"']*:)[^\s/@\"']+(?=@)"
    r"|(?P<bearer>\bBearer\s+)[^\s\"',]+|(?P<option>\b(?:password|passwd|api[_-]?key|secret)\s*[=:]\s*)[^\s\"',}]+",
    re.IGNORECASE,
)
# A shorter one would be cut out of words.
_SHORTEST_SECRET = 6
# Secrets of files that were read since the process began.
_known: set[str] = set()
# Clawloop's own modules log only ids and numbers; tests hold them to it.
_OWN = ("clawloop", "api", "db", "activities", "workflows", "migrations")

log_role: ContextVar[str | None] = ContextVar("log_role", default=None)
"""The role whose task logs, in a process of several roles; each line then names it."""


def configure_logging(level: str = "INFO", secrets: Iterable[str] = ()) -> None:
    """Write every record of this process to standard error as one JSON object a line, uncaught errors included.

    Args:
        secrets: what must not appear, whatever logs it.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RedactingFormatter(secrets))
    handler.addFilter(_name_role)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # The gateway logs one line for each turn, with more detail than uvicorn's.
    logging.getLogger("uvicorn.access").disabled = True
    # The server by which verifiers gives an agent its task logs each of the agent's looks at it.
    logging.getLogger("aiohttp.access").disabled = True
    # Pydantic quotes values in its warnings.
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_thread_end
    sys.unraisablehook = _log_unraisable


def never_log(secrets: Iterable[str]) -> None:
    """Redact these secrets in every log line from now on, beside those that `configure_logging` was given."""
    _known.update(secret for secret in secrets if len(secret) >= _SHORTEST_SECRET)


class RedactingFormatter(JsonFormatter):
    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets = [secret for secret in secrets if len(secret) >= _SHORTEST_SECRET]
        super().__init__(
            "{levelname}{name}{message}{exc_info}",
            style="{",
            timestamp="time",
            rename_fields={"levelname": "level", "name": "logger"},
        )

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(_without_quotes(record))
        for secret in (*self._secrets, *_known):
            text = text.replace(secret, REDACTED)
        return redact(text)

    def formatException(self, ei: Any) -> str:
        return describe_chain(ei[1])


def redact(text: str) -> str:
    """The text without keys and passwords."""
    return _SECRETS.sub(lambda found: f"{_kept(found)}{REDACTED}", text)


def describe(error: BaseException) -> str:
    """An error's type, and its message if that quotes nothing."""
    name = type(error).__qualname__
    if type(error).__module__ not in ("builtins", "__main__"):
        name = f"{type(error).__module__}.{name}"
    if isinstance(error, ExceptionGroup):
        return f"{name} of {len(error.exceptions)}: {', '.join(map(describe, error.exceptions))}"
    is_plain = isinstance(error, _PLAIN_ERRORS) and not isinstance(error, _QUOTING_ERRORS)
    return f"{name}: {error}" if is_plain and str(error) else name


def describe_chain(error: BaseException | None) -> str:
    """The error as `traceback.format_exception` writes it, without messages that may quote content."""
    parts: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = "".join(traceback.format_list(_frames(error.__traceback__)))
        parts.append(f"Traceback (most recent call last):\n{frames}{describe(error)}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n\nwhich followed\n\n".join(parts)


def _frames(trace: TracebackType | None) -> traceback.StackSummary:
    return traceback.StackSummary.extract(traceback.walk_tb(trace), limit=-50)


def _without_quotes(record: logging.LogRecord) -> logging.LogRecord:
    """The record; a record of a library's logger without arguments and lines that may quote content."""
    if record.name.split(".")[0] in _OWN:
        return record
    changed = logging.makeLogRecord(record.__dict__)
    changed.exc_text = None  # another handler may have formatted it in full
    if isinstance(record.args, tuple):
        changed.args = tuple(map(_plain, record.args))
    elif isinstance(record.args, Mapping):
        changed.args = {name: _plain(value) for name, value in record.args.items()}
    if record.name == "asyncio":
        # Further lines show the task or the transport with its error.
        changed.msg = str(record.msg).partition("\n")[0]
    elif record.name == "py.warnings":
        # `PLACE: CATEGORY: text`, and the line of code.
        place, _, rest = record.getMessage().partition(": ")
        changed.msg, changed.args = f"{place}: {rest.partition(':')[0]}", ()
    return changed


def _name_role(record: logging.LogRecord) -> bool:
    if (role := log_role.get()) is not None and not hasattr(record, "role"):
        record.role = role
    return True


def _plain(argument: Any) -> Any:
    return describe(argument) if isinstance(argument, BaseException) else argument


def _kept(found: re.Match[str]) -> str:
    return found["scheme"] or found["bearer"] or found["option"] or ""


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger("clawloop").critical("the process ends with an error", exc_info=(kind, error, trace))


def _log_thread_end(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is not None:
        logging.getLogger("clawloop").error("a thread ended with an error", exc_info=ended.exc_value)


def _log_unraisable(raised: Any) -> None:
    if raised.exc_value is not None:
        logging.getLogger("clawloop").error("an error that could not be raised", exc_info=raised.exc_value)
