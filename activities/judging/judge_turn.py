"""Judging a turn: evidence, votes, hint, verdict, sample.

Knows nothing about Postgres or HTTP. A judge is asked once for each answer: answers are stored as they come, and
whoever goes on asks only for what is missing. What stays missing is a missing vote, never a zero.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from temporalio import activity

from activities.heartbeat import heartbeating
from activities.judging.messages import WHY_LIMIT, AskDirectly, Judged, JudgeTurn, TurnResult
from activities.judging.next_state_lookup import find_next_state, judgeable_by
from activities.judging.ports import Counts, Judge, JudgementStore, Renderer, Uncounted
from activities.judging.turn_results import with_trained_turns
from activities.judging.vote_collector import VoteCollector
from activities.training.notifier import TrainingNotifier
from clawloop.contracts.turns import Message, TurnOutcome, TurnRecord
from clawloop.errors import EngineRejected, EngineUnavailable, PromptTooLong
from clawloop.ids import TurnId
from clawloop.judging.evidence import Evidence, gather
from clawloop.judging.hints import NOT_ASKED, HintChoice, choose_hint, with_hint, without_hint
from clawloop.judging.records import (
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
from clawloop.judging.voting import Verdict, majority, rated
from clawloop.samples.assembly import Decision, assemble, decide
from clawloop.samples.eligibility import why_not_trainable
from clawloop.samples.rewards import relation_of, shape_reward
from clawloop.turns.canonical import is_volatile
from clawloop.turns.next_state import NextState

log = logging.getLogger(__name__)

NOT_VOTED = Verdict(None, None, None, "no verdict asked for")
NOTHING_FOLLOWED = Verdict(None, None, None, "nothing followed")
NO_WORDS = HintChoice(None, answered=True, why="nothing says what to do better")


@dataclass(frozen=True, slots=True)
class _Case:
    """One turn to be judged, and by what."""

    placed: TurnContext
    state: NextState | None
    feedback: list[GivenFeedback]
    give_up: str | None

    @property
    def record(self) -> TurnRecord:
        return self.placed.turn.record

    @property
    def texts(self) -> list[str]:
        return [given.text for given in self.feedback if given.text]

    @property
    def hint_kind(self) -> str:
        return f"{HINTS}+{len(self.texts)}" if self.texts else HINTS

    @property
    def evidence(self) -> Evidence:
        messages = [] if self.state is None else self.state.messages
        said = "\n\n".join(self.texts) or None
        return gather(self.record.messages, self.record.response or {}, messages, said, is_volatile=is_volatile)

    @property
    def evidence_hash(self) -> bytes:
        """Names what a turn was judged by: its next state and the feedback on it."""
        messages: list[Message] = [] if self.state is None else self.state.messages
        known = [messages, [[given.score, given.text] for given in self.feedback]]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode("utf-8", "surrogatepass")).digest()


class JudgingActivities:
    """On the queue `judge`."""

    def __init__(
        self,
        store: JudgementStore,
        judge: Judge,
        renderer: Renderer,
        work: TrainingNotifier,
        counts: Counts | None = None,
    ) -> None:
        self._store = store
        self._judge = judge
        self._renderer = renderer
        self._work = work
        self._counts: Counts = counts or Uncounted()

    @activity.defn(name="judge_turn")
    async def judge_turn(self, ask: JudgeTurn) -> Judged:
        """Judge what a turn makes judgeable: the turn it follows, itself if it came late, or itself if asked."""
        async with heartbeating():
            told = await self._store.place(ask.turn_id)
            if told is None:
                return Judged(fates=[_unknown(ask)])
            fates: list[TurnResult] = []
            for placed, state in await self._to_judge(ask, told):
                result = await self._judge_one(ask, placed, state)
                fates += [] if result is None else [result]
            return Judged(fates=await with_trained_turns(self._store, ask.session_id, fates))

    @activity.defn(name="ask_directly")
    async def collect_direct_vote(self, ask: AskDirectly) -> None:
        """Ask one direct vote on a judged turn and keep it; its session's closing decides by it."""
        async with heartbeating():
            placed = await self._store.place(ask.turn_id)
            if placed is None or placed.turn.outcome is TurnOutcome.ERASED:
                return
            state = await find_next_state(self._store, placed)
            given = await self._store.feedback_of(ask.turn_id)
            case = _Case(placed, state, given, None)
            next_turn_id = None if state is None else state.next_turn_id
            judgement = await self._store.revise(ask.turn_id, next_turn_id, case.evidence_hash, case.hint_kind)
            asking = VoteCollector(self._store, self._judge, case.record, case.evidence, judgement, None)
            vote = await asking.direct_vote()
            self._count("vote", [vote.verdict])
            if asking.problems:
                log.warning("no direct vote", extra={"turn_id": str(ask.turn_id), "why": "; ".join(asking.problems)})

    async def _to_judge(self, ask: JudgeTurn, told: TurnContext) -> list[tuple[TurnContext, NextState | None]]:
        if ask.itself or ask.feedback_id is not None or ask.revision is not None:
            return [(told, await find_next_state(self._store, told))]
        return [*await judgeable_by(self._store, told)]

    async def _judge_one(self, ask: JudgeTurn, placed: TurnContext, state: NextState | None) -> TurnResult | None:
        turn = placed.turn
        given = await self._store.feedback_of(turn.record.turn_id)
        new_feedback = any(not one.applied for one in given)
        if turn.outcome is TurnOutcome.ERASED:
            return _turn_result(placed, turn.outcome, None, turn.outcome_detail or "erased")
        late_state = placed.held is not None and placed.held.next_turn_id is None and state is not None
        if placed.held is not None and placed.held.revision >= (ask.revision or 0) and not (new_feedback or late_state):
            # Judged before: this attempt only did not hear of it, or the message came twice.
            return _turn_result(placed, turn.outcome, placed.held.verdict, turn.outcome_detail or "")
        by_outcome = ask.itself and placed.task_outcome is not None
        if state is None and not given and not by_outcome:
            return None
        case = _Case(placed, state, given, ask.give_up)
        judgement = await self._open(case, ask, new_feedback)
        end = await self._end(case, judgement)
        held = placed.held
        if held is not None and end.outcome is TurnOutcome.UNJUDGED is not held.outcome:
            # A judge that does not answer must not undo what one said before; the votes there are wait for the next
            # time, and feedback that is not taken in is told again by the sweep.
            why = f"judged again in vain, {end.why}; it stays: {turn.outcome_detail}"
            return _turn_result(placed, turn.outcome, held.verdict, why)
        ready = await self._store.finalize(judgement.id, end, [one.id for one in given])
        await self._work.tell(ready)
        wanted = held.revision + 1 if ask.revision is None and held is not None and not new_feedback else ask.revision
        if wanted is not None and (stays := await self._stays(turn.record.turn_id, wanted)) is not None:
            return stays
        self._counts.judged(end.outcome)
        log.info("judged", extra={"turn_id": str(turn.record.turn_id), "outcome": end.outcome})
        if end.relation is not Relation.NONE and (now := await self._store.place(turn.record.turn_id)) is not None:
            # Only the store knew what the reward was in relation to.
            return _turn_result(now, now.turn.outcome, end.verdict.verdict, now.turn.outcome_detail or "")
        return _turn_result(placed, end.outcome, end.verdict.verdict, end.why)

    async def _stays(self, turn_id: TurnId, revision: int) -> TurnResult | None:
        """The turn's fate if this judgement of it came too late; None if it did not."""
        now = await self._store.place(turn_id)
        if now is None or (now.held is not None and now.held.revision >= revision):
            return None
        held = None if now.held is None else now.held.verdict
        why = f"a step has its sample, so it stays: {now.turn.outcome_detail}"
        return _turn_result(now, now.turn.outcome, held, why)

    async def _open(self, case: _Case, ask: JudgeTurn, new_feedback: bool) -> OpenJudgement:
        turn_id = case.record.turn_id
        next_turn_id = None if case.state is None else case.state.next_turn_id
        known = next_turn_id, case.evidence_hash, case.hint_kind
        held = case.placed.held
        words = new_feedback and all(given.score is None for given in case.feedback)
        late_state = held is not None and held.next_turn_id is None and case.state is not None
        if ask.revision is not None and (held is None or ask.revision > held.revision):
            return await self._store.rejudge(turn_id, ask.revision, *known)
        if held is not None and (words or late_state):
            # There is more to judge by than before, so what was answered without it does not count any more.
            return await self._store.rejudge(turn_id, held.revision + 1, *known)
        if new_feedback:
            return await self._store.revise(turn_id, *known)
        return await self._store.open(turn_id, *known)

    async def _end(self, case: _Case, judgement: OpenJudgement) -> FinalizedJudgement:
        record, signal = case.record, judgement.recipe.signal
        asking = VoteCollector(self._store, self._judge, record, case.evidence, judgement, case.give_up)
        verdict, ballot = NOT_VOTED, None
        scores = [given.score for given in case.feedback if given.score is not None]
        if scores:
            verdict = rated(scores[-1])
        elif signal.verdicts and case.state is None and not case.texts:
            verdict = NOTHING_FOLLOWED
        elif signal.verdicts and signal.votes == "direct":
            verdict = await asking.direct_vote()
            ballot = Ballot(DIRECT, (verdict.verdict,))
        elif signal.verdicts:
            votes = await asking.votes()
            verdict = majority(votes)
            ballot = Ballot(VOTES, tuple(votes))
        if ballot is not None:
            self._count("vote", ballot.scores)
        relation = relation_of(signal, grouped=record.group_id is not None)
        if record.response_ids is not None:
            cut = record.finish_reason == "length"
            verdict = shape_reward(signal, verdict, relation, tokens=len(record.response_ids), cut_by_length=cut)
        hint = NOT_ASKED
        if signal.hints and (case.state is not None or case.texts):
            hints = await asking.hints(case.hint_kind)
            self._count("hint", hints)
            hint = choose_hint(hints, case.evidence, signal.hints_needed)
        elif signal.hints:
            hint = NO_WORDS
        fault = why_not_trainable(
            status=record.status,
            sampling=record.sampling,
            tools=record.tools,
            prompt_ids=record.prompt_ids,
            response_ids=record.response_ids,
            logprobs=record.logprobs,
        )
        decision = decide(signal, verdict, hint, fault)
        hinted: list[int] | None = None
        if decision.hint is not None:
            hinted, problem = await self._hinted_prompt(case, decision.hint)
            if problem is not None:
                hint = without_hint(hint, problem)
                decision = decide(signal, verdict, hint, fault)
        if decision.outcome is TurnOutcome.SAMPLED:
            _check_sample(decision, record, hinted)
        why = decision.why if not asking.problems else f"{decision.why} ({'; '.join(asking.problems)})"
        return FinalizedJudgement(
            verdict=verdict,
            hint=hint,
            not_trainable=fault,
            reward=decision.reward if relation is Relation.NONE else verdict.reward,
            hinted_prompt_ids=None if hinted is None else tuple(hinted),
            outcome=decision.outcome,
            why=why,
            relation=relation,
            ballot=ballot,
        )

    def _count(self, kind: str, answers: Sequence[object | None]) -> None:
        missing = sum(answer is None for answer in answers)
        self._counts.answered(kind, len(answers) - missing, missing)

    async def _hinted_prompt(self, case: _Case, hint: str) -> tuple[list[int] | None, str | None]:
        """The prompt's ids with the hint in it, or why there are none."""
        record = case.record
        hinted = with_hint(record.messages, hint, is_volatile=is_volatile)
        if hinted is None:
            return None, "no user message takes a hint"
        try:
            # Only a template that gives the recorded ids can be trusted with the hint.
            if await self._renderer.render(record, record.messages) != record.prompt_ids:
                return None, "template mismatch"
            return await self._renderer.render(record, hinted), None
        except EngineRejected as error:
            return None, f"the engine does not render the hinted prompt ({error.status})"
        except PromptTooLong as error:
            return None, f"the hinted prompt is too long: {error}"
        except EngineUnavailable:
            if case.give_up is None:
                raise
            return None, "no engine rendered the hinted prompt"


def _check_sample(decision: Decision, record: TurnRecord, hinted: list[int] | None) -> None:
    """Raises what a sample of this turn would raise; eligibility has seen to it that nothing is missing."""
    temperature = record.sampling["temperature"]
    assert isinstance(temperature, int | float)
    assemble(
        decision,
        turn_id=record.turn_id,
        prompt_ids=record.prompt_ids or (),
        response_ids=record.response_ids or (),
        logprobs=record.logprobs or (),
        temperature=float(temperature),
        version=record.version,
        hinted_prompt_ids=hinted,
    )


def _turn_result(placed: TurnContext, outcome: TurnOutcome, verdict: int | None, why: str) -> TurnResult:
    return TurnResult(
        turn_id=placed.turn.record.turn_id,
        number=placed.number,
        kind=placed.turn.record.kind,
        outcome=outcome,
        verdict=verdict,
        sample=outcome in (TurnOutcome.SAMPLED, TurnOutcome.TRAINED),
        step=None,
        why=why[:WHY_LIMIT],
    )


def _unknown(ask: JudgeTurn) -> TurnResult:
    return TurnResult(
        turn_id=ask.turn_id,
        number=None,
        kind="unknown",
        outcome=None,
        verdict=None,
        sample=False,
        step=None,
        why="no main turn of this id is stored",
    )
