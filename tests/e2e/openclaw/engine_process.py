"""The scripted engine as a process that can be killed. Arguments: port, a file that gets a line for each request."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clawloop.core.lessons.prompt import LEAD_IN
from tests.chaos.stand_in_engine import StandInEngine, serving_stand_in
from tests.e2e.openclaw.script import about, answer, text_of
from tests.fakes.replies import Reply

MODEL = "tiny-random"


async def serve(port: int, log: Path) -> None:
    def noted(body: dict[str, Any]) -> Reply:
        with log.open("a") as lines:
            lessons = sum(text_of(message).count(LEAD_IN) for message in body["messages"])
            lines.write(json.dumps(asdict(about(body["messages"])) | {"lessons": lessons}) + "\n")
        return answer(body)

    async with serving_stand_in(StandInEngine(MODEL, 0, noted), port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2])))
