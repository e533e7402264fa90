"""Who gets a canary: a share of the conversations, each of them every time."""

from __future__ import annotations

from uuid import UUID

from api.chat.versions import VersionChooser
from clawloop.core.contracts.serving import Policy
from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource
from clawloop.core.ids import ApiKeyId
from tests.fakes.turn_store import FakeTurnStore

KEY = ApiKeyId(UUID(int=5))
EVIDENCE = SessionEvidence(SessionSource.HEADER, "s")
POLICY = Policy("default", "tiny", (), 3, {}, canary=4, canary_share=0.25)


async def test_a_share_of_the_conversations_gets_the_canary_and_keeps_it() -> None:
    chooser = VersionChooser(FakeTurnStore())
    messages: list[Message] = [{"role": "user", "content": "Hello"}]

    async def version(conversation: int, policy: Policy) -> int:
        return await chooser.choose(KEY, policy, EVIDENCE, messages, f"{KEY}/{conversation}")

    chosen = [await version(conversation, POLICY) for conversation in range(400)]
    assert set(chosen) == {3, 4}
    assert 0.15 < chosen.count(4) / 400 < 0.35
    assert chosen == [await version(conversation, POLICY) for conversation in range(400)]
    ended = Policy("default", "tiny", (), 3, {})
    assert {await version(conversation, ended) for conversation in range(400)} == {3}
