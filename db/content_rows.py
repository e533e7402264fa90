"""Names of the rows with a key of several columns, to which encrypted content is bound."""

from __future__ import annotations

from uuid import UUID

ANSWER_KEY = ("judgement_id", "kind", "index")


def answer_row(judgement: UUID, kind: str, index: int) -> str:
    """Name of a row of `votes` or `hints`."""
    return f"{judgement}/{kind}/{index}"


def step_sample_row(policy: str, step: int, sample: UUID) -> str:
    """Name of a row of `step_samples`."""
    return f"{policy}/{step}/{sample}"
