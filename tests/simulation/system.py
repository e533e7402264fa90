"""The activities of judging, closing, training and publishing on the fakes of the contract suite, under one schedule.

Clients chat, workflows have their activities run, an operator rolls back, an engine restarts. Signals are lost, late or
doubled. What must hold is in `problems`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any

from activities.judging.closing import CloseSession, ClosingActivities
from activities.judging.judge_turn import CollectDirectVote, JudgeTurn, JudgingActivities
from activities.notify import TrainingNotifier
from activities.serving.engines import EngineActivities, EngineLoad, EngineUnload
from activities.serving.publishing import PublishingActivities, PublishVersion
from activities.training.gate import DecideVersion, GateActivities
from activities.training.steps import ClaimBatch, StepActivities
from activities.training.train_step import StepDone, TrainingActivities, TrainStep
from clawloop.core.contracts.serving import Engine
from clawloop.core.contracts.training import OPEN_STEPS, SampleState, StepState
from clawloop.core.contracts.turns import InsertedTurn, Message, SessionEvidence, SessionSource, TurnOutcome, TurnRecord
from clawloop.core.errors import JudgeUnavailable, StateConflict
from clawloop.core.ids import SampleId, SessionId, TurnId
from clawloop.core.judging.prompts import AnswerForm, JudgeAnswer, JudgePrompt
from clawloop.core.judging.voting import Vote
from clawloop.core.recipes.recipe import JudgeForm
from tests.fakes.gate_store import FakeGateStore
from tests.fakes.ledger import FakeLedger
from tests.fakes.notifier import FakeNotifier, NoWork
from tests.fakes.publishing_store import FakePublishingStore
from tests.fakes.step_store import FakeStepStore
from tests.fakes.trainer import FakeTrainer
from tests.fakes.training_store import FakeTrainingStore
from tests.fakes.turn_store import FakeTurnStore
from tests.records import KEY, turn_record
from tests.simulation.parts import POLICY, RECIPE, VOTES, JudgedStore, LoadedFiles
from tests.simulation.schedule import Attempt, Schedule, Through

ENGINE = "e1"
NO_TIME = timedelta(0)
NO_VOTES = (TurnOutcome.UNJUDGED, TurnOutcome.NO_FEEDBACK)


class SimulatedJudge:
    """Satisfies `activities.judging.vote_collector.Judge`, and renders; answers by grammar, sometimes not at all."""

    def __init__(self, system: System, attempt: Attempt) -> None:
        self._system = system
        self._attempt = attempt

    async def votes_off(self, policy: str, wanted: JudgeForm) -> str | None:
        return None

    async def form(self, policy: str, wanted: JudgeForm) -> AnswerForm:
        return AnswerForm.GRAMMAR

    async def answers(self, policy: str, prompt: JudgePrompt, n: int, temperature: float) -> list[JudgeAnswer]:
        schedule, opened = self._system.schedule, self._attempt.note
        await schedule.point(self._attempt)
        stored = len(next(one for one in self._system.judged.judgements if one.id == opened.id).votes)
        if n > VOTES - stored:
            self._system.found.append(f"{n} answers were asked for though {stored} of {VOTES} were stored")
        if schedule.chance.random() < 0.1:
            raise JudgeUnavailable("the judge is away")
        await schedule.point(self._attempt)
        return [JudgeAnswer(schedule.chance.choice(["1", "0", "-1"])) for _ in range(n)]

    async def distribution(self, policy: str, prompt: JudgePrompt) -> dict[Vote, float]:
        await self._system.schedule.point(self._attempt)
        return {1: -0.2, 0: -3.0, -1: -2.0}

    async def render(self, turn: TurnRecord, messages: Sequence[Message]) -> list[int]:
        return [1, 2, 3]


class System:
    """
    Attributes:
        found: what was wrong while it ran.
        disturbed: how often an engine with versions was restarted, and a roll-back changed the head.
        acknowledged: the turns whose answer a client saw, each with the one before.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.found: list[str] = []
        self.disturbed: Counter[str] = Counter()
        self.acknowledged: list[tuple[TurnRecord, TurnId | None]] = []
        self.turns = FakeTurnStore()
        self.ledger = FakeLedger()
        self.ledger.add_policy(POLICY, RECIPE)
        self.ledger.engines[ENGINE] = Engine(ENGINE, "http://e1:8100", {}, draining=False)
        self.judged = JudgedStore(self.turns, self.ledger)
        self.engine = LoadedFiles()
        self._judging: dict[str, set[asyncio.Task[None]]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._ids: dict[str, SessionId] = {}
        self._machines = count()
        self._chatting = 0
        self._ended = False

    # What runs --------------------------------------------------------------------------------------------------------

    def start(self, sessions: int, turns: int) -> None:
        self._chatting = sessions
        for number in range(sessions):
            self.schedule.start(self._session(f"s{number}", turns))
        self.schedule.start(self._training())
        self.schedule.start(self._engine_agent())
        self.schedule.start(self._disturbances())

    async def _session(self, session: str, turns: int) -> None:
        self._judging[session], self._locks[session] = set(), asyncio.Lock()
        messages: list[Message] = []
        before: TurnId | None = None
        for number in range(turns):
            messages = [*messages, {"role": "user", "content": f"{session} question {number}"}]
            record = await self._chat(session, messages, number)
            self.acknowledged.append((record, before))
            before = record.turn_id
            assert record.response is not None
            messages = [*messages, record.response]
        await self._close(session)
        self._chatting -= 1

    async def _chat(self, session: str, messages: list[Message], number: int) -> TurnRecord:
        """One message, sent again until the client has an answer."""
        tries = 0

        async def request(attempt: Attempt) -> TurnRecord:
            nonlocal tries
            tries += 1
            # An engine gives another answer each time.
            answer: Message = {"role": "assistant", "content": f"answer {number}.{tries} of {session}"}
            evidence = SessionEvidence(SessionSource.HEADER, session)
            record = turn_record(api_key_id=KEY, evidence=evidence, messages=messages, response=answer)
            if self.schedule.chance.random() < 0.3:  # PostgreSQL is away; the file outlives the gateway
                self._from_spool(session, record)
                await self.schedule.point(attempt)
                return record
            inserted = await Through(self.turns, self.schedule, attempt).insert(record)
            self._signal(session, inserted.session_id, record)
            await self.schedule.point(attempt)
            return record

        return await self.schedule.attempts(request)

    def _from_spool(self, session: str, record: TurnRecord) -> None:
        async def drain(attempt: Attempt) -> InsertedTurn:
            inserted: InsertedTurn = await Through(self.turns, self.schedule, attempt).insert(record)
            return inserted

        async def drained() -> None:
            inserted = await self.schedule.attempts(drain, may_double=True)
            self._signal(session, inserted.session_id, record)

        self._judging[session].add(self.schedule.start(drained()))

    def _signal(self, session: str, session_id: SessionId, record: TurnRecord) -> None:
        """Judge the turn, now or late, once or twice; or never, if the signal is lost: closing judges it then."""
        self._ids[session] = session_id
        for _ in range(self.schedule.chance.choice([0, 1, 1, 1, 2])):
            self._judging[session].add(
                self.schedule.start(
                    self._judge(session, JudgeTurn(session_id=self._ids[session], turn_id=record.turn_id))
                )
            )

    async def _judge(self, session: str, request: JudgeTurn) -> None:
        # One message after the other: two workers at once may both ask about the same turn.
        async with self._locks[session]:
            await self.schedule.attempts(lambda attempt: self._activities(attempt)[0].judge_turn(request))

    async def _close(self, session: str) -> None:
        while waiting := {task for task in self._judging[session] if not task.done()}:
            await asyncio.wait(waiting)
        request = CloseSession(session_id=self._ids[session], why="idle")
        tried: set[TurnId] = set()
        while True:
            closed = await self.schedule.attempts(
                lambda attempt, request=request: self._activities(attempt)[1].close_session(request)  # type: ignore[misc]
            )
            if closed.to_ask:
                for turn in closed.to_ask:
                    ask = CollectDirectVote(session_id=self._ids[session], turn_id=turn)
                    await self.schedule.attempts(
                        lambda attempt, ask=ask: self._activities(attempt)[0].collect_direct_vote(ask)  # type: ignore[misc]
                    )
                request = request.model_copy(update={"asked_directly": True})
            elif closed.to_judge:
                request = request.model_copy(update={"give_up": tried >= set(closed.to_judge)})
                for turn in set(closed.to_judge) - tried:
                    tried.add(turn)
                    await self._judge(session, JudgeTurn(session_id=self._ids[session], turn_id=turn, itself=True))
            else:
                return

    def _activities(self, attempt: Attempt) -> tuple[JudgingActivities, ClosingActivities]:
        def seen(name: str, result: Any) -> None:
            if name in ("open", "revise"):
                attempt.note = result

        store: Any = Through(self.judged, self.schedule, attempt, seen)
        judge: Any = SimulatedJudge(self, attempt)
        work = TrainingNotifier(NoWork(), FakeNotifier())
        return JudgingActivities(store, judge, judge.render, work), ClosingActivities(store, store, work)

    async def _training(self) -> None:
        steps: Any = lambda attempt: StepActivities(self._steps(attempt))  # noqa: E731
        ended = None
        while self._chatting or self._batch_waits():
            view = await self.schedule.attempts(lambda attempt: steps(attempt).read_training_status(POLICY))
            ask = ClaimBatch(policy=POLICY, n=view.step)
            claim = await self.schedule.attempts(lambda attempt, ask=ask: steps(attempt).claim_batch(ask))  # type: ignore[misc]
            if claim.state not in OPEN_STEPS:
                await asyncio.sleep(1)
                continue
            if claim.n == ended:  # the workflow waits then, until it is started anew
                self.found.append(f"step {claim.n} has ended for its workflow, and is {claim.state} in the ledger")
            state = claim.state
            if state is StepState.CLAIMED:
                state = (await self._train(TrainStep(policy=POLICY, n=claim.n))).state
            if state is StepState.CANDIDATE:
                await self._decide(DecideVersion(policy=POLICY, n=claim.n))
            ended = claim.n
            await self._publish()
        self._ended = True

    async def _train(self, train: TrainStep) -> StepDone:
        def computed(attempt: Attempt) -> Awaitable[StepDone]:
            trainer = FakeTrainer(machine=str(next(self._machines)))
            return TrainingActivities(self._steps(attempt), trainer).train_step(train)

        return await self.schedule.attempts(computed, may_double=True)

    async def _decide(self, decide: DecideVersion) -> None:
        def decision(attempt: Attempt) -> Awaitable[Any]:
            store: Any = Through(FakeGateStore(self.ledger), self.schedule, attempt)
            return GateActivities(store).decide_version(decide)

        await self.schedule.attempts(decision, may_double=True)

    async def _publish(self) -> None:
        def publish(attempt: Attempt) -> Awaitable[Any]:
            store: Any = Through(FakePublishingStore(self.ledger), self.schedule, attempt)
            activities = PublishingActivities(store, self._steps(attempt), FakeNotifier())
            return activities.publish_version(PublishVersion(policy=POLICY))

        await self.schedule.attempts(publish)

    def _steps(self, attempt: Attempt) -> Any:
        return Through(FakeStepStore(self.ledger), self.schedule, attempt)

    async def _engine_agent(self) -> None:
        def activities(attempt: Attempt) -> EngineActivities:
            store: Any = Through(FakePublishingStore(self.ledger), self.schedule, attempt)
            control: Any = Through(self.engine, self.schedule, attempt)
            return EngineActivities(store, control, keep=NO_TIME, routed_seconds=0)

        load, unload = EngineLoad(engine_id=ENGINE), EngineUnload(engine_id=ENGINE)
        while not self._ended:
            await self.schedule.attempts(lambda attempt: activities(attempt).load_versions(load))
            await self.schedule.attempts(lambda attempt: activities(attempt).unload_versions(unload))
            await asyncio.sleep(0.2)

    async def _disturbances(self) -> None:
        operators = FakeTrainingStore(self.ledger)
        while not self._ended:
            await asyncio.sleep(self.schedule.chance.uniform(0, 2))
            disturbance = self.schedule.chance.choice(["restart", "roll back", "nothing", "nothing"])
            policy, head = self.ledger.policies[POLICY], self.ledger.policies[POLICY].head
            if disturbance == "restart":
                self.disturbed[disturbance] += bool(self.engine.paths)
                self.engine.restart()
            elif disturbance == "roll back":
                known = [n for name, n in self.ledger.versions if name == POLICY]
                with suppress(StateConflict):  # the gate has not accepted that version
                    await operators.roll_back(POLICY, self.schedule.chance.choice(known))
                self.disturbed[disturbance] += policy.head != head

    def _batch_waits(self) -> bool:
        fresh = len(self.ledger.fresh(POLICY))
        return fresh >= RECIPE.train.batch_samples or self.ledger.open_step(POLICY) is not None

    # What must hold ---------------------------------------------------------------------------------------------------

    async def problems(self) -> list[str]:
        return [*self.found, *await self._turn_problems(), *self._sample_problems(), *self._version_problems()]

    async def _turn_problems(self) -> list[str]:
        found = []
        stored = {turn.record.turn_id: turn for turn in await self.turns.all()}
        for record, before in self.acknowledged:
            if record.turn_id not in stored:
                found.append(f"acknowledged turn {record.turn_id} is lost")
            elif stored[record.turn_id].parent_turn_id != before:
                found.append(f"turn {record.turn_id} has another parent than the turn before")
        waiting = [str(key) for key, turn in stored.items() if turn.outcome is TurnOutcome.WAITING]
        found += [f"turn {turn} waits, though its session is closed" for turn in waiting]
        followed = {before for _, before in self.acknowledged if before in stored}
        outcomes = {key: stored[key].outcome for key in followed}
        found += [
            f"turn {key} is {outcomes[key]}, though another follows it" for key in followed if outcomes[key] in NO_VOTES
        ]
        decided = Counter(one.turn_id for one in self.judged.judgements if one.finalized is not None)
        return found + [f"turn {turn} is judged {count} times" for turn, count in decided.items() if count > 1]

    def _sample_problems(self) -> list[str]:
        found = []
        steps = {n: step for (name, n), step in self.ledger.steps.items() if name == POLICY}
        lineages: Counter[SampleId] = Counter()
        for n in self.ledger.path(POLICY, self.ledger.policies[POLICY].head):
            if n in steps:
                lineages.update(steps[n].samples)
        found += [f"sample {sample} is {count} times on the lineage" for sample, count in lineages.items() if count > 1]
        taken = {sample for step in steps.values() if step.state in OPEN_STEPS for sample in step.samples}
        for key, sample in self.ledger.samples.items():
            if (sample.state is SampleState.CLAIMED) != (key in taken):
                found.append(f"sample {key} is {sample.state}, and open steps have it: {key in taken}")
        if self._batch_waits():
            found.append("a full batch waits at the end")
        return found

    def _version_problems(self) -> list[str]:
        found = []
        policy = self.ledger.policies[POLICY]
        for (name, n), step in self.ledger.steps.items():
            if step.state is StepState.COMMITTED and (name, n) not in self.ledger.versions:
                found.append(f"committed step {n} has no version")
        for n in (policy.head, policy.active):
            if (POLICY, n) not in self.ledger.versions:
                found.append(f"version {n} does not exist")
        for name, path in self.engine.paths.items():
            number = int(name.rpartition("-v")[2])
            version = self.ledger.versions.get((POLICY, number))
            if version is None or version.ref is None or version.ref.path != path:
                found.append(f"{name} is {path} in the engine, which no version is")
        return found
