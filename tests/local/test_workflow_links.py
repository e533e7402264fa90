"""Links into Temporal's UI: where its address comes from, and what a link is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from clawloop.app.local import parts
from clawloop.app.local.parts import Deployment
from clawloop.app.processes.endpoints import RuntimeAddresses, read_runtime_file, workflow_links, write_runtime_file
from clawloop.core.errors import SetupError
from clawloop.core.settings import Settings, read_settings
from clawloop.operations.workflow_links import NO_LINKS, WorkflowLinks

UI = "http://127.0.0.1:8233"


def test_a_link_is_one_segment_of_the_address_whatever_the_id_holds() -> None:
    links = WorkflowLinks(UI)
    assert links.of("session/0b1") == f"{UI}/namespaces/default/workflows/session%2F0b1"
    assert (
        links.of("engine/127.0.0.1:8100?x#y") == f"{UI}/namespaces/default/workflows/engine%2F127.0.0.1%3A8100%3Fx%23y"
    )
    assert links.named("training/default") == f"training/default  {UI}/namespaces/default/workflows/training%2Fdefault"
    assert (NO_LINKS.of("session/0b1"), NO_LINKS.named("session/0b1")) == (None, "session/0b1")


def test_the_setting_comes_before_what_up_started_and_another_temporal_has_no_ui_of_ups(tmp_path: Path) -> None:
    def ui(**given: str) -> str | None:
        return workflow_links(Settings.model_validate({"data": tmp_path} | given)).ui

    assert ui() is None
    write_runtime_file(tmp_path, RuntimeAddresses("postgresql://me@here/x", "here:7233", UI, None, None))
    assert ui() == UI
    assert ui(temporal_ui="https://temporal.example.test/") == "https://temporal.example.test"
    assert ui(TEMPORAL_ADDRESS="elsewhere:7233") is None
    write_runtime_file(tmp_path, RuntimeAddresses("postgresql://me@here/x", "here:7233", None, None, None))
    assert ui() is None
    (tmp_path / "running.json").write_text('{"database_url": "x", "temporal_address": "y", "temporal_ui": 7}')
    with pytest.raises(SetupError, match="is damaged"):
        read_runtime_file(tmp_path)


def test_an_address_that_a_browser_would_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAWLOOP_TEMPORAL_UI", "javascript:alert(1)")
    with pytest.raises(SetupError, match=r"CLAWLOOP_TEMPORAL_UI: it must begin with http:// or https://"):
        read_settings()
    monkeypatch.setenv("CLAWLOOP_TEMPORAL_UI", "")
    assert read_settings().temporal_ui is None


def test_up_tells_its_gateways_and_workers_where_the_ui_is(tmp_path: Path) -> None:
    deployment = Deployment(
        data=tmp_path,
        database_url="postgresql://me@here/x",
        temporal_address="127.0.0.1:7233",
        engines=(),
        base_model="tiny",
        aliases=(),
        keys={},
    )
    for given, told in ((deployment, None), (replace(deployment, temporal_ui=UI), UI)):
        for part in parts.workers(given, {}):
            assert part.prepare().environment.get("CLAWLOOP_TEMPORAL_UI") == told


def test_the_runtime_file_has_it_for_other_commands(tmp_path: Path) -> None:
    write_runtime_file(tmp_path, RuntimeAddresses("postgresql://me@here/x", "here:7233", UI, None, None))
    assert json.loads((tmp_path / "running.json").read_text())["temporal_ui"] == UI
    assert read_runtime_file(tmp_path) == RuntimeAddresses("postgresql://me@here/x", "here:7233", UI, None, None)
