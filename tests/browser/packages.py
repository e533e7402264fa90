"""axe-core from npm, in a fixed version, kept where Chromium is."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from clawloop.environments.browser.chromium import FETCHED, NpmPackage

AXE = NpmPackage("axe-core", "4.14.1", "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745")


def axe_script() -> str:
    """axe-core, which looks for what people with a screen reader or a keyboard cannot use."""
    kept = FETCHED / f"axe-{AXE.version}.js"
    if not kept.is_file():
        FETCHED.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FETCHED) as scratch:
            package = AXE.fetch(Path(scratch))
            shutil.move(package / "axe.min.js", kept)
    return kept.read_text(encoding="utf-8")
