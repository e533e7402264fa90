"""Imported turns and judgements in memory, for the policy `default`."""

from __future__ import annotations

from clawloop.contracts.turns import TurnRecord
from clawloop.errors import NotFound, RecordUnusable
from clawloop.ids import ApiKeyId, TurnId, new_api_key_id
from clawloop.turns.logged import LoggedJudgement


class FakeImportStore:
    """Satisfies `clawloop.operations.imports.ImportStore`."""

    def __init__(self) -> None:
        self.key = new_api_key_id()
        self.turns: dict[TurnId, TurnRecord] = {}
        self.judged: set[tuple[str, int]] = set()

    async def import_key(self, policy: str) -> ApiKeyId:
        if policy != "default":
            raise NotFound(f"There is no policy {policy!r}.", code="policy_not_found", field="policy")
        return self.key

    async def add_turn(self, record: TurnRecord, why: str) -> bool:
        known = record.turn_id in self.turns
        self.turns.setdefault(record.turn_id, record)
        return not known

    async def add_judgement(self, key: ApiKeyId, judgement: LoggedJudgement, reason: str) -> bool:
        if judgement.session not in {turn.evidence.value for turn in self.turns.values()}:
            raise RecordUnusable("its turn was not imported")
        place = (judgement.session, judgement.number)
        known = place in self.judged
        self.judged.add(place)
        return not known

    async def is_followed(self, turn: TurnId) -> bool:
        return False
