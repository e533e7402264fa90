"""Steps and samples as they are exported from PostgreSQL."""

from __future__ import annotations

from uuid import UUID

from clawloop.operations.export import ExportFilter
from db.export import PostgresExportStore
from tests.contract.learning import POLICY, PostgresLearning, step


async def test_steps_come_with_their_samples_and_are_continued(postgres_learning: PostgresLearning) -> None:
    for n in (1, 2):
        await step(postgres_learning, n)
    store = PostgresExportStore(postgres_learning.database)
    steps = await store.steps(ExportFilter(policy=POLICY), None, 10)
    assert [(line["n"], line["parent"], line["state"]) for line in steps] == [(1, 0, "committed"), (2, 1, "committed")]
    assert await store.steps(ExportFilter(), UUID(str(steps[0]["id"])), 10) == steps[1:]
    assert await store.steps(ExportFilter(policy="other"), None, 10) == []
    samples = await store.samples(ExportFilter(policy=POLICY), None, 100)
    for line in steps:
        assert line["samples"]
        assert {sample["id"] for sample in samples if sample["step"] == line["n"]} == set(line["samples"])  # type: ignore[arg-type]
    one = samples[0]
    of_session = await store.steps(ExportFilter(session=UUID(str(one["session"]))), None, 10)  # type: ignore[arg-type]
    assert one["step"] in [line["n"] for line in of_session]
