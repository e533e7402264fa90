"""Logging as JSON lines, which hold ids and never the content of a message."""

from __future__ import annotations

import logging
import sys

from pythonjsonlogger.json import JsonFormatter


def configure_logging(level: str = "INFO") -> None:
    """Write every record of this process to standard error as one JSON object a line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter(
            "{levelname}{name}{message}{exc_info}",
            style="{",
            timestamp="time",
            rename_fields={"levelname": "level", "name": "logger"},
        )
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # The gateway logs one line for each turn, with more detail than uvicorn's.
    logging.getLogger("uvicorn.access").disabled = True
