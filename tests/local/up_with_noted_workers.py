"""A program for test_up.py: as up_with_stand_ins.py, with workers that only note how they were started."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from clawloop.app.cli import up
from clawloop.app.local import parts
from clawloop.app.local.parts import Deployment
from clawloop.app.local.supervision.supervisor import Launch, Part
from tests.local import up_with_stand_ins

# Answers /readyz once it has noted its arguments and variables.
NOTING = """
import http.server, json, os, pathlib, sys
name, *arguments = sys.argv[1:]
noted = {"arguments": arguments, "environment": dict(os.environ)}
pathlib.Path(os.environ["NOTES"], f"{name}.json").write_text(json.dumps(noted))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *words):
        pass
port = int(arguments[arguments.index("--health-port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
real_workers, real_trainer = parts.workers, parts.trainer


def noting(part: Part) -> Part:
    def prepare() -> Launch:
        launch = part.prepare()
        arguments = launch.command[launch.command.index("worker") + 1 :]
        return Launch((sys.executable, "-c", NOTING, part.name, *arguments), launch.environment)

    return replace(part, prepare=prepare)


def workers(deployment: Deployment, environment: Mapping[str, str]) -> list[Part]:
    return [noting(part) for part in real_workers(deployment, environment)]


def trainer(model: Path, deployment: Deployment, environment: Mapping[str, str]) -> Part:
    return noting(real_trainer(model, deployment, environment))


if __name__ == "__main__":
    parts.gateways = up_with_stand_ins.gateways
    parts.workers = workers
    parts.trainer = trainer
    up.prepare_deployment = up_with_stand_ins.prepare
    up_with_stand_ins.app()
