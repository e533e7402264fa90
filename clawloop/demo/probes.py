"""The probes of the demo's gate: right content in either style; which style a user wants is no business of the gate."""

from __future__ import annotations

import re

from clawloop.contracts.probes import ProbeContent
from clawloop.demo.world import PROBES, STYLES, Request, answer


def demo_probes() -> list[ProbeContent]:
    """Return what the demo adds by `PostgresProbeStore.add`, as `clawloop probe add` does."""
    return [
        ProbeContent(messages=[{"role": "user", "content": request.text}], regex=_either_style(request))
        for request in PROBES
    ]


def _either_style(request: Request) -> str:
    answers = "|".join(_literal(answer(request, style)) for style in STYLES[request.axis])
    return rf"\A\s*(?:{answers})\s*\z"


def _literal(text: str) -> str:
    """Escape a text for Rust's regex crate, which refuses some of what `re.escape` writes."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text)
