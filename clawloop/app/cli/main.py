"""The `clawloop` program: registers all verbs, and runs one.

Heavy imports happen inside a verb, so that `--help` stays quick. Exit codes: 0 done, 1 failed with one line on
standard error, 2 wrong usage.
"""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import timedelta
from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from clawloop.app.cli.adapter import adapter_app
from clawloop.app.cli.chat import chat_command
from clawloop.app.cli.content import encryption_app, erase_command, export
from clawloop.app.cli.demo import demo_app
from clawloop.app.cli.engine import engine_app
from clawloop.app.cli.environment import environment_app
from clawloop.app.cli.evaluate import evaluate_command
from clawloop.app.cli.feedback import feedback
from clawloop.app.cli.judge import judge_app
from clawloop.app.cli.key import key_app, limit_key
from clawloop.app.cli.lesson import lesson_app
from clawloop.app.cli.model import model_app
from clawloop.app.cli.openclaw_config import openclaw_config
from clawloop.app.cli.plan import plan_command
from clawloop.app.cli.probe import probe_app
from clawloop.app.cli.rollouts import episode_app, rollouts_app
from clawloop.app.cli.session import session_app, why_command
from clawloop.app.cli.terminal import Data, fail, settings_of
from clawloop.app.cli.training import compare_version, list_events, policy_app, recipe_app, training_app
from clawloop.app.cli.up import up_command
from clawloop.app.cli.upkeep import check_app, recover_command, status_command
from clawloop.app.cli.worker import worker_app
from clawloop.app.local.private_folder import UMASK
from clawloop.app.processes.install_check import check_install, missing_extra
from clawloop.app.processes.process_exit import run_and_exit
from clawloop.core.errors import ClawloopError, NotFound, RecipeRejected

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"clawloop {installed_version('clawloop')}")
        raise typer.Exit


@app.callback()
def clawloop(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A personal agent's model that gets better by being used."""


app.command("up")(up_command)
app.command("chat")(chat_command)


@app.command()
def gateway(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 30000,
    fd: Annotated[
        int | None,
        typer.Option(
            min=3, help="Listen on this inherited file descriptor; a socket from systemd is found automatically."
        ),
    ] = None,
    drain_seconds: Annotated[float, typer.Option(min=0, help="Seconds that replies may go on after SIGTERM.")] = 60.0,
    name: Annotated[str | None, typer.Option(help="Label `gateway` of its metrics.")] = None,
    health_port: Annotated[int, typer.Option(help="Loopback port where this process alone answers; 0: none.")] = 0,
    peer: Annotated[
        list[int] | None,
        typer.Option(help="Health port of a gateway on the same socket, to be shown on /metrics; repeatable."),
    ] = None,
    allowed_host: Annotated[list[str] | None, typer.Option(help="A host name clients may use; repeatable.")] = None,
    data: Data = None,
) -> None:
    """Serve the OpenAI-compatible API."""
    from clawloop.app.local.checks import bound_socket, require_folder
    from clawloop.app.processes.listener import inherited_socket, systemd_socket

    settings = settings_of(data)
    require_folder(settings.data)
    listener = (systemd_socket(os.environ) if fd is None else inherited_socket(fd, "--fd")) or bound_socket(
        "the gateway", host, port, "--port"
    )
    # After the checks: these imports take seconds, and an error should not wait for them.
    import uvloop

    from api.dependencies import Limits
    from clawloop.app.processes.gateway import GatewayOptions, run_gateway
    from clawloop.core.telemetry.logs import configure_logging

    configure_logging(secrets=settings.secrets)
    options = GatewayOptions(
        listener=listener,
        name=name,
        health_port=health_port,
        peers=tuple(peer or ()),
        drain=timedelta(seconds=drain_seconds),
        allowed_hosts=frozenset(allowed_host or ()),
        limits=Limits(
            chat=settings.chat_bounds,
            engine_fields=settings.engine_fields,
            cache_per_key=settings.prefix_cache == "key",
        ),
    )
    uvloop.run(run_gateway(settings, options))  # a chat takes a fifth less CPU than on asyncio's own loop


@app.command()
def migrate(
    base_model: Annotated[
        str | None, typer.Option(help="Also create the default policy: the name by which engines serve this model.")
    ] = None,
    alias: Annotated[
        list[str] | None, typer.Option(help="With --base-model: a further model name clients may use; repeatable.")
    ] = None,
    engine: Annotated[list[str] | None, typer.Option(help="With --base-model: an engine's URL; repeatable.")] = None,
    data: Data = None,
) -> None:
    """Migrate the database to this version's schema; with --base-model, also create what a gateway needs."""
    from clawloop.app.processes.bootstrap import create_default_policy
    from clawloop.app.processes.database import codec_of
    from clawloop.app.processes.endpoints import database_url, engine_secret
    from db.schema import migrate as migrate_schema

    if base_model is None and (alias or engine):
        raise typer.BadParameter("needs --base-model", param_hint="--alias" if alias else "--engine")
    settings = settings_of(data)
    url = database_url(settings)
    migrate_schema(url)
    typer.echo("The database has this version's schema.")
    if base_model is not None:
        aliases = alias or [base_model.rsplit("/", 1)[-1].lower()]
        secret = engine_secret(settings)()
        content = codec_of(settings.encryption_key_file)
        silent = asyncio.run(
            create_default_policy(url, base_model, aliases, engine or [], settings.model_folder, secret, content)
        )
        for line in silent:
            typer.echo(line, err=True)
        typer.echo(f"The default policy exists, for {base_model}.")


app.command("plan")(plan_command)
app.command("recover")(recover_command)
app.command("erase")(erase_command)
app.command("why")(why_command)
app.command("status")(status_command)
app.command("evaluate")(evaluate_command)
app.add_typer(check_app, name="check")
app.add_typer(session_app, name="session")
app.command("export")(export)
app.command("feedback")(feedback)
app.command("openclaw-config")(openclaw_config)
key_app.command("limit")(limit_key)
app.add_typer(key_app, name="key")
app.add_typer(encryption_app, name="encryption")
app.add_typer(engine_app, name="engine")
app.add_typer(worker_app, name="worker")
app.add_typer(training_app, name="training")
policy_app.command("compare")(compare_version)
policy_app.command("events")(list_events)
app.add_typer(policy_app, name="policy")
app.add_typer(recipe_app, name="recipe")
app.add_typer(judge_app, name="judge")
app.add_typer(lesson_app, name="lesson")
app.add_typer(probe_app, name="probe")
app.add_typer(rollouts_app, name="rollouts")
app.add_typer(episode_app, name="episode")
app.add_typer(environment_app, name="environment")
app.add_typer(adapter_app, name="adapter")
app.add_typer(model_app, name="model")
app.add_typer(demo_app, name="demo")


def main() -> None:
    """Run a verb, then end the process; a failure is one line on standard error."""
    os.umask(UMASK)
    run_and_exit(run_verb)


def run_verb() -> None:
    """Run the verb that the command line names.

    Raises:
        SystemExit: always; a failure has been printed.
    """
    try:
        check_install()
        app()
    except RecipeRejected as error:
        fail("\n  ".join(error.lines))
    except NotFound as error:
        fail(
            f"{error} `clawloop policy list` shows those there are." if error.code == "policy_not_found" else str(error)
        )
    except ClawloopError as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        reason = missing_extra(error)
        if reason is None:
            raise
        fail(reason)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
