"""The paths through a policy's training workflow, for the histories that test_replay.py replays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from temporalio.client import Client, WorkflowHistory
from temporalio.exceptions import ApplicationError

from clawloop.core.contracts.training import StepState
from tests.workflows.conftest import until
from tests.workflows.learning import Learner, ScriptedLearning, learning

Path = Callable[[Learner, ScriptedLearning], Awaitable[None]]


async def training_steps(learner: Learner, scripted: ScriptedLearning) -> None:
    """Three full batches, one after the other, each accepted and published."""
    await learner.samples(5)
    await learner.shows("waiting: 5 of 16")
    await learner.samples(43)
    await until(lambda: scripted.version == 3)


async def training_while_engines_are_slow(learner: Learner, scripted: ScriptedLearning) -> None:
    """Steps go on while a version waits for engines; the newest one is published."""
    scripted.engines.clear()
    await learner.samples(48)
    await until(lambda: scripted.head == 3)
    scripted.engines.set()
    await until(lambda: scripted.version == 3)


async def training_paused_and_resumed(learner: Learner, scripted: ScriptedLearning) -> None:
    """An operator pauses while a step is computed; training goes on after it is resumed."""
    scripted.gate.clear()
    await learner.samples(32)
    await until(lambda: scripted.at_once == 1)
    await learner.pause("for now")
    await learner.shows("still computing")
    scripted.gate.set()
    await learner.shows("v1 answers, the newest")
    await learner.resume()
    await until(lambda: scripted.version == 2)


async def training_quarantined(learner: Learner, scripted: ScriptedLearning) -> None:
    """The trainer quarantines a step, which pauses training; its samples are trained after `resume --retry`."""
    scripted.ends[1] = (StepState.QUARANTINED, "KL 12.3 above 10")
    await learner.samples(16)
    await learner.shows("paused: step 1")
    await learner.resume(retry=True)
    await until(lambda: scripted.version == 2)


async def training_rejected(learner: Learner, scripted: ScriptedLearning) -> None:
    """The gate rejects a version; the next one is accepted."""
    scripted.rejects[1] = "numbers: too far"
    await learner.samples(32)
    await until(lambda: scripted.version == 2)


async def training_probed(learner: Learner, scripted: ScriptedLearning) -> None:
    """Probes are added while a step is computed, and asked; those of the second version cannot be asked."""
    scripted.gate.clear()
    scripted.probes_fail[2] = ApplicationError("no engine has it", type="RecordUnusable", non_retryable=True)
    await learner.samples(32)
    await until(lambda: scripted.at_once == 1)
    scripted.probed = True
    scripted.gate.set()
    await until(lambda: scripted.version == 2)


async def training_base_asked(learner: Learner, scripted: ScriptedLearning) -> None:
    """The base model is asked the general questions while the first step is computed; its version waits for them."""
    scripted.general_unasked = scripted.probed = True
    scripted.base.clear()
    await learner.samples(16)
    await until(lambda: "train 1" in scripted.happened)
    scripted.base.set()
    await until(lambda: scripted.version == 1)


async def training_practised(learner: Learner, scripted: ScriptedLearning) -> None:
    """Lessons are practised until none is left, then again; an engine is away at first, and then used."""
    scripted.practises, scripted.requests, scripted.idle = True, 4, False
    scripted.practise_fails = [ApplicationError("no answer", type="EngineRejected", non_retryable=True)]
    await learner.begin(practise_seconds=0.2, rest_seconds=0.3)
    await until(lambda: scripted.happened.count("practise") >= 2)
    scripted.idle = True
    await until(lambda: not scripted.requests)
    await until(lambda: scripted.happened.count("practise") >= 6)
    await learner.samples(16)
    await until(lambda: scripted.version == 1)


async def training_candidate_found(learner: Learner, scripted: ScriptedLearning) -> None:
    """An earlier run ended before the gate decided about its version."""
    scripted.step_state = StepState.CANDIDATE
    await learner.samples(0)
    await until(lambda: scripted.version == 1)


async def training_refused(learner: Learner, scripted: ScriptedLearning) -> None:
    """The trainer refuses a step that was rolled back, which is abandoned; then one for good."""
    errors = {kind: ApplicationError(kind, type=kind, non_retryable=True) for kind in ("RecordUnusable", "SetupError")}
    failing = iter(errors.values())
    scripted.fails = lambda n: next(failing, None)
    await learner.samples(16)
    await learner.shows("paused: step 2 quarantined: SetupError")


async def training_rolled_back_and_pinned(learner: Learner, scripted: ScriptedLearning) -> None:
    """The head moves under a step, and a pin holds back the next versions."""
    await learner.samples(32)
    await until(lambda: scripted.version == 2)
    scripted.gate.clear()
    await learner.samples(16)
    await until(lambda: scripted.at_once == 1)
    await learner.roll_back(1)
    scripted.gate.set()
    await until(lambda: scripted.version == 4)
    await learner.pin(4)
    await learner.samples(16)
    await until(lambda: scripted.head == 5)
    await learner.pin(None)
    await until(lambda: scripted.version == 5)


async def training_operator_changed(learner: Learner, scripted: ScriptedLearning) -> None:
    """Each of an operator's changes."""
    await learner.samples(16)
    await until(lambda: scripted.version == 1)
    await learner.pause("for now")
    await learner.resume()
    await learner.set_recipe(needed=8)
    await learner.samples(8)
    await until(lambda: scripted.version == 2)
    await learner.pin(2)
    await learner.pin(None)
    await learner.roll_back(1)
    await learner.samples(8)
    await until(lambda: scripted.version == 3)


async def training_ledger_away(learner: Learner, scripted: ScriptedLearning) -> None:
    """A call of the ledger fails where the workflow runs, and is made on its queue."""
    scripted.claims_fail = [ApplicationError("PostgreSQL is away", type="StoreUnavailable")] * 3
    await learner.samples(16)
    await until(lambda: scripted.version == 1)


async def training_by_timer(learner: Learner, scripted: ScriptedLearning) -> None:
    """A smaller batch is claimed once its oldest sample has waited long enough."""
    scripted.max_wait_seconds, scripted.oldest_seconds = 10.0, 9.0
    await learner.samples(3)
    await learner.shows("waiting: 3 of 16")
    scripted.oldest_seconds = 10.0
    await until(lambda: scripted.version == 1)


async def training_by_schedule(learner: Learner, scripted: ScriptedLearning) -> None:
    """A batch waits until the recipe's hours begin."""
    scripted.closed_seconds = 1.0
    await learner.samples(16)
    await learner.shows("waiting: outside of its hours")
    scripted.closed_seconds = None
    await until(lambda: scripted.version == 1)


async def training_rolled_over(learner: Learner, scripted: ScriptedLearning) -> None:
    """The history is long enough: the workflow continues as new."""
    await learner.begin(roll_over_events=30)
    await learner.samples(48)
    await until(lambda: scripted.version == 3)


PATHS: tuple[Path, ...] = (
    training_steps,
    training_while_engines_are_slow,
    training_paused_and_resumed,
    training_quarantined,
    training_rejected,
    training_probed,
    training_base_asked,
    training_practised,
    training_candidate_found,
    training_refused,
    training_rolled_back_and_pinned,
    training_operator_changed,
    training_ledger_away,
    training_by_timer,
    training_by_schedule,
    training_rolled_over,
)


async def history(client: Client, path: Path) -> WorkflowHistory:
    """What the first run of a workflow on this path leaves behind; the workflow itself never ends."""
    scripted = ScriptedLearning()
    scripted.policy = "default"
    learner = Learner(client, scripted)
    async with learning(client, scripted):
        await path(learner, scripted)
        await asyncio.sleep(0.3)  # it looks once more
        described = await learner.handle.describe()
        first = described.raw_description.workflow_execution_info.first_run_id
        return await client.get_workflow_handle(described.id, run_id=first).fetch_history()
