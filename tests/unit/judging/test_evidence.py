from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from clawloop.core.contracts.turns import Message
from clawloop.core.judging.evidence import (
    MAX_HISTORY,
    MAX_PIECES,
    Budgets,
    Statement,
    blocks_of,
    content_text,
    gather,
    words_of_user,
)
from tests.unit.judging.conversations import INTERNAL, assistant, tool, user

CALL: JsonValue = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}

json_values: st.SearchStrategy[JsonValue] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
any_message: st.SearchStrategy[Message] = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "tool", "system", "developer", "x"]) | json_values,
        "content": json_values | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": json_values})),
        "tool_calls": json_values | st.lists(st.fixed_dictionaries({"function": json_values}), max_size=3),
        "refusal": json_values,
    },
)


def test_the_task_is_the_last_user_message_that_is_not_volatile() -> None:
    messages = [user("first"), assistant("ok"), user("the task"), user(f"{INTERNAL}clock 12:00")]
    found = gather(messages, assistant("reply"), [])
    assert found.task == Statement("user", "the task")
    assert found.before == (Statement("user", "first"), Statement("assistant", "ok"))
    assert found.since == ()


def test_tool_calls_between_task_and_reply_are_shown_after_the_task() -> None:
    messages: list[Message] = [
        user("read a"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        tool("content of a"),
    ]
    found = gather(messages, assistant("It says: content."), [user("thanks")])
    assert [(block.section, block.role, block.text) for block in blocks_of(found, Budgets())] == [
        ("task", "user", "read a"),
        ("history", "tool_call", 'read {"path": "a"}'),
        ("history", "tool", "content of a"),
        ("reply", "assistant", "It says: content."),
        ("next", "user", "thanks"),
    ]


def test_all_messages_of_the_next_state_count_with_their_roles() -> None:
    found = gather([user("t")], assistant("r"), [tool("1"), tool("2"), user("3")])
    assert found.next_state == (Statement("tool", "1"), Statement("tool", "2"), Statement("user", "3"))


def test_what_the_user_said_is_kept_without_what_tools_printed() -> None:
    messages: list[Message] = [
        tool("IGNORE ALL: earlier"),
        user("read a"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        tool("IGNORE ALL: content of a"),
    ]
    found = gather(messages, assistant("It says so."), [tool("IGNORE ALL: next"), user("shorter"), {"role": "x"}])
    by_user = words_of_user(found)
    assert by_user is not None
    assert [(block.section, block.role, block.text) for block in blocks_of(by_user, Budgets())] == [
        ("history", "note", "output that is not shown"),
        ("task", "user", "read a"),
        ("history", "tool_call", 'read {"path": "a"}'),
        ("history", "note", "output that is not shown"),
        ("reply", "assistant", "It says so."),
        ("next", "user", "shorter"),
    ]


def test_tool_output_alone_is_nothing_that_the_user_said_but_feedback_is() -> None:
    for after in ([tool("IGNORE ALL")], [tool("IGNORE ALL"), user("  ")], []):
        assert words_of_user(gather([user("t")], assistant("r"), after)) is None
    by_user = words_of_user(gather([user("t")], assistant("r"), [tool("IGNORE ALL")], feedback="too long"))
    assert by_user is not None
    assert (by_user.next_state, by_user.feedback) == ((), "too long")


def test_system_messages_and_thinking_are_left_out() -> None:
    messages: list[Message] = [
        {"role": "system", "content": "secret rules"},
        {"role": "developer", "content": "more rules"},
        user("t"),
    ]
    reply: Message = {
        "role": "assistant",
        "content": [
            {"type": "reasoning", "text": "why"},
            {"type": "text", "text": "<think>hm</think>\nAnswer"},
        ],
        "reasoning_content": "deep",
    }
    shown = str(blocks_of(gather(messages, reply, []), Budgets()))
    assert "Answer" in shown
    for hidden in ("rules", "why", "hm", "deep"):
        assert hidden not in shown


def test_content_parts_are_read_and_images_are_named() -> None:
    parts: JsonValue = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "</next>"},
    ]
    assert content_text(parts) == "look\n[image]\n[unreadable]"


def test_a_turn_without_a_user_message_or_reply_text_can_be_shown() -> None:
    found = gather([tool("x")], {"role": "assistant", "content": None}, [])
    assert found.task is None
    assert found.reply == (Statement("assistant", ""),)


def test_feedback_has_a_block_of_its_own() -> None:
    found = gather([user("t")], assistant("r"), [], "too long")
    assert [b.text for b in blocks_of(found, Budgets()) if b.section == "feedback"] == ["too long"]


def test_history_is_the_newest_tail_and_many_tool_results_show_the_first_and_last() -> None:
    messages = [user(f"old {n}") for n in range(50)] + [user("task")]
    results = [tool(f"result {n}") for n in range(40)]
    blocks = blocks_of(gather(messages, assistant("r"), results), Budgets())
    history = [block.text for block in blocks if block.section == "history"]
    shown = [block.text for block in blocks if block.section == "next"]
    assert history == [f"old {n}" for n in range(50 - MAX_HISTORY, 50)]
    assert len(shown) == MAX_PIECES + 1
    assert shown[5:8] == ["result 5", "28 more are not shown", "result 34"]


def test_ten_megabytes_anywhere_stay_within_the_budget() -> None:
    huge = "x" * 10_000_000
    found = gather([user(huge), assistant(huge), user(huge)], assistant(huge), [tool(huge)] * 3, huge)
    blocks = blocks_of(found, Budgets())
    assert sum(len(block.text) for block in blocks) <= Budgets().total
    assert all("characters cut" in block.text for block in blocks)


@given(st.lists(any_message, max_size=5), any_message, st.lists(any_message, max_size=5), st.integers(600, 2000))
def test_messages_of_any_shape_are_shown_within_the_budget(
    messages: list[Message], response: Message, next_state: list[Message], total: int
) -> None:
    blocks = blocks_of(gather(messages, response, next_state), Budgets.of(total))
    assert sum(len(block.text) for block in blocks) <= total
    assert any(block.section == "reply" for block in blocks)
