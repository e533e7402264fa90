"""`clawloop probe`: prompts that the gate asks of each version. Heavy imports happen inside a verb."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clawloop.app.cli.terminal import AsJson, Data, Policy, age, show_json, show_table, with_policy
from clawloop.core.errors import SetupError
from clawloop.core.ids import short_form

if TYPE_CHECKING:
    from clawloop.core.contracts.training import ProbeContent, StoredProbe
    from db.database import Database

probe_app = typer.Typer(no_args_is_help=True, help="Probes: prompts that the gate asks of each version.")

_SHOWN = 30  # characters of a prompt in the list


@probe_app.callback()
def probe() -> None:
    """Probes: prompts that the gate asks of each version."""


@probe_app.command("add")
def add_probes(
    file: Annotated[
        Path | None, typer.Argument(exists=True, dir_okay=False, help="JSON lines, a probe each.", metavar="[FILE]")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="One probe, instead of a file.")] = None,
    contains: Annotated[
        list[str] | None, typer.Option(help="With --prompt: a text the answer has to contain; repeatable.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="With --prompt: a pattern that has to match in the answer.")] = None,
    exact: Annotated[str | None, typer.Option(help="With --prompt: the whole answer.")] = None,
    policy: Policy = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Add probes, from a file or one from the options; a file with a line that cannot be used adds none."""
    if (file is None) == (prompt is None):
        raise typer.BadParameter("give a file or --prompt", param_hint="FILE")
    if file is not None and (contains or regex is not None or exact is not None):
        raise typer.BadParameter("belongs to --prompt; in a file it is a key of each line", param_hint="--contains")
    probes = _read_file(file) if file is not None else _read_options(prompt, contains, regex, exact)
    from clawloop.operations.probes import MOST_PROBES
    from db.training.probes import PostgresProbeStore

    added = with_policy(
        data, policy, lambda database, name: PostgresProbeStore(database).add(name, probes, MOST_PROBES)
    )
    if as_json:
        _show(added)
    else:
        typer.echo(f"{len(added)} added; the next version is asked")


@probe_app.command("list")
def list_probes(policy: Policy = None, data: Data = None, as_json: AsJson = False) -> None:
    """List the policy's probes."""
    from db.training.probes import PostgresProbeStore

    probes = with_policy(data, policy, lambda database, name: PostgresProbeStore(database).all(name))
    if as_json:
        _show(probes)
        return
    show_table([_row(probe, probes) for probe in probes])


@probe_app.command("remove")
def remove_probe(
    probe: Annotated[str, typer.Argument(metavar="ID", help="From `clawloop probe list`, or its beginning.")],
    policy: Policy = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Remove a probe."""
    from clawloop.operations.probes import find_probe
    from db.training.probes import PostgresProbeStore

    async def remove(database: Database, name: str) -> list[StoredProbe]:
        store = PostgresProbeStore(database)
        await store.remove(name, find_probe(name, await store.all(name), probe))
        return await store.all(name)

    left = with_policy(data, policy, remove)
    if as_json:
        _show(left)
    else:
        typer.echo("removed")


def _show(probes: list[StoredProbe]) -> None:
    from clawloop.core.contracts.answers import Probe, ProbeList

    show_json(ProbeList(probes=[Probe.of(probe) for probe in probes]))


def _read_file(file: Path) -> list[ProbeContent]:
    """
    Raises:
        SetupError: it cannot be read, is empty, or names each line that is no probe.
    """
    from clawloop.operations.probes import read_probe_lines

    try:
        probes, faults = read_probe_lines(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{file} cannot be read: {error}") from error
    if faults:
        lines = "; ".join(f"line {number}: {fault}" for number, fault in faults.items())
        raise SetupError(f"{file}: none was added, because {len(faults)} cannot be used: {lines}")
    if not probes:
        raise SetupError(
            f'{file} has no probe: write one JSON object a line, e.g. {{"prompt": "What is 2 + 2?", "contains": "4"}}'
        )
    return probes


def _read_options(
    prompt: str | None, contains: list[str] | None, regex: str | None, exact: str | None
) -> list[ProbeContent]:
    from clawloop.operations.probes import read_probes

    written: dict[str, Any] = {"prompt": prompt, "contains": contains or None, "regex": regex, "exact": exact}
    probes, faults = read_probes([written])
    if faults:
        raise SetupError(f"the probe cannot be used: {faults[0]}")
    return probes


def _row(probe: StoredProbe, probes: list[StoredProbe]) -> dict[str, str]:
    content = probe.content
    text = str(content.messages[-1].get("content") or "")
    checks = [f"contains {part!r}" for part in content.contains]
    checks += [f"regex {content.regex!r}"] if content.regex is not None else []
    checks += [f"exact {content.exact!r}"] if content.exact is not None else []
    return {
        "id": short_form(probe.id, *(other.id for other in probes if other.id != probe.id)),
        "age": age(probe.created_at),
        "from": "general" if probe.general else "operator",
        "tools": str(len(content.tools or ())),
        "prompt": _shortened(text.replace("\n", " "), _SHOWN),
        "checks": ", ".join(checks) or "compared by the judge",
    }


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
