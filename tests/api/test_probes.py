"""`/admin/v1/policies/{policy}/probes` over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.api.conftest import Gateway, running_gateway
from tests.fakes.engine import fake_engine

PATH = "/admin/v1/policies/default/probes"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with fake_engine() as engine, running_gateway(tmp_path, engines=[engine]) as running:
        yield running


async def test_probes_are_added_listed_and_removed(gateway: Gateway) -> None:
    async with gateway.client(gateway.admin_key) as client:
        added = await client.post(PATH, json={"probes": [{"prompt": "2 + 2?", "contains": "4"}, {"prompt": "Hello"}]})
        assert added.status_code == 200
        first, second = added.json()["probes"]
        assert (first["messages"], first["contains"]) == ([{"role": "user", "content": "2 + 2?"}], ["4"])
        assert (await client.get(PATH)).json()["probes"] == [first, second]
        left = await client.delete(f"{PATH}/{first['id']}")
        assert left.json()["probes"] == [second]
        again = await client.delete(f"{PATH}/{first['id']}")
        assert (again.status_code, again.json()["code"]) == (404, "probe_not_found")
        other = await client.get("/admin/v1/policies/other/probes")
        assert (other.status_code, other.json()["code"]) == (404, "policy_not_found")


async def test_one_that_cannot_be_used_adds_none_and_is_named(gateway: Gateway) -> None:
    async with gateway.client(gateway.admin_key) as client:
        refused = await client.post(PATH, json={"probes": [{"prompt": "a"}, {"prompt": "b", "regex": "(b"}, {}]})
        assert (refused.status_code, refused.json()["code"]) == (400, "invalid_probe")
        said = refused.json()["detail"]
        assert "`probes.1`: regex" in said
        assert "; `probes.2`: give either prompt or messages. None was added." in said
        assert "either." not in said
        worse = await client.post(PATH, json={"probes": [{}] * 23})
        assert "; `probes.19`: give" in worse.json()["detail"]
        assert worse.json()["detail"].endswith("None was added. 3 more cannot be used either.")
        assert (await client.get(PATH)).json() == {"probes": []}
        many = await client.post(PATH, json={"probes": [{"prompt": "a"}] * 201})
        assert many.status_code == 400
