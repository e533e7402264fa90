"""Checks the invariants of the stored data, one query each: a row it returns is a violation.

Reads only; `clawloop check` also compares the hashes of files.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.training import VersionRef
from db.database import Database
from db.tables import StepRow, VersionRow
from db.training.policies import version_ref

# Violations listed per invariant.
MAX_LISTED = 50


INVARIANTS: dict[str, str] = {
    "every main turn of a closed session has an outcome": """
        SELECT 'turn ' || t.id || ' of session ' || s.id FROM turns t JOIN sessions s ON s.id = t.session_id
        WHERE t.outcome = 'waiting' AND t.kind = 'main' AND s.state = 'closed'""",
    # A judge that is away is given up within hours. Turns of episodes wait for their rollout group.
    "no turn waits for a day in a session that its client ended": """
        SELECT 'turn ' || t.id || ' of session ' || s.id FROM turns t JOIN sessions s ON s.id = t.session_id
        WHERE t.outcome = 'waiting' AND s.state = 'ending' AND t.announced_at IS NOT NULL AND t.episode_id IS NULL
            AND greatest(t.announced_at, t.entered_at, s.last_turn_at) < now() - interval '1 day'""",
    # A gateway's clock may be wrong, so that its word alone is no violation: PostgreSQL knows when it stored the turn,
    # and before that the reply took its time. A version answers seconds after its creation, at the earliest.
    "every turn names a version that existed when it began": """
        SELECT 'turn ' || t.id || ' names version ' || t.version || ' of ' || s.policy
        FROM turns t JOIN sessions s ON s.id = t.session_id
            LEFT JOIN versions v ON v.policy = s.policy AND v.n = t.version
        WHERE v.n IS NULL OR (v.n > 0 AND v.created_at >
            greatest(t.started_at, t.entered_at - (t.finished_at - t.started_at)) + interval '10 seconds')""",
    # A direct vote is three numbers, which the closing reads.
    "an erased turn has no content": """
        WITH said AS (
            SELECT judgement_id FROM votes WHERE kind <> 'direct' AND raw <> ''
            UNION ALL
            SELECT judgement_id FROM hints WHERE raw <> '' OR text IS NOT NULL
            UNION ALL
            SELECT judgement_id FROM samples WHERE octet_length(hinted_prompts) > 0)
        SELECT 'turn ' || t.id FROM turns t
        WHERE (t.outcome = 'erased' OR t.erased_at IS NOT NULL) AND (
            t.outcome <> 'erased' OR t.messages_added::text <> '[]' OR t.response IS NOT NULL OR t.error IS NOT NULL
            OR t.prompt_ids IS NOT NULL OR t.response_ids IS NOT NULL OR t.logprobs IS NOT NULL
            OR t.tools_sha256 IS NOT NULL OR t.response_digest IS NOT NULL OR t.reply_digest IS NOT NULL
            OR t.asked_digest IS NOT NULL
            OR t.sampling::text <> '{}' OR t.evidence->>'value' IS NOT NULL
            OR EXISTS (SELECT FROM turn_files f WHERE f.turn_id = t.id)
            OR EXISTS (SELECT FROM feedback f WHERE f.turn_id = t.id AND f.text <> 'erased')
            OR EXISTS (SELECT FROM yardstick y WHERE y.turn_id = t.id AND y.prompts IS NOT NULL))
        UNION
        SELECT 'turn ' || o.id FROM judgements j CROSS JOIN LATERAL (VALUES (j.turn_id), (j.shown_by)) w (turn)
            JOIN turns o ON o.id = w.turn
        WHERE o.outcome = 'erased' AND (j.hint <> 'erased' OR j.id IN (SELECT judgement_id FROM said))""",
    # A turn with lessons is judged and not trained; an insertion waits for the erasure of a lesson, and the other way
    # round.
    "an erased lesson is in no prompt": """
        SELECT 'turn ' || t.id || ', lesson ' || l.id FROM lessons l JOIN turns t ON t.lessons @> ARRAY[l.id]
        WHERE l.state = 'erased' AND (t.prompt_ids IS NOT NULL
            OR EXISTS (SELECT FROM yardstick y WHERE y.turn_id = t.id AND y.prompts IS NOT NULL))
        UNION ALL
        SELECT 'turn ' || p.turn_id || ', lesson ' || l.id FROM lessons l JOIN practice p ON p.lessons @> ARRAY[l.id]
            JOIN judgements j ON j.turn_id = p.turn_id JOIN samples s ON s.judgement_id = j.id
        WHERE l.state = 'erased' AND (octet_length(s.hinted_prompts) > 0 OR j.hint <> 'erased' OR s.state = 'fresh')""",
    "a practice turn has a sample by its lessons alone, or measures one, of a main turn that is erased with it": """
        WITH again AS (
            SELECT turn_id, source_turn_id, false AS measures FROM practice
            UNION ALL
            SELECT turn_id, source_turn_id, true FROM yardstick)
        SELECT 'turn ' || t.id FROM turns t LEFT JOIN again p ON p.turn_id = t.id
            LEFT JOIN turns o ON o.id = p.source_turn_id LEFT JOIN samples s ON s.turn_id = t.id
        WHERE (t.kind = 'practice' OR p.turn_id IS NOT NULL) AND (
            t.kind <> 'practice' OR o.kind IS DISTINCT FROM 'main' OR o.session_id <> t.session_id
            OR (o.outcome = 'erased' AND t.outcome <> 'erased')
            OR CASE WHEN p.measures THEN s.id IS NOT NULL OR (t.lessons IS NULL AND t.outcome <> 'erased')
                ELSE t.lessons IS NOT NULL OR s.id IS NULL OR s.reward IS NOT NULL OR s.hinted_prompts IS NULL END)""",
    "no request is practised that a lesson is measured by": """
        SELECT DISTINCT 'turn ' || y.source_turn_id FROM yardstick y JOIN practice p USING (source_turn_id)
        WHERE y.turn_id IS NOT NULL AND p.turn_id IS NOT NULL""",
    "a turn that was answered with lessons has no sample": """
        SELECT 'turn ' || t.id FROM turns t JOIN samples s ON s.turn_id = t.id
        WHERE t.lessons IS NOT NULL AND s.state NOT IN ('superseded', 'expired')""",
    # By the judgement that it was made of, and those before: the turn may be judged again.
    "a forgotten lesson leaves no hint that it was made of": """
        SELECT 'judgement ' || j.id || ', lesson ' || l.id FROM lessons l JOIN judgements j ON j.turn_id = l.turn_id
        WHERE l.state = 'erased' AND l.source = 'hint' AND j.decided_at <= l.created_at AND (j.hint <> 'erased'
            OR EXISTS (SELECT FROM hints h WHERE h.judgement_id = j.id AND (h.raw <> '' OR h.text IS NOT NULL))
            OR EXISTS (SELECT FROM samples s WHERE s.judgement_id = j.id AND octet_length(s.hinted_prompts) > 0))""",
    "a lesson is erased with the turns that it came from": """
        SELECT 'lesson ' || l.id || ' of turn ' || t.id FROM lessons l JOIN turns t ON t.id IN (l.turn_id, l.shown_by)
        WHERE l.state <> 'erased' AND t.outcome = 'erased'""",
    "a file is there as long as a turn refers to it": """
        SELECT 'file ' || f.id FROM files f WHERE NOT EXISTS (SELECT FROM turn_files r WHERE r.file_id = f.id)""",
    "no sample is twice on the path from a version to the base": """
        WITH RECURSIVE learned AS (
            SELECT m.policy, m.sample_id, m.step FROM step_samples m
                JOIN steps s ON s.policy = m.policy AND s.n = m.step
            WHERE s.state = 'committed' AND m.dropped IS NULL),
        up AS (
            SELECT a.policy, a.sample_id, a.step AS first, b.step AS second, b.step AS n
            FROM learned a JOIN learned b ON b.policy = a.policy AND b.sample_id = a.sample_id AND b.step > a.step
            UNION ALL
            SELECT u.policy, u.sample_id, u.first, u.second, v.parent
            FROM up u JOIN versions v ON v.policy = u.policy AND v.n = u.n WHERE v.parent >= u.first)
        SELECT 'sample ' || sample_id || ' in steps ' || first || ' and ' || second || ' of ' || policy
        FROM up WHERE n = first""",
    # What the user said next is stored as a hint; another turn's request or a comment has it.
    "every trained sample has a verdict, a hint, the next message, a rating, an outcome or lessons": """
        SELECT 'sample ' || s.id || ' of turn ' || s.turn_id FROM samples s JOIN judgements j ON j.id = s.judgement_id
            JOIN recipes r ON r.hash = j.recipe_hash
        WHERE s.state = 'trained' AND j.verdict IS NULL
            AND NOT EXISTS (SELECT FROM practice p WHERE p.turn_id = s.turn_id) AND (
                j.hint IS NULL OR r.content->'signal'->>'hints_from' = 'message' AND j.shown_by IS NULL
                AND NOT EXISTS (SELECT FROM feedback c WHERE c.turn_id = s.turn_id AND c.text IS NOT NULL))
            AND NOT EXISTS (
            SELECT FROM feedback f WHERE f.turn_id = s.turn_id AND f.score IS NOT NULL AND f.applied_at IS NOT NULL)
            AND NOT EXISTS (
                SELECT FROM turns t JOIN sessions o ON o.id = t.session_id LEFT JOIN episodes e ON e.id = t.episode_id
                WHERE t.id = s.turn_id AND (o.task_outcome IS NOT NULL OR e.reward IS NOT NULL))""",
    "a turn is trained once by one recipe, and once more after feedback": """
        SELECT 'turn ' || s.turn_id || ', ' || count(*) || ' times' FROM samples s
            JOIN judgements j ON j.id = s.judgement_id
        WHERE s.state = 'trained' GROUP BY s.turn_id, j.recipe_hash
        HAVING count(*) > 1 + (SELECT count(DISTINCT f.applied_at) FROM feedback f WHERE f.turn_id = s.turn_id)""",
    "a sample is claimed or trained exactly if a step has it": """
        SELECT 'sample ' || s.id || ' is ' || s.state FROM samples s
        WHERE s.state IN ('claimed', 'trained') AND NOT EXISTS (
            SELECT FROM step_samples m JOIN steps p ON p.policy = m.policy AND p.n = m.step
            WHERE m.sample_id = s.id AND CASE s.state
                WHEN 'claimed' THEN p.state IN ('claimed', 'candidate') ELSE p.state = 'committed' END)
        UNION ALL
        SELECT 'sample ' || s.id || ' is ' || s.state || ', but step ' || p.n || ' of ' || p.policy || ' is ' || p.state
        FROM step_samples m JOIN steps p ON p.policy = m.policy AND p.n = m.step JOIN samples s ON s.id = m.sample_id
        WHERE (p.state = 'claimed' AND s.state <> 'claimed')
            OR (p.state = 'candidate' AND m.dropped IS NULL AND s.state <> 'claimed')
            OR (p.state = 'committed' AND m.dropped IS NULL AND s.state <> 'trained')""",
    # Turns that come late, e.g. from a spool, are ended by the sweep.
    "no turn waits for a rollout group that is settled": """
        SELECT 'turn ' || t.id || ' of episode ' || e.id FROM turns t JOIN episodes e ON e.id = t.episode_id
            JOIN rollout_groups g ON g.id = e.group_id
        WHERE t.outcome = 'waiting' AND g.state <> 'open' AND t.entered_at < now() - interval '10 minutes'""",
    "the key of an episode that has ended is revoked": """
        SELECT 'episode ' || e.id FROM episodes e JOIN api_keys k ON k.episode_id = e.id
        WHERE e.state <> 'running' AND k.revoked_at IS NULL""",
    "a step takes all samples of a rollout group or none": """
        SELECT 'rollout group ' || s.rollout_group_id FROM samples s
            LEFT JOIN step_samples m ON m.sample_id = s.id
            LEFT JOIN steps p ON p.policy = m.policy AND p.n = m.step
                AND p.state IN ('claimed', 'candidate', 'committed')
        WHERE s.rollout_group_id IS NOT NULL AND s.state IN ('fresh', 'claimed', 'trained')
        GROUP BY s.rollout_group_id
        HAVING bool_or(s.state = 'fresh') AND bool_or(s.state <> 'fresh')
            OR count(DISTINCT p.n) FILTER (WHERE s.state <> 'fresh') > 1""",
    "no step trains a held-out sample": """
        SELECT 'sample ' || s.id || ', step ' || p.n || ' of ' || p.policy FROM samples s
            JOIN step_samples m ON m.sample_id = s.id AND m.dropped IS NULL
            JOIN steps p ON p.policy = m.policy AND p.n = m.step
        WHERE s.state = 'held_out' AND p.state IN ('claimed', 'candidate', 'committed')""",
    "a committed step's version exists": """
        SELECT 'step ' || s.n || ' of ' || s.policy FROM steps s
            LEFT JOIN versions v ON v.policy = s.policy AND v.n = s.n AND v.parent = s.parent
        WHERE s.state = 'committed' AND (v.path IS NULL OR v.sha256 IS NULL)""",
    "a candidate has files and was made from the head of this epoch": """
        SELECT 'version ' || s.n || ' of ' || s.policy FROM steps s JOIN policies p ON p.id = s.policy
            LEFT JOIN versions v ON v.policy = s.policy AND v.n = s.n AND v.parent = s.parent
        WHERE s.state = 'candidate'
            AND (v.path IS NULL OR v.removed_at IS NOT NULL OR (s.parent, s.epoch) <> (p.head, p.epoch))""",
    "no version answers, and none is trained on, that the gate has not accepted": """
        SELECT 'version ' || w.n || ' of ' || p.id || ' is ' || s.state FROM policies p
            CROSS JOIN LATERAL (VALUES (p.head), (p.active), (p.pinned)) w (n)
            JOIN steps s ON s.policy = p.id AND s.n = w.n
        WHERE s.state <> 'committed'
        UNION ALL
        SELECT 'step ' || c.n || ' of ' || c.policy || ' began from ' || c.parent || ', which is ' || s.state
        FROM steps c JOIN steps s ON s.policy = c.policy AND s.n = c.parent WHERE s.state <> 'committed'""",
    "a version that began as another policy's has the files of it": """
        SELECT 'version ' || v.n || ' of ' || v.policy FROM versions v
            JOIN versions o ON o.policy = v.origin_policy AND o.n = v.origin_n
        WHERE v.origin_policy = v.policy OR (v.path, v.sha256) IS DISTINCT FROM (o.path, o.sha256)""",
    "a rejected version has a failed check and a reason": """
        SELECT 'version ' || s.n || ' of ' || s.policy FROM steps s
        WHERE s.state = 'rejected' AND (coalesce(s.reason, '') = '' OR NOT EXISTS (
            SELECT FROM gate_checks g WHERE g.policy = s.policy AND g.version = s.n AND g.result = 'failed'))""",
    "head, active and pinned versions exist and have files": """
        SELECT 'version ' || w.n || ' of ' || p.id FROM policies p
            CROSS JOIN LATERAL (VALUES (p.head), (p.active), (p.pinned)) w (n)
            LEFT JOIN versions v ON v.policy = p.id AND v.n = w.n
        WHERE w.n IS NOT NULL AND (v.n IS NULL OR v.removed_at IS NOT NULL)""",
    "a canary is the head, and an accepted version": """
        SELECT 'version ' || p.canary || ' of ' || p.id FROM policies p
            LEFT JOIN steps s ON s.policy = p.id AND s.n = p.canary
        WHERE p.canary IS NOT NULL AND (p.canary <> p.head OR p.canary_share IS NULL OR p.canary_since IS NULL
            OR s.state IS DISTINCT FROM 'committed')""",
    "the active version is loaded where requests go": """
        SELECT 'version ' || p.active || ' of ' || p.id FROM policies p
        WHERE p.active > 0 AND p.retired_at IS NULL
            AND EXISTS (SELECT FROM engines e WHERE NOT e.draining AND e.problem IS NULL)
            AND NOT EXISTS (
                SELECT FROM engine_versions v JOIN engines e ON e.id = v.engine_id
                WHERE v.policy = p.id AND v.version = p.active AND NOT e.draining)""",
    "a policy with a full batch, and not paused, is known to have work": """
        SELECT 'policy ' || p.id || ', ' || w.samples || ' samples of chats, ' || w.groups || ' rollout groups'
        FROM policies p JOIN recipes r ON r.hash = p.recipe_hash CROSS JOIN LATERAL (
            SELECT count(*) FILTER (WHERE s.rollout_group_id IS NULL) AS samples,
                count(DISTINCT s.rollout_group_id) AS groups
            FROM samples s WHERE s.policy = p.id AND s.state = 'fresh') w
        WHERE p.paused_reason IS NULL AND NOT p.work_waiting
            AND NOT EXISTS (SELECT FROM steps c WHERE c.policy = p.id AND c.state IN ('claimed', 'candidate'))
            AND (w.samples >= CAST(r.content->'train'->>'batch_samples' AS int)
                OR w.groups >= CAST(r.content->'train'->>'batch_groups' AS int))""",
}
"""Invariant → query for descriptions of the rows that violate it."""


@dataclass(frozen=True, slots=True)
class Violation:
    """
    Args:
        row: describes the row.
    """

    invariant: str
    row: str


async def violations(database: Database) -> list[Violation]:
    """All violations in one snapshot.

    Raises:
        StoreUnavailable
    """
    return await database.run(_violations)


async def committed_versions(database: Database) -> list[VersionRef]:
    """The versions of committed steps, of the own policy or another one, and those that were brought along, whose files
    were not removed.

    Raises:
        StoreUnavailable
    """

    async def read(connection: AsyncConnection) -> list[VersionRef]:
        query = (
            select(VersionRow)
            .outerjoin(
                StepRow,
                (StepRow.policy == func.coalesce(VersionRow.origin_policy, VersionRow.policy))
                & (StepRow.n == func.coalesce(VersionRow.origin_n, VersionRow.n)),
            )
            .where(
                func.coalesce(StepRow.state, "committed") == "committed",
                VersionRow.path.is_not(None),
                VersionRow.removed_at.is_(None),
            )
        )
        rows = await connection.execute(query.order_by(VersionRow.policy, VersionRow.n))
        return [version_ref(row) for row in rows]

    return await database.run(read)


async def _violations(connection: AsyncConnection) -> list[Violation]:
    await connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
    found: list[Violation] = []
    for invariant, query in INVARIANTS.items():
        rows = await connection.scalars(text(f"{query} LIMIT {MAX_LISTED}"))
        found += [Violation(invariant, row) for row in rows]
    return found
