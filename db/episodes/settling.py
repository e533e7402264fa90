"""Settles a rollout group: its episodes' advantages become samples, in one transaction."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import bindparam, func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.episodes import EpisodeState, GroupResult, GroupState
from clawloop.core.contracts.sessions import SessionState
from clawloop.core.contracts.training import SampleState
from clawloop.core.contracts.turns import Message, TurnOutcome, TurnStatus
from clawloop.core.errors import ContentUnreadable, EngineAnswerUnusable, RecipeRejected, RecordUnusable
from clawloop.core.ids import EpisodeId, JudgementId, RolloutGroupId, TurnId, new_judgement_id, new_sample_id
from clawloop.core.recipes.recipe import Recipe, Signal
from clawloop.core.samples.decision import PREFIX, is_held_out, unseen_parts, why_not_trainable
from clawloop.core.samples.rollouts import EpisodeTurn, Member, Settlement, hold_out, settle
from db.content import bytes_to_logprobs, content_of, storable, token_count
from db.encryption.columns import opened
from db.tables import ApiKeyRow, EpisodeRow, JudgementRow, RolloutGroupRow, SampleRow, SessionRow, TurnRow
from db.training.policies import lock_policy
from db.training.recipes import recipe_of_policy
from db.training.work_flag import refresh_work_flag

_LATE = text("""
    UPDATE turns t SET kind = 'side', outcome = 'side', kind_reason = 'its episode had ended',
        outcome_detail = 'its episode had ended'
    FROM episodes e WHERE t.episode_id = e.id AND e.id = ANY(:episodes) AND t.outcome = 'waiting'
        AND t.started_at > e.ended_at
""")
_WITH_LATE_TURNS = text("""
    SELECT DISTINCT t.episode_id FROM turns t JOIN episodes e ON e.id = t.episode_id
        JOIN rollout_groups g ON g.id = e.group_id
    WHERE t.outcome = 'waiting' AND g.state <> 'open' ORDER BY t.episode_id
""")
_TURNS = text(f"""
    SELECT t.id, t.episode_id, t.status, t.finish_reason, t.sampling, t.messages_added, t.tools_sha256, l.tools,
        t.logprobs, t.response,
        j.id AS judgement_id, j.expected,
        coalesce(t.prompt_shared, 0) + coalesce({token_count("t.prompt_ids")}, 0) AS prompt_tokens,
        {token_count("t.response_ids")} AS response_tokens
    FROM turns t LEFT JOIN tool_lists l ON l.sha256 = t.tools_sha256
        LEFT JOIN judgements j ON j.turn_id = t.id AND j.revision = 0 AND j.decided_at IS NULL
    WHERE t.episode_id = ANY(:episodes) AND t.outcome = 'waiting' AND t.kind = 'main'
    ORDER BY t.id FOR NO KEY UPDATE OF t
""")
_COUNT_SAMPLES = select(func.count()).select_from(SampleRow)


async def settle_group(connection: AsyncConnection, group: RolloutGroupId) -> tuple[GroupResult, str | None]:
    """See `activities.episodes.EpisodeStore.settle`; also the policy, if it has a batch since this call."""
    policy = await connection.scalar(select(RolloutGroupRow.policy).where(RolloutGroupRow.id == group))
    if policy is None:
        raise RecordUnusable(f"there is no rollout group {group}")
    await lock_policy(connection, policy)
    query = select(RolloutGroupRow.__table__).where(RolloutGroupRow.id == group).with_for_update()
    row = (await connection.execute(query)).one()
    if row.state != GroupState.OPEN:
        return await _result(connection, row), None
    episodes = await _end_open_episodes(connection, group)
    ids = [episode.id for episode in episodes]
    await _close_sessions(connection, ids)
    await connection.execute(_LATE, {"episodes": ids})
    recipe = await recipe_if_any(connection, policy)
    turns = await _turns(connection, ids)
    members, earlier = _members(row.size, episodes, turns)
    settlement = settle(members, Signal() if recipe is None else recipe.signal, no_recipe=recipe is None)
    samples = 0
    if recipe is not None:
        if is_held_out(policy, group, recipe.gate.held_out):
            settlement = hold_out(settlement)
        samples = await _insert_samples(connection, row, recipe, members, settlement)
    await _set_outcomes(connection, settlement, earlier)
    for episode, advantage in settlement.advantages.items():
        await connection.execute(update(EpisodeRow).where(EpisodeRow.id == episode).values(advantage=advantage))
    finished = {
        "state": settlement.state,
        "reason": settlement.reason,
        "scored": settlement.scored,
        "mean_reward": settlement.mean_reward,
        "finished_at": func.now(),
    }
    await connection.execute(update(RolloutGroupRow).where(RolloutGroupRow.id == group).values(finished))
    result = GroupResult(group, settlement.state, settlement.scored, settlement.mean_reward, samples, settlement.reason)
    return result, policy if samples and await refresh_work_flag(connection, policy) else None


async def end_late_turns(connection: AsyncConnection) -> int:
    """End turns that were stored after their rollout group was settled, e.g. from a spool; the number of turns.

    As in the settlement, those that began after their episode had ended are side turns.
    """
    episodes = list(await connection.scalars(_WITH_LATE_TURNS))
    await _close_sessions(connection, episodes)
    began_late = (await connection.execute(_LATE, {"episodes": episodes})).rowcount
    left = update(TurnRow).where(TurnRow.episode_id.in_(episodes), TurnRow.outcome == TurnOutcome.WAITING)
    ended = left.values(outcome=TurnOutcome.UNJUDGED, outcome_detail="stored after its rollout group was settled")
    return began_late + (await connection.execute(ended)).rowcount


async def _close_sessions(connection: AsyncConnection, episodes: Sequence[UUID]) -> None:
    """Close the sessions of these episodes; before their turns change, as inserts and erasures lock them."""
    still_open = update(SessionRow).where(SessionRow.api_key_id.in_(episodes), SessionRow.state != SessionState.CLOSED)
    closed = {
        "state": SessionState.CLOSED,
        "closed_at": func.now(),
        "closed_why": "its rollout group was settled",
        "first_closed_at": func.coalesce(SessionRow.first_closed_at, func.now()),
    }
    await connection.execute(still_open.values(closed))


async def _result(connection: AsyncConnection, row: Any) -> GroupResult:
    samples = await connection.scalar(_COUNT_SAMPLES.where(SampleRow.rollout_group_id == row.id))
    state = GroupState(row.state)
    return GroupResult(RolloutGroupId(row.id), state, row.scored or 0, row.mean_reward, samples or 0, row.reason or "")


async def _end_open_episodes(connection: AsyncConnection, group: RolloutGroupId) -> list[Any]:
    """The group's episodes, all ended, in order of place and attempt; their keys are revoked."""
    unfinished = update(EpisodeRow).where(
        EpisodeRow.group_id == group, EpisodeRow.state.in_([EpisodeState.RUNNING, EpisodeState.ENDED])
    )
    values = {
        "state": EpisodeState.ABANDONED,
        "ended_at": func.coalesce(EpisodeRow.ended_at, func.now()),
        "reason": "its group was settled without it",
    }
    await connection.execute(unfinished.values(values))
    query = select(EpisodeRow.__table__).where(EpisodeRow.group_id == group)
    episodes = (await connection.execute(query.order_by(EpisodeRow.place, EpisodeRow.attempt))).all()
    keys = update(ApiKeyRow).where(ApiKeyRow.episode_id.in_([e.id for e in episodes]), ApiKeyRow.revoked_at.is_(None))
    await connection.execute(keys.values(revoked_at=func.now()))
    return list(episodes)


async def recipe_if_any(connection: AsyncConnection, policy: str) -> Recipe | None:
    """The policy's recipe; None if it has none that this version understands."""
    try:
        return await recipe_of_policy(connection, policy)
    except (RecordUnusable, RecipeRejected):
        return None


async def _turns(connection: AsyncConnection, episodes: Sequence[Any]) -> dict[EpisodeId, list[EpisodeTurn]]:
    turns: defaultdict[EpisodeId, list[EpisodeTurn]] = defaultdict(list)
    # A turn has the messages of those above it: what one of an episode's turns shows, the later ones are taken to show.
    unseen: defaultdict[EpisodeId, list[str]] = defaultdict(list)
    rows = await connection.execute(_TURNS, {"episodes": list(episodes)})
    for row in opened(connection, rows, turns="id", tool_lists="tools_sha256"):
        judgement = None if row.judgement_id is None else JudgementId(row.judgement_id)
        episode = EpisodeId(row.episode_id)
        why = turn_not_trainable(row, unseen[episode], row.response)
        cut = row.finish_reason == "length"
        turn = EpisodeTurn(TurnId(row.id), why, row.expected, judgement, row.response_tokens, cut)
        turns[episode].append(turn)
    return turns


def turn_not_trainable(row: Any, unseen: list[str], reply: Message | None = None) -> str | None:
    """The reason that the turn cannot be trained; None if it can.

    Args:
        row: opened, with the turn's columns as `_TURNS` names them.
        unseen: parts of the messages before it that the trainer cannot read; those of its own are added.
        reply: see `why_not_trainable`.
    """
    response = None if row.response_tokens is None else range(row.response_tokens)
    try:
        unseen += [kind for kind in unseen_parts(row.messages_added) if kind not in unseen]
        logprobs = row.logprobs
        return why_not_trainable(
            status=TurnStatus(row.status),
            sampling=row.sampling,
            tools=row.tools,
            prompt_ids=range(row.prompt_tokens),
            response_ids=response,
            logprobs=None if logprobs is None else bytes_to_logprobs(logprobs, len(response or ())),
            unseen=unseen,
            reply=reply,
        )
    except (
        ContentUnreadable,
        EngineAnswerUnusable,
        RecordUnusable,
    ) as error:  # of this turn alone
        return f"{PREFIX}{error}"


def _members(
    size: int, episodes: Sequence[Any], turns: Mapping[EpisodeId, Sequence[EpisodeTurn]]
) -> tuple[list[Member], dict[TurnId, str]]:
    """The last attempt of each place; and of the turns of earlier attempts, why they give no sample."""
    last = {episode.place: episode for episode in episodes}
    missing = Member(None, EpisodeState.ABANDONED, None, "it never began", ())
    members = [_member(last[place], turns) if place in last else missing for place in range(size)]
    earlier = {
        turn.id: f"its episode was abandoned: {episode.reason or 'tried again'}"
        for episode in episodes
        if episode is not last[episode.place]
        for turn in turns.get(EpisodeId(episode.id), ())
    }
    return members, earlier


def _member(row: Any, turns: Mapping[EpisodeId, Sequence[EpisodeTurn]]) -> Member:
    episode = EpisodeId(row.id)
    return Member(episode, EpisodeState(row.state), row.reward, row.reason, turns.get(episode, ()))


async def _insert_samples(
    connection: AsyncConnection, group: Any, recipe: Recipe, members: Sequence[Member], settlement: Settlement
) -> int:
    samples: list[dict[str, Any]] = []
    for member in members:
        for turn in member.turns:
            settled = settlement.turns[turn.id]
            sampled = settled.advantage is not None and member.id is not None
            if not sampled and turn.judgement is None:
                continue
            judgement = turn.judgement or new_judgement_id()
            decided = {
                "recipe_hash": recipe.hash,
                "reward": member.reward,
                "outcome": settled.outcome,
                "why": storable(settled.why),
                "decided_at": func.now(),
            }
            if turn.judgement is not None:  # its votes were asked for
                votes = update(JudgementRow).where(JudgementRow.id == judgement)
                await connection.execute(votes.values(decided))
            else:
                assert member.id is not None  # it has turns
                evidence = content_of(connection).write_digest(hashlib.sha256(member.id.bytes).digest())
                made = {"id": judgement, "turn_id": turn.id, "revision": 0, "evidence_hash": evidence, **decided}
                await connection.execute(insert(JudgementRow).values(made))
            if not sampled:
                continue
            held_out = settled.outcome is TurnOutcome.HELD_OUT
            samples.append(
                {
                    "id": new_sample_id(),
                    "judgement_id": judgement,
                    "turn_id": turn.id,
                    "policy": group.policy,
                    "state": SampleState.HELD_OUT if held_out else SampleState.FRESH,
                    "reason": settled.why,
                    "reward": settled.advantage,
                    "rollout_group_id": group.id,
                }
            )
    if samples:
        await connection.execute(insert(SampleRow), samples)
    return len(samples)


async def _set_outcomes(connection: AsyncConnection, settlement: Settlement, earlier: Mapping[TurnId, str]) -> None:
    rows = [
        {"turn": turn, "becomes": settled.outcome, "why": storable(settled.why)}
        for turn, settled in settlement.turns.items()
    ]
    rows += [{"turn": turn, "becomes": TurnOutcome.UNJUDGED, "why": storable(why)} for turn, why in earlier.items()]
    if rows:
        turn = update(TurnRow).where(TurnRow.id == bindparam("turn"))
        await connection.execute(turn.values(outcome=bindparam("becomes"), outcome_detail=bindparam("why")), rows)
