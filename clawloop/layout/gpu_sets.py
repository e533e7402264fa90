"""The GPUs that serve, judge and train: as options name them, or chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from clawloop.errors import SetupError
from clawloop.layout.request import Gpus


def splits(gpus: Gpus, *, training: bool) -> Iterator[Gpus]:
    """The sets as given, and where they are not, all ways to part the rest: half and half first, the first GPUs serve.

    Of GPUs that differ in size the first may be the ones that a trainer needs.
    """
    judges = gpus.judge or ()
    if not training:
        rest = tuple(index for index in range(len(gpus.sizes)) if index not in judges)
        yield replace(gpus, serve=gpus.serve or rest, train=())
        return
    if gpus.serve is not None and gpus.train is not None:
        yield gpus
        return
    taken = {*judges, *(gpus.serve or ()), *(gpus.train or ())}
    rest = tuple(index for index in range(len(gpus.sizes)) if index not in taken)
    if gpus.serve is not None or gpus.train is not None:
        yield replace(gpus, serve=gpus.serve or rest, train=gpus.train or rest)
        return
    half = len(rest) // 2
    counts = sorted(range(1, len(rest)), key=lambda count: (abs(count - half), count))
    for training_gpus in counts:
        yield replace(gpus, serve=rest[:-training_gpus], train=rest[-training_gpus:])
    if len({gpus.sizes[index] for index in rest}) > 1:
        for training_gpus in counts:
            yield replace(gpus, serve=rest[training_gpus:], train=rest[:training_gpus])


def check_sets(gpus: Gpus, *, training: bool) -> None:
    """
    Raises:
        SetupError: the sets overlap, name a GPU that is not there, or leave none.
    """
    sets = {"--serve-gpus": gpus.serve, "--judge-gpus": gpus.judge, "--train-gpus": gpus.train}
    owners: dict[int, str] = {}
    for option, indices in sets.items():
        for index in indices or ():
            if index >= len(gpus.sizes):
                raise SetupError(f"{option}: there is no GPU {index}, --gpus lists {len(gpus.sizes)}, from 0")
            if index in owners:
                shared = " (engine and trainer share a GPU only where it is the only one)"
                raise SetupError(f"GPU {index} is in {owners[index]} and {option}: put it in one of them{shared}")
            owners[index] = option
    if gpus.train and not training:
        raise SetupError("--train-gpus and --no-train contradict each other: leave one out")
    if len(gpus.sizes) == 1 and training and owners:
        raise SetupError(f"{owners[0]}: with one GPU engine and trainer share it: leave the sets out")
    free = len(gpus.sizes) - len(owners)
    wanting = ([] if gpus.serve else ["engines"]) + ([] if gpus.train or not training else ["the trainer"])
    if len(gpus.sizes) > 1 and free < len(wanting):
        raise SetupError(f"no GPU is left for {' and '.join(wanting)}: give fewer to {', '.join(set(owners.values()))}")
