"""A whole loop on an encrypted database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.security.encrypted import Loop, codec, whole_loop


@pytest.fixture
async def loop(postgres_url: str, tmp_path: Path) -> AsyncIterator[Loop]:
    done = await whole_loop(postgres_url, codec(tmp_path))
    yield done
    await done.database.close()
