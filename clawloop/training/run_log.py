"""A log of training steps for TensorBoard, written with TensorBoard's own classes.

Each step is one file, whose name is the step's number and whose content depends on the stored figures alone: a step
that is computed, committed or logged twice is there once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import JsonValue

from clawloop.core.contracts.training import StepRecord
from clawloop.core.errors import SetupError


class TensorBoardLog:
    """A run for each policy in one folder.

    Args:
        folder: a run for each policy is made in it.

    Raises:
        SetupError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import tensorboard.summary.writer.record_writer  # noqa: F401
        except ImportError as error:
            raise SetupError(
                f"CLAWLOOP_RUN_LOG needs TensorBoard ({error}): install the extra `tensorboard`, or unset it"
            ) from None
        self._folder = folder

    def write(self, step: StepRecord) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        when = step.at.timestamp()
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars_of(step.metrics)]
        events = [
            Event(wall_time=when, file_version="brain.Event:2"),
            Event(wall_time=when, step=step.n, summary=Summary(value=values)),
        ]
        run = self._folder / step.policy
        run.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a run in the order of their names, and takes those with `tfevents` in it.
        path = run / f"events.out.tfevents.{step.n:010d}.clawloop"
        unfinished = run / f".{step.n}"
        with unfinished.open("wb") as file:
            writer = RecordWriter(file)
            for event in events:
                writer.write(event.SerializeToString())
        unfinished.replace(path)


def scalars_of(metrics: Mapping[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers among a step's stored figures, e.g. `loss`, `parts/kl`, `to_parent/median`."""
    for name, value in metrics.items():
        if isinstance(value, dict):
            yield from scalars_of(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)
