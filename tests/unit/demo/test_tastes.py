"""Tastes that a rule checks, and what a person of such a taste asks and says."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawloop.app.demo.tastes import (
    EVERYDAY,
    HELD_OUT,
    MOST_BEFORE,
    Answer,
    Person,
    Taste,
    is_loop,
    share_met,
    tastes_to_learn,
    wordings,
)
from clawloop.core.gate.general import general_questions
from clawloop.core.judging import phrases, prompts

LONG = "A tide is the slow rise and fall of the sea. " * 6
MEETS = {
    Taste.BRIEF: Answer("A tide is the rise and fall of the sea.", ended=True),
    Taste.PROSE: Answer(LONG, ended=False),
    Taste.ASKS: Answer("A tide is the rise and fall of the sea. Do you live near it? ", ended=True),
    Taste.FRIENDLY: Answer("Hello! A tide is the rise and fall of the sea.", ended=True),
    Taste.DIRECT: Answer("A tide is the rise and fall of the sea, by the moon.", ended=True),
    Taste.STEPS: Answer("A tide:\n1. The sea rises.\n2. The sea falls.", ended=True),
    Taste.EXAMPLE: Answer("A tide moves the sea, for example at Mont Saint-Michel.", ended=True),
}
MISSES = {
    Taste.BRIEF: [Answer(LONG, ended=True), Answer("A tide is the", ended=False), Answer("Sea.", ended=True)],
    Taste.PROSE: [
        Answer("A tide is this:\n- the sea rises\n- the sea falls after some hours", ended=True),
        Answer("The **tide** is the rise and fall of the sea every day.", ended=True),
        Answer("# Tides\nThe rise and fall of the sea, twice a day.", ended=True),
        Answer("The sea moves.", ended=True),
    ],
    Taste.ASKS: [Answer("What is a tide? It is the sea.", ended=True), Answer("The sea rises. Do you?", ended=False)],
    Taste.FRIENDLY: [Answer("A tide is the rise and fall of the sea. Hi!", ended=True), Answer("History of it.", True)],
    Taste.DIRECT: [Answer("A tide may be high or low, which often depends on the moon.", ended=True)],
    Taste.STEPS: [Answer("A tide:\n1. The sea rises.", ended=True), Answer("It rises 2. It falls 3. Done.", True)],
    Taste.EXAMPLE: [Answer("A tide moves the sea. Its height is exemplary.", ended=True)],
}


@pytest.mark.parametrize("taste", Taste)
def test_a_rule_tells_a_reply_in_taste_from_others(taste: Taste) -> None:
    assert taste.is_met(MEETS[taste])
    assert [answer for answer in MISSES[taste] if taste.is_met(answer)] == []
    assert not taste.is_met(Answer("", ended=True))


def test_a_taste_that_the_base_model_mostly_meets_is_not_drawn() -> None:
    base = [MEETS[Taste.PROSE]] * 7 + [MISSES[Taste.PROSE][0]] * 3
    assert share_met(Taste.PROSE, base) == 0.7 > MOST_BEFORE
    learnable = {taste for taste in Taste if share_met(taste, base) <= MOST_BEFORE}
    orders = [tastes_to_learn(seed, base) for seed in range(1, 100)]
    assert {order[0] for order in orders} == learnable
    assert all(set(order) == learnable for order in orders)
    assert len(learnable) >= 5
    assert tastes_to_learn(5, base) == tastes_to_learn(5, base)


def test_requests_for_measuring_are_of_subjects_that_no_chat_has() -> None:
    assert len(set(EVERYDAY)) == len(EVERYDAY) >= 200
    assert len(set(HELD_OUT)) == len(HELD_OUT) >= 32
    assert set(EVERYDAY).isdisjoint(HELD_OUT)
    asked = {str(question.content.messages[0]["content"]) for question in general_questions()}
    assert asked.isdisjoint({*EVERYDAY, *HELD_OUT})
    first = [request.removeprefix("What is ").removesuffix("?") for request in HELD_OUT if "What is a tide" in request]
    assert first == ["a tide"]
    assert not any("a tide" in request.split("?")[0].removeprefix("What is ") for request in EVERYDAY)


def test_a_person_says_it_in_many_wordings_that_no_prompt_has() -> None:
    said = {text for taste in Taste for text in wordings(taste)}
    assert all(len(wordings(taste)) >= 40 for taste in Taste)
    assert len(said) == sum(len(wordings(taste)) for taste in Taste), "two tastes say the same"
    ours = [Path(prompts.__file__), *Path(phrases.__file__).with_suffix("").glob("*.toml")]
    assert len(ours) == 5
    fixed = "\n".join(path.read_text(encoding="utf-8") for path in ours).lower()
    assert [text for text in said if text.lower() in fixed] == []


def test_reactions_follow_the_rule_and_praise_names_no_taste() -> None:
    person, met, missed = Person("1-1", Taste.BRIEF), MEETS[Taste.BRIEF], MISSES[Taste.BRIEF][0]
    praised = [person.react("What is salt?", met) for _ in range(400)]
    blamed = [person.react("What is salt?", missed) for _ in range(400)]
    assert {reaction.wish for reaction in praised} == {""}
    assert {reaction.thumb for reaction in praised} == {None, 1}
    assert {reaction.thumb for reaction in blamed} == {None, -1}
    assert len({reaction.text for reaction in praised if reaction.text not in EVERYDAY}) > 150
    assert len({reaction.wish for reaction in blamed} - {""}) > 80
    assert any(reaction.text in EVERYDAY for reaction in praised), "silence"
    assert any(reaction.text in EVERYDAY for reaction in blamed), "silence"
    again = [reaction for reaction in blamed if reaction.request == "What is salt?"]
    assert 0.6 < len(again) / len(blamed) < 0.85
    thanks = [reaction for reaction in praised if not reaction.request]
    assert 0.5 < len(thanks) / len(praised) < 0.7
    alone = {reaction.text for reaction in (*again, *thanks)}
    assert not any(text.endswith(request) for text in alone for request in EVERYDAY)
    others = [reaction for reaction in (*praised, *blamed) if reaction.text not in alone]
    assert all(reaction.text.endswith(reaction.request) for reaction in others)
    after_thanks = person.react("", met)
    assert (after_thanks.text, after_thanks.thumb) == (after_thanks.request, None)
    assert after_thanks.request in EVERYDAY


def test_the_same_seed_says_the_same() -> None:
    def said(seed: str) -> list[str]:
        person = Person(seed, Taste.ASKS)
        return [person.request(), *(person.react("?", MISSES[Taste.ASKS][0]).text for _ in range(5))]

    assert said("3-1") == said("3-1") != said("3-2")


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("the sea is the sea is the sea is the sea is the sea is", True),
        ("no no no no no no", True),
        ("no no no no no, never", False),
        (LONG, True),
        ("A tide is the rise of the sea. A tide is the fall of the sea. The moon pulls it.", False),
        ("", False),
    ],
)
def test_a_loop_says_the_same_again_and_again(text: str, loops: bool) -> None:
    assert is_loop(text) is loops
