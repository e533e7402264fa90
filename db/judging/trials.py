"""Trials of judges, in PostgreSQL: the newest of each."""

from __future__ import annotations

from dataclasses import asdict

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.judging.prompts import AnswerForm
from clawloop.core.judging.quality import JudgeTrial, Quality
from clawloop.core.judging.voting import Vote
from db.content import exact_json, storable
from db.database import PostgresStore, transaction
from db.tables import JudgeTrialRow

_VOTES: tuple[Vote, ...] = (1, 0, -1)


class PostgresTrialStore(PostgresStore):
    @transaction
    async def keep(self, connection: AsyncConnection, trial: JudgeTrial) -> None:
        """Keep a judge's trial, in place of its earlier one."""
        found = asdict(trial) | {"biases": None if trial.biases is None else [trial.biases[vote] for vote in _VOTES]}
        values = {"digest": bytes.fromhex(trial.digest), "judge": storable(trial.judge), "found": exact_json(found)}
        changed = {"found": values["found"], "tried_at": func.now()}
        row = insert(JudgeTrialRow).values(values)
        await connection.execute(row.on_conflict_do_update(index_elements=["digest"], set_=changed))

    @transaction
    async def trial(self, connection: AsyncConnection, digest: str) -> JudgeTrial | None:
        """The trial of the judge with this digest; None if there was none."""
        query = select(JudgeTrialRow.found).where(JudgeTrialRow.digest == bytes.fromhex(digest))
        found = (await connection.execute(query)).scalar_one_or_none()
        return None if found is None else _trial(found)

    @transaction
    async def newest(self, connection: AsyncConnection) -> JudgeTrial | None:
        """The newest trial of any judge; None if there was none."""
        query = select(JudgeTrialRow.found).order_by(JudgeTrialRow.tried_at.desc()).limit(1)
        found = (await connection.execute(query)).scalar_one_or_none()
        return None if found is None else _trial(found)


def _trial(found: dict) -> JudgeTrial:  # type: ignore[type-arg]
    biases = found["biases"]
    return JudgeTrial(
        judge=found["judge"],
        digest=found["digest"],
        form=AnswerForm(found["form"]),
        biases=None if biases is None else dict(zip(_VOTES, biases, strict=True)),
        by_form={name: _quality(one) for name, one in found["by_form"].items()},
        reported=_quality(found["reported"]),
    )


def _quality(found: dict) -> Quality:  # type: ignore[type-arg]
    by_kind = {kind: (phrases, right) for kind, (phrases, right) in found["by_kind"].items()}
    return Quality(found["phrases"], found["accuracy"], found["kappa"], by_kind)
