"""Locates the shipped demo model; imports no model code."""

from __future__ import annotations

from pathlib import Path


def model_path() -> Path:
    """Return the folder of the model shipped with Clawloop, in Hugging Face's format."""
    return Path(__file__).with_name("model")
