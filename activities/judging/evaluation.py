"""Evaluates one turn under one judgement: votes, verdict, hint, decision."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from activities.judging.vote_collector import VoteCollector
from clawloop.core.contracts.lessons import Correction
from clawloop.core.contracts.turns import Message, TurnRecord
from clawloop.core.errors import EngineRejected, EngineUnavailable, PromptTooLong
from clawloop.core.ids import TurnId
from clawloop.core.judging.evidence import Evidence, follows_output, gather, hint_evidence, rests_on_tools, words_of
from clawloop.core.judging.hints import (
    CONTROL_HINT,
    NOT_ASKED,
    HintChoice,
    PromptChange,
    choose_hints,
    next_message,
    reject_hints,
    with_hint,
)
from clawloop.core.judging.records import (
    DIRECT,
    HINTS,
    VOTES,
    Ballot,
    FinalizedJudgement,
    GivenFeedback,
    OpenJudgement,
    Relation,
    TurnContext,
)
from clawloop.core.judging.voting import Verdict, majority, rated
from clawloop.core.lessons.ledger import correction_of
from clawloop.core.samples.decision import decide, unseen_parts, why_not_trainable
from clawloop.core.samples.rewards import relation_of, shape_reward
from clawloop.core.turns.next_state import NextState

if TYPE_CHECKING:
    from clawloop.core.telemetry.metrics import WorkerMetrics

NOT_VOTED = Verdict(verdict=None, expected=None, reward=None, why="no verdict asked for")
NO_VOTES = Verdict(verdict=None, expected=None, reward=None, why="no vote")
NOTHING_FOLLOWED = Verdict(verdict=None, expected=None, reward=None, why="nothing followed")
NOT_SPOKEN = HintChoice((), answered=True, why="the user has not spoken since")
WEAK_JUDGE = HintChoice((), answered=True, why="the judge is too weak to be asked")
GOOD_ALREADY = HintChoice((), answered=True, why="the reply is good, so that what was said next corrects nothing")
NO_HINT_SOURCE = HintChoice((), answered=True, why="nothing says what to do better")


Render = Callable[[TurnRecord, Sequence[Message]], Awaitable[list[int]]]
"""The prompt ids of these messages with the turn's tools and options, by the engine's own template.

Raises:
    EngineUnavailable: retry later.
    EngineRejected: the engine cannot render the messages.
    PromptTooLong: the messages and the turn's reply do not fit into the engine's context.
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A turn and what it is judged by.

    Args:
        give_up: why no judge is asked; None: ask.
    """

    context: TurnContext
    next_state: NextState | None
    give_up: str | None = None

    @property
    def feedback(self) -> Sequence[GivenFeedback]:
        return self.context.feedback

    @property
    def record(self) -> TurnRecord:
        return self.context.turn.record

    @property
    def texts(self) -> list[str]:
        return [given.text for given in self.feedback if given.text]

    @property
    def scores(self) -> list[float]:
        return [given.score for given in self.feedback if given.score is not None]

    @property
    def key(self) -> tuple[TurnId, TurnId | None, bytes, str]:
        """Arguments of `JudgementStore.open` and `revise`: turn, turn that holds its next state, evidence hash, hint
        kind."""
        next_turn_id = None if self.next_state is None else self.next_state.next_turn_id
        return self.record.turn_id, next_turn_id, self.evidence_hash, self.hint_kind

    @property
    def hint_kind(self) -> str:
        return f"{HINTS}+{len(self.texts)}" if self.texts else HINTS

    @property
    def messages(self) -> list[Message]:
        """The messages of the next state; empty without one."""
        return [] if self.next_state is None else self.next_state.messages

    @property
    def evidence(self) -> Evidence:
        feedback = "\n\n".join(self.texts) or None
        return gather(self.record.messages, self.record.response or {}, self.messages, feedback)

    @property
    def evidence_hash(self) -> bytes:
        """Identifies the next state and the feedback."""
        content = [self.messages, [[given.score, given.text] for given in self.feedback]]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8", "surrogatepass")).digest()


class Evaluator:
    """Decides one case under one judgement, with the answers that `collector` gets."""

    def __init__(
        self,
        case: Case,
        judgement: OpenJudgement,
        collector: VoteCollector,
        render: Render,
        counts: WorkerMetrics | None,
    ) -> None:
        self._case = case
        self._record = case.record
        self._recipe = judgement.recipe
        self._signal = judgement.recipe.signal
        self._collector = collector
        self._render = render
        self._counts = counts

    async def evaluate(self) -> FinalizedJudgement:
        """
        Raises:
            JudgeUnavailable: answers so far are stored; retry later.
            EngineUnavailable: no engine rendered the hinted prompt; retry later.
        """
        record, signal = self._record, self._signal
        verdict, ballot = await self._verdict()
        # What the reward is measured against: the mean verdict, the group, the outcome of the task, or nothing.
        relation = relation_of(signal, grouped=record.group_id is not None)
        if record.response_ids is not None:
            cut = record.finish_reason == "length"
            verdict = shape_reward(signal, verdict, relation, tokens=len(record.response_ids), cut_by_length=cut)
        hint = await self._hint(verdict)
        fault = why_not_trainable(
            status=record.status,
            sampling=record.sampling,
            tools=record.tools,
            prompt_ids=record.prompt_ids,
            response_ids=record.response_ids,
            logprobs=record.logprobs,
            unseen=unseen_parts(record.messages),
            reply=record.response,
            lessons=record.lessons,
        )
        correction = self._correction(hint)
        decision = decide(signal, verdict, hint, fault)
        hinted: tuple[PromptChange, ...] = ()
        control: PromptChange | None = None
        if decision.hints:
            hint, hinted = await self._hinted_prompts(hint)
            control = await self._control_prompt() if hinted else None
            if hinted and control is None and self._recipe.train.advantage.control:
                hint, hinted = reject_hints(hint, "no engine renders the prompt that it is compared with"), ()
            decision = decide(signal, verdict, hint, fault)
        problems = self._collector.problems
        return FinalizedJudgement(
            verdict=verdict,
            hint=hint,
            not_trainable=fault,
            reward=decision.reward if relation is Relation.NONE else verdict.reward,
            hinted_prompts=hinted,
            outcome=decision.outcome,
            why=f"{decision.why} ({'; '.join(problems)})" if problems else decision.why,
            relation=relation,
            ballot=ballot,
            control_prompt=control,
            correction=correction,
        )

    async def _verdict(self) -> tuple[Verdict, Ballot | None]:
        """The newest rating, or else the judge's verdict with its votes."""
        if self._case.scores:
            return rated(self._case.scores[-1]), None
        if not self._signal.verdicts:
            return NOT_VOTED, None
        if self._case.next_state is None and not self._case.texts:
            return NOTHING_FOLLOWED, None
        if await self._collector.votes_off():
            return NO_VOTES, None
        if await self._collector.has_direct_verdict():
            verdict = await self._collector.direct_vote()
            ballot = Ballot(DIRECT, (verdict.verdict,))
        else:
            votes = await self._collector.votes()
            verdict = majority(votes)
            ballot = Ballot(VOTES, tuple(votes))
        count_answers(self._counts, "vote", ballot.scores)
        return verdict, ballot

    async def _hint(self, verdict: Verdict) -> HintChoice:
        if not self._signal.hints:
            return NOT_ASKED
        if self._case.next_state is None and not self._case.texts:
            return NO_HINT_SOURCE
        if not self._signal.asks_for_hints:
            if verdict.verdict == 1 and not self._case.texts:
                return GOOD_ALREADY
            words = words_of(self._case.messages, self._case.texts)
            return NOT_SPOKEN if words is None else next_message(words)
        evidence = hint_evidence(self._case.evidence, self._signal)
        if evidence is None:
            return NOT_SPOKEN
        if await self._collector.votes_off():
            return WEAK_JUDGE
        hints = await self._collector.hints(self._case.hint_kind, evidence)
        count_answers(self._counts, "hint", hints)
        return choose_hints(hints, evidence, self._signal.hints_needed, from_tools=rests_on_tools(self._signal))

    def _correction(self, hint: HintChoice) -> Correction | None:
        """The lesson of a judge's hint; without a judge that of the user's words, where they are known to correct."""
        case = self._case
        if self._signal.asks_for_hints:
            # The judge sees the reply, which may repeat what a tool printed.
            return None if follows_output(case.record.messages) else correction_of(self._recipe, hint)
        comments = [given.text for given in case.feedback if given.text and (given.score or 0) <= 0]
        said = case.messages if case.scores and case.scores[-1] < 0 else []
        words = words_of(said, comments)
        commented = not words_of(said, [])
        return None if words is None else correction_of(self._recipe, next_message(words), commented=commented)

    async def _hinted_prompts(self, choice: HintChoice) -> tuple[HintChoice, tuple[PromptChange, ...]]:
        """The hints whose prompts the engine renders, with these prompts; without any, the first hint's reason."""
        record = self._record
        prompts: dict[str, PromptChange] = {}
        problems: list[str] = []
        # Only a template that gives the recorded ids can be trusted with a hint.
        plain = await self._rendered(record.messages, problems)
        if plain is None:
            return reject_hints(choice, problems[0]), ()
        if plain != record.prompt_ids:
            return reject_hints(choice, "template mismatch"), ()
        for text in choice.texts:
            hinted = with_hint(record.messages, text, spoken=self._signal.teaches_by_message)
            if hinted is None:
                return reject_hints(choice, "no user message takes a hint"), ()
            rendered = await self._rendered(hinted, problems)
            if rendered is not None:
                prompts[text] = PromptChange.between(record.prompt_ids or (), rendered)
        if not prompts:
            return reject_hints(choice, problems[0]), ()
        left = f", {len(problems)} left out: {problems[0]}" if problems else ""
        return HintChoice(tuple(prompts), choice.answered, f"{choice.why}{left}"), tuple(prompts.values())

    async def _control_prompt(self) -> PromptChange | None:
        """The prompt with a hint that says nothing; None if no engine renders it."""
        hinted = with_hint(self._record.messages, CONTROL_HINT, spoken=self._signal.teaches_by_message)
        rendered = None if hinted is None else await self._rendered(hinted, [])
        return None if rendered is None else PromptChange.between(self._record.prompt_ids or (), rendered)

    async def _rendered(self, messages: Sequence[Message], problems: list[str]) -> list[int] | None:
        """Token ids of these messages in place of the turn's own; None if no engine renders them: `problems` says why.

        Raises:
            EngineUnavailable: a retry may find one.
        """
        try:
            return await self._render(self._record, messages)
        except EngineRejected as error:
            problems.append(f"the engine does not render the hinted prompt ({error.status})")
        except PromptTooLong as error:
            problems.append(f"the hinted prompt is too long: {error}")
        except EngineUnavailable:
            if self._case.give_up is None:
                raise
            problems.append("no engine rendered the hinted prompt")
        return None


def count_answers(counts: WorkerMetrics | None, kind: str, answers: Sequence[object | None]) -> None:
    if counts is not None:
        missing = sum(answer is None for answer in answers)
        counts.answered(kind, len(answers) - missing, missing)
