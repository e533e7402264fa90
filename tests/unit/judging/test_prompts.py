import re
from uuid import uuid4

import pytest

from clawloop.core.ids import TurnId
from clawloop.core.judging.evidence import Budgets, gather
from clawloop.core.judging.prompts import (
    HINT_INSTRUCTION,
    VOTE_INSTRUCTION,
    AnswerForm,
    hint_prompt,
    vote_prompt,
)
from tests.unit.judging.conversations import TURN, assistant, evidence, question, user


def test_a_vote_prompt_reads_like_this() -> None:
    prompt = vote_prompt(TURN, evidence())
    mark = prompt.mark
    assert prompt.messages == [
        {"role": "system", "content": VOTE_INSTRUCTION},
        {
            "role": "user",
            "content": f"""\
<task {mark} user>
Add two numbers in Python.
</task {mark}>
<reply {mark} assistant>
const add = (a, b) => a + b;
</reply {mark}>
<next {mark} user>
No, in Python.
</next {mark}>
You may think first. End with the line "verdict {mark}: N", where N is 1, -1 or 0.""",
        },
    ]
    assert prompt.structured_outputs is None


def test_a_hint_prompt_shows_the_same_evidence_and_asks_for_a_hint() -> None:
    vote, hint = vote_prompt(TURN, evidence()), hint_prompt(TURN, evidence())
    assert hint.mark == vote.mark
    assert hint.messages[0]["content"] == HINT_INSTRUCTION
    assert question(hint).rsplit("\n", 1)[0] == question(vote).rsplit("\n", 1)[0]
    assert question(hint).endswith(f'"hint {hint.mark}: ..." or the line "no hint {hint.mark}".')


def test_a_constrained_vote_is_one_of_three_words_and_nothing_else() -> None:
    prompt = vote_prompt(TURN, evidence(), AnswerForm.GRAMMAR)
    assert prompt.structured_outputs == {"choice": ["1", "0", "-1"]}
    assert question(prompt).endswith("\nAnswer with 1, -1 or 0 only.")


def test_a_constrained_hint_matches_its_grammar() -> None:
    prompt = hint_prompt(TURN, evidence(), AnswerForm.GRAMMAR)
    assert prompt.structured_outputs is not None
    grammar = prompt.structured_outputs["regex"]
    assert isinstance(grammar, str)
    assert re.fullmatch(grammar, f"hint {prompt.mark}: Use Python.")
    assert re.fullmatch(grammar, f"no hint {prompt.mark}")
    assert not re.fullmatch(grammar, f"hint {prompt.mark}: Use\nPython.")


@pytest.mark.parametrize("form", AnswerForm)
def test_the_fixed_part_is_the_same_for_every_turn_and_tells_that_any_language_counts(
    form: AnswerForm,
) -> None:
    for build in (vote_prompt, hint_prompt):
        first = build(TURN, evidence(), form)
        second = build(TurnId(uuid4()), evidence(answer="Nein, in Python."), form)
        assert first.messages[0] == second.messages[0]
        assert first.mark != second.mark
        assert "in any language" in str(first.messages[0]["content"])


def test_instructions_are_short_enough_for_a_small_judge() -> None:
    assert len(VOTE_INSTRUCTION.split()) < 90
    assert len(HINT_INSTRUCTION.split()) < 110


def test_a_prompt_stays_within_its_budget_plus_its_own_words_whatever_it_is_given() -> None:
    huge = "long <|im_end|> text " * 200_000
    found = gather([user(huge)] * 30, assistant(huge), [user(huge)] * 100, huge)
    for build in (vote_prompt, hint_prompt):
        for budgets in (Budgets(), Budgets.of(1200)):
            prompt = build(TURN, found, AnswerForm.FREE, budgets)
            words = sum(len(str(message["content"])) for message in prompt.messages)
            assert words <= budgets.total + 3_000


def test_explicit_feedback_is_shown() -> None:
    prompt = vote_prompt(TURN, evidence(feedback="Too long for a phone."))
    assert f"<feedback {prompt.mark} user>\nToo long for a phone.\n</feedback {prompt.mark}>" in question(prompt)
