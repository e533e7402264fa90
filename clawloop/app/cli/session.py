"""`clawloop session` and `clawloop why`: sessions, their turns, and each turn's result with its reason.

Heavy imports happen inside a verb.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from clawloop.app.cli.operations import with_operations
from clawloop.app.cli.terminal import AsJson, Data, age, show_facts, show_json, show_table, when

if TYPE_CHECKING:
    from clawloop.core.contracts.views import SessionPage, SessionView, TurnView
    from clawloop.operations.reading import Reading

session_app = typer.Typer(no_args_is_help=True, help="Sessions and the results of their turns.")

SESSION_HELP = "An id or its beginning, the client's own id, a reply's id, or last."
TURN_HELP = "An id or its beginning, a reply's id (chatcmpl-…), SESSION:N, or last."
_PAGE = 500
Choice = TypeVar("Choice", bound=StrEnum)
More = Annotated[bool, typer.Option("--more", help="All of them.")]


@session_app.command("list")
def list_sessions(
    policy: Annotated[str | None, typer.Option(help="Only sessions of this policy.")] = None,
    state: Annotated[str | None, typer.Option(help="open, ending or closed.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500)] = 20,
    more: More = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="Also sessions of side turns alone, and closed ones of a single turn.")
    ] = False,
    text: Annotated[str | None, typer.Option(help="Only those in which this was said.")] = None,
    verdict: Annotated[int | None, typer.Option(min=-1, max=1, help="Only those with a turn of this verdict.")] = None,
    judged: Annotated[
        bool | None, typer.Option("--judged/--unjudged", help="Only those with a turn that has a verdict, or has none.")
    ] = None,
    outcome: Annotated[str | None, typer.Option(help="Only those with a turn of this outcome, e.g. trained.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only those with a turn of this kind: main or side.")] = None,
    version: Annotated[
        int | None, typer.Option(min=0, max=2**31 - 1, help="Only those with a turn that this version answered.")
    ] = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """List sessions, the one with the newest turn first. One turn has to fit all that is said of turns."""
    from clawloop.core.contracts.sessions import SessionState
    from clawloop.core.contracts.turns import TurnKind, TurnOutcome
    from clawloop.core.contracts.views import SessionFilter

    wanted = SessionFilter(
        policy=policy,
        state=_one_of(SessionState, state, "--state"),
        text=(text or "").strip() or None,
        verdict=verdict,
        judged=judged,
        outcome=_one_of(TurnOutcome, outcome, "--outcome"),
        kind=_one_of(TurnKind, kind, "--kind"),
        version=version,
        fold=not show_all,
    )

    async def read(reading: Reading) -> SessionPage:
        page = await reading.page(wanted, limit=_PAGE if more else limit)
        while more and page.next is not None:
            further = await reading.page(wanted, after=str(page.next), limit=_PAGE)
            page = further.model_copy(update={"sessions": [*page.sessions, *further.sessions]})
        return page

    _show_page(with_operations(data, lambda operations: read(operations.reading)), as_json)


def _show_page(page: SessionPage, as_json: bool) -> None:
    if as_json:
        show_json(page)
        return
    # A search counts no total.
    show_table(
        [_session_row(session) for session in page.sessions], "nothing yet" if page.total is not None else "none fits"
    )
    if page.total is None and page.next is not None:
        typer.echo(f"the newest {len(page.sessions)}, --more")
    if page.total is not None and len(page.sessions) < page.total:
        typer.echo(f"{len(page.sessions)} of {page.total}, --more")
    if page.folded:
        sessions = "1 session" if page.folded == 1 else f"{page.folded} sessions"
        typer.echo(f"{sessions} of a single turn or of side turns alone left out, --all")


def _one_of(choices: type[Choice], value: str | None, option: str) -> Choice | None:
    try:
        return None if value is None else choices(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r}: use {', '.join(choices)}", param_hint=option) from None


@session_app.command("show")
def show_session(
    session: Annotated[str, typer.Argument(help=SESSION_HELP)],
    full: Annotated[bool, typer.Option("--full", help="Shorten nothing.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=500, help="The newest turns.")] = 20,
    more: More = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show a session as a conversation, with the outcome of each reply and its reason."""
    from clawloop.app.cli.conversation import conversation_lines

    detail = with_operations(
        data, lambda operations: operations.reading.session(session, limit=500 if more else limit, content=True)
    )
    if as_json:
        show_json(detail)
        return
    for line in conversation_lines(detail, full=full):
        typer.echo(line)
    if detail.earlier is not None:
        total = detail.session.main_turns + detail.session.side_turns
        typer.echo(f"\nthe newest {len(detail.turns)} of {total} turns, --more")


def why_command(
    turn: Annotated[str, typer.Argument(metavar="ID", help=TURN_HELP)],
    tokens: Annotated[
        bool, typer.Option("--tokens", help="The reply's tokens, each with its advantage in the step that trained it.")
    ] = False,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show the result of one reply's turn, and the reason."""
    if tokens:
        from clawloop.app.cli.conversation import show_tokens

        show_tokens(turn, data, as_json=as_json)
        return
    view = with_operations(data, lambda operations: operations.reading.turn(turn))
    if as_json:
        show_json(view)
    else:
        show_facts(_turn_facts(view))


def _session_row(session: SessionView) -> dict[str, str]:
    return {
        "id": session.short_id,
        "age": age(session.last_turn_at),
        "state": session.state,
        "turns": f"{session.main_turns}+{session.side_turns}" if session.side_turns else str(session.main_turns),
        "learned": str(session.sampled),
        "title": session.title or session.external_id or "",
    }


def _turn_facts(turn: TurnView) -> dict[str, str]:
    """The turn's fields by their label; fields without a value are left out."""
    from clawloop.core.judging.voting import signed
    from clawloop.core.turns.explain import FORGOTTEN, FOUND_BY

    facts = {
        "outcome": turn.outcome,
        "why": turn.why,
        "turn": turn.short_id if turn.number is None else f"{turn.short_id}, number {turn.number} of its session",
        "session": str(turn.session_id),
        "response": turn.response_id,
        "kind": f"{turn.kind}: {turn.kind_reason}",
        "follows": None if turn.matched_by is None else f"{turn.parent_turn_id}, {FOUND_BY[turn.matched_by]}",
        "status": turn.status if turn.error is None else f"{turn.status}: {turn.error}",
        "version": str(turn.version),
        "lessons": "; ".join(lesson.text or FORGOTTEN for lesson in turn.lessons) or None,
        "verdict": None if turn.verdict is None else signed(turn.verdict),
        "expected": _mean_vote(turn),
        "hints": "; ".join(hint.line() for hint in turn.hints if hint.source == "judge") or None,
        "next message": "; ".join(hint.line() for hint in turn.hints if hint.source == "message") or None,
        "practised with": "; ".join(hint.line() for hint in turn.hints if hint.source == "lessons") or None,
        "sample": turn.sample,
        "reward": None if turn.reward is None else f"{turn.reward:+g}",
        "step": None if turn.step is None else str(turn.step),
        "began": f"{when(turn.started_at)}, {age(turn.started_at)} ago",
        "notified": None if turn.announced_at is None else when(turn.announced_at),
        "workflow": f"session/{turn.session_id}",
        "link": turn.workflow_url,
    }
    return {label: str(value) for label, value in facts.items() if value is not None}


def _mean_vote(turn: TurnView) -> str | None:
    """Mean vote; None if no judge voted, e.g. because the user rated the reply."""
    if turn.expected is None or not turn.votes:
        return None
    return f"{turn.expected:+.2f} of {turn.votes} valid votes"
