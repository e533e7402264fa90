"""The toys by their environments' names."""

from __future__ import annotations

from clawloop.app.demo.practice.toy import Toy
from clawloop.app.demo.swe.toy import SWE
from clawloop.app.demo.terminal.toy import TERMINAL
from clawloop.app.demo.tool_calls.toy import TOOL_CALLS
from clawloop.core.errors import SetupError

TOYS = {toy.environment: toy for toy in (TOOL_CALLS, TERMINAL, SWE)}


def toy_of(environment: str) -> Toy:
    """
    Raises:
        SetupError: no toy practises this.
    """
    if environment == "browser":
        raise SetupError(
            "--environment 'browser': no model that is small enough for a demo has learned to find elements on a page;"
            " docs/environments.md, Browser, has the commands that let yours practise"
        )
    if environment not in TOYS:
        raise SetupError(f"--environment {environment!r}: there are demos of {', '.join(TOYS)}")
    return TOYS[environment]
