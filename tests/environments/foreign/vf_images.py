"""An environment of verifiers 0.4 whose tasks name an image, as those of many data sets do."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from vf_sums import SumsConfig, SumsData, SumsHarness, SumsTask  # type: ignore[import-not-found]

__all__ = ["ImagesTaskset", "SumsHarness"]


class ImagesTaskset(vf.Taskset[SumsTask, SumsConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[SumsTask]:
        for n in range(self.config.count):
            yield SumsTask(SumsData(prompt=f"What is {n} + 1?", answer=n + 1, image="debian:12"), self.config.task)
