"""`/admin/v1/policies/{policy}/probes`: prompts that the gate asks of each version. Needs the scope `admin`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from api.admin.bodies import RequestBody, check, described
from api.dependencies import admin_services
from api.request_body import read_json
from clawloop.contracts.answers import Probe, ProbeList
from clawloop.errors import RequestRejected
from clawloop.operations.probes import MOST_PROBES, find_probe, read_probes

router = APIRouter(prefix="/admin/v1", tags=["training"])

# An answer of all faults of a long list would be as long as the list.
_NAMED = 20


class NewProbes(RequestBody):
    probes: list[dict[str, Any]] = Field(min_length=1, max_length=MOST_PROBES)
    """Each has `prompt` or `messages`, may have `tools`, and the checks `contains`, `regex`, `exact`."""


@router.get("/policies/{policy}/probes")
async def list_probes(request: Request, policy: str) -> ProbeList:
    """The policy's probes, oldest first."""
    services = await admin_services(request)
    return ProbeList(probes=[Probe.of(probe) for probe in await services.probes.all(policy)])


@router.post("/policies/{policy}/probes", openapi_extra=described(NewProbes))
async def add_probes(request: Request, policy: str) -> ProbeList:
    """Add probes, all or none; the answer has those that were added."""
    services = await admin_services(request)
    requested = check(NewProbes, await read_json(request, services.limits))
    probes, faults = read_probes(requested.probes)
    if faults:
        named = "; ".join(f"`probes.{place}`: {fault}" for place, fault in list(faults.items())[:_NAMED])
        others = f" {len(faults) - _NAMED} more cannot be used either." if len(faults) > _NAMED else ""
        raise RequestRejected(
            f"{named}. None was added.{others}", code="invalid_probe", field=f"probes.{next(iter(faults))}"
        )
    return ProbeList(probes=[Probe.of(probe) for probe in await services.probes.add(policy, probes, MOST_PROBES)])


@router.delete("/policies/{policy}/probes/{probe}")
async def remove_probe(request: Request, policy: str, probe: str) -> ProbeList:
    """Remove a probe, by its id or the beginning of it; the answer has those that are left."""
    services = await admin_services(request)
    await services.probes.remove(policy, find_probe(policy, await services.probes.all(policy), probe))
    return ProbeList(probes=[Probe.of(each) for each in await services.probes.all(policy)])
