"""Runs a sandbox that does not end by itself, until this process is killed.

Arguments: the folder of sandboxes, a word that the sandbox's command line holds, and the image of a container, if it
is one.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from clawloop.sandboxes.boxes import BoxTask, Sandboxes
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.containers import Containers
from clawloop.sandboxes.folders import BoxFolders

folders = BoxFolders(Path(sys.argv[1]))
image = sys.argv[3] if len(sys.argv) > 3 else None
sandboxes: Sandboxes = Bubblewrap.find(folders) if image is None else Containers.find(folders)
command = ("python3", "-c", f"import time; print({sys.argv[2]!r}); time.sleep(600)")
asyncio.run(sandboxes.run(BoxTask("endless", command, 600.0, image=image)))
