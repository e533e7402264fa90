"""A conversation that nothing names is known by its messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawloop.core.contracts.turns import Message
from clawloop.core.ids import SessionId
from clawloop.core.turns.canonical import History, extend_digest, prefix_digests, seed_digest
from clawloop.core.turns.conversation import KnownPrefix, choose_session, choose_session_by_place
from clawloop.core.turns.identify import conversation_session_id
from tests.chats import (
    KEY,
    OTHER_KEY,
    SEED,
    VOLATILE,
    assistant,
    calls,
    exchanges,
    plain_messages,
    system,
    tool,
    turn,
    user,
)


class Ledger:
    """Keeps known prefixes and enters turns as the gateway's store does, in memory."""

    def __init__(self) -> None:
        self.known: list[KnownPrefix] = []
        self._turns = 0

    def insert(
        self, messages: list[Message], response: Message, *, completed: bool = True, seed: bytes = SEED
    ) -> SessionId:
        found = History(seed, messages)
        digests = {*found.replies, found.whole}
        chosen = choose_session(found, [prefix for prefix in self.known if prefix.digest in digests])
        self._turns += 1
        turn_id = turn(self._turns)
        session = chosen or conversation_session_id(turn_id)
        reply = extend_digest(found.whole, response)
        self.known.append(KnownPrefix(reply, turn_id, session, is_reply=True, completed=completed))
        self.known.append(KnownPrefix(found.whole, turn_id, session, is_reply=False, completed=completed))
        return session


OPENING: list[Message] = [system("s"), user("hi")]
LATER: list[Message] = [*OPENING, assistant("hello"), user("how are you")]


def test_a_lookup_has_each_reply_and_the_whole_request() -> None:
    messages = [*LATER, calls("exec"), tool("exec", "x"), VOLATILE]
    digests = prefix_digests(SEED, messages)
    found = History(SEED, messages)
    assert found.replies == [digests[2], digests[4]]
    assert found.whole == digests[-1] == digests[-2]
    assert found.alone
    assert not History(SEED, OPENING).alone
    assert History(SEED, []).whole == SEED


def test_a_conversation_continues_its_session() -> None:
    ledger = Ledger()
    first = ledger.insert([*OPENING, VOLATILE], assistant("<think>hm</think>hello"))
    assert ledger.insert(LATER, calls("exec")) == first
    assert ledger.insert([*LATER, calls("exec"), tool("exec", "x"), VOLATILE], assistant("done")) == first


def test_the_same_opening_again_starts_another_session() -> None:
    ledger = Ledger()
    first = ledger.insert(OPENING, assistant("hello"))
    assert ledger.insert(OPENING, assistant("good day")) != first


def test_the_newest_of_equal_conversations_is_continued() -> None:
    ledger = Ledger()
    ledger.insert(OPENING, assistant("hello"))
    second = ledger.insert(OPENING, assistant("hello"))
    assert ledger.insert(LATER, assistant("fine")) == second


def test_repeating_an_opening_whose_reply_never_completed_continues_the_session() -> None:
    ledger = Ledger()
    first = ledger.insert(OPENING, assistant(""), completed=False)
    assert ledger.insert([*OPENING, VOLATILE], assistant("hel"), completed=False) == first
    assert ledger.insert(OPENING, assistant("hello")) == first
    assert ledger.insert(OPENING, assistant("hello")) != first  # answered by now: somebody begins anew


def test_an_old_failure_is_not_continued_after_a_newer_success() -> None:
    ledger = Ledger()
    failed = ledger.insert(OPENING, assistant(""), completed=False)
    ledger.known[0], ledger.known[1] = ledger.known[1], ledger.known[0]  # the order of rows says nothing
    assert ledger.insert(OPENING, assistant("hello")) == failed
    ledger.known.reverse()
    assert ledger.insert(OPENING, assistant("hello")) != failed


def test_repeating_an_opening_with_examples_continues_the_session_too() -> None:
    examples: list[Message] = [user("1+1"), assistant("2"), user("2+2")]
    ledger = Ledger()
    first = ledger.insert(examples, assistant(""), completed=False)
    assert ledger.insert(examples, assistant("4")) == first
    assert ledger.insert(examples, assistant("4")) != first


def test_an_opening_that_ends_with_the_beginning_of_an_answer_is_no_known_reply() -> None:
    begun: list[Message] = [user("tell me"), assistant("Once")]
    ledger = Ledger()
    first = ledger.insert(begun, assistant(" upon"))
    assert ledger.insert(begun, assistant(" more")) != first


@pytest.mark.parametrize(
    ("messages", "same"),
    [
        ([*OPENING, assistant("hello"), user("something else")], True),  # the second message edited
        ([*OPENING, assistant("hello"), user("how are you"), assistant("edited"), user("x")], True),
        ([*LATER, assistant("fine"), user("bye")], True),
        (LATER, True),  # asked again
        ([system("s"), user("edited"), assistant("hello"), user("how are you")], False),  # nothing known before it
        ([system("t"), user("hi"), assistant("hello"), user("how are you")], False),
        ([*OPENING, assistant("edited"), user("how are you")], False),
    ],
)
def test_an_edited_history_is_a_branch_of_its_session_while_a_reply_of_it_is_known(
    messages: list[Message], same: bool
) -> None:
    ledger = Ledger()
    session = ledger.insert(OPENING, assistant("hello"))
    ledger.insert(LATER, assistant("fine"))
    assert (ledger.insert(messages, assistant("x")) == session) is same


def test_the_deepest_known_reply_wins_over_a_newer_shallow_one() -> None:
    found = History(SEED, [*LATER, assistant("fine"), user("bye")])
    old, new = (conversation_session_id(turn(n)) for n in (1, 2))
    shallow, deep = found.replies
    known = [
        KnownPrefix(deep, turn(1), old, is_reply=True, completed=True),
        KnownPrefix(shallow, turn(2), new, is_reply=True, completed=True),
        KnownPrefix(found.whole, turn(3), new, is_reply=False, completed=False),
    ]
    assert choose_session(found, known) == old
    assert choose_session(found, known[1:]) == new
    assert choose_session(found, []) is None


@given(exchanges, st.data())
def test_a_continued_conversation_is_always_found(
    said: list[tuple[list[Message], Message]], data: st.DataObject
) -> None:
    ledger = Ledger()
    history: list[Message] = []
    sessions: set[SessionId] = set()
    for words, answer in said:
        history += words
        request = [*history, VOLATILE] if data.draw(st.booleans()) else list(history)
        sessions.add(ledger.insert(request, answer))
        history.append(answer)
    assert len(sessions) == 1


@given(exchanges, st.data())
def test_an_edit_after_a_known_reply_forks_within_the_session(
    said: list[tuple[list[Message], Message]], data: st.DataObject
) -> None:
    ledger = Ledger()
    history: list[Message] = []
    replies: list[int] = []
    session: SessionId | None = None
    for words, answer in said:
        history += words
        session = ledger.insert(list(history), answer)
        history.append(answer)
        replies.append(len(history))
    kept = data.draw(st.sampled_from(replies))
    assert ledger.insert([*history[:kept], user("edited")], assistant("x")) == session


@given(st.lists(plain_messages, min_size=1, max_size=5))
def test_another_key_or_narrowing_finds_nothing(messages: list[Message]) -> None:
    ledger = Ledger()
    session = ledger.insert(messages, assistant("x"))
    for seed in (seed_digest(OTHER_KEY, ()), seed_digest(KEY, ("user=ann",))):
        assert ledger.insert([*messages, assistant("x"), user("y")], assistant("z"), seed=seed) != session


def test_a_request_that_was_cut_off_and_sent_again_is_of_one_session() -> None:
    asked = [user("The time?")]
    session, other = (conversation_session_id(turn(n)) for n in (1, 2))
    again = History(SEED, [*asked, assistant("It  is ten."), user("Thanks.")])
    told = {again.asked[0]: [(session, assistant("It is"), False), (session, assistant("It is ten."), True)]}
    assert choose_session_by_place(again, told) == session
    told[again.asked[0]].append((other, assistant("It is ten."), True))
    assert choose_session_by_place(again, told) is None
