"""A policy's training workflow: the order of its activities, operators' changes, and outages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from temporalio.client import Client, WorkflowFailureError, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError, CancelledError

from clawloop.core.contracts.training import OperatorAction, OperatorChange, StepState
from tests.workflows.conftest import until
from tests.workflows.learning import Learner, ScriptedLearning, learning, training
from workflows import names


@pytest.fixture
async def scripted(client: Client) -> AsyncIterator[ScriptedLearning]:
    activities = ScriptedLearning()
    async with learning(client, activities):
        yield activities


@pytest.fixture
def learner(client: Client, scripted: ScriptedLearning) -> Learner:
    return Learner(client, scripted)


async def answers(scripted: ScriptedLearning, version: int) -> None:
    await until(lambda: scripted.version == version and not scripted.at_once)


async def test_a_full_batch_becomes_a_step_and_its_version_answers(
    scripted: ScriptedLearning, learner: Learner
) -> None:
    scripted.judging = 3
    await learner.samples(5)
    assert "waiting: 5 of 16 samples, 3 turns are being judged" in await learner.shows("waiting: 5 of 16")
    await learner.samples(11)
    await answers(scripted, 1)
    happened = [line for line in scripted.happened if not line.startswith("publish")]
    assert happened == ["v0 answers", "claim 1: 16", "train 1", "decide 1: accepted", "v1 answers"]
    details = await learner.shows("v1 answers, the newest")
    assert "| 1 | 16 | 0.5 | 0.01 | 1 | 1.2 | numbers passed | committed | yes |" in details


async def test_the_ui_shows_the_running_step_and_search_attributes_find_it(
    client: Client, scripted: ScriptedLearning, learner: Learner
) -> None:
    scripted.gate.clear()
    await learner.samples(16)
    await learner.shows("step 1: 16 samples, from v0, queued for trainer-")
    described = await learner.handle.describe()
    assert await described.static_summary() == f"{learner.policy}: steps and versions"
    details = await described.static_details()
    assert details is not None
    assert f"clawloop policy versions --policy {learner.policy}" in details
    assert f"/ui/versions?policy={learner.policy}" in details
    assert described.typed_search_attributes[names.POLICY] == learner.policy
    assert described.typed_search_attributes[names.STATE] == "training"
    scripted.gate.set()
    await learner.shows("v1 answers, the newest")
    await until(lambda: scripted.looks >= 2)
    found = (await learner.handle.describe()).typed_search_attributes
    assert (found[names.STATE], found[names.VERSION]) == ("waiting", 1)
    summaries = [
        event.user_metadata.summary.data.decode().strip('"')
        for event in (await learner.handle.fetch_history()).events
        if event.HasField("activity_task_scheduled_event_attributes")
        or event.HasField("marker_recorded_event_attributes")  # of an activity that ran where the workflow runs
    ]
    assert set(summaries) - {""} == {
        "read the training status",
        "a batch for step 1",
        "a batch for step 2",
        "step 1: 16 samples, from v0",
        "decide about version 1",
        "publish the newest version",
    }


async def test_after_a_rejected_version_training_goes_on_and_the_parent_answers(
    scripted: ScriptedLearning, learner: Learner
) -> None:
    scripted.rejects[1] = "numbers: too far"
    await learner.samples(32)
    await answers(scripted, 2)
    # The base model is published at the start, beside the first step.
    happened = [line for line in scripted.happened if line.startswith(("decide", "claim", "v2"))]
    assert happened == [
        "claim 1: 16",
        "decide 1: numbers: too far",
        "claim 2: 16",
        "decide 2: accepted",
        "v2 answers",
    ]
    details = await learner.shows("v2 answers, the newest")
    assert "numbers failed | rejected: numbers: too far |" in details


async def test_probes_are_asked_before_a_version_is_decided(scripted: ScriptedLearning, learner: Learner) -> None:
    scripted.probed = True
    await learner.samples(16)
    await answers(scripted, 1)
    assert [line for line in scripted.happened if line.startswith(("probe", "decide"))] == [
        "probe 1",
        "decide 1: accepted",
    ]


async def test_a_version_whose_probes_cannot_be_asked_is_decided_and_says_so(
    scripted: ScriptedLearning, learner: Learner
) -> None:
    scripted.probed = True
    scripted.probes_fail[1] = ApplicationError("no engine has it", type="RecordUnusable", non_retryable=True)
    await learner.samples(16)
    await answers(scripted, 1)
    assert [line for line in scripted.happened if line.startswith(("probe", "not probed", "decide"))] == [
        "probe 1",
        "not probed 1: no engine has it",
        "decide 1: accepted",
    ]


async def test_a_candidate_that_an_ended_run_left_is_decided_and_not_trained_again(
    client: Client, scripted: ScriptedLearning, learner: Learner
) -> None:
    scripted.at_gate.clear()
    await learner.samples(16)
    await until(lambda: scripted.step_state is StepState.CANDIDATE)
    await learner.handle.terminate("by hand")
    scripted.at_gate.set()
    await learner.samples(0)
    await answers(scripted, 1)
    assert [line for line in scripted.happened if line.startswith("train")] == ["train 1"]


async def test_the_next_step_is_computed_while_engines_load_and_publishing_goes_to_the_newest(
    scripted: ScriptedLearning, learner: Learner
) -> None:
    scripted.engines.clear()
    await learner.samples(64)
    await until(lambda: scripted.head == 4)
    assert scripted.version == 0
    scripted.engines.set()
    await answers(scripted, 4)
    # One that began before the first step, one for all four.
    assert scripted.happened.count("publish begins") <= 2
    assert scripted.most_at_once == 1


async def test_a_batch_signalled_many_times_is_trained_once(scripted: ScriptedLearning, learner: Learner) -> None:
    scripted.gate.clear()
    await learner.samples(16)
    await asyncio.gather(*(learner.samples(0) for _ in range(20)))
    scripted.gate.set()
    await answers(scripted, 1)
    await learner.shows("waiting: 0 of 16")
    assert [line for line in scripted.happened if line.startswith("train")] == ["train 1"]


async def test_a_pause_lets_the_running_step_finish_and_holds(scripted: ScriptedLearning, learner: Learner) -> None:
    scripted.gate.clear()
    await learner.samples(40)
    await until(lambda: scripted.at_once == 1)
    await learner.pause("the machine is needed")
    await learner.shows("paused: the machine is needed\n\nstill computing: step 1: 16 samples, from v0")
    scripted.gate.set()
    await answers(scripted, 1)  # it is published nevertheless
    await learner.samples(16)
    assert "paused: the machine is needed" in await learner.shows("v1 answers, the newest")
    assert scripted.step == 2
    await learner.resume()
    await answers(scripted, 3)
    assert scripted.ready == 8


async def test_a_recipe_that_is_set_is_used_at_once(scripted: ScriptedLearning, learner: Learner) -> None:
    await learner.samples(8)
    await learner.shows("waiting: 8 of 16")
    await learner.set_recipe(needed=8)  # no other signal
    await answers(scripted, 1)
    scripted.gate.clear()
    await learner.samples(8)
    await until(lambda: scripted.at_once == 1)
    looks = scripted.looks
    await learner.set_recipe(needed=4)
    await until(lambda: scripted.looks > looks)  # also beside a running step


async def test_a_pause_holds_without_a_signal(scripted: ScriptedLearning, learner: Learner) -> None:
    await learner.samples(0)
    await learner.shows("waiting: 0 of 16")
    scripted.paused = "paused while Temporal was away"
    await learner.samples(16)
    await learner.shows("paused: paused while Temporal was away")
    assert scripted.step == 1


async def test_a_resume_without_a_signal_is_seen_at_the_next_read(scripted: ScriptedLearning, learner: Learner) -> None:
    scripted.paused, scripted.ready = "for now", 16
    await learner.begin(quiet_seconds=0.5)
    await learner.shows("paused: for now")
    scripted.paused = None
    await answers(scripted, 1)


async def test_a_bad_step_is_quarantined_and_training_pauses_with_the_reason(
    scripted: ScriptedLearning, learner: Learner
) -> None:
    scripted.ends[2] = (StepState.QUARANTINED, "KL 12.3 above 10")
    await learner.samples(48)
    details = await learner.shows("paused: step 2 quarantined: KL 12.3 above 10")
    assert "| 2 | 16 | 0.5 | 0.01 | 1 | 1.2 |  | quarantined: KL 12.3 above 10 |  |" in details
    await answers(scripted, 1)
    assert scripted.ready == 16
    await learner.resume(retry=True)
    await answers(scripted, 4)
    assert [line for line in scripted.happened if line.startswith("train")] == [f"train {n}" for n in (1, 2, 3, 4)]


async def test_a_step_that_cannot_succeed_is_quarantined_too(scripted: ScriptedLearning, learner: Learner) -> None:
    scripted.fails = lambda n: ApplicationError("AdapterUnusable", type="AdapterUnusable", non_retryable=True)
    await learner.samples(16)
    await learner.shows("paused: step 1 quarantined: AdapterUnusable")


async def test_a_step_that_is_over_in_the_ledger_is_abandoned(scripted: ScriptedLearning, learner: Learner) -> None:
    gone = ApplicationError("RecordUnusable", type="RecordUnusable", non_retryable=True)
    scripted.fails = lambda n: gone if n == 1 else None
    await learner.samples(16)
    await answers(scripted, 2)
    assert "abandon 1: RecordUnusable" in scripted.happened


async def test_a_trainer_that_fails_computes_the_same_step_again(scripted: ScriptedLearning, learner: Learner) -> None:
    broken = iter([ApplicationError("a rank died", type="TrainerUnavailable")])
    scripted.fails = lambda n: next(broken, None)
    await learner.samples(16)
    await answers(scripted, 1)
    assert [line for line in scripted.happened if line.startswith("train")] == ["train 1", "train 1"]


async def test_a_roll_back_while_a_step_is_computed_abandons_it_and_its_samples_go_to_the_next(
    scripted: ScriptedLearning, learner: Learner
) -> None:
    await learner.samples(32)
    await answers(scripted, 2)
    scripted.gate.clear()
    await learner.samples(16)
    await until(lambda: scripted.at_once == 1)
    published = scripted.happened.count("publish begins")
    await learner.roll_back(1)
    await until(lambda: scripted.happened.count("publish begins") > published)  # engines may lack v1
    scripted.gate.set()
    await answers(scripted, 4)
    details = await learner.shows("v4 answers, the newest")
    assert "| 3 | 16 | 0.5 | 0.01 | 1 | 1.2 |  | abandoned: rolled back to v1 |  |" in details


async def test_a_pinned_version_answers_while_others_are_trained(scripted: ScriptedLearning, learner: Learner) -> None:
    await learner.samples(16)
    await answers(scripted, 1)
    await learner.pin(1)
    await learner.samples(16)
    await until(lambda: scripted.head == 2)
    assert "v1 answers, pinned" in await learner.shows("v1 is pinned")
    await learner.pin(None)
    await answers(scripted, 2)


async def test_a_change_without_detail_or_of_an_unknown_kind_is_refused(
    scripted: ScriptedLearning, learner: Learner
) -> None:
    await learner.samples(0)
    with pytest.raises(WorkflowUpdateFailedError) as refused:
        await learner.handle.execute_update(names.OPERATOR_CHANGED, OperatorChange(OperatorAction.PAUSE, "  "))
    assert "reason" in str(refused.value.cause)
    with pytest.raises(WorkflowUpdateFailedError):
        await learner.handle.execute_update(names.OPERATOR_CHANGED, {"action": "stop", "detail": "now"})
    with pytest.raises(WorkflowUpdateFailedError):
        await learner.handle.execute_update("stop", {"reason": "now"})


async def test_the_newest_change_of_an_operator_is_shown(scripted: ScriptedLearning, learner: Learner) -> None:
    await learner.samples(0)
    await learner.roll_back(0)
    await learner.shows("last change by an operator: roll back: to version 0")


async def test_a_smaller_batch_is_taken_once_its_oldest_sample_has_waited_long_enough(
    scripted: ScriptedLearning, learner: Learner
) -> None:
    scripted.max_wait_seconds, scripted.oldest_seconds = 10.0, 8.5
    await learner.samples(3)
    await learner.shows("waiting: 3 of 16")
    scripted.oldest_seconds = 10.0
    await answers(scripted, 1)
    assert "claim 1: 3" in scripted.happened


async def test_a_batch_waits_until_the_schedule_opens(scripted: ScriptedLearning, learner: Learner) -> None:
    scripted.closed_seconds = 2.0
    await learner.samples(16)
    await learner.shows("waiting: outside of its hours; 16 of 16 samples")
    scripted.closed_seconds = None
    await answers(scripted, 1)
    assert "claim 1: 16" in scripted.happened


async def test_another_recipe_opens_at_once(scripted: ScriptedLearning, learner: Learner) -> None:
    scripted.closed_seconds = 3000.0
    await learner.samples(16)
    await learner.shows("waiting: outside of its hours")
    scripted.closed_seconds = None
    await learner.set_recipe(needed=8)
    await answers(scripted, 1)


async def test_while_no_trainer_is_there_nothing_is_lost_and_history_does_not_grow(client: Client) -> None:
    scripted = ScriptedLearning()
    async with learning(client, scripted, trainer=False):
        learner = Learner(client, scripted)
        await learner.samples(16)
        await learner.shows("step 1: 16 samples, from v0, queued for trainer-")
        await learner.shows("v0 answers, the newest")  # which is published beside the step
        before = (await learner.handle.describe()).history_length
        await asyncio.sleep(1)
        assert (await learner.handle.describe()).history_length == before
        async with training(client, scripted):
            await answers(scripted, 1)


async def test_engines_that_are_away_get_the_version_when_they_come_back(
    scripted: ScriptedLearning, learner: Learner
) -> None:
    scripted.engines.clear()
    await learner.samples(16)
    details = await learner.shows("v0 answers, engines are loading the newest")
    assert "step 1" in details or "waiting" in details
    scripted.engines.set()
    await answers(scripted, 1)


async def test_a_cancelled_workflow_quarantines_nothing(scripted: ScriptedLearning, learner: Learner) -> None:
    scripted.gate.clear()
    await learner.samples(16)
    await until(lambda: scripted.at_once == 1)
    await learner.handle.cancel()
    async with asyncio.timeout(60):
        with pytest.raises(WorkflowFailureError) as ended:
            await learner.handle.result()
    assert isinstance(ended.value.cause, CancelledError)
    assert [line for line in scripted.happened if line.startswith("quarantine")] == []
    scripted.gate.set()
    await until(lambda: scripted.at_once == 0)
    await learner.samples(0)
    await answers(scripted, 1)


async def test_a_terminated_workflow_goes_on_when_started_again(
    client: Client, scripted: ScriptedLearning, learner: Learner
) -> None:
    scripted.gate.clear()
    await learner.samples(16)
    await until(lambda: scripted.at_once == 1)
    await learner.handle.terminate("the whole of Temporal is lost")
    scripted.gate.set()
    await until(lambda: scripted.at_once == 0)
    await learner.samples(16)
    await answers(scripted, 2)
    assert scripted.ready == 0


async def test_lessons_are_practised_until_none_is_left_and_looked_for_again(
    scripted: ScriptedLearning, learner: Learner
) -> None:
    scripted.practises, scripted.requests = True, 5
    scripted.practise_fails = [ApplicationError("no engine", type="EngineRejected", non_retryable=True)]
    await learner.begin(practise_seconds=0.1, rest_seconds=3600.0)
    await until(lambda: not scripted.requests)
    done = scripted.happened.count("practise")
    await until(lambda: scripted.happened.count("practise") >= done + 2)
    scripted.requests = 2
    await until(lambda: not scripted.requests)


async def calls_of_practise(scripted: ScriptedLearning, learner: Learner) -> int:
    """How many there were, once none that had begun is left."""
    async with asyncio.timeout(60):
        while "practise" in [
            pending.activity_type.name
            for pending in (await learner.handle.describe()).raw_description.pending_activities
        ]:
            await asyncio.sleep(0.05)
    return scripted.happened.count("practise")


async def test_nothing_is_practised_while_a_step_is_computed_or_training_is_paused(
    scripted: ScriptedLearning, learner: Learner
) -> None:
    scripted.practises = True
    await learner.begin(practise_seconds=0.05, rest_seconds=0.05)
    await until(lambda: scripted.happened.count("practise") >= 2)
    scripted.gate.clear()
    await learner.samples(16)
    await until(lambda: scripted.at_once == 1)
    before = await calls_of_practise(scripted, learner)
    await asyncio.sleep(0.5)
    assert scripted.happened.count("practise") == before
    scripted.gate.set()
    await answers(scripted, 1)
    await until(lambda: scripted.happened.count("practise") > before)
    await learner.pause("for now")
    await learner.shows("paused: for now")
    before = await calls_of_practise(scripted, learner)
    await asyncio.sleep(0.5)
    assert scripted.happened.count("practise") == before


async def test_a_step_that_ended_has_lessons_practised_again_at_once(
    scripted: ScriptedLearning, learner: Learner
) -> None:
    scripted.practises = True
    await learner.begin(practise_seconds=3600.0, rest_seconds=3600.0)
    await until(lambda: scripted.happened.count("practise") == 1)
    await learner.samples(16)
    await answers(scripted, 1)
    await until(lambda: scripted.happened.count("practise") == 2)


async def test_nothing_is_practised_by_a_recipe_without_practice(scripted: ScriptedLearning, learner: Learner) -> None:
    scripted.requests = 2
    await learner.begin(practise_seconds=0.05, rest_seconds=0.05)
    await learner.samples(16)
    await answers(scripted, 1)
    assert "practise" not in scripted.happened
