"""A request's parent is the turn that spoke the last of its messages whose speaker is known."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from clawloop.core.contracts.turns import Message, TurnKind
from clawloop.core.ids import TurnId
from clawloop.core.turns.canonical import History
from clawloop.core.turns.parents import Candidate, find_parent, find_speakers
from tests.chats import (
    SEED,
    VOLATILE,
    Recorder,
    assistant,
    calls,
    exchanges,
    plain_messages,
    system,
    tool,
    turn,
    user,
)

S = system("s")


def parent(recorder: Recorder, *messages: Message) -> TurnId | None:
    found = find_parent(History(recorder.seed, messages), recorder.turns)
    return None if found is None else found[0]


def speakers(recorder: Recorder, *messages: Message) -> list[TurnId | None]:
    found = find_speakers(History(recorder.seed, messages), recorder.turns)
    return [speaker.turn_id if speaker else None for speaker in found]


def test_a_request_that_continues_follows_the_last_answer() -> None:
    record = Recorder()
    assert parent(record, S, user("a")) is None
    first = record.record([S, user("a"), VOLATILE], assistant("<think>hm</think>one"))
    second = record.record([S, user("a"), assistant("one"), user("b"), VOLATILE], calls("exec"))
    assert parent(record, S, user("a"), assistant("one"), user("b")) == first
    history = (S, user("a"), assistant("one"), user("b"), calls("exec"), tool("exec", "x"))
    assert parent(record, *history, VOLATILE) == second
    assert speakers(record, *history) == [None, None, first, None, second, None]


def test_equal_short_answers_are_distinguished_by_their_context() -> None:
    record = Recorder()
    first = record.record([S, user("a")], assistant("ok"))
    second = record.record([S, user("a"), assistant("ok"), user("b")], assistant("ok"))
    assert parent(record, S, user("a"), assistant("ok"), user("b"), assistant("ok"), user("c")) == second
    assert parent(record, S, user("a"), assistant("ok"), user("edited")) == first


def test_an_empty_answer_is_found_by_its_context_alone() -> None:
    record = Recorder()
    first = record.record([S, user("a")], assistant("<think>cut short"))
    second = record.record([S, user("a"), assistant(""), user("Hello?")], assistant("one"))
    assert parent(record, S, user("a"), assistant(""), user("Hello?")) == first
    assert parent(record, S, user("a"), assistant(""), user("Hello?"), assistant("one"), user("b")) == second
    assert parent(record, S, user("of another beginning"), assistant(""), user("Hello?")) is None


def test_an_edit_goes_back_to_the_answer_before_it() -> None:
    record = Recorder()
    first = record.record([S, user("a")], assistant("one"))
    record.record([S, user("a"), assistant("one"), user("b")], assistant("two"))
    assert parent(record, S, user("a"), assistant("one"), user("edited")) == first
    assert parent(record, S, user("edited")) is None


def test_forks_with_the_same_answer_keep_to_their_branch() -> None:
    record = Recorder()
    first = record.record([S, user("a")], assistant("ok"))
    left = record.record([S, user("a"), assistant("ok"), user("b")], assistant("yes"))
    right = record.record([S, user("a"), assistant("ok"), user("c")], assistant("yes"))
    on_left = (S, user("a"), assistant("ok"), user("b"), assistant("yes"), user("d"))
    assert speakers(record, *on_left) == [None, None, first, None, left, None]
    on_right = (S, user("a"), assistant("ok"), user("c"), assistant("yes"), user("d"))
    assert speakers(record, *on_right) == [None, None, first, None, right, None]


def test_of_regenerated_answers_the_one_that_was_kept_is_the_parent() -> None:
    record = Recorder()
    kept = record.record([S, user("a")], assistant("one"))
    record.record([S, user("a")], assistant("two"))
    record.record([S, user("a")], assistant("three"))
    assert parent(record, S, user("a"), assistant("one"), user("b")) == kept


def test_of_retries_with_the_same_answer_the_newest_is_the_parent() -> None:
    record = Recorder()
    record.record([S, user("a")], assistant("one"))
    retry = record.record([S, user("a")], assistant("one"))
    assert parent(record, S, user("a"), assistant("one"), user("b")) == retry


def test_the_same_answer_regenerated_later_does_not_take_the_old_branch() -> None:
    record = Recorder()
    first = record.record([S, user("a")], assistant("one"))
    second = record.record([S, user("a"), assistant("one"), user("b")], assistant("two"))
    again = record.record([S, user("a")], assistant("one"))
    old_branch = (S, user("a"), assistant("one"), user("b"), assistant("two"), user("c"))
    assert speakers(record, *old_branch) == [None, None, first, None, second, None]
    assert parent(record, S, user("a"), assistant("one"), user("d")) == again


def test_a_rewritten_retry_has_the_parent_of_the_first_try() -> None:
    record = Recorder()
    first = record.record([S, user("a")], assistant("one"))
    record.record([S, user("a"), assistant("one"), user("b")], assistant("cut o"))
    rewritten = user("[Queued user message] b\n\nContinue the current task from the existing transcript")
    assert parent(record, S, user("a"), assistant("one"), rewritten) == first
    aborted = user("<turn_aborted>\nThe previous turn was interrupted.\n</turn_aborted>")
    assert parent(record, S, user("a"), assistant("one"), user("b"), aborted, user("c")) == first


def test_a_rewritten_system_prompt_hides_no_answer() -> None:
    record = Recorder()
    record.record([S, user("a")], assistant("ok"))
    second = record.record([S, user("a"), assistant("ok"), user("b")], assistant("ok"))
    history = (user("a"), assistant("ok"), user("b"), assistant("ok"), user("c"))
    assert speakers(record, system("t"), *history)[2:5] == [turn(1), None, second]
    third = record.record([system("t"), *history], assistant("three"))
    assert parent(record, system("u"), *history, assistant("three"), user("d")) == third


def test_after_compaction_the_answers_that_were_kept_are_found() -> None:
    record = Recorder()
    record.record([S, user("a")], assistant("one"))
    second = record.record([S, user("a"), assistant("one"), user("b")], assistant("two"))
    assert parent(record, S, user("<summary>"), assistant("two"), user("c")) == second
    assert parent(record, S, user("<summary>"), user("c")) is None


def test_pruned_tool_results_do_not_lead_back_to_the_answer_before_them() -> None:
    record = Recorder()
    first = record.record([S, user("a")], assistant("one"))
    asked: list[Message] = [S, user("a"), assistant("one"), user("b")]
    second = record.record(asked, calls("exec"))
    third = record.record([*asked, calls("exec"), tool("exec", "long")], assistant("three"))
    pruned = (*asked, calls("exec"), tool("exec", "[pruned]"), assistant("three"), user("c"))
    assert speakers(record, *pruned) == [None, None, first, None, second, None, third, None]


def test_an_answer_of_another_author_is_not_matched_with_an_older_turn() -> None:
    record = Recorder()
    record.record([S, user("x")], assistant("ok"))
    record.record([S, user("a")], assistant("no"))
    second = record.record([S, user("a"), assistant("no"), user("b")], assistant("yes"))
    edited = (S, user("a"), assistant("no"), user("b"), assistant("yes"), user("c"), assistant("ok"), user("d"))
    assert parent(record, *edited) == second


def test_an_answer_matched_in_context_is_not_matched_a_second_time() -> None:
    record = Recorder()
    first = record.record([S, user("a")], assistant("ok"))
    foreign = (S, user("a"), assistant("ok"), user("b"), assistant("ok"), user("c"))
    assert speakers(record, *foreign) == [None, None, first, None, None, None]


def test_a_retry_displaced_by_a_newer_one_matches_no_other_message() -> None:
    record = Recorder()
    record.record([S, user("a")], assistant("ok"))
    retry = record.record([S, user("a")], assistant("ok"))
    foreign = (S, user("a"), assistant("ok"), user("b"), assistant("ok"), user("c"))
    assert speakers(record, *foreign) == [None, None, retry, None, None, None]


def test_after_a_rewritten_beginning_turns_still_get_newer() -> None:
    record = Recorder()
    yes = record.record([S, user("a")], assistant("yes"))
    no = record.record([S, user("a"), assistant("yes"), user("b")], assistant("no"))
    record.record([S, user("elsewhere")], assistant("yes"))
    kept = (user("<summary>"), assistant("yes"), user("b"), assistant("no"), user("c"))
    assert speakers(record, *kept) == [None, yes, None, no, None]


def test_repeated_answers_after_a_rewritten_beginning_get_the_newest_turn_last() -> None:
    record = Recorder()
    history: list[Message] = [S]
    for word in "abc":
        history.append(user(word))
        record.record(list(history), assistant("ok"))
        history.append(assistant("ok"))
    kept = (user("<summary>"), assistant("ok"), user("c"), assistant("ok"), user("d"))
    assert speakers(record, *kept) == [None, turn(2), None, turn(3), None]


def test_side_turns_that_stay_in_the_history_are_parents_like_others() -> None:
    record = Recorder()
    record.record([S, user("a")], assistant("one"))
    beat = record.record([S, user("a"), assistant("one"), user("beat")], assistant("NO_REPLY"), TurnKind.SIDE)
    assert parent(record, S, user("a"), assistant("one"), user("beat"), assistant("NO_REPLY"), user("b")) == beat


def test_context_outweighs_clocks_that_disagree() -> None:
    record = Recorder()
    late = record.record([S, user("a")], assistant("one"))
    early = record.record([S, user("a"), assistant("one"), user("b")], assistant("two"))
    swapped = {late: early, early: late}
    record.turns = [Candidate(swapped[c.turn_id], c.kind, c.response_digest, c.reply_digest) for c in record.turns]
    history = (S, user("a"), assistant("one"), user("b"), assistant("two"), user("c"))
    assert speakers(record, *history) == [None, None, early, None, late, None]


def test_clocks_that_disagree_do_not_let_newer_turns_in_before_older_ones() -> None:
    record = Recorder()
    early = record.ask([])
    elsewhere = record.record([S, user("elsewhere")], assistant("x"))
    opening: list[Message] = [S, user("p"), assistant("x"), user("a")]
    late = record.record(opening, assistant("one"))
    record.record([*opening, assistant("one"), user("b")], assistant("two"))
    last = record.turns.pop()
    record.turns.append(Candidate(early, last.kind, last.response_digest, last.reply_digest))
    history = (*opening, assistant("one"), user("b"), assistant("two"), user("c"))
    assert early < elsewhere < late
    assert speakers(record, *history) == [None, None, None, None, late, None, early, None]


def test_time_is_linear_where_one_answer_was_given_thousands_of_times() -> None:
    record = Recorder()
    answers = [assistant("ok")] * 20_000
    digest = record.record([user("a")], assistant("ok"))
    template = record.turns[0]
    turns = [Candidate(turn(n), TurnKind.MAIN, template.response_digest, n.to_bytes(16)) for n in range(2, 20_000)]
    begun = time.process_time()
    found = find_speakers(History(SEED, [user("rewritten"), *answers]), [template, *turns])
    assert time.process_time() - begun < 5  # about 0.3 s; quadratic would be minutes
    assert found[-1] is not None
    assert found[-1].turn_id == turn(19_999)
    assert digest == turn(1)


@given(exchanges)
def test_each_request_of_a_conversation_follows_the_turn_before(
    said: list[tuple[list[Message], Message]],
) -> None:
    record = Recorder()
    history: list[Message] = []
    last: TurnId | None = None
    for words, answer in said:
        history += words
        assert parent(record, *history) == last
        last = record.record(list(history), answer)
        history.append(answer)


@given(exchanges, st.data())
def test_retries_never_become_parents(said: list[tuple[list[Message], Message]], data: st.DataObject) -> None:
    record = Recorder()
    history: list[Message] = []
    last: TurnId | None = None
    for words, answer in said:
        history += words
        for n in range(data.draw(st.integers(0, 2))):
            record.record(list(history), assistant(f"lost {n}"))
        last = record.record(list(history), answer)
        for n in range(data.draw(st.integers(0, 2))):
            record.record(list(history), assistant(f"too late {n}"))
        history.append(answer)
    assert parent(record, *history, user("next")) == last


@given(st.lists(plain_messages, max_size=8), st.lists(st.lists(plain_messages, max_size=4), max_size=6))
def test_speakers_are_distinct_get_newer_and_wrote_their_messages(
    messages: list[Message], requests: list[list[Message]]
) -> None:
    record = Recorder()
    for request in requests:
        record.record(request, assistant("ok"))
    history = [message for said in messages for message in (said, assistant("ok"))]
    found = [speaker for speaker in speakers(record, *history) if speaker is not None]
    assert found == sorted(set(found))
    assert parent(record, *history) == (found[-1] if found else None)
