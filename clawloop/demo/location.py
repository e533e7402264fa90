"""Where the demo model lies.

Knows nothing about what is in it.
"""

from __future__ import annotations

from pathlib import Path


def model_path() -> Path:
    """The folder of the model that ships with Clawloop, in Hugging Face's form."""
    return Path(__file__).with_name("model")
