"""The log file of one part: appended to across starts, bounded in size, and searched for the last error."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from io import FileIO
from pathlib import Path

# Two files of that size per part: enough for days of an engine's log, too little to fill a disk.
MAX_BYTES = 10 * 2**20
_TAIL_BYTES = 16_384
_ERROR = re.compile(r"(?:\w*Error|FATAL|PANIC|panic|fatal|cannot run)\b.*:")
_ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MAX_MESSAGE = 300  # characters: two lines on a screen


class PartLog:
    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._run_start = 0
        self._read_offset = 0

    def open_for_run(self) -> FileIO:
        """The file to give to a new process as its output. Moves a file that is too large to `NAME.log.1` first."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size > self._max_bytes:
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        file = self.path.open("ab", buffering=0)  # append mode: after `rotate_if_large` truncates, writes go on at 0
        with suppress(OSError):  # a full disk keeps no part from starting
            file.write(f"--- started {datetime.now().astimezone().isoformat(timespec='seconds')}\n".encode())
        self._run_start = self._read_offset = file.tell()
        return file

    def rotate_if_large(self) -> None:
        """Copy the log of a running part to `NAME.log.1` and truncate it, once it is too large.

        The part has the file open, so it cannot be renamed. Output between copy and truncation is lost; on a full disk
        all of it is, since turns need the room more.
        """
        if not self.path.exists() or self.path.stat().st_size <= self._max_bytes:
            return
        copy = self.path.with_name(self.path.name + ".1")
        try:
            shutil.copyfile(self.path, copy)
        except OSError:
            copy.unlink(missing_ok=True)
        os.truncate(self.path, 0)
        self._run_start = self._read_offset = 0

    def new_lines(self) -> Iterator[str]:
        """Complete lines written since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._read_offset)
            text = file.read(2**20)
        complete, newline, _ = text.rpartition(b"\n")
        self._read_offset += len(complete) + len(newline)
        for line in complete.splitlines():
            yield line.decode("utf-8", "replace")

    def last_message(self, any_line: bool = True) -> str:
        """The last line of this run that names an error; without one its last line, or "" if not `any_line`."""
        with self.path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(self._run_start, end - _TAIL_BYTES))
            text = _ANSI_COLOUR.sub("", file.read().decode("utf-8", "replace"))
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if _ERROR.search(line)]
        message = (errors or (lines if any_line else []) or [""])[-1]
        return message if len(message) <= _MAX_MESSAGE else "…" + message[-_MAX_MESSAGE:]
