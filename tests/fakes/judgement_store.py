"""Judgements and closings in memory, over the turns of a fake turn store; steps run only where a test says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from clawloop.core.algorithms.rewards import RunningMean
from clawloop.core.contracts.lessons import ShownLesson
from clawloop.core.contracts.sessions import FeedbackEffect, SessionState, TurnResult
from clawloop.core.contracts.training import UNTAKEN, SampleState
from clawloop.core.contracts.turns import StoredTurn, TurnKind, TurnOutcome
from clawloop.core.errors import RecordUnusable, StoreUnavailable
from clawloop.core.ids import ApiKeyId, FeedbackId, JudgementId, SessionId, TurnId, new_feedback_id, new_judgement_id
from clawloop.core.judging.prompts import JudgeReply
from clawloop.core.judging.records import (
    ClosingSession,
    CurrentJudgement,
    FinalizedJudgement,
    GivenFeedback,
    JudgingContext,
    OpenJudgement,
    Relation,
    SessionTurn,
    StoredAnswers,
    StoredHint,
    StoredVote,
    TurnContext,
    TurnDecision,
)
from clawloop.core.judging.voting import Vote
from clawloop.core.recipes.recipe import Recipe
from clawloop.core.samples.decision import FallbackSample
from clawloop.core.samples.rewards import Member, decide_by_outcome, decide_group, wait_for_outcome, with_reward
from db.turns.prepared_turn import PreparedTurn
from tests.fakes.judgement import Closed, FakeJudgement, new_sample_state
from tests.fakes.turn_facts import follows
from tests.fakes.turn_store import FakeTurnStore

_BY_OUTCOME = "outcome_process"
_OPEN = (None, *UNTAKEN)


class FakeJudgementStore:
    """Satisfies `activities.judging.judge_turn.JudgementStore` and `ClosingStore`.

    Attributes:
        recipe: the policy's.
    """

    def __init__(self, turns: FakeTurnStore, recipe: Recipe) -> None:
        self._turns = turns
        self.recipe = recipe
        self.judgements: list[FakeJudgement] = []
        self.given: list[GivenFeedback] = []
        self.closed: dict[SessionId, Closed] = {}
        self._closed_with: set[TurnId] = set()
        self._outcomes: dict[SessionId, int] = {}

    async def load_context(self, turn_id: TurnId) -> TurnContext | None:
        stored = await self._turns.load(turn_id)
        if stored is None or stored.record.kind is not TurnKind.MAIN:
            return None
        own = await self._session(stored.session_id)
        request = PreparedTurn(stored.record).request
        after = [turn for turn in own if turn.record.kind is TurnKind.MAIN and follows(own, turn) == turn_id]
        arrived = [record.turn_id for record in self._turns.records]
        overtaken = [turn for turn in after if arrived.index(turn.record.turn_id) < arrived.index(turn_id)]
        current = self._current(turn_id)
        replies = [
            candidate
            for candidate in self._turns.candidates(stored.session_id, request)
            if candidate.response_digest in request.replies
        ]
        judged = None
        if current is not None and (finalized := current.finalized) is not None:
            verdict = finalized.verdict.verdict
            judged = CurrentJudgement(current.revision, finalized.outcome, verdict, current.next_turn_id)
        return TurnContext(
            turn=stored,
            number=sum(turn.record.kind is TurnKind.MAIN and turn.record.turn_id <= turn_id for turn in own),
            seed=request.seed,
            candidates=replies,
            follows=follows(own, stored),
            followed_by=[turn.record.turn_id for turn in after],
            overtaken_by=frozenset(turn.record.turn_id for turn in overtaken),
            current=judged,
            task_outcome=self._outcomes.get(stored.session_id),
            feedback=self._feedback(turn_id),
            placed=self._turns.placed(stored.session_id, request).replies,
        )

    async def load_judging(self, turn_id: TurnId, trained_limit: int) -> JudgingContext | None:
        if (turn := await self.load_context(turn_id)) is None:
            return None
        before = None if turn.follows is None else await self.load_context(turn.follows)
        return JudgingContext(turn, before, await self.trained_turns(turn.turn.session_id, trained_limit))

    async def trained_turns(self, session: SessionId, limit: int) -> list[TurnResult]:
        main = [turn for turn in await self._session(session) if turn.record.kind is TurnKind.MAIN]
        found: list[TurnResult] = []
        for number, turn in enumerate(main, 1):
            learned = [one for one in self._of(turn.record.turn_id) if one.sample is SampleState.TRAINED]
            if turn.outcome not in (TurnOutcome.TRAINED, TurnOutcome.ROLLED_BACK) or not learned:
                continue
            newest = max(learned, key=lambda one: one.step or 0)
            assert newest.finalized is not None
            found.append(
                TurnResult(
                    turn_id=turn.record.turn_id,
                    number=number,
                    kind=TurnKind.MAIN,
                    outcome=turn.outcome,
                    verdict=newest.finalized.verdict.verdict,
                    sample=True,
                    step=newest.step,
                    why=turn.outcome_detail or "",
                )
            )
        return found[-limit:]

    async def open(
        self, turn_id: TurnId, next_turn_id: TurnId | None, evidence_hash: bytes, hint_kind: str, revision: int = 0
    ) -> OpenJudgement:
        self._require_content(turn_id, next_turn_id)
        known = next((one for one in self._of(turn_id) if one.revision == revision), None)
        if known is None:
            known = FakeJudgement(new_judgement_id(), turn_id, revision, self.recipe, next_turn_id)
            self.judgements.append(known)
        return known.open(hint_kind)

    async def revise(
        self, turn_id: TurnId, next_turn_id: TurnId | None, evidence_hash: bytes, hint_kind: str
    ) -> OpenJudgement:
        newest = max(self._of(turn_id), key=lambda one: one.revision, default=None)
        revision = 0
        if newest is not None:
            nothing_followed = newest.finalized is None and newest.next_turn_id is None
            other_evidence = self._is_erased(newest.next_turn_id) or (nothing_followed and next_turn_id is not None)
            revision = newest.revision + (newest.sample not in _OPEN or other_evidence)
        return await self.open(turn_id, next_turn_id, evidence_hash, hint_kind, revision)

    async def lessons(self, policy: str) -> list[ShownLesson]:
        return []

    async def store_votes(
        self, judgement: JudgementId, votes: Sequence[StoredVote], replies: Mapping[int, JudgeReply] | None = None
    ) -> StoredAnswers:
        one = self._by_id(judgement)
        if one.finalized is None and not self._is_evidence_erased(one):
            one.votes = {index: vote for index, _, vote in votes} | one.votes
        return one.stored()

    async def store_direct_vote(
        self, judgement: JudgementId, logprobs: Mapping[Vote, float], vote: Vote
    ) -> StoredAnswers:
        one = self._by_id(judgement)
        if (one.finalized is None or one.finalized.verdict.verdict is not None) and not self._is_evidence_erased(one):
            one.direct = one.direct or dict(logprobs)
        return one.stored()

    async def store_hints(self, judgement: JudgementId, kind: str, hints: Sequence[StoredHint]) -> StoredAnswers:
        one = self._by_id(judgement)
        if not self._is_evidence_erased(one):
            one.hints = {(kind, index): hint for index, _, hint in hints} | one.hints
        return one.stored()

    async def finalize(
        self, judgement: JudgementId, finalized: FinalizedJudgement, feedback_ids: Sequence[FeedbackId]
    ) -> str | None:
        one = self._by_id(judgement)
        self._require_content(one.turn_id, one.next_turn_id)
        feedback = self._feedback(one.turn_id)
        if any(given.applied and given.id not in feedback_ids for given in feedback):
            raise StoreUnavailable("other feedback was applied meanwhile")
        applied = [given.id for given in feedback if not given.applied and given.id in feedback_ids]
        if one.sample not in _OPEN:
            if applied:
                raise StoreUnavailable("a step took the sample meanwhile")
            return None
        if finalized.ballot is not None and not one.has_votes(finalized.ballot):
            raise StoreUnavailable("other votes were stored first")
        others = [other for other in self._of(one.turn_id) if other is not one]
        if not applied and any(other.sample not in (*_OPEN, SampleState.EXPIRED) for other in others):
            return None
        for other in (other for other in others if other.sample in UNTAKEN):
            other.sample = SampleState.SUPERSEDED
        own = finalized.reward
        if finalized.relation is Relation.MEAN and finalized.verdict.verdict and own is not None:
            before = [other.finalized for other in self.judgements if other.finalized and other is not one]
            verdicts = [other.verdict.verdict or 0 for other in before]
            mean = RunningMean(sum(map(abs, verdicts)), sum(verdicts))
            if mean.count:
                finalized = with_reward(finalized, mean.relative(own), f"mean before {mean.total / mean.count:+.2f}")
        one.decide(finalized, own)
        self._set_outcome(one.turn_id, finalized.outcome, finalized.why)
        if finalized.sampled and finalized.relation in (Relation.NONE, Relation.MEAN):
            await self._make_sample(one, finalized.why)
        elif one.sample in UNTAKEN:
            one.sample = SampleState.SUPERSEDED
        await self._relate(one, finalized.relation, own)
        self.given = [replace(given, applied=True) if given.id in applied else given for given in self.given]
        return None

    async def _make_sample(self, one: FakeJudgement, why: str) -> None:
        one.sample = new_sample_state(await self._turns.load(one.turn_id), self.recipe)
        if one.sample is SampleState.HELD_OUT:
            self._set_outcome(one.turn_id, TurnOutcome.HELD_OUT, f"held out: {why}")

    async def _relate(self, one: FakeJudgement, relation: Relation, own: float | None) -> None:
        if relation is Relation.GROUP:
            record = next(record for record in self._turns.records if record.turn_id == one.turn_id)
            await self._finalize_group(record.group_id or record.turn_id)
        if relation is Relation.OUTCOME and one.turn_id in self._closed_with:
            stored = await self._turns.load(one.turn_id)
            assert stored is not None
            await self._finalize_by_outcome([one.turn_id], self._outcomes.get(stored.session_id))
        elif relation is Relation.OUTCOME and own is not None:
            await self._apply({one.turn_id: wait_for_outcome(self._member(one.turn_id, Relation.OUTCOME))})

    def _feedback(self, turn_id: TurnId) -> list[GivenFeedback]:
        return [given for given in self.given if given.turn_id == turn_id]

    async def _finalize_group(self, group: TurnId, *, closing: bool = False) -> dict[TurnId, TurnDecision]:
        ids = sorted(record.turn_id for record in self._turns.records if record.group_id == group)
        members = [self._member(turn_id, Relation.GROUP) for turn_id in ids]
        closed = closing or any(turn_id in self._closed_with for turn_id in ids)
        return await self._apply(decide_group(members, session_closed=closed))

    def _member(self, turn_id: TurnId, relation: Relation) -> Member:
        current = self._current(turn_id)
        finalized = None if current is None else current.finalized
        if current is None or finalized is None or finalized.relation is not relation:
            return Member(turn_id, None, None, "", taken=False)
        taken = current.sample not in _OPEN
        return Member(turn_id, current.own, finalized.not_trainable, finalized.why, taken, current.mean_vote)

    async def _finalize_by_outcome(self, turns: Sequence[TurnId], outcome: int | None) -> dict[TurnId, TurnDecision]:
        judgements = [current for turn in turns if (current := self._current(turn)) is not None]
        rewarded = [one.turn_id for one in judgements if one.recipe.signal.reward == _BY_OUTCOME]
        return await self._apply(
            decide_by_outcome([self._member(turn, Relation.OUTCOME) for turn in rewarded], outcome)
        )

    async def _apply(self, decisions: dict[TurnId, TurnDecision]) -> dict[TurnId, TurnDecision]:
        for turn_id, decision in decisions.items():
            current = self._current(turn_id)
            assert current is not None
            self._set_outcome(turn_id, decision.outcome, decision.why)
            if decision.outcome is TurnOutcome.SAMPLED:
                current.reward = decision.reward
                await self._make_sample(current, decision.why)
            elif current.sample in UNTAKEN:
                current.sample = SampleState.SUPERSEDED
        return decisions

    async def load(self, session: SessionId) -> ClosingSession | None:
        own = await self._session(session)
        if not own:
            return None
        main = [turn for turn in own if turn.record.kind is TurnKind.MAIN]
        first = session not in self.closed
        turns = [
            self._closing_turn(own, turn, number, last=turn is main[-1])
            for number, turn in enumerate(main, 1)
            if first or turn.outcome is TurnOutcome.WAITING
        ]
        signal = self.recipe.signal
        related = any(one.recipe.signal.reward != "verdict" for turn in main for one in self._of(turn.record.turn_id))
        by_outcome = session in self._outcomes and signal.reward == _BY_OUTCOME
        known = self.closed.get(session)
        closed = known is not None and known.state is SessionState.CLOSED
        alive = [turn.record.turn_id for turn in main if turn.outcome is not TurnOutcome.ERASED]
        closed = closed and self._closed_with.issuperset(alive)
        return ClosingSession(session, turns, first, signal.at_least_one, len(main), related, by_outcome, closed)

    def _closing_turn(self, own: Sequence[StoredTurn], turn: StoredTurn, number: int, *, last: bool) -> SessionTurn:
        turn_id = turn.record.turn_id
        current = self._current(turn_id)
        finalized = None if current is None else current.finalized
        waiting = turn.outcome is TurnOutcome.WAITING
        followers = [
            other.record.turn_id
            for other in own
            if waiting and other.record.kind is TurnKind.MAIN and follows(own, other) == turn_id
        ]
        return SessionTurn(
            turn_id=turn_id,
            number=number,
            outcome=turn.outcome,
            judged=finalized is not None,
            followed_by=followers,
            last=last,
            expected=None if finalized is None else finalized.verdict.expected,
            verdict=None if finalized is None else finalized.verdict.verdict,
            trainable=None if finalized is None else finalized.not_trainable is None,
            samples=sum(one.sample not in (None, SampleState.SUPERSEDED) for one in self._of(turn_id)),
            direct=None if finalized is None or current is None else current.direct,
        )

    async def finalize_related(self, session: SessionId) -> tuple[dict[TurnId, TurnDecision], str | None]:
        own = {turn.record.turn_id: turn.record.group_id for turn in await self._session(session)}
        open_groups = {group for turn, group in own.items() if group is not None and turn not in self._closed_with}
        decisions: dict[TurnId, TurnDecision] = {}
        for group in sorted(open_groups):
            decisions |= await self._finalize_group(group, closing=True)
        fresh = [turn for turn in own if turn not in self._closed_with]
        return decisions | await self._finalize_by_outcome(fresh, self._outcomes.get(session)), None

    async def give_outcome(self, key: ApiKeyId, session: str, outcome: int) -> FeedbackEffect | None:
        found = next((turn for turn in await self._turns.all() if turn.record.evidence.value == session), None)
        if found is None or found.record.api_key_id != key:
            return None
        self._outcomes[found.session_id] = outcome
        own = [turn.record.turn_id for turn in await self._session(found.session_id)]
        decisions = await self._finalize_by_outcome([turn for turn in own if turn in self._closed_with], outcome)
        closed = self.closed.get(found.session_id)
        waits = closed is None or closed.state is not SessionState.CLOSED
        amends = bool(decisions) or (waits and self.recipe.signal.reward == _BY_OUTCOME)
        return FeedbackEffect.AMENDS if amends else FeedbackEffect.RECORDED

    async def close(
        self,
        session: SessionId,
        why: str,
        decisions: Mapping[TurnId, TurnDecision],
        fallback: FallbackSample | None = None,
    ) -> str | None:
        self._closed_with.update(turn.record.turn_id for turn in await self._session(session))
        if fallback is not None and fallback.turn_id is not None and not self._is_erased(fallback.turn_id):
            current = self._current(fallback.turn_id)
            assert current is not None
            current.reward = fallback.reward
            self._set_outcome(fallback.turn_id, TurnOutcome.SAMPLED, fallback.why)
            await self._make_sample(current, fallback.why)
        for turn_id, decision in decisions.items():
            stored = await self._turns.load(turn_id)
            if stored is not None and stored.outcome is TurnOutcome.WAITING:
                self._set_outcome(turn_id, decision.outcome, decision.why)
        unknown = any(
            turn.outcome is TurnOutcome.WAITING and turn.record.kind is TurnKind.MAIN
            for turn in await self._session(session)
        )
        state = SessionState.OPEN if unknown else SessionState.CLOSED
        self.closed[session] = Closed(datetime.now(UTC), state)
        return None

    def give(self, key: ApiKeyId, turn_id: TurnId, score: float | None, text: str | None) -> FeedbackId:
        given = GivenFeedback(new_feedback_id(), turn_id, key, score, text, datetime.now(UTC), applied=False)
        self.given.append(given)
        return given.id

    def samples(self, turn_id: TurnId) -> list[tuple[SampleState, float | None]]:
        return [(one.sample, one.reward) for one in self._of(turn_id) if one.sample is not None]

    def claim(self, turn_id: TurnId) -> None:
        """Take the turn's fresh sample, as a step does."""
        for one in self._of(turn_id):
            if one.sample is SampleState.FRESH:
                one.sample = SampleState.CLAIMED

    def erase(self, turn_id: TurnId) -> None:
        self._turns.fates[turn_id] = (TurnOutcome.ERASED, None)

    def train(self, turn_id: TurnId, step: int) -> None:
        """Learn from the turn's fresh sample, as a step does."""
        for one in self._of(turn_id):
            if one.sample is SampleState.FRESH:
                one.sample, one.step = SampleState.TRAINED, step
        self._set_outcome(turn_id, TurnOutcome.TRAINED, f"trained in step {step}")

    def roll_back(self, turn_id: TurnId) -> None:
        self._set_outcome(turn_id, TurnOutcome.ROLLED_BACK, f"{self._turns.fates[turn_id][1]}, rolled back to 0")

    # Lookups ----------------------------------------------------------------------------------------------------------

    async def _session(self, session: SessionId) -> list[StoredTurn]:
        return [turn for turn in await self._turns.all() if turn.session_id == session]

    def _of(self, turn_id: TurnId) -> list[FakeJudgement]:
        return [one for one in self.judgements if one.turn_id == turn_id]

    def _current(self, turn_id: TurnId) -> FakeJudgement | None:
        decided = [one for one in self._of(turn_id) if one.finalized is not None]
        return max(decided, key=lambda one: one.revision, default=None)

    def _by_id(self, judgement: JudgementId) -> FakeJudgement:
        return next(one for one in self.judgements if one.id == judgement)

    def _is_erased(self, turn_id: TurnId | None) -> bool:
        return turn_id is not None and self._turns.fates.get(turn_id, (None, None))[0] is TurnOutcome.ERASED

    def _is_evidence_erased(self, one: FakeJudgement) -> bool:
        return self._is_erased(one.turn_id) or self._is_erased(one.next_turn_id)

    def _require_content(self, *turns: TurnId | None) -> None:
        for turn_id in turns:
            if self._is_erased(turn_id):
                raise RecordUnusable(f"turn {turn_id} was erased")

    def _set_outcome(self, turn_id: TurnId, outcome: TurnOutcome, why: str) -> None:
        if not self._is_erased(turn_id):
            self._turns.fates[turn_id] = (outcome, why)
