"""A ledger by a script: the same in every run, through the real stores and activities.

It has sessions, judgements, steps, versions, episodes and keys in each state that operators see. Nobody's clock is in
it: `fixed_ids` counts ids, and `fix_times` puts all times ten seconds apart, in the order in which they were written.
"""

from __future__ import annotations

import itertools
from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from uuid import UUID

import psycopg

from activities.judging.closing import CloseSession, ClosingActivities
from activities.judging.judge_turn import JudgeTurn, JudgingActivities
from activities.notify import TrainingNotifier
from activities.serving.publishing import PublishingActivities, PublishVersion
from activities.training.gate import DecideVersion, GateActivities
from activities.training.steps import ClaimBatch, QuarantineStep, StepActivities
from activities.training.train_step import TrainingActivities, TrainStep
from clawloop.core.contracts.episodes import RolloutsPlan
from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.training import CheckResult, GateCheck, ProbeContent, StepState
from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource, TurnKind, TurnStatus
from clawloop.core.errors import StepDiverged
from clawloop.core.ids import SessionId, TurnId
from clawloop.core.judging.prompts import AnswerForm
from clawloop.serving.endpoints import Endpoint
from clawloop.serving.judge import JudgeClient
from clawloop.serving.rendering import EngineRenderer
from db.episodes.rollouts import PostgresRolloutStore
from db.erasure import PostgresErasureStore
from db.judging.closing import PostgresClosingStore
from db.judging.feedback import PostgresFeedbackStore
from db.serving.engines import add_engine
from db.serving.keys import PostgresKeyStore
from db.tables import Base
from db.training.probes import PostgresProbeStore
from db.training.work_flag import PostgresWorkStore
from tests.contract.episodes import run_group
from tests.contract.learning import POLICY, PostgresLearning
from tests.fakes.judge import FakeJudge, fake_judge
from tests.fakes.notifier import FakeNotifier
from tests.fakes.trainer import FakeTrainer
from tests.ui.recorded import Recorder

START = datetime(2026, 1, 1, tzinfo=UTC)
NOW = START + timedelta(days=2)
"""The time at which the ledger is read."""
PICTURE = "data:image/png;base64,iVBORw0KGgo="
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


class FixedClock(datetime):
    """For modules that say how long ago something was."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return NOW.astimezone(tz)


class RisingClock(datetime):
    """Never gives the same time twice."""

    _last = START

    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        RisingClock._last = max(datetime.now(tz), RisingClock._last + timedelta(microseconds=1))
        return RisingClock._last


def fixed_ids(stack: AsyncExitStack) -> None:
    """Ids and secrets are counted until the stack is closed; the first eight digits of an id are its own."""
    numbers = itertools.count(1)
    first = int(START.timestamp() * 1000)

    def next_id() -> UUID:
        return UUID(int=(first + next(numbers) * 2**16) << 80 | 7 << 76 | 2 << 62)

    def next_hex(size: int) -> str:
        return f"{next(numbers):0{2 * size}x}"

    secrets = SimpleNamespace(
        token_hex=next_hex,
        token_urlsafe=lambda size: f"{next(numbers):043x}",
        token_bytes=lambda size: next(numbers).to_bytes(size),
    )
    stack.enter_context(patch("clawloop.core.ids.uuid7", next_id))
    stack.enter_context(patch("tests.records.datetime", RisingClock))
    stack.enter_context(patch("db.serving.keys.secrets", secrets))
    for module in ("clawloop.app.cli.terminal", "api.ui.wording"):
        stack.enter_context(patch(f"{module}.datetime", FixedClock))


def fix_times(url: str, chapters: Sequence[datetime]) -> None:
    """Give each chapter of the script an hour, and put the times in it ten seconds apart, in their order.

    So what is written once more changes no times in other chapters. Times to come are a century later.

    Args:
        chapters: when each ended.
    """
    columns = [
        (table.name, column.name)
        for table in Base.metadata.sorted_tables
        for column in table.columns
        if column.type.python_type is datetime
    ]
    counts: dict[datetime, int] = defaultdict(int)
    before: datetime | None = None
    with psycopg.connect(url) as connection:
        every = " UNION ".join(f'SELECT "{column}" FROM "{table}"' for table, column in columns)
        written = connection.execute(f"SELECT at FROM ({every}) AS t (at) WHERE at IS NOT NULL ORDER BY at").fetchall()
        now = datetime.now(UTC)
        connection.execute("CREATE TEMPORARY TABLE times (old timestamptz, fixed timestamptz)")
        with connection.cursor().copy("COPY times FROM STDIN") as rows:
            for (at,) in written:
                hour = START + timedelta(hours=bisect(chapters, at)) if at < now else START.replace(year=2126)
                # Keys of episodes end at whole seconds: whether two end in the same one is the machine's pace.
                if at < now or before is None or at - before > timedelta(minutes=1):
                    counts[hour] += 1
                rows.write_row((at, hour + timedelta(seconds=10 * (counts[hour] - 1))))
                before = at if at >= now else None
        for table, column in columns:
            connection.execute(f'UPDATE "{table}" SET "{column}" = fixed FROM times WHERE old = "{column}"')


@dataclass
class Script(Recorder):
    """
    Attributes:
        engine: id of the engine that has each version.
        made: sessions and turns by name, for questions about them, and the secret of a chat key.
        chapters: when each ended.
    """

    engine: str
    answers: FakeJudge
    judging: JudgingActivities
    trainer: FakeTrainer = field(default_factory=FakeTrainer)
    made: dict[str, UUID | str] = field(default_factory=dict)
    chapters: list[datetime] = field(default_factory=list)

    def end_chapter(self) -> None:
        self.chapters.append(RisingClock.now(UTC))

    async def turn(self, messages: Sequence[Message], response: Message | None, **changes: Any) -> TurnId:
        return await super().turn(messages, response, engine_id=self.engine, **changes)

    async def session_of(self, turn: TurnId) -> SessionId:
        (row,) = await self.learning.rows("SELECT session_id FROM turns WHERE id = %s", turn)
        return SessionId(row["session_id"])

    async def judged(self, turn: TurnId, *votes: int | str, hint: str | None = None, **ask: Any) -> None:
        """What the judge says once this turn was stored."""
        self.answers.votes, self.answers.hint = list(votes), hint
        await self.judging.judge_turn(JudgeTurn(session_id=await self.session_of(turn), turn_id=turn, **ask))

    async def close(self, turn: TurnId, why: str = "idle for 30 min") -> None:
        learning = self.learning
        training = TrainingNotifier(PostgresWorkStore(learning.database), FakeNotifier())
        activities = ClosingActivities(PostgresClosingStore(learning.database), learning.judgements, training)
        session = await self.session_of(turn)
        await activities.close_session(CloseSession(session_id=session, why=why, give_up=True))

    async def praise(self, name: str, count: int) -> None:
        """So many praised turns, each in a session of its own."""
        self.end_chapter()
        version = (await self.learning.steps.status(POLICY)).head
        for n in range(count):
            _, later = await self.chat(f"{name}-{n}", f"Name a river ({name} {n})", "Good, thank you.", version=version)
            await self.judged(later, 1)

    async def step(self, n: int, *checks: GateCheck, decide: bool = True) -> None:
        """A step from its claim to its publication, as the training workflow asks for it."""
        self.end_chapter()
        learning = self.learning
        steps = StepActivities(learning.steps)
        assert (await steps.claim_batch(ClaimBatch(policy=POLICY, n=n))).state is StepState.CLAIMED
        done = await TrainingActivities(learning.steps, self.trainer).train_step(TrainStep(policy=POLICY, n=n))
        if done.state is StepState.QUARANTINED:
            await steps.quarantine_step(QuarantineStep(policy=POLICY, n=n, reason=done.reason))
        if done.state is not StepState.CANDIDATE or not decide:
            return
        for check in checks:
            await learning.gate.record(POLICY, n, check)
        decided = await GateActivities(learning.gate).decide_version(DecideVersion(policy=POLICY, n=n))
        if decided.state is StepState.COMMITTED:
            await learning.publishing.loaded(self.engine, POLICY, n)
            publishing = PublishingActivities(learning.publishing, learning.steps, FakeNotifier())
            await publishing.publish_version(PublishVersion(policy=POLICY))


async def write(learning: PostgresLearning, engine: str) -> Script:
    """Play the script."""
    async with AsyncExitStack() as stack:
        judge = await stack.enter_async_context(fake_judge())

        def endpoints(policy: str) -> list[Endpoint]:
            return [Endpoint(judge.url, "tiny")]

        client = await stack.enter_async_context(JudgeClient(endpoints, AnswerForm.FREE, seconds=30.0))
        renderer = await stack.enter_async_context(EngineRenderer(endpoints))
        training = TrainingNotifier(PostgresWorkStore(learning.database), FakeNotifier())
        judging = JudgingActivities(learning.judgements, client, renderer.render, training)
        script = Script(learning, engine, judge, judging)
        for part in (_chats, _feedback, _steps, _operators, _episodes):
            script.end_chapter()
            await part(script)
        return script


async def _chats(script: Script) -> None:
    """Conversations of each shape: followed, forked, with tools and pictures, cut, failed, beside the main one."""
    tides = await script.chat("tides", "Explain the tides.", "Shorter, please.", "Thanks, and for whom?")
    await script.judged(tides[1], -1, hint="Answer in one sentence; the user asked for short answers.")
    await script.judged(tides[2], 1, 1, 0)
    script.made |= {"tides": await script.session_of(tides[0]), "blamed": tides[0], "praised": tides[1]}
    script.end_chapter()
    named = {"evidence": SessionEvidence(SessionSource.HEADER, "tides")}
    heartbeat: list[Message] = [{"role": "user", "content": "Read HEARTBEAT.md"}]
    side = {"kind": TurnKind.SIDE, "kind_reason": "heartbeat"}
    script.made["side"] = await script.turn(
        heartbeat, {"role": "assistant", "content": "HEARTBEAT_OK"}, **side, **named
    )

    script.end_chapter()
    asked: list[Message] = [{"role": "user", "content": "A name for a boat?"}]
    forked = {"evidence": SessionEvidence(SessionSource.AFFINITY, "boat")}
    await script.turn(asked, {"role": "assistant", "content": "Nina"}, **forked)
    again = await script.turn(asked, {"role": "assistant", "content": "Pinta"}, **forked)
    kept: list[Message] = [*asked, {"role": "assistant", "content": "Pinta"}, {"role": "user", "content": "Bad, no."}]
    after = await script.turn(kept, {"role": "assistant", "content": "Maria"}, **forked)
    await script.judged(after, -1, 0, 1)  # votes that differ
    await script.close(after)
    script.made["regenerated"] = again

    script.end_chapter()
    evidence = {"evidence": SessionEvidence(SessionSource.OPENCLAW, "main"), "tools": TOOLS}
    call: Message = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Graz"}'}}
    picture: Message = {"role": "user", "content": [
        {"type": "text", "text": "What is the weather there?"},
        {"type": "image_url", "image_url": {"url": PICTURE}},
    ]}  # fmt: skip
    calls: Message = {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [call]}
    messages: list[Message] = [picture]
    script.made["calls"] = await script.turn(messages, calls, **evidence, finish_reason="tool_calls")
    messages += [calls, {"role": "tool", "tool_call_id": "c1", "content": "Rain."}]
    told: Message = {"role": "assistant", "content": "It rains.", "reasoning_content": "Rain it is."}
    judged = await script.turn(messages, told, **evidence)
    await script.judged(judged, 1)
    messages += [told, {"role": "user", "content": "Wrong city! ☂"}]
    last = await script.turn(messages, {"role": "assistant", "content": "Sorry."}, **evidence, ends_session=True)
    await script.judged(last, "no number at all")
    await script.close(last, "ended by the client")
    script.made["tools"] = await script.session_of(last)

    script.end_chapter()
    alone = {"evidence": SessionEvidence(SessionSource.CONVERSATION, None)}
    for word, reply, changes in (
        ("cut", "It is lo", {"status": TurnStatus.LENGTH, "finish_reason": "length"}),
        ("left", "It", {"status": TurnStatus.ABORTED, "finish_reason": None}),
        ("failed", None, {"status": TurnStatus.ERROR, "error": "engine: 500", "response_ids": None, "logprobs": None}),
        ("narrow", "Yes.", {"sampling": {"temperature": 0.6, "top_p": 0.5, "top_k": -1}}),
    ):
        response: Message | None = None if reply is None else {"role": "assistant", "content": reply}
        turn = await script.turn([{"role": "user", "content": word}], response, **alone, **changes)
        await script.close(turn)
        script.made[word] = turn

    script.end_chapter()
    erased = await script.chat("secret", "My number is 12.", "Forget it.")
    await PostgresErasureStore(script.learning.database).erase_turn(erased[1])
    script.made["erased"] = erased[1]


async def _feedback(script: Script) -> None:
    """Ratings, a comment, and a task's outcome."""
    store, key = PostgresFeedbackStore(script.learning.database), script.learning.key
    rated = await script.chat("rated", "Sing.", "Sing again.")
    for score, text in ((-1.0, "Too loud."), (1.0, None), (None, "Better at night.")):
        given = await store.give(key, rated[0], score, text)
        assert given is not None
        if score is not None:
            await script.judged(rated[0], 1, feedback_id=given.given.feedback_id)
    await store.give_outcome(key, POLICY, "rated", 1)
    await script.close(rated[1])
    script.made |= {"rated": rated[0], "rated session": await script.session_of(rated[0])}


async def _steps(script: Script) -> None:
    """Steps and versions in each state, the newest claimed."""
    operators = script.learning.operators
    await script.praise("first", 2)
    await script.step(1, GateCheck("replay", CheckResult.PASSED, "no worse", {"praised": 3.0, "change": 0.01}))
    await script.praise("second", 4)
    await script.step(2, GateCheck("replay", CheckResult.FAILED, "worse", {"praised": 3.0, "change": -0.5}))
    await script.praise("third", 4)
    script.trainer.fails = [StepDiverged("the loss is not a number")]
    await script.step(3)
    await operators.resume(POLICY, retry_quarantined=False)
    await script.praise("fourth", 4)
    await script.step(4)
    await script.praise("fifth", 4)
    await script.step(5, decide=False)
    await operators.roll_back(POLICY, 1)  # which abandons the fifth
    await script.step(6)
    await script.praise("last", 5)
    claimed = await StepActivities(script.learning.steps).claim_batch(ClaimBatch(policy=POLICY, n=7))
    assert claimed.state is StepState.CLAIMED


async def _operators(script: Script) -> None:
    """Keys, engines, probes, another policy, and what operators said."""
    learning, keys = script.learning, PostgresKeyStore(script.learning.database)
    _, script.made["chat key"] = await keys.create_key(POLICY, {Scope.CHAT}, "phone", START.replace(year=2100))
    lost, _ = await keys.create_key(POLICY, {Scope.CHAT, Scope.READ}, "lost")
    (row,) = await learning.rows("SELECT prefix FROM api_keys WHERE id = %s", lost.id)
    await keys.revoke(row["prefix"])
    script.end_chapter()
    limits = "requests_per_minute = 60, tokens_per_minute = 9000, concurrency = 4, stored_mib = 100"
    await learning.execute(f"UPDATE api_keys SET {limits} WHERE name = 'phone'")
    away = await add_engine(learning.database, "http://127.0.0.1:1")
    await learning.drain(away.id)
    script.end_chapter()
    ask: list[Message] = [{"role": "user", "content": "2 + 2?"}]
    probes = [ProbeContent(messages=ask, exact="4"), ProbeContent(messages=ask)]
    await PostgresProbeStore(learning.database).add(POLICY, probes, 10)
    script.end_chapter()
    await learning.operators.create_policy("other", POLICY, None, 1)
    await learning.operators.pause("other", "on holiday")
    await learning.operators.pin(POLICY, 1)


async def _episodes(script: Script) -> None:
    """Groups that gave samples, gave none, or were dropped."""
    plan = RolloutsPlan("tool-call", size=2, groups=1, barren_limit=3, curriculum=True)
    store = PostgresRolloutStore(script.learning.database)
    await store.start(POLICY, plan)
    script.end_chapter()
    result, episodes = await run_group(script.learning, [1.0, 0.0], turns=2)
    script.end_chapter()
    await run_group(script.learning, [1.0, None])
    script.end_chapter()
    await run_group(script.learning, [0.5, 0.5])
    script.end_chapter()
    await store.pause(POLICY, "enough")
    script.made |= {"group": result.id, "episode": episodes[0].id}
