"""What surrounds the activities of the simulated system: its ledger of judgements, an engine's files, no notifier."""

from __future__ import annotations

from collections.abc import Sequence

from clawloop.core.contracts.training import SampleState, VersionRef
from clawloop.core.ids import FeedbackId, JudgementId, SampleId
from clawloop.core.judging.records import FinalizedJudgement
from clawloop.core.recipes.recipe import Recipe
from tests.fakes.engine_control import FakeEngineControl
from tests.fakes.judgement_store import FakeJudgementStore
from tests.fakes.ledger import FakeLedger
from tests.fakes.turn_store import FakeTurnStore

POLICY = "default"
VOTES = 3
RECIPE = Recipe.model_validate(
    {
        "name": "simulated",
        "signal": {"hints": False, "m": VOTES},
        "train": {"batch_samples": 2, "advantage": {"verdict_weight": 1.0, "teacher_weight": 0.0}},
    }
)


class JudgedStore(FakeJudgementStore):
    """Its samples are those of the training ledger.

    Attributes:
        made: the sample of each judgement that made one.
    """

    def __init__(self, turns: FakeTurnStore, ledger: FakeLedger) -> None:
        super().__init__(turns, RECIPE)
        self.ledger = ledger
        self.made: dict[JudgementId, SampleId] = {}

    async def finalize(
        self, judgement: JudgementId, finalized: FinalizedJudgement, feedback_ids: Sequence[FeedbackId]
    ) -> str | None:
        ready = await super().finalize(judgement, finalized, feedback_ids)
        if self._by_id(judgement).sample is SampleState.FRESH and judgement not in self.made:
            self.made[judgement] = self.ledger.add_sample(POLICY)
        return ready


class LoadedFiles(FakeEngineControl):
    """An engine that knows which directory each name stands for, as vLLM does."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: dict[str, str] = {}

    async def load(self, version: VersionRef, name: str) -> None:
        if self.paths.get(name) not in (None, version.path):
            await self.unload(name)
        await super().load(version, name)
        self.paths[name] = version.path

    async def unload(self, name: str) -> None:
        await super().unload(name)
        self.paths.pop(name, None)

    def restart(self) -> None:
        super().restart()
        self.paths.clear()
