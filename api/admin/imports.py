"""`POST /admin/v1/import`: logs of OpenClaw-RL and exports of Clawloop, line by line as they arrive."""

from __future__ import annotations

from fastapi import APIRouter, Request

from api.dependencies import Services, admin_services
from api.request_body import body_pieces
from clawloop.contracts.answers import ImportDone
from clawloop.operations.imports import NAMED_PROBLEMS, Importer, done_of
from clawloop.turns.log_lines import log_lines

router = APIRouter(prefix="/admin/v1", tags=["sessions"])

# Some ten thousand turns of long conversations, in a connection that lives for minutes; a longer log comes in parts.
_MOST_BYTES = 1024**3
_LINES = {"schema": {"type": "string", "description": "JSON lines: turns before judgements."}}
_BODY = {"requestBody": {"required": True, "content": {"application/x-ndjson": _LINES}}}


@router.post("/import", openapi_extra=_BODY)
async def import_log(request: Request, policy: str = "default") -> ImportDone:
    """Import turns and judgements. The same log again, or a longer one, adds only what is missing."""
    return await import_body(request, await admin_services(request), policy)


async def import_body(request: Request, services: Services, policy: str) -> ImportDone:
    """Import what a request's body holds.

    Raises:
        NotFound: there is no such policy.
        RequestRejected: the body is too large or too slow; the lines before are imported.
        StoreUnavailable: likewise; what was stored is known when the log is sent again.
    """
    problems: list[tuple[int, str]] = []

    def report(_name: str, line: int, reason: str) -> None:
        if len(problems) < NAMED_PROBLEMS:
            problems.append((line, reason))

    importer = Importer(services.imports, policy, report)
    lines = log_lines(body_pieces(request, services.limits, _MOST_BYTES))
    return done_of(await importer.run([("body", lines)]), problems)
