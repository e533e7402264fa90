"""A program for test_up.py: `clawloop up` with a stand-in gateway, no workers, and a `prepare` that counts its calls.

`python up_with_stand_ins.py up OPTIONS…`; the options are those of `clawloop up`.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace

import psycopg
import typer

from clawloop.app.cli import up
from clawloop.app.local import parts
from clawloop.app.local.parts import Deployment
from clawloop.app.local.private_folder import UMASK
from clawloop.app.local.supervision.supervisor import Launch, Part

SERVER = """
import http.server, os, socket, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ["CLAWLOOP_ENGINES"].encode())
listener = socket.socket(fileno=int(sys.argv[1]))
server = http.server.HTTPServer(listener.getsockname(), Handler, bind_and_activate=False)
server.socket = listener
server.serve_forever()
"""
real_gateways = parts.gateways


def gateways(deployment: Deployment, listener: socket.socket, count: int, environment: Mapping[str, str]) -> list[Part]:
    def stand_in(real: Part) -> Part:
        launch = real.prepare()
        command = (sys.executable, "-c", SERVER, str(listener.fileno()))
        return replace(
            real,
            prepare=lambda: Launch(command, launch.environment, pass_fds=launch.pass_fds),
            is_ready=lambda: parts.answers_ok(real.address),
        )

    return [stand_in(real) for real in real_gateways(deployment, listener, count, environment)]


async def prepare(deployment: Deployment) -> dict[str, str]:
    """Counts the starts in the database; returns the stored keys, or new ones."""
    async with await psycopg.AsyncConnection.connect(deployment.database_url) as connection:
        await connection.execute("CREATE TABLE IF NOT EXISTS starts ()")
        await connection.execute("INSERT INTO starts DEFAULT VALUES")
        counted = await (await connection.execute("SELECT count(*) FROM starts")).fetchone()
    assert counted is not None
    print(f"start {counted[0]} of {deployment.base_model} as {deployment.aliases}", flush=True)  # noqa: T201
    return dict(deployment.keys) or {"chat": "ck-1", "admin": "ak-1"}


app = typer.Typer()
app.command("up")(up.up_command)


@app.callback()
def program() -> None:
    """One verb, as in `clawloop`."""


if __name__ == "__main__":
    os.umask(UMASK)
    parts.gateways = gateways
    parts.workers = lambda *_: []
    up.prepare_deployment = prepare
    app()
