"""Runs `clawloop` verbs, in a process or in this one."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from unittest.mock import patch

import pytest
from typer.main import get_command

from clawloop.app.cli.main import run_verb

_made_once = cache(get_command)  # the tree of all verbs, which takes longer than many a verb

Done = subprocess.CompletedProcess[str]


def clawloop_process(*arguments: str, **environment: str) -> Done:
    """Run the program. Its imports take a second or two, so one test for each verb is enough."""
    return subprocess.run(
        [sys.executable, "-m", "clawloop.app.cli.main", *arguments],
        env=dict(os.environ) | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def clawloop(*arguments: str, **environment: str) -> Done:
    """Run the verb in this process; not in a running event loop, because verbs start their own."""
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, environment),
        patch.object(sys, "argv", ["clawloop", *arguments]),
        patch("typer.main.get_command", _made_once),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        run_verb()
    code = end.value.code or 0
    assert isinstance(code, int)
    return subprocess.CompletedProcess(["clawloop", *arguments], code, out.getvalue(), err.getvalue())


def refusal(done: Done) -> str:
    """The single line on standard error of a verb that failed."""
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("clawloop: ")
    return line
