"""A process that computes training steps without rest, for benchmarks of what others notice: `MODEL`."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

from benchmarks.processes import FIRST_STEP
from clawloop.training.packing.collate import collate
from clawloop.training.packing.sequences import TokenSequence
from tests.e2e.adapters import load_policy


def main(model: Path) -> None:
    policy = load_policy(model)
    optimiser = torch.optim.AdamW(policy.adapter_parameters().values(), lr=1e-4)
    ids = torch.randint(1, 500, (16, 512)).tolist()
    packed = collate([TokenSequence(str(n), row[:256], row[256:], 1.0) for n, row in enumerate(ids)], range(16))
    for n in itertools.count(1):
        (-policy(packed).logprobs_N.mean()).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad()
        if n == 1:
            print(FIRST_STEP, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
