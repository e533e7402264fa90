"""Rollouts of one policy, and each of their groups.

A rollout group is k episodes of one task, then its settlement. An episode's turns are with the gateway; the workflow
only decides what happens next. A lost attempt is never continued: the next one is another episode, in another sandbox.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, ChildWorkflowError, WorkflowAlreadyStartedError, is_cancelled_exception
from temporalio.workflow import ParentClosePolicy

with workflow.unsafe.imports_passed_through():
    from activities.episodes import BeginEpisode, EpisodeLedgerActivities
    from activities.judging.episode_votes import EpisodeJudgingActivities, JudgeEpisode
    from clawloop.core.contracts.episodes import (
        Ending,
        EpisodeBegun,
        EpisodeEnd,
        EpisodeScore,
        EpisodeState,
        GroupBegun,
        GroupResult,
        GroupState,
    )
    from clawloop.core.episodes.running import REASON_LIMIT, EnvironmentActivities, EpisodeWork
    from clawloop.core.errors import TaskUnusable
    from clawloop.core.ids import EpisodeId, RolloutGroupId
    from workflows import names
    from workflows.activity_options import (
        EPISODE_ATTEMPTS,
        JUDGE_EPISODE,
        STORE,
        VERIFY_FIRST,
        call_ledger,
        pause_after,
        run_in,
        verify_in,
    )
    from workflows.long_running import LongRunningWorkflow, error_type_of, reason_of, timed_out
    from workflows.state import PolicyRollouts

# A worker that is away comes back; after a day its episodes would be too stale to train.
DEADLINE = timedelta(days=1)


@workflow.defn(name=names.ROLLOUT_GROUP_WORKFLOW)
class RolloutGroupWorkflow:
    def __init__(self) -> None:
        self._rows: dict[int, str] = {}

    @workflow.run
    async def run(self, group: RolloutGroupId) -> GroupResult:
        task = await call_ledger(EpisodeLedgerActivities.begin_group, group, "begin the group")
        if task.state is GroupState.OPEN:
            await self._run_places(task)
        result = await workflow.execute_activity_method(
            EpisodeLedgerActivities.settle_group, group, summary="settle the group", **STORE
        )
        self._show(task, f"{result.state}: {result.reason}; {result.samples} samples")
        return result

    async def _run_places(self, task: GroupBegun) -> None:
        """Run all episodes until the deadline; the settlement abandons episodes that have not ended by then."""
        places = [asyncio.create_task(self._run_place(task, first)) for first in task.episodes]
        done, pending = await workflow.wait(places, timeout=DEADLINE.total_seconds())
        for place in pending:
            place.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for place in done:
            place.result()

    async def _run_place(self, task: GroupBegun, begun: EpisodeBegun) -> None:
        """
        Args:
            begun: the first attempt at the place.
        """
        group, place = begun.group, begun.place
        for attempt in range(1, EPISODE_ATTEMPTS + 1):
            if attempt > 1:
                begun = await self._begin(group, place, attempt)
            # Not `running` only if an earlier run of this workflow was lost.
            if begun.state is EpisodeState.RUNNING:
                self._note(task, place, f"runs, attempt {attempt}")
                end, was_waited_for, unusable = await self._run_episode(task, begun.id, place)
                self._note(task, place, f"{end.ending} {end.reason}")
                if await self._finish(task, place, end) or unusable:
                    return
                if attempt < EPISODE_ATTEMPTS and not was_waited_for:
                    await workflow.sleep(pause_after(attempt), summary=f"episode {place} is tried again")
            elif begun.state is EpisodeState.ENDED:
                score = await self._verify(task, begun.id, place, begun.artifact_sha256)
                await self._record_score(task, place, "ended", score)
                return
            elif begun.state is not EpisodeState.ABANDONED:
                self._note(task, place, f"{begun.state} before")
                if begun.state is EpisodeState.SCORED:
                    await self._judge(task, begun.id, place)
                return

    async def _begin(self, group: RolloutGroupId, place: int, attempt: int) -> EpisodeBegun:
        request = BeginEpisode(group=group, place=place, attempt=attempt)
        return await call_ledger(EpisodeLedgerActivities.begin_episode, request, f"episode {place}, attempt {attempt}")

    async def _finish(self, task: GroupBegun, place: int, end: EpisodeEnd) -> bool:
        """Record the end, and have it verified; False after a failure of infrastructure, which is tried again."""
        if end.score is not None:
            await self._record_score(task, place, str(end.ending), end.score, end)
            return True
        ended = call_ledger(EpisodeLedgerActivities.end_episode, end, f"episode {place}: {end.ending}")
        if end.ending is Ending.INFRASTRUCTURE:
            await ended
            return False
        # The verifier reads what the agent left, not the ledger: neither waits for the other.
        _, score = await asyncio.gather(ended, self._verify(task, end.id, place, end.artifact_sha256))
        await self._record_score(task, place, str(end.ending), score)
        return True

    async def _run_episode(self, task: GroupBegun, episode: EpisodeId, place: int) -> tuple[EpisodeEnd, bool, bool]:
        """The episode's end; True if a time-out showed it, which takes as long as a pause; True if no attempt can
        play its task."""
        work = EpisodeWork(episode=episode, environment=task.environment, task=task.task)
        try:
            end = await workflow.execute_activity_method(
                EnvironmentActivities.run_episode, work, summary=f"episode {place}", **run_in(task.environment)
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            failed = EpisodeEnd(episode, Ending.INFRASTRUCTURE, reason_of(error)[:REASON_LIMIT])
            return failed, timed_out(error), error_type_of(error) == TaskUnusable.__name__
        return end, False, False

    async def _record_score(
        self, task: GroupBegun, place: int, ending: str, score: EpisodeScore, end: EpisodeEnd | None = None
    ) -> None:
        """
        Args:
            end: of an episode that has not ended yet.
        """
        try:
            await self._call_score(place, score, end)
        except ActivityError as error:
            if score.reward is None or is_cancelled_exception(error):
                raise
            # Else the group would fail, stay open and have the same verified again, without end.
            score = EpisodeScore(score.episode, None, f"not recorded: {reason_of(error)}"[:REASON_LIMIT])
            await self._call_score(place, score, end)
        self._note(task, place, f"{ending}, {_shown(score.reward)} {score.reason}")
        if score.reward is not None:
            await self._judge(task, score.episode, place)

    async def _call_score(self, place: int, score: EpisodeScore, end: EpisodeEnd | None) -> None:
        summary = f"episode {place}: {_shown(score.reward)}"
        if end is None:
            await call_ledger(EpisodeLedgerActivities.score_episode, score, summary)
        else:
            await call_ledger(EpisodeLedgerActivities.end_episode, replace(end, score=score), summary)

    async def _judge(self, task: GroupBegun, episode: EpisodeId, place: int) -> None:
        """Ask for votes on the episode's turns, where they count; without them the outcome alone is its reward."""
        if not task.judged:
            return
        try:
            judged = await workflow.execute_activity_method(
                EpisodeJudgingActivities.judge_episode,
                JudgeEpisode(episode=episode),
                summary=f"judge episode {place}",
                **JUDGE_EPISODE,
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            self._note(task, place, f"{self._rows[place]}; not judged: {reason_of(error)}")
        else:
            self._note(task, place, f"{self._rows[place]}; votes on {judged.judged} of {judged.turns} turns")

    async def _verify(self, task: GroupBegun, episode: EpisodeId, place: int, artifact: str | None) -> EpisodeScore:
        work = EpisodeWork(episode=episode, environment=task.environment, task=task.task, artifact_sha256=artifact)
        try:
            return await workflow.execute_activity_method(
                EnvironmentActivities.verify_episode,
                work,
                summary=f"verify episode {place}",
                priority=VERIFY_FIRST,
                **verify_in(task.environment),
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            return EpisodeScore(episode, None, f"not verified: {reason_of(error)}"[:REASON_LIMIT])

    def _note(self, task: GroupBegun, place: int, what: str) -> None:
        self._rows[place] = what
        self._show(task, "open")

    def _show(self, task: GroupBegun, state: str) -> None:
        rows = "\n".join(f"| {place} | {self._rows[place]} |" for place in sorted(self._rows))
        workflow.set_current_details(
            f"**{task.environment} {task.task}**, policy {task.policy}: {state}\n\n| episode | |\n|---|---|\n{rows}"
        )


def _shown(reward: float | None) -> str:
    return "no reward" if reward is None else f"reward {reward:g}"


# A group that ends elsewhere, a step that makes room, a pause that was said while Temporal was away.
LOOK_AGAIN = timedelta(seconds=15)


@workflow.defn(name=names.ROLLOUTS_WORKFLOW)
class RolloutsWorkflow(LongRunningWorkflow):
    @workflow.init
    def __init__(self, state: PolicyRollouts) -> None:
        super().__init__(state.roll_over_events)
        self._policy = state.policy
        self._changed = False
        self._waiting: set[RolloutGroupId] = set()

    @workflow.run
    async def run(self, state: PolicyRollouts) -> None:
        while not self._must_roll_over():
            self._changed = False
            try:
                found = await call_ledger(EpisodeLedgerActivities.next_groups, self._policy, "which groups to start")
            except ActivityError as error:
                if is_cancelled_exception(error):
                    raise
                workflow.set_current_details(f"PostgreSQL call failed: {reason_of(error)}")
            else:
                workflow.set_current_details(f"{len(found.open)} groups in flight; {found.reason}")
                if not found.running and not found.open:
                    return  # `clawloop rollouts start` starts this workflow again
                # All that are open, so that those of an earlier run of this workflow are found as well.
                for group in found.open:
                    if group not in self._waiting:
                        self._waiting.add(group)
                        self._start(self._run_group(group))
            try:
                await workflow.wait_condition(lambda: self._changed or self._bug is not None, timeout=LOOK_AGAIN)
            except TimeoutError:
                continue
            self._raise_bug()
        workflow.continue_as_new(state)

    @workflow.signal(name=names.ROLLOUTS_CHANGED)
    def rollouts_changed(self) -> None:
        self._changed = True

    async def _run_group(self, group: RolloutGroupId) -> None:
        try:
            await workflow.execute_child_workflow(
                RolloutGroupWorkflow.run,
                group,
                id=names.rollout_group_workflow_id(group),
                parent_close_policy=ParentClosePolicy.ABANDON,
                static_summary=f"{self._policy}: a rollout group",
            )
        except WorkflowAlreadyStartedError:
            pass  # an earlier run of this workflow started it
        except ChildWorkflowError as error:
            workflow.logger.warning("rollout group failed: %s", type(error.cause).__name__)
        else:
            self._changed = True
        # While the ledger says that the group is open, it is tried again: after a pause, for what fails at once would
        # be tried again at once, without end.
        self._waiting.discard(group)
