from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from clawloop.core.contracts.turns import Message
from clawloop.core.judging.hints import LEAD_IN, HintChoice, choose_hint, fault_of, reject_hint, with_hint
from clawloop.core.judging.voting import HintVote
from tests.unit.judging.conversations import INTERNAL, assistant, evidence, user

NONE = HintVote(accepted=False, text=None)


def hint(text: str) -> HintVote:
    return HintVote(accepted=True, text=text)


def test_the_longest_usable_hint_is_chosen_and_one_positive_is_enough() -> None:
    votes = [NONE, hint("Use Python here."), None, hint("Use Python, and add type annotations.")]
    assert choose_hint(votes, evidence()) == HintChoice(
        "Use Python, and add type annotations.", answered=True, why="2 of 3 hint answers usable"
    )


def test_as_many_answers_must_have_a_usable_hint_as_are_needed() -> None:
    votes = [NONE, hint("Use Python here."), None, hint("Use Python."), hint("Be formal.")]
    assert choose_hint(votes, evidence(), 2).text == "Use Python here."
    why = "2 of 4 hint answers usable, 3 needed"
    assert choose_hint(votes, evidence(), 3) == HintChoice(None, answered=True, why=why)
    unread = [None, None, hint("Use Python here.")]
    why = "1 of 1 hint answers usable, 2 needed"
    assert choose_hint(unread, evidence(), 2) == HintChoice(None, answered=False, why=why)
    for readable in (NONE, hint("Python")):
        assert not choose_hint([None, None, readable], evidence(), 2).answered
        assert choose_hint([None, readable, readable], evidence(), 2).answered


def test_a_longer_hint_that_is_trivial_does_not_win() -> None:
    votes = [hint("Use type hints."), hint("The assistant should improve the previous response.")]
    assert choose_hint(votes, evidence()).text == "Use type hints."


@pytest.mark.parametrize(
    ("votes", "answered", "why"),
    [
        ([], False, "no valid hint answer"),
        ([None, None], False, "no valid hint answer"),
        ([None, NONE], True, "the judge found no hint"),
        ([hint("Be formal.")], True, "hint dropped: too short"),
        ([hint("The response was wrong.")], True, "hint dropped: repeats the verdict"),
    ],
)
def test_without_a_usable_hint_the_reason_is_kept(votes: list[HintVote | None], answered: bool, why: str) -> None:
    assert choose_hint(votes, evidence()) == HintChoice(None, answered, why)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Be formal.", "too short"),
        ("          x          ", "too short"),
        ("Be concise.", None),
        ("The user was not satisfied with the answer.", "repeats the verdict"),
        ("Do it better next time!", "repeats the verdict"),
        ("!!!!!!!!!!!!!!!", "repeats the verdict"),
        ("Add two numbers in Python", "repeats the request"),
        ("add TWO numbers, in python!", "repeats the request"),
        ("const add = (a, b) => a + b", "repeats the reply"),
        ("Add two numbers in Python, not in JavaScript.", None),
        ("Verwende Python statt JavaScript.", None),
        ("Use <|im_end|> in answers.", "holds control tokens"),
    ],
)
def test_a_hint_that_only_repeats_is_trivial(text: str, fault: str | None) -> None:
    assert fault_of(text, request="Add two numbers in Python.", reply="const add = (a, b) => a + b;") == fault


def test_a_hint_in_a_script_without_spaces_can_repeat_the_request() -> None:
    request = "请用蟒蛇语言写一个把两个数字相加的函数"
    assert fault_of("写一个把两个数字相加的函数", request=request, reply="x") == "repeats the request"
    assert fault_of("写一个把两个数字相减的函数", request=request, reply="x") is None


def test_a_hint_that_cannot_be_used_leaves_the_turn_answered() -> None:
    found = choose_hint([hint("Use type hints.")], evidence())
    assert reject_hint(found, "template mismatch") == HintChoice(None, answered=True, why="template mismatch")


def test_a_hint_goes_to_the_end_of_the_last_user_message_that_is_not_volatile() -> None:
    messages = [user("a"), assistant("b"), user("c"), assistant("d"), user(f"{INTERNAL}now")]
    hinted = with_hint(messages, "Use Python.")
    assert hinted == [*messages[:2], user("c\n\nKeep in mind: Use Python."), *messages[3:]]


def test_a_hint_becomes_a_further_part_of_a_list() -> None:
    part: JsonValue = {"type": "text", "text": "c"}
    hinted = with_hint([{"role": "user", "content": [part]}], "Use Python.")
    assert hinted == [{"role": "user", "content": [part, {"type": "text", "text": f"{LEAD_IN}Use Python."}]}]


@pytest.mark.parametrize("messages", [[], [assistant("x")], [user(INTERNAL)], [{"role": "user", "content": None}]])
def test_without_a_place_there_is_no_hinted_prompt(messages: list[Message]) -> None:
    assert with_hint(messages, "Use Python.") is None


@given(
    st.lists(
        st.builds(
            lambda role, content: {"role": role, "content": content, "name": "n"},
            st.sampled_from(["user", "assistant", "tool"]),
            st.one_of(st.text(max_size=5), st.just([{"type": "text", "text": "x"}])),
        ),
        max_size=6,
    )
)
def test_inserting_a_hint_changes_one_message_of_a_copy(messages: list[Message]) -> None:
    before = deepcopy(messages)
    hinted = with_hint(messages, "Use Python.")
    assert messages == before
    if hinted is None:
        assert all(message["role"] != "user" for message in messages)
        return
    changed = [at for at, (old, new) in enumerate(zip(messages, hinted, strict=True)) if old != new]
    assert changed == [max(at for at, message in enumerate(messages) if message["role"] == "user")]
