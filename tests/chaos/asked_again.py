"""Whether a judge was asked for answers that were stored before: each answer is paid for once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import psycopg

from clawloop.core.ids import TurnId
from clawloop.core.judging.evidence import choose_mark
from clawloop.core.judging.records import HINTS
from tests.chaos.judge_relay import Question, session_of

# The time of a row is that of its transaction's begin, which a busy PostgreSQL commits a while later. Temporal gives up
# a worker that lost a judgement only after 30 s, so that the questions of its successor come later than this.
COMMIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Stored:
    """
    Args:
        judgement: a turn has several where it is judged again; each has answers of its own.
    """

    judgement: UUID
    at: float


Answered = dict[tuple[str, int | None, str], list[Stored]]
"""Stored answers, by their kind, the chatting user and the mark of the judged turn.

A mark has 24 bits, so that two turns of one user hardly have the same one.
"""

_STORED = """
    SELECT a.kind, t.id, t.messages_added::text, j.id, extract(epoch FROM a.answered_at)::float8
    FROM (SELECT judgement_id, kind, answered_at FROM votes
          UNION ALL SELECT judgement_id, %s, answered_at FROM hints) a
        JOIN judgements j ON j.id = a.judgement_id JOIN turns t ON t.id = j.turn_id
"""


def stored_answers(database_url: str) -> Answered:
    found: Answered = defaultdict(list)
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(_STORED, [HINTS]).fetchall()
    for kind, turn_id, messages, judgement, answered_at in rows:
        # No message of a chatting user contains a mark, so it is the turn's first one.
        key = kind, session_of(messages), choose_mark(TurnId(turn_id), [])
        found[key].append(Stored(judgement, answered_at))
    return found


def asked_again(questions: Sequence[Question], stored: Answered, wanted: Mapping[str, int]) -> list[str]:
    """Questions for more answers than each judgement of the turn was missing.

    Args:
        wanted: how many answers of each kind a judgement has.
    """
    found = []
    for question in questions:
        answers = stored.get((question.kind, question.session, question.mark), [])
        counts: Counter[UUID] = Counter()
        for answer in answers:
            counts[answer.judgement] += answer.at < question.asked_at - COMMIT_SECONDS
        # A question does not say for which judgement it is: it is for the one that misses most.
        count = min(counts.values(), default=0)
        if question.answers > wanted[question.kind] - count:
            times = sorted(round(answer.at - question.asked_at, 1) for answer in answers)
            of_all = f"{count} of {wanted[question.kind]}"
            found.append(f"{question} was asked though {of_all} answers were stored, at {times} s from it")
    return found
