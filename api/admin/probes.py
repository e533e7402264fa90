"""`/admin/v1/policies/{policy}/probes`: prompts that the gate asks of each version. Needs the scope `admin`."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from api.dependencies import admin_services
from clawloop.contracts.probes import StoredProbe
from clawloop.errors import NotFound, RequestRejected
from clawloop.ids import ProbeId
from clawloop.operations.probes import MOST_PROBES, read_probes

router = APIRouter(prefix="/admin/v1")


class NewProbes(BaseModel):
    """
    Args:
        probes: each has `prompt` or `messages`, may have `tools`, and the checks `contains`, `regex`, `exact`.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    probes: list[dict[str, Any]] = Field(min_length=1, max_length=MOST_PROBES)


class Probe(BaseModel):
    """A probe as it is stored; without any check the judge compares the answers to it."""

    id: UUID
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    contains: list[str]
    regex: str | None
    exact: str | None
    created_at: datetime

    @classmethod
    def of(cls, stored: StoredProbe) -> Probe:
        content = stored.content
        return cls(
            id=stored.id,
            messages=[dict(message) for message in content.messages],
            tools=None if content.tools is None else [dict(tool) for tool in content.tools],
            contains=list(content.contains),
            regex=content.regex,
            exact=content.exact,
            created_at=stored.created_at,
        )


class ProbeList(BaseModel):
    probes: list[Probe]


@router.get("/policies/{policy}/probes")
async def list_probes(request: Request, policy: str) -> ProbeList:
    """The policy's probes, oldest first."""
    services = await admin_services(request)
    return ProbeList(probes=[Probe.of(probe) for probe in await services.probes.all(policy)])


@router.post("/policies/{policy}/probes")
async def add_probes(request: Request, policy: str, requested: NewProbes) -> ProbeList:
    """Add probes, all or none; the answer has those that were added."""
    services = await admin_services(request)
    probes, faults = read_probes(requested.probes)
    if faults:
        place, fault = next(iter(faults.items()))
        others = f" {len(faults) - 1} more cannot be used either." if len(faults) > 1 else ""
        raise RequestRejected(
            f"`probes.{place}`: {fault}. None was added.{others}", code="invalid_probe", field=f"probes.{place}"
        )
    return ProbeList(probes=[Probe.of(probe) for probe in await services.probes.add(policy, probes, MOST_PROBES)])


@router.delete("/policies/{policy}/probes/{probe}")
async def remove_probe(request: Request, policy: str, probe: UUID) -> ProbeList:
    """Remove a probe; the answer has those that are left."""
    services = await admin_services(request)
    if not await services.probes.remove(policy, ProbeId(probe)):
        raise NotFound(f"Policy {policy!r} has no probe {probe}.", code="probe_not_found", field="probe")
    return ProbeList(probes=[Probe.of(each) for each in await services.probes.all(policy)])
