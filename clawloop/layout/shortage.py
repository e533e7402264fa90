"""A lack of memory, told in one sentence with numbers."""

from __future__ import annotations

from dataclasses import dataclass

from clawloop.layout.parts import Device, Part, Process, gibibytes


@dataclass(frozen=True, slots=True)
class Shortage:
    """Processes that need more memory than a device has.

    Args:
        device: the smallest one that they would have to share.
        processes: with the least memory they can do with.
    """

    device: Device
    processes: tuple[Process, ...]

    @property
    def needed(self) -> int:
        return sum(process.bytes for process in self.processes)

    @property
    def largest(self) -> tuple[Process, Part]:
        parts = [(process, part) for process in self.processes for part in process.parts]
        return max(parts, key=lambda found: found[1].bytes)

    def __str__(self) -> str:
        process, part = self.largest
        who = " and ".join(process.name for process in self.processes)
        verb = "needs" if len(self.processes) == 1 else "need"
        return (
            f"{self.device.name} has {gibibytes(self.device.usable)} to use, {who} {verb} {gibibytes(self.needed)}; "
            f"the largest part is the {process.name}'s {part.name}, {gibibytes(part.bytes)} ({part.how})"
        )
