"""Sessions and turns in words, for the command line. Knows nothing about where they come from."""

from __future__ import annotations

from clawloop.contracts.views import SessionView, TurnView
from clawloop.judging.voting import signed


def session_row(session: SessionView) -> dict[str, str]:
    return {
        "id": str(session.id),
        "policy": session.policy,
        "state": session.state,
        "turns": str(session.main_turns),
        "side": str(session.side_turns),
        "waiting": str(session.waiting),
        "sampled": str(session.sampled),
        "newest turn": session.last_turn_at.isoformat(timespec="seconds"),
        "closed": session.closed_why or "",
        "at least one": session.guarantee or "",
    }


def turn_row(turn: TurnView) -> dict[str, str]:
    return {
        "turn": "" if turn.number is None else str(turn.number),
        "id": str(turn.id),
        "kind": turn.kind,
        "status": turn.status,
        "version": str(turn.version),
        "verdict": "" if turn.verdict is None else signed(turn.verdict),
        "sample": turn.sample or "",
        "step": "" if turn.step is None else str(turn.step),
        "outcome": turn.outcome,
        "why": turn.why or "",
    }


def turn_facts(turn: TurnView) -> dict[str, str]:
    """All that is known of one turn; what is not known is left out."""
    known = {
        "outcome": turn.outcome,
        "why": turn.why,
        "turn": None if turn.number is None else f"{turn.number} of session {turn.session_id}",
        "kind": f"{turn.kind}: {turn.kind_reason}",
        "status": turn.status if turn.error is None else f"{turn.status}: {turn.error}",
        "version": str(turn.version),
        "verdict": None if turn.verdict is None else signed(turn.verdict),
        "expected": None if turn.expected is None else f"{turn.expected:+.2f} of {turn.votes} valid votes",
        "hint": turn.hint,
        "sample": turn.sample,
        "reward": None if turn.reward is None else f"{turn.reward:+g}",
        "step": None if turn.step is None else str(turn.step),
        "announced": None if turn.announced_at is None else turn.announced_at.isoformat(timespec="seconds"),
    }
    return {name: str(value) for name, value in known.items() if value is not None}
