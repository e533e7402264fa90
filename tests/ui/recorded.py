"""Sessions, judgements and steps in PostgreSQL, as the gateway and the workers store them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clawloop.core.contracts.lessons import ShownLesson
from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource, TurnOutcome
from clawloop.core.ids import TurnId
from clawloop.core.judging.hints import HintChoice, PromptChange
from clawloop.core.judging.records import HINTS, FinalizedJudgement
from clawloop.core.judging.voting import HintVote, Verdict, Vote
from tests.contract.learning import PostgresLearning
from tests.records import turn_record

HINT = "Answer in one sentence; the user asked for short answers."
CHANGED = "Make it shorter, please."


@dataclass
class Recorder:
    """Stores turns of one policy."""

    learning: PostgresLearning

    async def chat(
        self,
        session: str,
        *said: str,
        reply: str = "A long answer.",
        version: int = 0,
        lessons: tuple[ShownLesson, ...] = (),
    ) -> list[TurnId]:
        """A session in which a person says these things in turn."""
        evidence = SessionEvidence(SessionSource.HEADER, session)
        messages: list[Message] = [{"role": "system", "content": "You are an assistant."}]
        turns: list[TurnId] = []
        for words in said:
            messages.append({"role": "user", "content": words})
            answer: Message = {"role": "assistant", "content": f"{reply} ({len(turns) + 1})"}
            turns.append(await self.turn(messages, answer, evidence=evidence, version=version, lessons=lessons))
            messages.append(answer)
        return turns

    async def turn(self, messages: Sequence[Message], response: Message | None, **changes: Any) -> TurnId:
        key = self.learning.key
        turn = turn_record(messages=list(messages), response=response, api_key_id=key, **changes)
        await self.learning.turns.insert(turn)
        return turn.turn_id

    async def judge(
        self,
        turn: TurnId,
        verdict: Vote,
        hint: str | None = None,
        raw: str = "It was too long.",
        after: TurnId | None = None,
    ) -> None:
        """Three votes of a judge, a hint if there is one, and a sample.

        Args:
            after: the turn whose request holds the reaction.
        """
        judgements = self.learning.judgements
        opened = await judgements.open(turn, after, b"evidence", HINTS)
        votes: list[tuple[int, str, Vote | None]] = [(n, f"{raw}\nverdict: {verdict}", verdict) for n in range(3)]
        await judgements.store_votes(opened.id, votes)
        if hint is not None:
            await judgements.store_hints(opened.id, HINTS, [(0, f"hint: {hint}", HintVote(True, hint))])
        finalized = FinalizedJudgement(
            verdict=Verdict(verdict, float(verdict), float(verdict), f"3 of 3 votes for {verdict}"),
            hint=HintChoice(() if hint is None else (hint,), answered=True, why="none" if hint is None else "1 of 1"),
            not_trainable=None,
            reward=float(verdict) or None,
            hinted_prompts=() if hint is None else (PromptChange(0, 0, (1, 2, 3, 4)),),
            outcome=TurnOutcome.SAMPLED,
            why=f"verdict {verdict:+d}",
        )
        await judgements.finalize(opened.id, finalized, [])
