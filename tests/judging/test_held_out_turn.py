"""A session's row of a held-out turn says what the store decided."""

from __future__ import annotations

from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.recipes.recipe import Gate
from tests.judging.conftest import BINARY, Bench, set_recipe


async def test_a_held_out_turn_is_shown_as_held_out(bench: Bench) -> None:
    recipe = BINARY.model_copy(update={"gate": Gate(held_out=0.5)})
    await set_recipe(bench, recipe)
    shown = set()
    for number in range(200):  # each session is held out or not with even odds
        first, second = bench.conversation("one", "two", session=f"s{number}")
        session = await bench.insert(first, second)
        (result,) = await bench.judge_turn(session, second)
        stored = await bench.turn(first.turn_id)
        assert (result.outcome, result.why) == (stored.outcome, stored.outcome_detail)
        assert result.sample is (stored.outcome is TurnOutcome.SAMPLED)
        shown.add(result.outcome)
        if len(shown) == 2:
            break
    assert shown == {TurnOutcome.SAMPLED, TurnOutcome.HELD_OUT}
