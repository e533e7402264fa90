"""A program for test_up.py: `clawloop up` with a stand-in gateway, and a preparation that leaves a trace.

`python up_with_stand_ins.py OPTIONS…`; the options are those of `clawloop up`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import replace

import psycopg
import typer

from clawloop.cli.up import up_command
from clawloop.local import parts, up
from clawloop.local.supervision.part import Launch, Part
from clawloop.settings import Settings

SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ["CLAWLOOP_ENGINES"].encode())
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


def gateway(facts: up.Surroundings, host: str, port: int, environment: Mapping[str, str]) -> Part:
    real = parts.gateway(facts, host, port, environment)
    command = (sys.executable, "-c", SERVER, host, str(port))
    return replace(real, prepare=lambda: Launch(command, real.prepare().environment))


async def prepare(surroundings: up.Surroundings) -> Mapping[str, str]:
    """Counts the starts in the database; makes keys where there are none."""
    async with await psycopg.AsyncConnection.connect(surroundings.database_url) as connection:
        await connection.execute("CREATE TABLE IF NOT EXISTS starts ()")
        await connection.execute("INSERT INTO starts DEFAULT VALUES")
        counted = await (await connection.execute("SELECT count(*) FROM starts")).fetchone()
    assert counted is not None
    print(f"start {counted[0]} of {surroundings.base_model} as {surroundings.aliases}", flush=True)  # noqa: T201
    return dict(surroundings.keys) or {"chat": "ck-1", "admin": "ak-1"}


app = typer.Typer()


@app.callback()
def program() -> None:
    """One verb, as in `clawloop`."""


if __name__ == "__main__":
    up.run = functools.partial(up.run, gateway=gateway, workers=lambda *_: [])
    app.command("up")(up_command(Settings, lambda: prepare))
    app()
