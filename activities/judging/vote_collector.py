"""Asking a judge for the answers a judgement still lacks.

Knows nothing about what becomes of them. All that is missing is one request; an answer that cannot be read is asked
for once more, by itself, and what then cannot be read is kept as unreadable, so that nobody asks a third time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from activities.judging.ports import Judge, JudgementStore
from clawloop.contracts.turns import TurnRecord
from clawloop.errors import EngineAnswerUnusable, JudgeRefused
from clawloop.judging.evidence import Evidence
from clawloop.judging.parsing import HintVote, Vote, parse_hint, parse_vote
from clawloop.judging.prompts import AnswerForm, JudgePrompt, hint_prompt, vote_prompt
from clawloop.judging.records import OpenJudgement
from clawloop.judging.truncation import Budgets
from clawloop.judging.voting import Verdict, direct_vote

Answer = TypeVar("Answer")
Reply = TypeVar("Reply")

NO_DIRECT_VOTE = Verdict(None, None, None, "no direct vote")

# Characters of evidence, tried one after the other while a judge says that the question is too long. The last one
# fits the smallest context anyone serves a judge with.
TOTALS = (Budgets().total, 9_000, 3_000, 1_200)


@dataclass(frozen=True)  # no slots: a parametrised generic notes its parameters on its instances
class _Question(Generic[Answer]):
    """Votes or hints: what is known already, how it is asked, read and kept."""

    known: Mapping[int, Answer | None]
    make_prompt: Callable[..., JudgePrompt]
    parse: Callable[[str, JudgePrompt], Answer | None]
    keep: Callable[[int, str, Answer | None], Awaitable[None]]


class VoteCollector:
    """
    Args:
        give_up: ask nothing: why.

    Attributes:
        problems: why answers are missing, without a word of what was asked.
    """

    def __init__(
        self,
        store: JudgementStore,
        judge: Judge,
        turn: TurnRecord,
        evidence: Evidence,
        judgement: OpenJudgement,
        give_up: str | None,
    ) -> None:
        self._store = store
        self._judge = judge
        self._turn = turn
        self._evidence = evidence
        self._judgement = judgement
        self._give_up = give_up
        self.problems: list[str] = []

    async def votes(self) -> list[Vote | None]:
        """
        Raises:
            JudgeUnavailable: what was answered so far is stored.
        """

        async def keep(index: int, raw: str, vote: Vote | None) -> None:
            await self._store.store_vote(self._judgement.id, index, raw, vote)

        return await self._all(_Question[Vote](self._judgement.votes, vote_prompt, parse_vote, keep))

    async def direct_vote(self) -> Verdict:
        """What one direct vote says; without a verdict if there is none.

        Raises:
            JudgeUnavailable
        """
        if self._judgement.direct is not None:
            return direct_vote(self._judgement.direct)
        if self._give_up is not None:
            self._say(self._give_up)
            return NO_DIRECT_VOTE
        try:
            logprobs = await self._first(vote_prompt, partial(self._judge.distribution, self._turn.policy))
            verdict = direct_vote(logprobs)
        except (JudgeRefused, EngineAnswerUnusable) as error:
            self._say(str(error))
            return NO_DIRECT_VOTE
        assert verdict.verdict is not None
        return direct_vote(await self._store.store_direct_vote(self._judgement.id, logprobs, verdict.verdict))

    async def hints(self, kind: str) -> list[HintVote | None]:
        """
        Raises:
            JudgeUnavailable: what was answered so far is stored.
        """

        async def keep(index: int, raw: str, hint: HintVote | None) -> None:
            await self._store.store_hint(self._judgement.id, kind, index, raw, hint)

        return await self._all(_Question[HintVote](self._judgement.hints, hint_prompt, parse_hint, keep))

    async def _all(self, question: _Question[Answer]) -> list[Answer | None]:
        answers = dict(question.known)
        wanted = range(self._judgement.recipe.signal.m)
        missing = [index for index in wanted if index not in answers]
        if missing and self._give_up is not None:
            self._say(self._give_up)
        elif missing:
            try:
                ask = partial(self._ask_with_prompt, n=len(missing))
                prompt, raws = await self._first(question.make_prompt, ask)
                # A judge may give fewer than asked for; more are not ours.
                for index, raw in zip(missing, raws, strict=False):
                    answer = question.parse(raw, prompt)
                    if answer is not None:
                        await question.keep(index, raw, answer)
                        answers[index] = answer
                for index in missing:
                    if index not in answers:
                        (raw, *_) = [*await self._ask(prompt, 1), ""]
                        answers[index] = question.parse(raw, prompt)
                        await question.keep(index, raw, answers[index])
            except JudgeRefused as error:
                self._say(str(error))
        return [answers.get(index) for index in wanted]

    async def _first(
        self, make_prompt: Callable[..., JudgePrompt], ask: Callable[[JudgePrompt], Awaitable[Reply]]
    ) -> Reply:
        """Ask, with less evidence each time the judge finds it too long."""
        *larger, smallest = TOTALS
        for total in larger:
            try:
                return await ask(self._prompt(make_prompt, total))
            except JudgeRefused as error:
                if not error.too_long:
                    raise
        return await ask(self._prompt(make_prompt, smallest))

    async def _ask_with_prompt(self, prompt: JudgePrompt, n: int) -> tuple[JudgePrompt, list[str]]:
        return prompt, await self._ask(prompt, n)

    def _prompt(self, make_prompt: Callable[..., JudgePrompt], total: int) -> JudgePrompt:
        form: AnswerForm = self._judge.form
        return make_prompt(self._turn.turn_id, self._evidence, form, Budgets.of(total))

    async def _ask(self, prompt: JudgePrompt, n: int) -> list[str]:
        temperature = self._judgement.recipe.signal.judge_temperature
        return await self._judge.answers(self._turn.policy, prompt, n, temperature)

    def _say(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)
