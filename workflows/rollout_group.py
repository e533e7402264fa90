"""One rollout group: k episodes of one task, then its settlement.

An episode's turns are with the gateway; the workflow only decides what happens next. A lost attempt is never
continued: the next one is another episode, in another sandbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from activities.episodes.ledger import EpisodeLedgerActivities
    from activities.episodes.messages import BeginEpisode, JudgeEpisode, ScoreEpisode
    from activities.judging.episode_votes import EpisodeJudgingActivities
    from clawloop.contracts.episodes import (
        Ending,
        EpisodeBegun,
        EpisodeEnd,
        EpisodeState,
        GroupBegun,
        GroupResult,
        GroupState,
        GroupTask,
    )
    from clawloop.episodes.messages import REASON_LIMIT, EpisodeRan, EpisodeVerified, RunEpisode, VerifyEpisode
    from clawloop.episodes.running import EnvironmentActivities
    from clawloop.errors import TaskUnusable
    from clawloop.ids import EpisodeId, RolloutGroupId
    from workflows import names
    from workflows.activity_options import (
        EPISODE_ATTEMPTS,
        JUDGE_EPISODE,
        STORE,
        VERIFY_FIRST,
        pause_after,
        run_in,
        verify_in,
    )
    from workflows.ledger_call import call_ledger
    from workflows.long_running import error_type_of, reason_of, timed_out

# A worker that is away comes back; after a day its episodes would be too stale to train.
DEADLINE = timedelta(days=1)


@workflow.defn(name=names.ROLLOUT_GROUP_WORKFLOW)
class RolloutGroupWorkflow:
    def __init__(self) -> None:
        self._rows: dict[int, str] = {}
        # False: the group began when each call of the ledger was an activity on a queue, one after the other.
        self._calls_are_local = False

    @workflow.run
    async def run(self, group: RolloutGroupId) -> GroupResult:
        self._calls_are_local = workflow.patched("call-the-ledger-where-the-workflow-runs")
        if self._calls_are_local:
            begun = await call_ledger(EpisodeLedgerActivities.begin_group, group, "begin the group")
        else:
            task = await workflow.execute_activity_method(
                EpisodeLedgerActivities.read_group_task, group, summary="read the group's task", **STORE
            )
            begun = GroupBegun(task)
        task = begun.task
        if task.state is GroupState.OPEN:
            await self._run_places(group, task, begun.episodes)
        result = await workflow.execute_activity_method(
            EpisodeLedgerActivities.settle_group, group, summary="settle the group", **STORE
        )
        self._show(task, f"{result.state}: {result.reason}; {result.samples} samples")
        return result

    async def _run_places(self, group: RolloutGroupId, task: GroupTask, begun: Sequence[EpisodeBegun]) -> None:
        """All episodes, until the deadline; the settlement abandons those that have not ended by then."""
        first = {episode.place: episode for episode in begun}
        places = [
            asyncio.create_task(self._run_place(group, task, place, first.get(place))) for place in range(task.size)
        ]
        done, pending = await workflow.wait(places, timeout=DEADLINE.total_seconds())
        for place in pending:
            place.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for place in done:
            place.result()

    async def _run_place(self, group: RolloutGroupId, task: GroupTask, place: int, first: EpisodeBegun | None) -> None:
        for attempt in range(1, EPISODE_ATTEMPTS + 1):
            begun = first if attempt == 1 and first is not None else await self._begin(group, place, attempt)
            # Only after a run of this workflow that was lost is it anything but running.
            if begun.state is EpisodeState.RUNNING:
                self._note(task, place, f"runs, attempt {attempt}")
                ran, was_waited_for, unusable = await self._run_episode(task, begun.id, place)
                self._note(task, place, f"{ran.ending} {ran.reason}")
                if await self._finish(task, begun.id, place, ran) or unusable:
                    return
                if attempt < EPISODE_ATTEMPTS and not was_waited_for and workflow.patched("pause-between-attempts"):
                    await workflow.sleep(pause_after(attempt), summary=f"episode {place} is tried again")
            elif begun.state is EpisodeState.ENDED:
                await self._score(task, begun.id, place, "ended", begun.artifact_sha256)
                return
            elif begun.state is not EpisodeState.ABANDONED:
                self._note(task, place, f"{begun.state} before")
                if begun.state is EpisodeState.SCORED:
                    await self._judge(task, begun.id, place)
                return

    async def _begin(self, group: RolloutGroupId, place: int, attempt: int) -> EpisodeBegun:
        request = BeginEpisode(group=group, place=place, attempt=attempt)
        return await call_ledger(
            EpisodeLedgerActivities.begin_episode,
            request,
            f"episode {place}, attempt {attempt}",
            local=self._calls_are_local,
        )

    async def _finish(self, task: GroupTask, episode: EpisodeId, place: int, ran: EpisodeRan) -> bool:
        """Record the end, and have it verified; False after a failure of infrastructure, which is tried again."""
        end = EpisodeEnd(episode, ran.ending, ran.reason, ran.artifact_sha256)
        if self._calls_are_local and ran.verified is not None:
            await self._record_score(task, place, str(ran.ending), ran.verified, episode, end)
            return True
        ended = call_ledger(
            EpisodeLedgerActivities.end_episode, end, f"episode {place}: {ran.ending}", local=self._calls_are_local
        )
        if ran.ending is Ending.INFRASTRUCTURE:
            await ended
            return False
        artifact = ran.artifact_sha256
        if not self._calls_are_local:
            await ended
            await self._score(task, episode, place, str(ran.ending), artifact)
            return True
        # The verifier reads what the agent left, not the ledger: neither waits for the other.
        _, verified = await asyncio.gather(ended, self._verify(task, episode, place, artifact or ""))
        await self._record_score(task, place, str(ran.ending), verified, episode)
        return True

    async def _run_episode(self, task: GroupTask, episode: EpisodeId, place: int) -> tuple[EpisodeRan, bool, bool]:
        """How it ended; whether only silence told that it failed, which takes as long as a pause; and whether its task
        cannot be played by any attempt."""
        request = RunEpisode(episode=episode, environment=task.environment, task=task.task)
        try:
            ran = await workflow.execute_activity_method(
                EnvironmentActivities.run_episode, request, summary=f"episode {place}", **run_in(task.environment)
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            failed = EpisodeRan(ending=Ending.INFRASTRUCTURE, reason=reason_of(error)[:REASON_LIMIT])
            return failed, timed_out(error), error_type_of(error) == TaskUnusable.__name__
        return ran, False, False

    async def _score(
        self, task: GroupTask, episode: EpisodeId, place: int, ending: str, artifact_sha256: str | None
    ) -> None:
        verified = await self._verify(task, episode, place, artifact_sha256 or "")
        await self._record_score(task, place, ending, verified, episode)

    async def _record_score(
        self,
        task: GroupTask,
        place: int,
        ending: str,
        verified: EpisodeVerified,
        episode: EpisodeId,
        end: EpisodeEnd | None = None,
    ) -> None:
        try:
            await self._call_score(place, verified, episode, end)
        except ActivityError as error:
            refused = verified.reward is not None and not is_cancelled_exception(error)
            if not refused or not workflow.patched("no-reward-where-the-ledger-refuses-it"):
                raise
            # Else the group would fail, stay open and have the same verified again, without end.
            verified = EpisodeVerified(reward=None, reason=f"not recorded: {reason_of(error)}"[:REASON_LIMIT])
            await self._call_score(place, verified, episode, end)
        shown = _shown(verified.reward)
        self._note(task, place, f"{ending}, {shown} {verified.reason}")
        if verified.reward is not None:
            await self._judge(task, episode, place)

    async def _call_score(
        self, place: int, verified: EpisodeVerified, episode: EpisodeId, end: EpisodeEnd | None
    ) -> None:
        score = ScoreEpisode(episode=episode, reward=verified.reward, reason=verified.reason, end=end)
        await call_ledger(
            EpisodeLedgerActivities.score_episode,
            score,
            f"episode {place}: {_shown(verified.reward)}",
            local=self._calls_are_local,
        )

    async def _judge(self, task: GroupTask, episode: EpisodeId, place: int) -> None:
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

    async def _verify(self, task: GroupTask, episode: EpisodeId, place: int, artifact: str) -> EpisodeVerified:
        request = VerifyEpisode(episode=episode, environment=task.environment, task=task.task, artifact_sha256=artifact)
        try:
            return await workflow.execute_activity_method(
                EnvironmentActivities.verify_episode,
                request,
                summary=f"verify episode {place}",
                priority=VERIFY_FIRST,
                **verify_in(task.environment),
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            return EpisodeVerified(reward=None, reason=f"not verified: {reason_of(error)}"[:REASON_LIMIT])

    def _note(self, task: GroupTask, place: int, what: str) -> None:
        self._rows[place] = what
        self._show(task, "open")

    def _show(self, task: GroupTask, state: str) -> None:
        rows = "\n".join(f"| {place} | {self._rows[place]} |" for place in sorted(self._rows))
        workflow.set_current_details(
            f"**{task.environment} {task.task}**, policy {task.policy}: {state}\n\n| episode | |\n|---|---|\n{rows}"
        )


def _shown(reward: float | None) -> str:
    return "no reward" if reward is None else f"reward {reward:g}"
