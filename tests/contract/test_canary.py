"""Canaries in PostgreSQL: a share of the conversations, until verdicts or time decide."""

from __future__ import annotations

from activities.notify import TrainingNotifier
from activities.training.gate import Canaries
from clawloop.core.contracts.training import CheckResult, TrainingState
from clawloop.core.recipes.recipe import Gate
from db.serving.directory import PostgresDirectoryStore
from db.training.gate import PostgresCanaryStore
from db.training.work_flag import PostgresWorkStore
from tests.contract.learning import POLICY, RECIPE, PostgresLearning, step
from tests.fakes.notifier import FakeNotifier


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
    assert view.reason == f"{undecided}: no traffic: {lacking}; 0 of 4 samples"
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
