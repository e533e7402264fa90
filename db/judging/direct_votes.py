"""A direct vote's log-probs as the text its row keeps, and back.

Knows nothing about verdicts: what the numbers mean is decided anew each time they are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from clawloop.judging.parsing import Vote

CHOICES: tuple[Vote, ...] = (1, 0, -1)
IMPOSSIBLE = -9999.0  # how vLLM writes −∞, which JSON has no number for


def direct_to_text(logprobs: Mapping[Vote, float]) -> str:
    """E.g. `{"1": -0.1, "0": -3.0, "-1": -9999.0}`."""
    return json.dumps({str(choice): max(logprobs[choice], IMPOSSIBLE) for choice in CHOICES})


def direct_from_text(raw: str) -> dict[Vote, float]:
    said = json.loads(raw)
    return {choice: float(said[str(choice)]) for choice in CHOICES}
