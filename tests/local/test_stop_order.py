"""The promise of `clawloop up`: it stops within 20 s."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from clawloop.app.local import parts
from clawloop.app.local.parts import Deployment
from clawloop.app.local.services import temporal_server
from clawloop.app.local.services.postgres import EmbeddedPostgres
from clawloop.app.local.services.vllm import EngineOptions, ModelFacts
from clawloop.app.local.supervision import guard
from clawloop.app.local.supervision.supervisor import GUARD_SECONDS, Part
from clawloop.core.families.chat_format import ChatFormat
from clawloop.core.families.template import Thinking

PROMISED = timedelta(seconds=20)


def bound(started: Sequence[Part]) -> timedelta:
    """The longest that `Supervisor.stop` waits: the parts of a group stop at once, the groups one after another."""
    within = {part.name: part.stop_within for part in started}
    groups = [group for group in parts.stop_order(within) if group]
    return sum((max(within[name] for name in group) for group in groups), timedelta()) + timedelta(
        seconds=GUARD_SECONDS * len(groups)
    )


def test_the_bounds_of_all_parts_add_up_to_less_than_promised(tmp_path: Path) -> None:
    deployment = Deployment(
        tmp_path,
        "postgresql://x",
        "x:1",
        engines=("http://127.0.0.1:1", "http://127.0.0.1:2"),
        base_model="tiny",
        aliases=(),
        keys={},
        local_engines=("http://127.0.0.1:1", "http://127.0.0.1:2"),
        sandboxed="http://127.0.0.1:3",
    )
    model = ModelFacts(tmp_path, "tiny", ChatFormat(Thinking.NEVER, None, None))
    engines = [parts.ENGINE, parts.numbered(parts.ENGINE, 1, 2), parts.JUDGE_ENGINE]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        started = [
            parts.postgres(EmbeddedPostgres(tmp_path / "postgres", port=1)),
            parts.temporal(tmp_path, temporal_server.Ports(1, 2, 3), {}),
            *(parts.vllm(name, model, EngineOptions(1, ()), "CPU", {}) for name in engines),
            *parts.gateways(deployment, listener, 2, {}),
            *parts.workers(deployment, {}),
            parts.trainer(tmp_path, deployment, {}),
        ]
    assert {parts.AGENT + "-0", parts.AGENT + "-1", parts.ENVIRONMENT, parts.TRAINER} <= {part.name for part in started}
    assert bound(started) < PROMISED


def test_what_writes_stops_before_what_it_writes_to() -> None:
    order = parts.stop_order(["postgres", "temporal", "vllm-judge", "vllm-0", "gateway", "trainer", "judge"])
    assert order == [["gateway", "trainer", "judge"], ["temporal", "vllm-judge", "vllm-0"], ["postgres"]]


def test_a_guard_has_ended_orphans_before_it_is_killed_itself() -> None:
    """Else what a part leaves behind would outlive both."""
    assert guard.ORPHAN_SECONDS < GUARD_SECONDS
