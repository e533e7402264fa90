"""Whether this installation is whole: our top-level names are plain words, which another distribution may have too."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from clawloop.errors import SetupError

TOP_LEVEL_NAMES = ("activities", "api", "db", "migrations", "workflows")


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
