"""Whether a judge was asked for answers that were stored before: each answer is paid for once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import psycopg

from clawloop.core.ids import TurnId
from clawloop.core.judging.evidence import choose_mark
from clawloop.core.judging.records import HINTS
from tests.chaos.judge_relay import Question, session_of

# An answer's time is that of its transaction's begin.
CLOCK_SECONDS = 0.5

Answered = dict[tuple[str, int | None, str], list[float]]
"""When answers were stored, by their kind, the chatting user and the mark of the judged turn.

A mark has 24 bits, so that two turns of one user hardly have the same one.
"""

_STORED = """
    SELECT a.kind, t.id, t.messages_added::text, extract(epoch FROM a.answered_at)::float8
    FROM (SELECT judgement_id, kind, answered_at FROM votes
          UNION ALL SELECT judgement_id, %s, answered_at FROM hints) a
        JOIN judgements j ON j.id = a.judgement_id JOIN turns t ON t.id = j.turn_id
"""


def stored_answers(database_url: str) -> Answered:
    found: Answered = defaultdict(list)
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(_STORED, [HINTS]).fetchall()
    for kind, turn_id, messages, answered_at in rows:
        # No message of a chatting user contains a mark, so it is the turn's first one.
        found[kind, session_of(messages), choose_mark(TurnId(turn_id), [])].append(answered_at)
    return found


def asked_again(questions: Sequence[Question], stored: Answered, wanted: Mapping[str, int]) -> list[str]:
    """Questions for more answers than were missing.

    Args:
        wanted: how many answers of each kind a judgement has.
    """
    found = []
    for question in questions:
        answered = stored.get((question.kind, question.session, question.mark), [])
        count = sum(at < question.asked_at - CLOCK_SECONDS for at in answered)
        if question.answers > wanted[question.kind] - count:
            found.append(f"{question} was asked though {count} of {wanted[question.kind]} answers were stored")
    return found
