"""An image for containers, made once; tests with it are marked `containers`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from uuid import uuid4

import pytest

from clawloop.sandboxes.boxes import BoxResult, BoxTask
from clawloop.sandboxes.containers import ContainerEngine, Containers
from tests.sandboxes.local_image import import_image

FILES = {"work/hello.txt": (b"hello\n", 0o644), "work/run.sh": (b"#!/bin/sh\necho ran\n", 0o755)}


@dataclass(frozen=True, slots=True)
class WithImage:
    """Containers like other sandboxes: each task has the image, and nothing of its working folder."""

    containers: Containers
    image: str

    async def run(self, task: BoxTask) -> BoxResult:
        return await self.containers.run(replace(task, image=self.image, fresh=True))


@pytest.fixture(scope="session")
def image() -> Iterator[str]:
    engine = ContainerEngine.find()
    name = f"localhost/clawloop-test:{uuid4().hex}"
    import_image(engine, name, "/work", FILES)
    yield name
    engine.ask("rmi", "--force", name)
