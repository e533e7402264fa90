"""Votes on turns of episodes, and a trial of the judge, in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from clawloop.core.errors import NotFound
from clawloop.core.judging.agreement import VotedTurn
from clawloop.core.judging.quality import JudgeTrial


@dataclass
class FakeVoteReader:
    """The policy `default` has these turns."""

    turns: list[VotedTurn] = field(default_factory=list)
    trial: JudgeTrial | None = None

    async def voted_turns(self, policy: str) -> list[VotedTurn]:
        if policy != "default":
            raise NotFound(f"there is no policy {policy!r}.", code="policy_not_found", field="policy")
        return self.turns

    async def newest_trial(self) -> JudgeTrial | None:
        return self.trial
