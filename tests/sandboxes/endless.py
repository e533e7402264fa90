"""Runs a sandbox that does not end by itself, until this process is killed.

Arguments: the folder of sandboxes, and a word that the sandbox's command line holds.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from clawloop.sandboxes.bubblewrap import BoxTask, Bubblewrap
from clawloop.sandboxes.folders import BoxFolders

sandboxes = Bubblewrap.find(BoxFolders(Path(sys.argv[1])))
command = ("python3", "-c", f"import time; print({sys.argv[2]!r}); time.sleep(600)")
asyncio.run(sandboxes.run(BoxTask("endless", command, 600.0)))
