"""Finds headless Chromium and Playwright's program that drives it, and says how a sandbox sees them."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawloop.errors import SetupError

PLAYWRIGHT = "/playwright"
"""Where a sandbox finds Playwright's program."""

REMEDY = (
    "run `clawloop environment fetch-chromium`, install a package such as Debian's `chromium`, or name a program by"
    " --chromium"
)
FETCHED = Path(sys.prefix) / "browser"
"""Where browsers are kept that were fetched, beside the virtual environment."""

_SYSTEMS = ("/usr/lib/chromium/chromium", "chromium", "chromium-browser", "google-chrome", "chrome")
_PLACE = "/chromium"
# Without a GPU. Chromium's own sandbox cannot be made in ours, which is what keeps its processes in.
_OPTIONS = (
    *("--no-sandbox", "--no-zygote", "--disable-gpu", "--use-gl=angle", "--use-angle=swiftshader"),
    "--disable-dev-shm-usage",
)


@dataclass(frozen=True, slots=True)
class Chromium:
    """
    Args:
        path: of the program.
        driver: the folder of Playwright's program.
    """

    path: Path
    driver: Path

    @classmethod
    def find(cls, path: Path | None = None) -> Chromium:
        """
        Args:
            path: Chromium's program; None: the one that was fetched, else the system's.

        Raises:
            SetupError: there is none, or no Playwright.
        """
        playwright = importlib.util.find_spec("playwright")
        if playwright is None or playwright.origin is None:
            raise SetupError("the environment browser needs Playwright: install the extra `browser`")
        found = path or _found()
        if found is None:
            raise SetupError(f"the environment browser needs Chromium, and there is none: {REMEDY}")
        if not found.is_file():
            raise SetupError(f"--chromium {found} is no program")
        return cls(found.resolve(), Path(playwright.origin).parent / "driver")

    @property
    def folders(self) -> dict[str, Path]:
        """Of this machine, by where they are in the sandbox."""
        own = {} if self._in_usr else {_PLACE: self.path.parent}
        return {PLAYWRIGHT: self.driver, **own}

    @property
    def config(self) -> dict[str, Any]:
        """How `session.cjs` starts it."""
        return {
            "playwright": PLAYWRIGHT,
            "program": str(self.path) if self._in_usr else f"{_PLACE}/{self.path.name}",
            "options": list(_OPTIONS),
            "variables": {"HOME": "/tmp", **self._libraries()},
        }

    @property
    def _in_usr(self) -> bool:
        return self.path.is_relative_to("/usr")

    def _libraries(self) -> Mapping[str, str]:
        """Of the npm package, which brings what a server's system lacks."""
        if not (self.path.parent / "fonts").is_dir():
            return {}
        return {
            "LD_LIBRARY_PATH": ":".join(f"{_PLACE}{below}" for below in ("/al2023/lib", "/lib", "")),
            "FONTCONFIG_PATH": f"{_PLACE}/fonts",
        }


def _found() -> Path | None:
    fetched = sorted(FETCHED.glob("chromium-*/chromium"))
    if fetched:
        return fetched[-1]
    for name in _SYSTEMS:
        if (program := shutil.which(name, path="/usr/bin:/usr/local/bin:/opt/google/chrome")) is not None:
            return Path(program)
    return None
