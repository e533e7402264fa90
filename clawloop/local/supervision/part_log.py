"""The log file of one part: kept across starts, bounded, and read for its last words.

Knows nothing about what the lines mean, except that a line which names an error says more than one that does not.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

# Two files of that size per part: enough for days of an engine's log, too little to fill a disk.
MOST_BYTES = 10 * 2**20
_TAIL_BYTES = 16_384
_TELLING = re.compile(r"(?:\w*Error|FATAL|PANIC|panic|fatal|cannot run)\b.*:")
_DECORATION = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST_WORDS = 300  # one line on a screen or two


class PartLog:
    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._run_begins = 0
        self._read_to = 0

    def open_for_run(self) -> BinaryIO:
        """The file to give to a new process. Moves a file that has grown too large to `NAME.log.1` first."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size > self._most_bytes:
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        file = self.path.open("ab")  # appending: what is written after `keep_bounded` begins at the beginning
        file.write(f"--- started {datetime.now().astimezone().isoformat(timespec='seconds')}\n".encode())
        file.flush()
        self._run_begins = self._read_to = file.tell()
        return file

    def keep_bounded(self) -> None:
        """Move what a running part has written to `NAME.log.1` once it is too much; call it now and then.

        The part keeps its file open, so its content is copied and cut. What it writes between the two is lost.
        """
        if not self.path.exists() or self.path.stat().st_size <= self._most_bytes:
            return
        shutil.copyfile(self.path, self.path.with_name(self.path.name + ".1"))
        os.truncate(self.path, 0)
        self._run_begins = self._read_to = 0

    def new_lines(self) -> Iterator[str]:
        """Whole lines written since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._read_to)
            text = file.read(2**20)
        whole, newline, _ = text.rpartition(b"\n")
        self._read_to += len(whole) + len(newline)
        for line in whole.splitlines():
            yield line.decode("utf-8", "replace")

    def last_words(self, any_line: bool = True) -> str:
        """The last line of this run that names an error; without one its last line, or "" if not `any_line`."""
        with self.path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(self._run_begins, end - _TAIL_BYTES))
            text = _DECORATION.sub("", file.read().decode("utf-8", "replace"))
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        telling = [line for line in lines if _TELLING.search(line)]
        words = (telling or (lines if any_line else []) or [""])[-1]
        return words if len(words) <= _LONGEST_WORDS else "…" + words[-_LONGEST_WORDS:]
