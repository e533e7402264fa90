"""Asks a judge for the answers that a judgement lacks.

All missing answers are one request. Those that cannot be read are asked for once more, in one request too, and so is
what a judge left out that gives fewer answers than asked for. What then cannot be read is stored as unreadable, so that
no retry asks a third time. So is an answer that was cut off, also where it seems to have a vote: a judge may still be
thinking then.

An attempt that Temporal gave up may go on beside the next one, on another worker. So with each answer that an attempt
stores it learns what is stored by then, and asks for no more than the rest; it ends where the judgement was decided
meanwhile. Where none of the first answers can be read there is nothing to store: an attempt that continues a judgement
looks then, and one that opened it sends the second request, as looking would cost every such turn a transaction.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from clawloop.core.contracts.turns import TurnRecord
from clawloop.core.errors import EngineAnswerUnusable, JudgeRefused, StoreUnavailable
from clawloop.core.ids import JudgementId, TurnId
from clawloop.core.judging.evidence import Budgets, Evidence
from clawloop.core.judging.prompts import AnswerForm, JudgeAnswer, JudgePrompt, JudgeReply, hint_prompt, vote_prompt
from clawloop.core.judging.records import OpenJudgement, StoredAnswers, StoredHint, StoredVote
from clawloop.core.judging.voting import HintVote, Verdict, Vote, direct_vote, parse_hint, parse_vote
from clawloop.core.recipes.recipe import JudgeForm

Answer = TypeVar("Answer")
Reply = TypeVar("Reply")

NO_DIRECT_VOTE = Verdict(None, None, None, "no direct vote")

# Characters of evidence, tried one after the other while a judge finds the question too long. The last one fits the
# smallest context anyone serves a judge with.
EVIDENCE_LIMITS = (Budgets().total, 9_000, 3_000, 1_200)


class AnswerStore(Protocol):
    """Stores each answer of a judge once.

    Each call that stores answers, also one that has none, returns what is stored afterwards, read in its transaction:
    another worker may have asked the same meanwhile.
    """

    async def store_votes(
        self, judgement: JudgementId, votes: Sequence[StoredVote], replies: Mapping[int, JudgeReply] | None = None
    ) -> StoredAnswers:
        """Insert votes in one transaction. Idempotent: the first of an index counts, and none after the decision.

        Args:
            replies: by index, where the gateway that the judge was asked through recorded the vote, for a judge that
                learns. Only that of a vote which is inserted is stored, with it: another worker's is another reply.
        """

    async def store_direct_vote(
        self, judgement: JudgementId, logprobs: Mapping[Vote, float], vote: Vote
    ) -> StoredAnswers:
        """Insert a direct vote with its log-probs as they came; the first one counts."""

    async def store_hints(self, judgement: JudgementId, kind: str, hints: Sequence[StoredHint]) -> StoredAnswers:
        """Insert hints in one transaction. Idempotent: the first of a kind and index counts."""


class Judge(Protocol):
    async def form(self, policy: str, wanted: JudgeForm) -> AnswerForm:
        """The form in which the judge of a policy answers sampled votes and hints.

        Args:
            wanted: the recipe's `signal.judge_form`.

        Raises:
            JudgeUnavailable: retry later.
        """

    async def votes_off(self, policy: str, wanted: JudgeForm) -> str | None:
        """The reason, from the judge's trial, to ignore its votes; None if they count or there was no trial.

        Raises:
            JudgeUnavailable: retry later.
        """

    async def answers(self, policy: str, prompt: JudgePrompt, n: int, temperature: float) -> list[JudgeAnswer]:
        """At most `n` answers to one question, in one request.

        Raises:
            JudgeUnavailable: retry later.
            JudgeRefused: the judge will never take this question.
        """

    async def distribution(self, policy: str, prompt: JudgePrompt) -> Mapping[Vote, float]:
        """Log-probs of the three votes, as the first token of a bare answer at temperature 1.

        Raises:
            JudgeUnavailable: retry later.
            JudgeRefused: the judge will never take this question, always thinks first, has no grammar, or reports no
                log-probs.
        """


@dataclass(frozen=True)  # no slots: _Question[Vote](...) sets __orig_class__ on the instance
class _Question(Generic[Answer]):
    """Votes or hints: the answers that were stored when the judgement was opened, and how to ask, parse and store."""

    opened: Mapping[int, Answer | None]
    stored: Callable[[StoredAnswers], Mapping[int, Answer | None]]
    make_prompt: Callable[..., JudgePrompt]
    parse: Callable[[str, JudgePrompt], Answer | None]
    store: Callable[[Sequence[_Parsed[Answer]]], Awaitable[StoredAnswers]]


@dataclass(frozen=True)  # as above
class _Parsed(Generic[Answer]):
    """An answer of a judge; None: it cannot be read."""

    index: int
    raw: JudgeAnswer
    answer: Answer | None

    @property
    def row(self) -> tuple[int, str, Answer | None]:
        """The answer in the form in which it is stored."""
        return self.index, self.raw.text, self.answer


class VoteCollector:
    """Votes, hints and the direct vote of one judgement, stored as they come.

    Args:
        give_up: why no judge is asked; None: ask.
        notes_replies: note where a gateway recorded the votes, so that the judge can learn from them.

    Attributes:
        problems: why answers are missing, without any text of the questions.
    """

    def __init__(
        self,
        store: AnswerStore,
        judge: Judge,
        turn: TurnRecord,
        evidence: Evidence,
        judgement: OpenJudgement,
        give_up: str | None,
        *,
        notes_replies: bool = False,
    ) -> None:
        self._notes_replies = notes_replies
        self._store = store
        self._judge = judge
        self._turn = turn
        self._evidence = evidence
        self._judgement = judgement
        self._give_up = give_up
        self._stored: StoredAnswers | None = None  # as of this collector's last store; None before the first
        self.problems: list[str] = []

    async def votes(self) -> list[Vote | None]:
        """
        Raises:
            JudgeUnavailable: the answers so far are stored.
            StoreUnavailable: also if the judgement was decided meanwhile.
        """

        def stored(answers: StoredAnswers) -> Mapping[int, Vote | None]:
            return answers.votes

        async def store(votes: Sequence[_Parsed[Vote]]) -> StoredAnswers:
            replies = {one.index: one.raw.reply for one in votes if one.raw.reply is not None and self._notes_replies}
            return await self._store.store_votes(self._judgement.id, [one.row for one in votes], replies)

        return await self._collect(_Question[Vote](self._judgement.votes, stored, vote_prompt, parse_vote, store))

    async def hints(self, kind: str, evidence: Evidence) -> list[HintVote | None]:
        """
        Args:
            evidence: what hints may rest on.

        Raises:
            JudgeUnavailable: the answers so far are stored.
            StoreUnavailable: also if the judgement was decided meanwhile.
        """

        def stored(answers: StoredAnswers) -> Mapping[int, HintVote | None]:
            return answers.hints_of(kind)

        def prompt(turn_id: TurnId, _: Evidence, form: AnswerForm, budgets: Budgets) -> JudgePrompt:
            return hint_prompt(turn_id, evidence, form, budgets)

        async def store(hints: Sequence[_Parsed[HintVote]]) -> StoredAnswers:
            return await self._store.store_hints(self._judgement.id, kind, [one.row for one in hints])

        return await self._collect(_Question[HintVote](self._judgement.hints, stored, prompt, parse_hint, store))

    async def has_direct_verdict(self) -> bool:
        """True if the verdict is a direct vote: by the recipe, or because that is the form of the judge.

        Raises:
            JudgeUnavailable
        """
        signal = self._judgement.recipe.signal
        if signal.votes == "direct" or self._judgement.direct is not None:
            return True
        if self._give_up is not None or self._judgement.votes:
            return False
        return await self._judge.form(self._turn.policy, signal.judge_form) is AnswerForm.EXAMPLES

    async def votes_off(self) -> bool:
        """True if no vote is asked for, since the judge's teach nothing; the reason is noted.

        Raises:
            JudgeUnavailable
        """
        if self._give_up is not None or self._judgement.votes or self._judgement.direct is not None:
            return False
        why = await self._judge.votes_off(self._turn.policy, self._judgement.recipe.signal.judge_form)
        if why is not None:
            self._note(why)
        return why is not None

    async def direct_vote(self) -> Verdict:
        """The verdict of one direct vote; NO_DIRECT_VOTE if there is none.

        Raises:
            JudgeUnavailable
            StoreUnavailable: also if the judgement was decided meanwhile.
        """
        if self._judgement.direct is not None:
            return direct_vote(self._judgement.direct)
        if self._give_up is not None:
            self._note(self._give_up)
            return NO_DIRECT_VOTE
        try:
            ask = partial(self._judge.distribution, self._turn.policy)
            form = await self._judge.form(self._turn.policy, self._judgement.recipe.signal.judge_form)
            form = form if form is AnswerForm.EXAMPLES else AnswerForm.GRAMMAR
            logprobs = await self._ask_within_limits(vote_prompt, form, ask)
            verdict = direct_vote(logprobs)
        except (JudgeRefused, EngineAnswerUnusable) as error:
            self._note(str(error))
            return NO_DIRECT_VOTE
        assert verdict.verdict is not None
        stored = self._learn(await self._store.store_direct_vote(self._judgement.id, logprobs, verdict.verdict))
        return direct_vote(logprobs if stored.direct is None else stored.direct)

    async def _collect(self, question: _Question[Answer]) -> list[Answer | None]:
        answers = dict(question.opened if self._stored is None else question.stored(self._stored))
        indices = range(self._judgement.recipe.signal.m)
        missing = [index for index in indices if index not in answers]
        if missing and self._give_up is not None:
            self._note(self._give_up)
        elif missing:
            signal = self._judgement.recipe.signal
            cut = 0
            try:
                form = await self._judge.form(self._turn.policy, signal.judge_form)
                ask = partial(self._ask_with_prompt, n=len(missing))
                prompt, raws = await self._ask_within_limits(question.make_prompt, form, ask)
                # A judge may give fewer answers than asked for; surplus ones are discarded.
                given = _parsed(question, dict(zip(missing, raws, strict=False)), prompt)
                readable = [one for one in given if one.answer is not None]
                if readable or self._judgement.continued:
                    kept = await self._keep(question, readable)
                    answers |= kept
                left = [index for index in missing if index not in answers]
                while left:
                    # One that gives no answer at all would give none if it was asked a third time.
                    asked = await self._ask(prompt, len(left)) or [JudgeAnswer("")]
                    again = _parsed(question, dict(zip(left, asked, strict=False)), prompt)
                    kept = await self._keep(question, again)
                    answers |= kept
                    cut += sum(one.raw.cut for one in again)
                    left = [index for index in left[len(again) :] if index not in answers]
            except JudgeRefused as error:
                self._note(str(error))
            if cut:
                self._note(f"{cut} of {len(missing)} answers ended at the judge's limit of tokens")
        return [answers.get(index) for index in indices]

    async def _keep(self, question: _Question[Answer], parsed: Sequence[_Parsed[Answer]]) -> dict[int, Answer | None]:
        """Store answers of one request, if any, in one transaction; returns all that count by now, by their index."""
        stored = self._learn(await question.store(parsed))
        # One of these is not stored if another worker stored its own first.
        return {one.index: one.answer for one in parsed} | dict(question.stored(stored))

    def _learn(self, stored: StoredAnswers) -> StoredAnswers:
        """Read the answers that are stored by now, and continue with them.

        Raises:
            StoreUnavailable: another worker decided the judgement since it was opened; a retry reads what was decided.
        """
        if stored.decided_at != self._judgement.decided_at:
            raise StoreUnavailable(f"turn {self._turn.turn_id} was decided meanwhile")
        self._stored = stored
        return stored

    async def _ask_within_limits(
        self, make_prompt: Callable[..., JudgePrompt], form: AnswerForm, ask: Callable[[JudgePrompt], Awaitable[Reply]]
    ) -> Reply:
        """Ask with less evidence each time the judge finds the question too long."""
        *larger, smallest = EVIDENCE_LIMITS
        for limit in larger:
            try:
                return await ask(self._prompt(make_prompt, form, limit))
            except JudgeRefused as error:
                if not error.too_long:
                    raise
        return await ask(self._prompt(make_prompt, form, smallest))

    async def _ask_with_prompt(self, prompt: JudgePrompt, n: int) -> tuple[JudgePrompt, list[JudgeAnswer]]:
        return prompt, await self._ask(prompt, n)

    def _prompt(self, make_prompt: Callable[..., JudgePrompt], form: AnswerForm, limit: int) -> JudgePrompt:
        return make_prompt(self._turn.turn_id, self._evidence, form, Budgets.of(limit))

    async def _ask(self, prompt: JudgePrompt, n: int) -> list[JudgeAnswer]:
        temperature = self._judgement.recipe.signal.judge_temperature
        return await self._judge.answers(self._turn.policy, prompt, n, temperature)

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def _parsed(question: _Question[Answer], raws: Mapping[int, JudgeAnswer], prompt: JudgePrompt) -> list[_Parsed[Answer]]:
    """The answers by their index; one that was cut off cannot be read."""
    return [_Parsed(index, raw, None if raw.cut else question.parse(raw.text, prompt)) for index, raw in raws.items()]
