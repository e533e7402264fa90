"""Precision of a judge's votes, compared with the outcomes of episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from clawloop.contracts.views import View
from clawloop.judging.precision import Precision, VotedTurn, precision_by_votes


class VoteReader(Protocol):
    async def voted_turns(self, policy: str) -> list[VotedTurn]:
        """The newest turns of the policy's episodes that have a reward and were voted on.

        Raises:
            NotFound: there is no such policy.
            StoreUnavailable
        """


class JudgePrecision(View):
    """
    Args:
        by_votes: for the majority of the first 1, 3, 5 … votes; empty without a voted turn.
    """

    policy: str
    by_votes: Sequence[Precision]


async def judge_precision(reader: VoteReader, policy: str) -> JudgePrecision:
    """
    Raises:
        NotFound, StoreUnavailable
    """
    return JudgePrecision(policy=policy, by_votes=precision_by_votes(await reader.voted_turns(policy)))
