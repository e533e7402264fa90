"""Replies that clients send back in other words are found by their place, and only there."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue

from clawloop.core.contracts.turns import MatchedBy, Message, TurnKind
from clawloop.core.ids import TurnId
from clawloop.core.turns.canonical import History, extend_digest, response_digest, without_asides
from clawloop.core.turns.next_state import next_states
from clawloop.core.turns.parents import Candidate, find_parent
from clawloop.core.turns.places import AskedTurn, Placed, find_places
from tests.chats import SEED, assistant, system, turn, user

CAPTURES = Path(__file__).parent / "captures"
# Whole requests, of clients that speak chat completions.
REQUESTS = Path(__file__).parents[2] / "clients" / "captures"
CHAT_CLIENTS = ("hermes", "opencode", "qwen_code")
REMINDER = "<system-reminder>\nToday is Friday.\n</system-reminder>"


def called(*calls: tuple[str, str, str], text: str | None = None) -> Message:
    """An assistant message with calls, each an id, a name and arguments."""
    functions: list[JsonValue] = [
        {"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls
    ]
    return {"role": "assistant", "content": text, "tool_calls": functions}


def result(identity: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": identity, "content": text}


class Ledger:
    """Records turns as the store does."""

    def __init__(self) -> None:
        self.asked: list[AskedTurn] = []
        self.candidates: list[Candidate] = []

    def record(
        self, messages: Sequence[Message], response: Message, kind: TurnKind = TurnKind.MAIN, *, ended: bool = True
    ) -> TurnId:
        history, placed = History(SEED, messages), self.placed(messages)
        turn_id = turn(len(self.asked) + 1)
        self.asked.append(AskedTurn(turn_id, kind, placed.whole, response, ended))
        reply = extend_digest(history.whole, response)
        self.candidates.append(Candidate(turn_id, kind, response_digest(response), reply))
        return turn_id

    def placed(self, messages: Sequence[Message]) -> Placed:
        return find_places(History(SEED, messages), self.asked)

    def parent(self, messages: Sequence[Message]) -> tuple[TurnId, MatchedBy] | None:
        return find_parent(History(SEED, messages), self.candidates, self.placed(messages).replies)

    def exact_parent(self, messages: Sequence[Message]) -> tuple[TurnId, MatchedBy] | None:
        return find_parent(History(SEED, messages), self.candidates)

    def states(self, messages: Sequence[Message]) -> dict[TurnId, list[Message]]:
        return next_states(SEED, messages, self.candidates, self.placed(messages).replies)


ASKED = [system("You code."), user("time in Oslo and Rome?")]
OSLO, ROME = '{"city": "Oslo"}', '{"city": "Rome"}'


@pytest.mark.parametrize(
    ("recorded", "sent_back"),
    [
        (called(("chatcmpl-1", "time", OSLO)), called(("abc123450", "time", OSLO))),
        (called(("chatcmpl-1", "time", OSLO)), called(("chatcmpl-1_suffix", "time", '{"city":"Oslo"}'))),
        (called(("a", "time", "{broken")), called(("a", "time", "{}"))),
        (called(("a", "time", "{broken"), ("b", "time", OSLO)), called(("x", "time", "{}"), ("y", "time", OSLO))),
        (called(("a", "time", OSLO), ("b", "time", ROME)), called(("b", "time", ROME), ("a", "time", OSLO))),
        (called(("a", "time", OSLO), text="I look."), called(("a", "time", OSLO))),
        (called(("a", "time", OSLO), text="I  look.\n"), called(("z", "time", OSLO), text="I look.")),
        (assistant("[[reply_to_current]] It is ten."), assistant("It is ten.")),
        (assistant("[[ reply_to: 42 ]]It is ten."), assistant("It is ten.")),
        (assistant("cafe\u0301 at ten"), assistant("caf\u00e9 at ten")),
        (assistant("It is ten.  \n\nReally."), assistant("It is ten.\nReally.")),
        (called(("a", "time", '{"city": "Malmo\u0308"}')), called(("a", "time", '{"city": "Malm\u00f6"}'))),
    ],
)
def test_a_reply_in_other_words_is_found_by_its_place(recorded: Message, sent_back: Message) -> None:
    ledger = Ledger()
    first = ledger.record(ASKED, recorded)
    calls: Any = sent_back.get("tool_calls", [])
    after = [result(call["id"], f"ten {n}") for n, call in enumerate(calls)] or [user("Thanks.")]
    later = [*ASKED, sent_back, *after]
    assert ledger.exact_parent(later) is None
    assert ledger.parent(later) == (first, MatchedBy.PLACE)
    assert ledger.states(later) == {first: after}


def test_split_parallel_calls_are_one_reply_with_all_results() -> None:
    ledger = Ledger()
    first = ledger.record(ASKED, called(("a", "time", OSLO), ("b", "time", ROME), text="I look."))
    one, two = result("x", "ten"), result("y", "eleven")
    split = [called(("x", "time", OSLO), text="I look."), one, called(("y", "time", ROME)), two]
    assert ledger.parent([*ASKED, *split]) == (first, MatchedBy.PLACE)
    assert ledger.states([*ASKED, *split]) == {first: [one, two]}
    apart = [assistant("I look."), called(("x", "time", OSLO), ("y", "time", ROME)), one, two]
    assert ledger.states([*ASKED, *apart]) == {first: [one, two]}


def test_the_conversation_goes_on_with_the_recorded_reply() -> None:
    """Ids that are new in each request cost only what they name: everything after them is found."""
    ledger, said, turns = Ledger(), list(ASKED), list[TurnId]()
    for n in range(6):
        for message in said:
            for call in message.get("tool_calls", ()):  # type: ignore[union-attr]
                call["id"] = f"new{n}{call['id']}"  # type: ignore[index,call-overload]
            if "tool_call_id" in message:
                message["tool_call_id"] = f"new{n}{message['tool_call_id']}"
        if turns:
            assert ledger.parent(said) == (turns[-1], MatchedBy.PLACE)
        reply = called((f"id{n}", "time", json.dumps({"n": n}))) if n % 2 == 0 else assistant(f"It is {n}.")
        turns.append(ledger.record(copy.deepcopy(said), reply))
        said += [copy.deepcopy(reply), result(f"id{n}", f"r{n}") if n % 2 == 0 else user(f"and {n}?")]
    assert [reply.turn_id for reply in ledger.placed(said).replies] == turns


def test_an_id_that_a_later_call_has_again_is_that_calls() -> None:
    ledger, first = Ledger(), called(("r1", "time", OSLO))
    ledger.record(ASKED, first)
    said = [*ASKED, called(("0", "time", OSLO)), result("0", "ten")]
    ledger.record(said, called(("0", "time", ROME)))
    said += [called(("0", "time", ROME)), result("0", "eleven")]
    third = ledger.record(said, assistant("Ten and  eleven."))
    anew = [*ASKED, called(("8", "time", OSLO)), result("8", "ten"), called(("9", "time", ROME)), result("9", "eleven")]
    assert ledger.parent([*anew, assistant("Ten and eleven."), user("Thanks.")]) == (third, MatchedBy.PLACE)


@pytest.mark.parametrize(
    "other",
    [
        called(("a", "bash", '{"command": "rm -r ."}')),  # other arguments
        called(("a", "shell", '{"command": "ls"}')),  # another name
        called(("a", "bash", '{"command": "ls"}'), ("b", "bash", '{"command": "ls"}')),  # one more
        called(("a", "bash", "{}")),  # the recorded arguments can be parsed
        called(("x", "bash", '{"command": "ls"}'), text="Something else."),
        assistant("I list the files."),
        assistant(""),
    ],
)
def test_another_reply_at_the_same_place_is_none(other: Message) -> None:
    ledger = Ledger()
    ledger.record(ASKED, called(("a", "bash", '{"command": "ls"}'), text="I list the files."))
    assert ledger.parent([*ASKED, other, user("No.")]) is None


def test_a_call_made_twice_is_not_the_call_made_once() -> None:
    twice = called(("a", "bash", '{"command": "ls"}'), ("b", "bash", '{"command": "ls"}'))
    ledger = Ledger()
    first = ledger.record(ASKED, twice)
    once = [*ASKED, called(("x", "bash", '{"command": "ls"}')), result("x", "files"), user("Again.")]
    assert ledger.parent(once) is None
    both = [*ASKED, called(("x", "bash", '{"command": "ls"}'), ("y", "bash", '{"command": "ls"}')), result("y", "2")]
    assert ledger.parent(both) == (first, MatchedBy.PLACE)


def test_two_agents_with_one_opening_are_told_apart_by_equal_replies_alone() -> None:
    ledger = Ledger()
    ledger.record(ASKED, called(("a", "bash", '{"command": "ls"}')))
    second = ledger.record(ASKED, called(("b", "bash", '{"command": "pwd"}')))
    renamed = called(("x", "bash", '{"command": "pwd"}'))
    assert ledger.parent([*ASKED, renamed, result("x", "/")]) is None
    equal = called(("b", "bash", '{"command": "pwd"}'))
    assert ledger.parent([*ASKED, equal, result("b", "/")]) == (second, MatchedBy.CONTEXT)


def test_a_request_that_was_cut_off_and_sent_again_makes_no_reply_ambiguous() -> None:
    ledger = Ledger()
    ledger.record(ASKED, assistant("I lo"), ended=False)
    ledger.record(ASKED, called(("a", "time", OSLO), text="I look."), ended=False)
    third = ledger.record(ASKED, called(("b", "time", OSLO), text="I look."))
    renamed = called(("x", "time", OSLO))
    assert ledger.parent([*ASKED, renamed, result("x", "ten")]) == (third, MatchedBy.PLACE)
    assert ledger.parent([*ASKED, assistant("I  lo"), user("Why?")]) is None
    ledger.record(ASKED, called(("c", "time", OSLO)))
    assert ledger.parent([*ASKED, renamed, result("x", "ten")]) is None


def test_the_reply_that_a_person_stopped_is_found_where_no_other_was_given() -> None:
    ledger = Ledger()
    stopped = ledger.record(ASKED, assistant("I  look"), ended=False)
    assert ledger.parent([*ASKED, assistant("I look"), user("Stop.")]) == (stopped, MatchedBy.PLACE)


def test_a_reply_is_not_found_elsewhere() -> None:
    ledger = Ledger()
    ledger.record(ASKED, called(("a", "time", OSLO)))
    renamed = called(("x", "time", OSLO))
    assert ledger.parent([system("You sing."), *ASKED[1:], renamed, result("x", "ten")]) is None
    assert ledger.parent([*ASKED, user("Quick."), renamed, result("x", "ten")]) is None


def histories() -> list[list[Message]]:
    """Conversations of real clients, whose last message is theirs."""
    told = [json.loads(file.read_text()) for file in sorted(CAPTURES.glob("*.json"))]
    for name in CHAT_CLIENTS:
        requests = json.loads((REQUESTS / f"{name}.json").read_text())
        asked = [request["body"]["messages"] for request in requests]
        told += [messages for messages in asked if any(message["role"] == "assistant" for message in messages)]
    return told


def rename_ids(messages: list[Message], rng: random.Random) -> None:
    ending = f"x{rng.randrange(10**9):09d}"
    for message in messages:
        for call in message.get("tool_calls", ()):  # type: ignore[union-attr]
            call["id"] = f"{call['id']}{ending}"  # type: ignore[index,call-overload]
        if "tool_call_id" in message:
            message["tool_call_id"] = f"{message['tool_call_id']}{ending}"


def reorder_calls(messages: list[Message], rng: random.Random) -> None:
    for message in messages:
        if calls := message.get("tool_calls"):
            rng.shuffle(calls)  # type: ignore[arg-type]


def split_calls(messages: list[Message], rng: random.Random) -> None:
    place = rng.choice([place for place, message in enumerate(messages) if message["role"] == "assistant"])
    calls: Any = messages[place].get("tool_calls", [])
    if len(calls) > 1:
        rest: list[Message] = [{"role": "assistant", "content": None, "tool_calls": [call]} for call in calls[1:]]
        messages[place]["tool_calls"] = calls[:1]
        messages[place + 1 : place + 1] = rest


def drop_text(messages: list[Message], rng: random.Random) -> None:
    for message in messages:
        if message.get("tool_calls"):
            message["content"] = rng.choice([None, ""])


def change_space(messages: list[Message], rng: random.Random) -> None:
    for message in messages:
        if message["role"] == "assistant" and isinstance(text := message.get("content"), str):
            message["content"] = rng.choice([text.strip(), f" {text}\n", text.replace(" ", "  ")])


def write_arguments_anew(messages: list[Message], rng: random.Random) -> None:
    for message in messages:
        for call in message.get("tool_calls", ()):  # type: ignore[union-attr]
            function: Any = call["function"]  # type: ignore[index,call-overload]
            function["arguments"] = json.dumps(json.loads(function["arguments"]), indent=rng.choice([None, 2]))


def move_asides(messages: list[Message], rng: random.Random) -> None:
    for message in messages:
        if message["role"] == "user":
            own = without_asides(message)
            aside: JsonValue = {"type": "text", "text": REMINDER}
            said: Any = own["content"]
            parts = said if isinstance(said, list) else [{"type": "text", "text": said}]
            message["content"] = rng.choice([own["content"], [aside, *parts], [*parts, aside]])


EDITS: tuple[Callable[[list[Message], random.Random], None], ...] = (
    rename_ids,
    reorder_calls,
    split_calls,
    drop_text,
    change_space,
    write_arguments_anew,
    move_asides,
)


def test_each_parent_is_found_in_a_thousand_edited_histories() -> None:
    rng, captured = random.Random(39), histories()
    assert len(captured) >= 5
    for n in range(1_000):
        whole = captured[n % len(captured)]
        ledger, turns = Ledger(), dict[int, TurnId]()
        for place, message in enumerate(whole):
            if message["role"] == "assistant":
                turns[place] = ledger.record(whole[:place], message)
        edited = copy.deepcopy(whole)
        edit = rng.choice(EDITS)
        edit(edited, rng)
        match = ledger.parent(edited)
        assert match is not None, (n, edit.__name__)
        assert match[0] == turns[max(turns)], (n, edit.__name__)
