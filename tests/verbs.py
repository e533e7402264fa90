"""`clawloop` verbs as people run them: as a process of its own, or the same from here on."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

import pytest

from clawloop.cli.main import run_verb

Done = subprocess.CompletedProcess[str]


def clawloop_process(*arguments: str, **environment: str) -> Done:
    """The program itself. Each start imports for a second or two, so once for each verb is enough."""
    return subprocess.run(
        [sys.executable, "-m", "clawloop.cli.main", *arguments],
        env=dict(os.environ) | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def clawloop(*arguments: str, **environment: str) -> Done:
    """The same verb, run in this process; not on an event loop's thread, since verbs bring their own."""
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, environment),
        patch.object(sys, "argv", ["clawloop", *arguments]),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        run_verb()
    code = end.value.code or 0
    assert isinstance(code, int)
    return subprocess.CompletedProcess(["clawloop", *arguments], code, out.getvalue(), err.getvalue())


def refusal(done: Done) -> str:
    """The one line on standard error of a verb that could not be done."""
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("clawloop: ")
    return line
