"""One rollout group: k episodes of one task, then its settlement.

An episode's turns are with the gateway; the workflow only decides what happens next. A lost attempt is never
continued: the next one is another episode, in another sandbox.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from activities.episodes.ledger import EpisodeLedgerActivities
    from activities.episodes.messages import BeginEpisode, JudgeEpisode, ScoreEpisode
    from activities.judging.episode_votes import EpisodeJudgingActivities
    from clawloop.contracts.episodes import Ending, EpisodeEnd, EpisodeState, GroupResult, GroupState, GroupTask
    from clawloop.episodes.messages import REASON_LIMIT, EpisodeRan, EpisodeVerified, RunEpisode, VerifyEpisode
    from clawloop.episodes.running import EnvironmentActivities
    from clawloop.ids import EpisodeId, RolloutGroupId
    from workflows import names
    from workflows.activity_options import JUDGE_EPISODE, STORE, run_in, verify_in
    from workflows.long_running import reason_of

# Attempts at one place: a sandbox or worker may die twice. A third failure is no accident.
ATTEMPTS = 3
# A worker that is away comes back; after a day its episodes would be too stale to train.
DEADLINE = timedelta(days=1)


@workflow.defn(name=names.ROLLOUT_GROUP_WORKFLOW)
class RolloutGroupWorkflow:
    def __init__(self) -> None:
        self._rows: dict[int, str] = {}

    @workflow.run
    async def run(self, group: RolloutGroupId) -> GroupResult:
        task = await workflow.execute_activity_method(
            EpisodeLedgerActivities.read_group_task, group, summary="read the group's task", **STORE
        )
        if task.state is GroupState.OPEN:
            await self._run_places(group, task)
        result = await workflow.execute_activity_method(
            EpisodeLedgerActivities.settle_group, group, summary="settle the group", **STORE
        )
        self._show(task, f"{result.state}: {result.reason}; {result.samples} samples")
        return result

    async def _run_places(self, group: RolloutGroupId, task: GroupTask) -> None:
        """All episodes, until the deadline; the settlement abandons those that have not ended by then."""
        places = [asyncio.create_task(self._run_place(group, task, place)) for place in range(task.size)]
        done, pending = await workflow.wait(places, timeout=DEADLINE.total_seconds())
        for place in pending:
            place.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for place in done:
            place.result()

    async def _run_place(self, group: RolloutGroupId, task: GroupTask, place: int) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            begun = await workflow.execute_activity_method(
                EpisodeLedgerActivities.begin_episode,
                BeginEpisode(group=group, place=place, attempt=attempt),
                summary=f"episode {place}, attempt {attempt}",
                **STORE,
            )
            # Only after a run of this workflow that was lost is it anything but running.
            if begun.state is EpisodeState.RUNNING:
                self._note(task, place, f"runs, attempt {attempt}")
                ran = await self._run_episode(task, begun.id, place)
                end = EpisodeEnd(begun.id, ran.ending, ran.reason, ran.artifact_sha256)
                await workflow.execute_activity_method(
                    EpisodeLedgerActivities.end_episode, end, summary=f"episode {place}: {ran.ending}", **STORE
                )
                self._note(task, place, f"{ran.ending} {ran.reason}")
                if ran.ending is not Ending.INFRASTRUCTURE:
                    await self._score(task, begun.id, place, str(ran.ending), ran.artifact_sha256)
                    return
            elif begun.state is EpisodeState.ENDED:
                await self._score(task, begun.id, place, "ended", begun.artifact_sha256)
                return
            elif begun.state is not EpisodeState.ABANDONED:
                self._note(task, place, f"{begun.state} before")
                if begun.state is EpisodeState.SCORED:
                    await self._judge(task, begun.id, place)
                return

    async def _run_episode(self, task: GroupTask, episode: EpisodeId, place: int) -> EpisodeRan:
        request = RunEpisode(episode=episode, environment=task.environment, task=task.task)
        try:
            return await workflow.execute_activity_method(
                EnvironmentActivities.run_episode, request, summary=f"episode {place}", **run_in(task.environment)
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            return EpisodeRan(ending=Ending.INFRASTRUCTURE, reason=reason_of(error)[:REASON_LIMIT])

    async def _score(
        self, task: GroupTask, episode: EpisodeId, place: int, ending: str, artifact_sha256: str | None
    ) -> None:
        verified = await self._verify(task, episode, place, artifact_sha256 or "")
        score = ScoreEpisode(episode=episode, reward=verified.reward, reason=verified.reason)
        shown = "no reward" if verified.reward is None else f"reward {verified.reward:g}"
        await workflow.execute_activity_method(
            EpisodeLedgerActivities.score_episode, score, summary=f"episode {place}: {shown}", **STORE
        )
        self._note(task, place, f"{ending}, {shown} {verified.reason}")
        if verified.reward is not None:
            await self._judge(task, episode, place)

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
