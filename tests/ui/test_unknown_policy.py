"""A policy that does not exist is an error that names it, wherever one is asked for: not an empty list."""

from __future__ import annotations

import asyncio
import html
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute

from api.app import create_app
from tests.ui.conftest import Page
from tests.verbs import clawloop, refusal


def paths(prefix: str) -> list[str]:
    """What is read of one policy, with a policy that does not exist."""
    application = create_app(lambda: pytest.fail("no service is needed to list routes"))
    found: list[str] = []
    for route in application.routes:
        if not isinstance(route, APIRoute) or "GET" not in route.methods or not route.path.startswith(prefix):
            continue
        by_query = {field.name for field in route.dependant.query_params}
        if "policy" in by_query or "{policy}" in route.path:
            found.append(f"{route.path.format(policy='nobody', version=0)}?policy=nobody&records=turns")
    return found


async def test_on_the_page(page: Page) -> None:
    found = paths("/ui")
    assert len(found) > 8
    async with page.visitor() as visitor:
        for path in found:
            answer = await visitor.client.get(path)
            assert (answer.status_code, "no policy 'nobody'" in html.unescape(answer.text)) == (404, True), path


async def test_over_rest(page: Page) -> None:
    found = paths("/admin")
    assert len(found) > 8
    async with httpx.AsyncClient(
        base_url=page.url, headers={"Authorization": f"Bearer {page.admin_key}"}, timeout=60
    ) as client:
        for path in [*found, "/admin/v1/sessions?policy=nobody&text=words"]:
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["code"]) == (404, "policy_not_found"), path
            assert "'nobody'" in answer.json()["detail"], path


async def test_by_a_command(page: Page, tmp_path: Path) -> None:
    commands = (
        "session list",
        "session list --text words",
        f"export --out {tmp_path / 'turns.jsonl'}",
        "rollouts groups",
        "rollouts status",
        "episode list",
        "probe list",
        "recipe show",
        "training status",
        "policy events",
    )
    for command in commands:
        asked = [*command.split(), "--policy", "nobody"]
        done = await asyncio.to_thread(clawloop, *asked, DATABASE_URL=page.database_url)
        assert "'nobody'" in refusal(done), command
