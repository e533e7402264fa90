"""`clawloop policy compare` and `policy events`: why it answers as it does. Heavy imports happen inside a verb."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.cli.gateway_request import Url, gateway_address, kept_key, post
from clawloop.cli.show import age, printable, show_json, show_table, wrapped
from clawloop.cli.terminal import AsJson, Data, with_database

if TYPE_CHECKING:
    from clawloop.contracts.answers import Comparison
    from clawloop.contracts.browsing import PolicyEvent
    from db.database import Database

# Eight prompts, each answered twice with 512 tokens, on an engine of ten tokens a second.
_COMPARE_SECONDS = 900.0
_INDENT = "    "
Policy = Annotated[str, typer.Option(help="The policy.")]


def compare_version(
    version: Annotated[int, typer.Argument(min=1, max=2**31 - 1, help="As `policy versions` shows it.")],
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Ask both this; repeatable. Default: what was asked in replies that it was trained on."),
    ] = None,
    policy: Policy = "default",
    url: Url = None,
    key: Annotated[
        str | None, typer.Option(help="An admin key; by default the one that `up` made in the data folder.")
    ] = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Ask a version and its parent the same prompts, and show the answers under each other. Needs a running gateway."""
    from urllib.parse import quote

    from clawloop.contracts.answers import Comparison

    path = f"/admin/v1/policies/{quote(policy, safe='')}/versions/{version}/compare"
    body = {"prompts": prompt} if prompt else {}
    found = Comparison.model_validate(
        post(gateway_address(url, data), path, body, key or kept_key(data, "admin"), _COMPARE_SECONDS)
    )
    if as_json:
        show_json(found)
        return
    for line in _lines(found):
        typer.echo(line)


def _lines(found: Comparison) -> Iterator[str]:
    for number, compared in enumerate(found.prompts):
        if number:
            yield ""
        yield from wrapped(f"asked: {compared.prompt}", "")
        for answer in compared.answers:
            parent = ", its parent" if answer.version == found.parent else ""
            yield f"-- version {answer.version}{parent}"
            said = answer.text or "(nothing)" if answer.problem is None else f"no answer: {answer.problem}"
            yield from wrapped(said, _INDENT)
        first, *others = [answer.text for answer in compared.answers]
        if first is not None and others == [first]:
            yield "-- both answered the same, word for word"


def list_events(
    policy: Policy = "default",
    limit: Annotated[int, typer.Option(min=1, max=500, help="The newest ones.")] = 20,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Show a policy's events, newest first: roll-backs, pauses, recipes, rejected versions."""
    from clawloop.contracts.answers import EventList
    from db.training.browsing import PostgresTrainingBrowser
    from db.training.operators import PostgresTrainingStore

    async def read(database: Database) -> EventList:
        await PostgresTrainingStore(database).status(policy)  # there must be such a policy
        return EventList(events=await PostgresTrainingBrowser(database).events(policy, limit))

    found = with_database(data, read)
    if as_json:
        show_json(found)
        return
    show_table([_event_row(event) for event in found.events])
    if len(found.events) == limit:
        typer.echo(f"the newest {limit}, --limit shows more")


def _event_row(event: PolicyEvent) -> dict[str, str]:
    detail = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in event.detail.items() if value is not None)
    return {"age": age(event.at), "what": event.kind.replace("_", " "), "detail": printable(detail)}
