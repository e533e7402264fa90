"""Which rows a claim can judge by what its own statement sees."""

from __future__ import annotations

from types import SimpleNamespace

from db.training.claims import known_prompt_tokens


def test_a_parent_that_the_claim_does_not_see_yet_is_trusted() -> None:
    """A late turn became the parent between the claim's snapshot and its lock: the sample must not expire for it."""
    seen = SimpleNamespace(parent_turn_id="p", parent_tokens=7, prompt_shared=9, prompt_added=3)
    unseen = SimpleNamespace(parent_turn_id="p", parent_tokens=None, prompt_shared=9, prompt_added=3)
    orphan = SimpleNamespace(parent_turn_id=None, parent_tokens=None, prompt_shared=9, prompt_added=3)
    assert [known_prompt_tokens(row) for row in (seen, unseen, orphan)] == [10, 12, 3]
