"""`/admin/v1/rollouts`, `/rollout-groups` and `/episodes`, over HTTP."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from clawloop.core.contracts.episodes import (
    Ending,
    EpisodeState,
    EpisodeView,
    GroupState,
    GroupView,
    RolloutsPlan,
)
from clawloop.core.ids import new_episode_id, new_rollout_group_id
from clawloop.environments.choice import ENVIRONMENTS
from clawloop.operations.rollouts import OURS
from tests.api.conftest import Gateway

ROLLOUTS = "/admin/v1/rollouts"
NOW = datetime(2026, 1, 2, tzinfo=UTC)


async def send(gateway: Gateway, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    async with gateway.client(gateway.admin_key) as client:
        answer = await client.request(method, path, json=body)
    return answer.status_code, answer.json()


def group_of_two() -> tuple[GroupView, list[EpisodeView]]:
    group = GroupView(
        new_rollout_group_id(), "default", "tool-call", "train-0", 2, GroupState.SETTLED, "why", 2, 0.5, NOW, NOW
    )
    episodes = [
        EpisodeView(
            id=new_episode_id(),
            group=group.id,
            policy="default",
            environment="tool-call",
            task="train-0",
            place=place,
            attempt=1,
            state=EpisodeState.SCORED,
            ending=Ending.COMPLETED,
            reward=float(place),
            advantage=2.0 * place - 1,
            reason=None,
            artifact_sha256="ab" * 32,
            turns=2,
            tokens=30,
            trained=0,
            started_at=NOW,
            ended_at=NOW,
        )
        for place in range(2)
    ]
    return group, episodes[::-1]


async def test_rollouts_are_started_paused_and_shown(fresh_gateway: Gateway) -> None:
    gateway = fresh_gateway
    assert (await send(gateway, "GET", ROLLOUTS))[1]["state"] == "never started"
    status, body = await send(gateway, "POST", f"{ROLLOUTS}/pause", {"reason": "lunch"})
    assert (status, body["code"]) == (404, "rollouts_not_found")
    status, body = await send(gateway, "POST", f"{ROLLOUTS}/start", {"environment": "tool-call", "size": 4})
    assert (status, body["state"]) == (200, "running")
    plan = {"environment": "tool-call", "size": 4, "groups": 2, "barren_limit": 20, "curriculum": False}
    assert body["plan"] == plan
    assert gateway.rollouts.plan == RolloutsPlan("tool-call", 4, 2, 20)
    chosen = {"environment": "tool-call", "size": 4, "curriculum": True}
    assert (await send(gateway, "POST", f"{ROLLOUTS}/start", chosen))[1]["plan"] == plan | {"curriculum": True}
    gateway.operator.available = False  # Temporal is away: PostgreSQL holds the change
    status, body = await send(gateway, "POST", f"{ROLLOUTS}/pause?policy=default", {"reason": "lunch"})
    assert (status, body["state"], body["reason"]) == (200, "paused", "lunch")
    assert gateway.operator.rollouts == ["default", "default"]
    assert (await send(gateway, "GET", f"{ROLLOUTS}?policy=other"))[0] == 404


async def test_an_environment_without_a_worker_is_said_at_once_and_until_one_comes(fresh_gateway: Gateway) -> None:
    gateway, rollouts = fresh_gateway, fresh_gateway.rollouts

    async def said(method: str, path: str, body: Any = None) -> str:
        line = (await send(gateway, method, path, body))[1]["no_worker"]
        assert isinstance(line, str)
        return line

    assert await said("GET", ROLLOUTS) == ""  # nothing was started, nothing is missing
    line = "no worker serves the environment 'terminal', and its episodes wait: "
    line += "`clawloop worker environment --environment terminal` starts one"
    assert await said("POST", f"{ROLLOUTS}/start", {"environment": "terminal"}) == line
    assert await said("POST", f"{ROLLOUTS}/pause", {"reason": "lunch"}) == line
    assert await said("GET", ROLLOUTS) == line
    # A worker whose places are all taken asks for nothing.
    rollouts.open = [new_rollout_group_id()]
    assert await said("GET", ROLLOUTS) == line
    rollouts.busy = set(rollouts.open)
    assert await said("GET", ROLLOUTS) == ""
    rollouts.busy = set()
    rollouts.available = False  # nobody can say, and that Temporal is away is said elsewhere
    assert await said("GET", ROLLOUTS) == ""
    rollouts.available = True
    rollouts.asking.add("terminal")
    assert await said("GET", ROLLOUTS) == ""
    rollouts.asking.clear()
    problems = (await send(gateway, "GET", "/admin/v1/status"))[1]["problems"]
    assert line not in problems  # while paused nothing waits
    await said("POST", f"{ROLLOUTS}/start", {"environment": "terminal"})
    assert line in (await send(gateway, "GET", "/admin/v1/status"))[1]["problems"]
    of_a_folder = await said("POST", f"{ROLLOUTS}/start", {"environment": "my tasks"})
    assert "`clawloop worker environment --tasks 'my tasks'`" in of_a_folder
    assert "`clawloop-environment --verifiers 'my tasks'`" in of_a_folder


def test_environments_that_a_worker_is_named_are_known() -> None:
    assert set(OURS) == set(ENVIRONMENTS)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "environment"),
        ({"environment": " "}, "environment"),
        ({"environment": "tool-call", "size": 1}, "size"),
        ({"environment": "tool-call", "groups": "2"}, "groups"),
        ({"environment": "tool-call", "barren": 0}, "barren"),
        ({"environment": "tool-call", "curriculum": "yes"}, "curriculum"),
        ({"environment": "tool-call", "more": 1}, "more"),
    ],
)
async def test_a_wrong_field_is_named_and_starts_nothing(
    fresh_gateway: Gateway, body: dict[str, Any], field: str
) -> None:
    status, answer = await send(fresh_gateway, "POST", f"{ROLLOUTS}/start", body)
    assert (status, answer["field"]) == (400, field)
    assert fresh_gateway.rollouts.plan is None


async def test_groups_and_episodes_are_listed_in_pages_and_shown(fresh_gateway: Gateway) -> None:
    gateway = fresh_gateway
    group, (second, first) = group_of_two()
    gateway.episodes.all_groups, gateway.episodes.all_episodes = [group], [second, first]
    _, groups = await send(gateway, "GET", "/admin/v1/rollout-groups")
    assert [(each["id"], each["mean_reward"]) for each in groups["groups"]] == [(str(group.id), 0.5)]
    assert groups["next"] is None
    path = f"/admin/v1/episodes?group={group.id}&limit=1"
    _, page = await send(gateway, "GET", path)
    _, rest = await send(gateway, "GET", f"{path}&after={page['next']}")
    assert [each["id"] for each in page["episodes"] + rest["episodes"]] == [str(second.id), str(first.id)]
    assert rest["next"] is None
    _, shown = await send(gateway, "GET", f"/admin/v1/episodes/{first.id}")
    assert (shown["state"], shown["ending"], shown["reward"], shown["advantage"]) == ("scored", "completed", 0.0, -1.0)
    assert (await send(gateway, "GET", f"/admin/v1/episodes/{new_episode_id()}"))[0] == 404
    assert (await send(gateway, "GET", "/admin/v1/episodes/nonsense"))[1]["code"] == "episode_not_found"
    assert (await send(gateway, "GET", "/admin/v1/episodes/last"))[1]["id"] == str(second.id)
    assert (await send(gateway, "GET", f"/admin/v1/episodes?group={new_rollout_group_id()}"))[1]["code"] == (
        "group_not_found"
    )


async def test_rollouts_need_an_admin_key(gateway: Gateway) -> None:
    async with gateway.client() as client:
        for path in (ROLLOUTS, "/admin/v1/rollout-groups", "/admin/v1/episodes"):
            assert (await client.get(path)).status_code == 403
        assert (await client.post(f"{ROLLOUTS}/start", json={"environment": "tool-call"})).status_code == 403
