"""Compares engines with the policies of a database, and with the trainer's model where its folder is here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from clawloop.errors import EngineUnavailable, SetupError
from clawloop.serving import engine_check
from db.database import Database
from db.serving.directory import PostgresDirectoryStore


async def check_engines(
    database: Database, urls: Sequence[str], model: Path | None, secret: str | None = None
) -> list[str]:
    """
    Args:
        model: CLAWLOOP_MODEL.
        secret: of the engines; None: they have none.

    Returns:
        A line for each engine that does not answer yet, and so is not compared.

    Raises:
        SetupError: an engine serves another model.
        StoreUnavailable
    """
    base_models = {policy.base_model for policy in (await PostgresDirectoryStore(database).read()).policies}
    silent = []
    for url in urls:
        try:
            await engine_check.require_model(url.strip().rstrip("/"), base_models, _vocabulary(model), secret)
        except EngineUnavailable as error:
            silent.append(f"{error} yet; its model was not compared.")
    return silent


def _vocabulary(model: Path | None) -> int | None:
    """Token ids of the model in this folder; None if it is not on this machine."""
    config = None if model is None else model / "config.json"
    if config is None or not config.is_file():
        return None
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
        return int({**content, **content.get("text_config", {})}["vocab_size"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SetupError(f"CLAWLOOP_MODEL: {config} does not describe a language model") from error
