"""Candidates: accepted, rejected, released by hand, tried on a share of conversations."""

from __future__ import annotations

import asyncio

import pytest

from activities.notify import TrainingNotifier
from activities.training.gate import Canaries, DecideVersion, GateActivities
from clawloop.core.contracts.training import (
    CheckResult,
    Claim,
    GateCheck,
    SampleState,
    StepBatch,
    StepState,
    TrainingState,
)
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.errors import NotFound, RecordUnusable, StateConflict
from clawloop.core.gate.canary import JudgedSessions
from clawloop.core.gate.gate import BY_SESSIONS, Check
from clawloop.core.recipes.recipe import Gate, Recipe
from db.serving.directory import PostgresDirectoryStore
from db.training.gate import PostgresCanaryStore
from db.training.work_flag import PostgresWorkStore
from tests.contract.learning import HOURS, POLICY, RECIPE, Learning, PostgresLearning, publish, reject, step, trained
from tests.fakes.notifier import FakeNotifier

# Candidates: accepted, rejected, released by hand, in memory and in PostgreSQL.

PASSED = GateCheck("numbers", CheckResult.PASSED, "within limits", {"loss": 0.5, "base_distance": None})
FAILED = GateCheck("numbers", CheckResult.FAILED, "gradient norm 2e+03, limit 1e+03", {"grad_norm": 2000.0})


async def candidate(learning: Learning, n: int, *checks: GateCheck) -> StepBatch:
    """A step whose version waits for the gate."""
    head = (await learning.steps.status(POLICY)).head
    await learning.add_samples(4, version=head)
    await learning.steps.claim(POLICY, n)
    batch = await learning.steps.batch(POLICY, n)
    assert await learning.steps.commit(batch, trained(batch), checks) is StepState.CANDIDATE
    return batch


async def test_a_candidate_has_files_and_is_neither_head_nor_trained(learning: Learning) -> None:
    batch = await candidate(learning, 1, PASSED)
    await learning.add_samples(4)
    view = await learning.steps.status(POLICY)
    assert (view.head, view.step, view.step_state, view.unpublished) == (0, 1, StepState.CANDIDATE, False)
    assert (view.state, view.reason) == (TrainingState.TRAINING, "step 1 is a candidate at the gate")
    assert await learning.steps.committed(POLICY, 1) is None
    assert (await learning.steps.candidate(POLICY, 1)) == trained(batch).version
    assert (await learning.sample_result(batch.samples[0].sample_id))[:2] == (SampleState.CLAIMED, TurnOutcome.SAMPLED)
    # Nothing is trained from what has not passed.
    assert await learning.steps.claim(POLICY, 2) == Claim(POLICY, 2, None, 0, "step 1 is a candidate at the gate")
    assert (await learning.steps.claim(POLICY, 1)).state is StepState.CANDIDATE
    assert (await learning.operators.versions(POLICY))[1].state == "candidate"


async def test_engines_may_load_a_candidate_that_does_not_answer(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    await candidate(learning, 1)
    assert [version.n for version in await learning.publishing.wanted(engine)] == [1]
    assert not await publish(learning, 1, engine)
    assert (await learning.steps.status(POLICY)).version == 0
    await learning.gate.reject(POLICY, 1, "too far")
    assert await learning.publishing.wanted(engine) == []


async def test_an_accepted_candidate_is_the_head_once(learning: Learning) -> None:
    batch = await candidate(learning, 1, PASSED)
    for _ in range(2):
        assert await learning.gate.accept(POLICY, 1) == (StepState.COMMITTED, "")
    assert await learning.gate.reject(POLICY, 1, "late") == (StepState.COMMITTED, "")
    assert await learning.steps.commit(batch, trained(batch)) is StepState.COMMITTED
    assert (await learning.steps.status(POLICY)).head == 1
    assert (await learning.sample_result(batch.samples[0].sample_id))[0] is SampleState.TRAINED
    (_, first) = await learning.operators.versions(POLICY)
    assert (first.state, list(first.gate)) == ("head", [PASSED])


async def test_a_rejected_candidate_sets_its_samples_aside_and_training_goes_on_from_its_parent(
    learning: Learning,
) -> None:
    batch = await reject(learning, 1, reason="numbers: too far")
    again = await learning.gate.accept(POLICY, 1)
    assert again == (StepState.REJECTED, "rejected: numbers: too far")
    why = "step 1: rejected: numbers: too far"
    assert await learning.sample_result(batch.samples[0].sample_id) == (
        SampleState.QUARANTINED,
        TurnOutcome.QUARANTINED,
        why,
    )
    view = await learning.steps.status(POLICY)
    assert (view.state, view.head, view.ready) == (TrainingState.WAITING, 0, 0)
    await learning.add_samples(4)
    assert await learning.work_waiting()
    assert (await learning.steps.claim(POLICY, 2)).samples == 4
    next_batch = await learning.steps.batch(POLICY, 2)
    assert (next_batch.parent, next_batch.lr_scale) == (None, 0.5)
    assert await learning.steps.batch(POLICY, 2) == next_batch
    assert (await learning.operators.versions(POLICY))[1].state == "rejected: numbers: too far"


async def test_the_learning_rate_backs_off_until_a_version_is_accepted(learning: Learning) -> None:
    scales = []
    for n, steps in ((1, "the last step"), (2, "the last 2 steps")):
        scales.append((await reject(learning, n)).lr_scale)
        said = f"0 of 4 samples for the next step; {steps} made no accepted version, "
        said += f"so the learning rate is multiplied by {0.5**n:g}"
        assert (await learning.operators.status(POLICY)).reason == said
    scales.append((await step(learning, 3)).lr_scale)
    scales.append((await step(learning, 4)).lr_scale)
    assert scales == [1.0, 0.5, 0.25, 1.0]
    assert (await learning.operators.status(POLICY)).reason == "0 of 4 samples for the next step"


async def test_the_learning_rate_never_backs_off_to_nothing(learning: Learning) -> None:
    await learning.set_recipe(Recipe.model_validate(RECIPE.model_dump() | {"gate": {"lr_backoff": 1e-200}}))
    assert [(await reject(learning, n)).lr_scale for n in (1, 2)] == [1.0, 1e-9]
    assert (await step(learning, 3)).lr_scale == 1e-9  # 1e-400 is 0 to a computer


async def test_training_pauses_after_three_steps_in_a_row_without_an_accepted_version(learning: Learning) -> None:
    await reject(learning, 1)
    await step(learning, 2)
    await reject(learning, 3)
    await learning.add_samples(4, version=2)
    await learning.steps.claim(POLICY, 4)
    await learning.steps.set_aside(POLICY, 4, "loss nan")
    assert (await learning.steps.status(POLICY)).state is TrainingState.WAITING
    await reject(learning, 5, reason="numbers: loss 2e+03")
    view = await learning.steps.status(POLICY)
    assert (view.state, view.reason) == (
        TrainingState.PAUSED,
        "paused: 3 steps in a row without an accepted version, the last one step 5: rejected: numbers: loss 2e+03;"
        " see `clawloop policy versions`",
    )
    await learning.add_samples(4, version=2)
    assert not await learning.work_waiting()
    await learning.operators.resume(POLICY)
    assert (await reject(learning, 6)).lr_scale == 1.0  # a person resumed: counted anew
    assert (await learning.steps.status(POLICY)).state is TrainingState.WAITING


async def test_a_recipe_says_after_how_many_rejections_training_pauses(learning: Learning) -> None:
    strict = Recipe.model_validate(RECIPE.model_dump() | {"gate": {"pause_after": 1, "lr_backoff": 1.0}})
    await learning.set_recipe(strict)
    await reject(learning, 1)
    view = await learning.steps.status(POLICY)
    assert view.reason.startswith("paused: 1 step without an accepted version, the last one step 1: rejected")


async def test_a_roll_back_abandons_an_open_candidate(learning: Learning) -> None:
    await step(learning, 1)
    batch = await candidate(learning, 2)
    await learning.operators.roll_back(POLICY, 0)
    state, reason = await learning.gate.accept(POLICY, 2)
    assert (state, reason) == (StepState.ABANDONED, "rolled back to version 0")
    assert (await learning.steps.status(POLICY)).head == 0
    assert (await learning.sample_result(batch.samples[0].sample_id))[0] is SampleState.FRESH
    assert await learning.work_waiting()


async def test_of_an_acceptance_and_a_roll_back_at_once_the_ledger_keeps_one_head(learning: Learning) -> None:
    await step(learning, 1)
    await candidate(learning, 2)
    (state, _), view = await asyncio.gather(learning.gate.accept(POLICY, 2), learning.operators.roll_back(POLICY, 0))
    assert state in (StepState.COMMITTED, StepState.ABANDONED)
    assert (view.head, (await learning.steps.status(POLICY)).head) == (0, 0)


async def test_a_pause_does_not_hold_up_the_gate(learning: Learning) -> None:
    await candidate(learning, 1)
    view = await learning.operators.pause(POLICY, "lunch")
    assert view.reason == "paused: lunch; step 1 is a candidate at the gate"
    assert (await learning.gate.accept(POLICY, 1))[0] is StepState.COMMITTED


async def test_only_accepted_versions_can_be_rolled_back_to_or_pinned(learning: Learning) -> None:
    await reject(learning, 1, reason="numbers: too far")
    await candidate(learning, 2)
    for n in (1, 2):
        for change in (learning.operators.roll_back(POLICY, n), learning.operators.pin(POLICY, n)):
            with pytest.raises(StateConflict) as conflict:
                await change
            assert conflict.value.code == "version_not_accepted"


async def test_a_rejected_version_is_released_by_hand(learning: Learning) -> None:
    engine = await learning.add_engine("http://e1:8100")
    await step(learning, 1)
    rejected = await reject(learning, 2)
    beside = await step(learning, 3)
    await learning.publishing.loaded(engine, POLICY, 2)
    waiting = await learning.add_samples(4, version=3)
    await learning.steps.claim(POLICY, 4)
    view = await learning.operators.release(POLICY, 2)
    assert (view.head, view.version, view.epoch) == (2, 2, 1)
    assert await learning.sample_result(rejected.samples[0].sample_id) == (
        SampleState.TRAINED,
        TurnOutcome.TRAINED,
        "trained in step 2",
    )
    assert (await learning.sample_result(beside.samples[0].sample_id))[1:] == (
        TurnOutcome.ROLLED_BACK,
        "trained in step 3, rolled back to 2",
    )
    assert (await learning.sample_result(waiting[0]))[0] is SampleState.FRESH
    assert (await learning.steps.claim(POLICY, 4)).state is StepState.ABANDONED
    versions = await learning.operators.versions(POLICY)
    assert [version.state for version in versions[2:]] == ["active, head", "rolled back"]


async def test_only_a_rejected_version_whose_samples_are_set_aside_is_released(learning: Learning) -> None:
    await step(learning, 1)
    with pytest.raises(StateConflict, match="not rejected") as conflict:
        await learning.operators.release(POLICY, 1)
    assert conflict.value.code == "version_not_rejected"
    with pytest.raises(NotFound, match="no version 7"):
        await learning.operators.release(POLICY, 7)
    await reject(learning, 2)
    await learning.operators.resume(POLICY, retry_quarantined=True)
    with pytest.raises(StateConflict, match="taken again") as conflict:
        await learning.operators.release(POLICY, 2)
    assert conflict.value.code == "samples_retried"
    await reject(learning, 3, count=0)
    await learning.operators.pin(POLICY, 1)
    with pytest.raises(StateConflict, match="unpin first"):
        await learning.operators.release(POLICY, 3)
    await learning.operators.unpin(POLICY)
    await learning.lose_files(3)
    with pytest.raises(StateConflict, match="were removed"):
        await learning.operators.release(POLICY, 3)


@pytest.mark.parametrize("check", [PASSED, FAILED], ids=["passed", "failed"])
async def test_the_gate_decides_by_its_checks_and_keeps_its_decision(learning: Learning, check: GateCheck) -> None:
    await candidate(learning, 1, check)
    gate = GateActivities(learning.gate)
    decided = await gate.decide_version(DecideVersion(policy=POLICY, n=1))
    if check is PASSED:
        assert (decided.state, decided.reason, decided.checks) == (StepState.COMMITTED, "", "numbers passed: loss 0.5")
    else:
        why = "rejected: numbers: gradient norm 2e+03, limit 1e+03"
        assert (decided.state, decided.reason, decided.checks) == (
            StepState.REJECTED,
            why,
            "numbers failed: grad_norm 2e+03",
        )
    assert await gate.decide_version(DecideVersion(policy=POLICY, n=1)) == decided  # its answer was lost


async def test_the_gate_of_an_unknown_step_is_an_error(learning: Learning) -> None:
    for call in (learning.gate.checks(POLICY, 3), learning.gate.accept(POLICY, 3), learning.gate.reject(POLICY, 3, "")):
        with pytest.raises(RecordUnusable, match="no step 3"):
            await call


async def test_files_of_a_candidate_are_kept_and_those_of_the_newest_rejected_versions_until_the_head_moves_on(
    learning: Learning,
) -> None:
    async def removable() -> set[int]:
        return {version.n for version in await learning.publishing.removable(HOURS)} & {5, 6, 7, 8}

    for n in (1, 2, 3, 4):
        await step(learning, n)
    await candidate(learning, 5)
    await learning.age(2 * HOURS)
    assert await removable() == set()
    await learning.gate.reject(POLICY, 5, "too far")
    assert await removable() == set()  # a person may release it
    for n in (6, 7):
        await reject(learning, n)
    await learning.operators.resume(POLICY)
    await reject(learning, 8)
    await learning.age(2 * HOURS)
    assert await removable() == {5}
    await step(learning, 9)
    assert await removable() == {5, 6, 7, 8}


# Canaries in PostgreSQL: a share of the conversations, until verdicts or time decide.


async def begun(learning: PostgresLearning) -> PostgresCanaryStore:
    """Version 1 is a canary; version 0 answers the others."""
    await learning.set_recipe(RECIPE.model_copy(update={"gate": Gate(canary_share=0.25)}))
    await learning.add_engine("http://e1:8100")
    await step(learning, 1)
    return PostgresCanaryStore(learning.database)


def canaries(learning: PostgresLearning, store: PostgresCanaryStore) -> tuple[Canaries, FakeNotifier]:
    notifier = FakeNotifier()
    work = TrainingNotifier(PostgresWorkStore(learning.database), notifier)
    return Canaries(store.open, store.decide, work), notifier


async def judged(learning: PostgresLearning, version: int, sessions: int, verdict: int) -> None:
    """Sessions that this version answered, of one turn each."""
    await learning.add_samples(sessions, version=version)
    await learning.execute(
        "UPDATE judgements SET verdict = %s WHERE turn_id IN (SELECT id FROM turns WHERE version = %s)",
        verdict,
        version,
    )


async def test_a_canary_is_head_and_not_active_and_no_batch_is_claimed(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    store = await begun(learning)
    view = await learning.steps.status(POLICY)
    assert (view.head, view.version, view.canary, view.unpublished) == (1, 0, 1, False)
    assert (view.state, view.closed_seconds) == (TrainingState.WAITING, 60.0)
    undecided = "version 1 is a canary, and its verdicts have not decided yet"
    lacking = "0 judged sessions of the canary and 0 of the version before, 8 of each are needed"
    assert view.reason == f"{undecided}: no traffic: {lacking}; 0 of 4 samples for the next step"
    await learning.add_samples(4, version=1)
    assert (await learning.steps.claim(POLICY, 2)).state is None
    (policy,) = (await PostgresDirectoryStore(learning.database).read()).policies
    assert (policy.active, policy.canary, policy.canary_share) == (0, 1, 0.25)
    assert (await learning.operators.versions(POLICY))[1].state == "canary, head"
    assert await store.open() == [POLICY]
    assert await canaries(learning, store)[0].decide() == 0
    await learning.operators.pin(POLICY, 0)
    (policy,) = (await PostgresDirectoryStore(learning.database).read()).policies
    assert policy.canary is None


async def test_the_status_says_how_many_sessions_of_a_canary_are_judged(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    await begun(learning)
    await judged(learning, 1, 3, 1)
    assert "decided yet: too little traffic: 3 judged sessions of the canary and 0 of" in await reason(learning)
    await judged(learning, 1, 5, 1)
    await judged(learning, 0, 9, 1)
    said = "decided yet: 8 judged sessions of the canary and 9 of the version before; "
    assert said in await reason(learning)


async def reason(learning: PostgresLearning) -> str:
    return (await learning.steps.status(POLICY)).reason


async def test_a_worse_canary_is_rolled_back(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    store = await begun(learning)
    await judged(learning, 1, 12, -1)
    await judged(learning, 0, 12, 1)
    deciding, notifier = canaries(learning, store)
    assert await deciding.decide() == 1
    assert notifier.waiting == [POLICY]
    view = await learning.steps.status(POLICY)
    assert (view.head, view.version, view.canary, view.epoch) == (0, 0, None, 1)
    version = (await learning.operators.versions(POLICY))[1]
    assert version.state == "rolled back"
    (check,) = [check for check in version.gate if check.name == "canary"]
    assert check.result is CheckResult.FAILED
    assert check.reason.startswith("worse: mean verdict -2.00")
    assert await store.decide(POLICY) is None


@pytest.mark.parametrize(
    ("second", "ends"),
    [(None, None), (CheckResult.PASSED, CheckResult.PASSED), (CheckResult.FAILED, CheckResult.FAILED)],
)
async def test_a_second_check_of_a_canary_counts_too(
    postgres_learning: PostgresLearning,
    monkeypatch: pytest.MonkeyPatch,
    second: CheckResult | None,
    ends: CheckResult | None,
) -> None:
    """A canary goes on while one check has not found anything yet, and is rolled back if any fails."""
    learning = postgres_learning
    store = await begun(learning)
    await judged(learning, 1, 12, 1)
    await judged(learning, 0, 12, -1)

    def find(sessions: JudgedSessions, gate: Gate) -> GateCheck | None:
        return None if second is None else GateCheck("length", second, "longer", {})

    monkeypatch.setattr("db.training.gate.BY_SESSIONS", (*BY_SESSIONS, Check("length", find, ())))
    decision = await store.decide(POLICY)
    assert (None if decision is None else decision.result) is ends
    kept = [check.name for check in (await learning.operators.versions(POLICY))[1].gate]
    assert [name for name in kept if name in ("canary", "length")] == ([] if ends is None else ["canary", "length"])
    head = (await learning.steps.status(POLICY)).head
    assert head == (0 if ends is CheckResult.FAILED else 1)


async def test_a_better_canary_becomes_the_version_of_all(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    store = await begun(learning)
    await judged(learning, 1, 12, 1)
    await judged(learning, 0, 12, -1)
    decision = await store.decide(POLICY)
    assert decision is not None
    assert decision.reason.startswith("better: ")
    view = await learning.steps.status(POLICY)
    assert (view.head, view.canary, view.unpublished, view.closed_seconds) == (1, None, True, None)


async def test_a_pin_holds_and_the_canary_goes_on_when_it_ends(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    store = await begun(learning)
    (engine,) = await learning.publishing.engines()
    await learning.publishing.loaded(engine.id, POLICY, 1)
    await judged(learning, 1, 12, -1)
    await judged(learning, 0, 12, 1)
    for pinned in (1, 0):
        assert (await learning.operators.pin(POLICY, pinned)).version == pinned
        assert await store.open() == []
        assert await store.decide(POLICY) is None
        view = await learning.steps.status(POLICY)
        assert (view.head, view.version, view.canary, view.epoch) == (1, pinned, 1, 0)
        assert view.reason.startswith(f"version 1 is a canary that no conversation gets while version {pinned} ")
        await learning.execute("UPDATE policies SET canary_since = now() - interval '25 hours'")
        view = await learning.operators.unpin(POLICY)
        assert (view.head, view.version, view.canary, view.unpublished) == (1, 0, 1, False)
        assert await store.decide(POLICY) is None  # its time and its evidence begin again
    (policy,) = (await PostgresDirectoryStore(learning.database).read()).policies
    assert (policy.active, policy.canary) == (0, 1)
    await judged(learning, 1, 12, -1)
    await judged(learning, 0, 12, 1)
    assert (await store.decide(POLICY)) is not None


async def test_the_others_get_the_canarys_parent_and_are_compared_from_then_on(
    postgres_learning: PostgresLearning,
) -> None:
    """A canary that is accepted before its parent was published, as when engines were away."""
    learning = postgres_learning
    engine = await learning.add_engine("http://e1:8100")
    await step(learning, 1)
    assert (await learning.steps.status(POLICY)).unpublished
    await learning.set_recipe(RECIPE.model_copy(update={"gate": Gate(canary_share=0.25)}))
    await step(learning, 2)
    store = PostgresCanaryStore(learning.database)
    view = await learning.steps.status(POLICY)
    assert (view.head, view.version, view.canary, view.canary_parent, view.unpublished) == (2, 0, 2, 1, True)
    wanted = [version.n for version in await learning.publishing.wanted(engine)]
    assert wanted == [1, 2]
    await judged(learning, 2, 12, -1)
    await judged(learning, 0, 12, 1)
    await judged(learning, 1, 12, 1)  # that it answered before is of another time
    for n in (1, 2):
        await learning.publishing.loaded(engine, POLICY, n)
    assert not await learning.publishing.activate(POLICY, 2, view.epoch)
    assert await learning.publishing.activate(POLICY, 1, view.epoch)
    assert (await learning.steps.status(POLICY)).unpublished is False
    assert await store.decide(POLICY) is None
    await judged(learning, 2, 12, -1)
    await judged(learning, 1, 12, 1)
    decision = await store.decide(POLICY)
    assert decision is not None
    assert decision.result is CheckResult.FAILED
    assert (await learning.steps.status(POLICY)).version == 1


async def test_worse_canaries_lower_the_learning_rate_and_pause_training(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    gate = Gate(canary_share=0.25, pause_after=2, lr_backoff=0.5)
    await learning.set_recipe(RECIPE.model_copy(update={"gate": gate}))
    store = PostgresCanaryStore(learning.database)
    batches = []
    for n in (1, 2):
        batches.append(await step(learning, n))
        await judged(learning, n, 12, -1)
        await judged(learning, 0, 12, 1)
        decision = await store.decide(POLICY)
        assert decision is not None
        assert decision.result is CheckResult.FAILED
        state = (await learning.steps.status(POLICY)).state
        assert (state is TrainingState.PAUSED) == (n == 2)
    assert [batch.lr_scale for batch in batches] == [1.0, 0.5]
    assert (await learning.steps.status(POLICY)).reason.startswith(
        "paused: 2 steps in a row without an accepted version, the last one step 2: canary: worse: mean verdict"
    )
    assert not await learning.work_waiting()


async def test_a_canary_that_is_not_worse_ends_a_row_of_rejections(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    store = await begun(learning)
    await learning.execute("UPDATE policies SET rejections = 2, canary_since = now() - interval '25 hours'")
    assert await store.decide(POLICY) is not None
    assert (await learning.rows("SELECT rejections FROM policies"))[0]["rejections"] == 0


async def test_the_sweep_notifies_of_an_ended_canary_until_its_version_is_active(
    postgres_learning: PostgresLearning,
) -> None:
    learning = postgres_learning
    store = await begun(learning)
    await learning.operators.pause(POLICY, "a paused workflow looks again within hours")
    await learning.execute("UPDATE policies SET canary_since = now() - interval '25 hours', work_signalled_at = now()")
    deciding, notifier = canaries(learning, store)
    notifier.available = False
    assert await deciding.decide() == 1
    assert notifier.waiting == []
    notifier.available = True
    training = TrainingNotifier(PostgresWorkStore(learning.database), notifier)
    assert await training.notify_pending() == 1
    assert notifier.waiting == [POLICY]
    assert await training.notify_pending() == 0
    await learning.execute("UPDATE policies SET work_signalled_at = now() - interval '11 minutes'")
    assert await training.notify_pending() == 1
    (engine,) = await learning.publishing.engines()
    await learning.publishing.loaded(engine.id, POLICY, 1)
    assert await learning.publishing.activate(POLICY, 1, 0)
    await learning.execute("UPDATE policies SET work_signalled_at = NULL")
    assert await training.notify_pending() == 0


async def test_a_canary_without_traffic_ends_by_time(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    store = await begun(learning)
    await learning.execute("UPDATE policies SET canary_since = now() - interval '25 hours'")
    assert await canaries(learning, store)[0].decide() == 1
    (check,) = (await learning.operators.versions(POLICY))[1].gate
    assert (check.result, check.reason.partition(":")[0]) == (CheckResult.NOT_ENOUGH, "no traffic in 24 h")
    assert (await learning.steps.status(POLICY)).unpublished


async def test_a_roll_back_by_hand_ends_the_canary(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    await begun(learning)
    view = await learning.operators.roll_back(POLICY, 0)
    assert (view.head, view.canary) == (0, None)


async def test_a_pinned_policy_has_no_canary(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    await learning.operators.pin(POLICY, 0)
    store = await begun(learning)
    assert await store.open() == []
