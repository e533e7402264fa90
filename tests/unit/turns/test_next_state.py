"""A turn's next state is what follows its response in the first later main request that holds it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawloop.core.contracts.turns import Message, TurnKind
from clawloop.core.ids import TurnId
from clawloop.core.turns.next_state import holds_exchange, is_doubtful, next_states
from tests.chats import (
    SEED,
    VOLATILE,
    LaterRequest,
    Recorder,
    assistant,
    calls,
    exchanges,
    next_state,
    system,
    tool,
    turn,
    user,
)
from tests.openclaw_chats import AFTER_HEARTBEATS, AGENT_PROMPT, HEARTBEAT, MEMORY_FLUSH, POLL

S = system("s")
ASKED: list[Message] = [S, user("a")]
SIDE = TurnKind.SIDE


def following(record: Recorder, turn_id: TurnId) -> list[Message] | None:
    state = next_state(record.seed, turn_id, record.turns, record.requests)
    return state.messages if state is not None else None


def test_the_users_next_message_is_the_next_state() -> None:
    record = Recorder()
    first = record.record([*ASKED, VOLATILE], assistant("one"))
    assert following(record, first) is None
    shown = record.ask([*ASKED, assistant("one"), user("thanks"), VOLATILE])
    record.ask([*ASKED, assistant("one"), user("thanks"), assistant("two"), user("bye")])
    state = next_state(SEED, first, record.turns, record.requests)
    assert state is not None
    assert (state.next_turn_id, state.messages) == (shown, [user("thanks")])


@pytest.mark.parametrize(
    ("after", "state"),
    [
        ([tool("read", "1"), tool("exec", "2")], [tool("read", "1"), tool("exec", "2")]),
        (
            [tool("read", "1"), tool("exec", "2"), user("hurry"), VOLATILE],
            [tool("read", "1"), tool("exec", "2"), user("hurry")],
        ),
        ([tool("read", "1"), VOLATILE, tool("exec", "2")], [tool("read", "1"), tool("exec", "2")]),
        ([tool("read", "1"), assistant("foreign"), user("x")], [tool("read", "1")]),
        ([user("x"), system("be brief")], [user("x")]),
        ([VOLATILE], None),
        ([], None),
        ([assistant("foreign"), user("x")], None),
    ],
)
def test_the_next_state_ends_before_the_next_answer(after: list[Message], state: list[Message] | None) -> None:
    record = Recorder()
    called = record.record(ASKED, calls("read", "exec"))
    record.ask([*ASKED, calls("read", "exec"), *after])
    assert following(record, called) == state


def test_a_request_without_a_next_state_leaves_it_to_the_next_request() -> None:
    record = Recorder()
    first = record.record(ASKED, assistant("one"))
    record.ask([*ASKED, assistant("one"), VOLATILE])
    record.ask([*ASKED, assistant("one"), user("thanks")])
    assert following(record, first) == [user("thanks")]


def test_every_answer_in_the_history_has_its_own_next_state() -> None:
    record = Recorder()
    one = record.record(ASKED, assistant("ok"))
    two = record.record([*ASKED, assistant("ok"), user("b")], assistant("ok"))
    history = [*ASKED, assistant("ok"), user("b"), assistant("ok"), user("c")]
    assert next_states(SEED, history, record.turns) == {one: [user("b")], two: [user("c")]}


@pytest.mark.parametrize(
    "later",
    [
        [*ASKED],  # asked again
        [*ASKED, assistant("another answer"), user("x")],  # regenerated, or a retry that went better
        [S, user("edited"), assistant("x"), user("y")],
        [S, user("<summary>"), user("x")],  # compacted away
        [*ASKED, user("[Queued user message] a"), user("x")],
    ],
)
def test_an_answer_that_never_appears_again_has_no_next_state(later: list[Message]) -> None:
    record = Recorder()
    lost = record.record(ASKED, assistant("one"))
    record.ask(later)
    assert following(record, lost) is None


def test_side_requests_and_older_requests_hold_no_next_state() -> None:
    record = Recorder()
    record.ask([*ASKED, assistant("one"), user("before")])
    first = record.record(ASKED, assistant("one"))
    record.ask([*ASKED, assistant("one"), user(HEARTBEAT)], SIDE)
    assert following(record, first) is None
    record.ask([*ASKED, assistant("one"), user("thanks")])
    record.requests.reverse()
    assert following(record, first) == [user("thanks")]


def test_a_fork_does_not_lend_its_feedback_to_the_same_short_answer_elsewhere() -> None:
    record = Recorder()
    one = record.record(ASKED, assistant("ok"))
    two = record.record([*ASKED, assistant("ok"), user("b")], assistant("ok"))
    record.record([*ASKED, assistant("ok"), user("c")], assistant("ok"))
    record.ask([*ASKED, assistant("ok"), user("c"), assistant("ok"), user("wrong!")])
    assert following(record, one) == [user("b")]
    assert following(record, two) is None


def test_of_two_tries_with_the_same_answer_one_gets_the_feedback() -> None:
    record = Recorder()
    first = record.record(ASKED, assistant("one"))
    retry = record.record(ASKED, assistant("one"))
    record.ask([*ASKED, assistant("one"), user("thanks")])
    assert following(record, first) is None
    assert following(record, retry) == [user("thanks")]


def test_a_later_equal_answer_does_not_take_an_earlier_next_state() -> None:
    record = Recorder()
    first = record.record(ASKED, assistant("one"))
    record.ask([*ASKED, assistant("one"), user("thanks")])
    again = record.record(ASKED, assistant("one"))
    assert following(record, first) == [user("thanks")]
    assert following(record, again) is None


def test_compaction_leaves_the_feedback_on_the_answers_it_kept() -> None:
    record = Recorder()
    one = record.record(ASKED, assistant("one"))
    two = record.record([*ASKED, assistant("one"), user("b")], assistant("two"))
    record.ask([S, user("<summary>"), assistant("two"), user("thanks")])
    assert following(record, one) == [user("b")]
    assert following(record, two) == [user("thanks")]


BEAT = user("any heartbeat prompt")


@pytest.mark.parametrize(
    ("after", "state"),
    [
        ([BEAT, assistant("NO_REPLY"), user("thanks")], [user("thanks")]),
        ([user("first"), BEAT, assistant("NO_REPLY"), user("thanks")], [user("first"), user("thanks")]),
        ([BEAT, calls("beat"), tool("beat", "x"), assistant("NO_REPLY"), user("thanks")], [user("thanks")]),
        (
            [user("first"), BEAT, calls("beat"), tool("beat", "x"), assistant("NO_REPLY")],
            [user("first")],
        ),
        ([BEAT, VOLATILE, assistant("NO_REPLY"), user("thanks")], [user("thanks")]),
        ([BEAT, assistant("NO_REPLY")], None),
        ([BEAT, assistant("NO_REPLY"), assistant("foreign"), user("x")], None),
        ([user(POLL), user("thanks")], [user("thanks")]),  # OpenClaw drops NO_REPLY and keeps the poll
        ([user(MEMORY_FLUSH), user("thanks")], [user("thanks")]),
    ],
)
def test_messages_of_side_turns_are_nobodys_next_state(after: list[Message], state: list[Message] | None) -> None:
    record = Recorder()
    first = record.record(ASKED, assistant("one"))
    history = [*ASKED, assistant("one")]
    record.record([*history, BEAT], calls("beat"), SIDE)
    # What stands in the history is not the prompt that was sent: OpenClaw writes it down in another form.
    record.record([*history, user(HEARTBEAT)], assistant("NO_REPLY"), SIDE)
    record.ask([*history, *after])
    assert following(record, first) == state


def test_tool_results_of_a_main_turn_stay_though_a_side_turn_follows() -> None:
    record = Recorder()
    called = record.record(ASKED, calls("read"))
    history = [*ASKED, calls("read"), tool("read", "1")]
    record.record([*history, BEAT], assistant("NO_REPLY"), SIDE)
    record.ask([*history, BEAT, assistant("NO_REPLY"), user("go on")])
    assert following(record, called) == [tool("read", "1"), user("go on")]


def test_openclaws_polls_are_not_feedback() -> None:
    record = Recorder()
    record.record([AGENT_PROMPT, user(HEARTBEAT)], assistant("NO_REPLY"), SIDE)
    assert next_states(SEED, AFTER_HEARTBEATS, record.turns) == {}


@given(exchanges, st.data())
def test_along_a_conversation_each_turn_gets_exactly_the_next_messages(
    said: list[tuple[list[Message], Message]], data: st.DataObject
) -> None:
    record = Recorder()
    history: list[Message] = []
    for words, answer in said:
        history += words
        for n in range(data.draw(st.integers(0, 1))):
            record.record(list(history), assistant(f"lost {n}"))
        kept = record.record([*history, VOLATILE], answer)
        history.append(answer)
        assert following(record, kept) is None
    record.ask([*history, user("next")])
    answered = [request.turn_id for request in record.requests if following(record, request.turn_id) is not None]
    assert [following(record, turn_id) for turn_id in answered] == [
        *(words for words, _ in said[1:]),
        [user("next")],
    ]


@given(exchanges)
def test_the_order_of_turns_and_requests_does_not_matter(said: list[tuple[list[Message], Message]]) -> None:
    record = Recorder()
    history: list[Message] = []
    for words, answer in said:
        history += words
        record.record(list(history), answer)
        history.append(answer)
    later = [*record.requests, LaterRequest(turn(99), TurnKind.MAIN, [*history, user("next")])]
    forwards = [next_state(SEED, one.turn_id, record.turns, later) for one in record.turns]
    backwards = [next_state(SEED, one.turn_id, record.turns[::-1], later[::-1]) for one in record.turns]
    assert forwards == backwards


@pytest.mark.parametrize("behind", [[], [system("# Environment")], [calls("remember"), tool("remember", "saved")]])
def test_a_request_that_looks_like_a_chore_is_doubtful_whatever_stands_behind_it(behind: list[Message]) -> None:
    record = Recorder()
    first = record.record(ASKED, assistant("one"))
    chore = [*ASKED, assistant("one"), user("Summarize our conversation so far."), *behind]
    state = next_states(SEED, chore, record.turns)[first]
    assert is_doubtful(chore, state)
    asked = [*chore, assistant("two"), user("No, you forgot it.")]
    assert not is_doubtful(asked, next_states(SEED, asked, record.turns)[first])


def test_an_exchange_is_held_where_somebody_says_more_after_it() -> None:
    record = Recorder()
    record.record(ASKED, assistant("one"))
    chore = [*ASKED, assistant("one"), user("Summarize our conversation so far."), system("# Environment")]
    second = record.record(chore, calls("remember"))
    with_result = [*chore, calls("remember"), tool("remember", "saved")]
    assert not holds_exchange(SEED, with_result, record.turns, [], chore, second)
    assert holds_exchange(SEED, [*with_result, assistant("Done."), user("Thanks.")], record.turns, [], chore, second)


def test_a_system_message_in_the_middle_is_no_reaction() -> None:
    record = Recorder()
    asked = [user("The time?")]
    first = record.record(asked, assistant("Ten."))
    added: Message = {"role": "system", "content": "The following tools are now available."}
    assert first not in next_states(SEED, [*asked, assistant("Ten."), added], record.turns)
    after: list[Message] = [*asked, assistant("Ten."), user("No."), added, {"role": "developer", "content": "Brief."}]
    assert next_states(SEED, after, record.turns)[first] == [user("No.")]
