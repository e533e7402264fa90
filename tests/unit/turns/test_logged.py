"""Lines of logs: what they become, and what is said of those that cannot be used."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawloop.contracts.turns import TurnStatus
from clawloop.errors import RecordUnusable
from clawloop.ids import following_turn_id
from clawloop.turns import logged
from clawloop.turns.canonical import response_digest
from clawloop.turns.logged import LoggedHint, LoggedJudgement, LoggedTurn, read_line

TURN: dict[str, Any] = {
    "session_id": "agent:main",
    "turn": 1,
    "timestamp": "2026-03-14 10:00:00",
    "messages": [{"role": "user", "content": "secret words"}],
    "prompt_text": "<|im_start|>user\nsecret words<|im_end|>\n<|im_start|>assistant\n",
    "response_text": "Hello.<|im_end|>\n",
    "tool_calls": None,
    "next_state": {"role": "user", "content": "Thanks."},
}
VOTE: dict[str, Any] = {"session_id": "s", "turn": 2, "score": 1.0, "votes": [1, 1], "hint": "Be brief, please."}
CALL = {"id": "call_1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}


def read(line: dict[str, Any]) -> Any:
    return read_line(json.dumps(line).encode(), "default")


def test_a_turn_of_the_original() -> None:
    turn = read(TURN)
    assert isinstance(turn, LoggedTurn)
    assert (turn.session, turn.number, turn.status) == ("agent:main", 1, TurnStatus.COMPLETE)
    assert turn.at.isoformat() == "2026-03-14T10:00:00+00:00"
    assert turn.reply == {"role": "assistant", "content": "Hello."}
    assert turn.following == [{"role": "user", "content": "Thanks."}]


BLANKS = " " * 10**6


@pytest.mark.parametrize(
    ("text", "calls", "reply"),
    [
        ("<think>\nHm.\n</think>\n\nHello.<|im_end|>\n", None, {"content": "Hello.", "reasoning_content": "Hm."}),
        ("Hello. <|im_end|> \n<|endoftext|>\n", None, {"content": "Hello."}),
        # Takes hours where the time is the square of the length.
        pytest.param(f"a{BLANKS}<|im_end|> b", None, {"content": f"a{BLANKS}<|im_end|> b"}, id="many blanks"),
        ("Hm.\n</think>\n\nHello.<|im_end|>", None, {"content": "Hello.", "reasoning_content": "Hm."}),
        ("I look.\n<tool_call>\n{}\n</tool_call><|im_end|>\n", [CALL], {"content": "I look.", "tool_calls": [CALL]}),
        ("<tool_call>\n{}\n</tool_call><|im_end|>\n", [CALL], {"content": None, "tool_calls": [CALL]}),
        ("Hello.<|eot_id|>", None, {"content": "Hello."}),
        ("Write <tool_call> so.</s>", None, {"content": "Write <tool_call> so."}),
    ],
)
def test_what_the_template_added_to_a_reply_is_taken_out(text: str, calls: Any, reply: dict[str, Any]) -> None:
    turn = read(TURN | {"response_text": text, "tool_calls": calls})
    assert turn.reply == {"role": "assistant"} | reply
    without_thinking = {name: value for name, value in reply.items() if name != "reasoning_content"}
    assert response_digest(turn.reply) == response_digest({"role": "assistant"} | without_thinking)


def test_an_export_of_ours_is_taken_as_it_is() -> None:
    line = {name: value for name, value in TURN.items() if name != "prompt_text"}
    own = "01985b1e-0000-7000-8000-000000000001"
    turn = read(line | {"id": own, "response_text": " <think> is a tag</s> ", "sampling": {"temperature": 1.0}})
    assert turn.reply == {"role": "assistant", "content": " <think> is a tag</s> "}
    assert (str(turn.turn_id), turn.sampling) == (own, {"temperature": 1.0})
    both = [{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}]
    assert read(line | {"followed_by": both, "next_state": both[1]}).following == both


def test_a_turn_without_a_reply() -> None:
    turn = read(TURN | {"response_text": None})
    assert (turn.reply, turn.status) == (None, TurnStatus.ABORTED)


def test_ids_are_those_of_the_same_line_and_sort_by_time_and_number() -> None:
    assert read(TURN).turn_id == read(dict(reversed(TURN.items()))).turn_id
    lines = [
        TURN,
        TURN | {"turn": 2},
        TURN | {"turn": 10},
        TURN | {"turn": 3, "timestamp": "2026-03-14 10:00:01"},
    ]
    ids = [read(line).turn_id for line in lines]
    assert ids == sorted(ids)
    assert {one.version for one in ids} == {7}
    assert following_turn_id(ids[2]) > ids[2]
    others = [TURN | {"response_text": "Bye."}, TURN | {"messages": [{"role": "user", "content": "other"}]}]
    assert len({read(line).turn_id for line in (TURN, *others)}) == 3
    assert read_line(json.dumps(TURN).encode(), "other").turn_id != ids[0]


def test_a_vote_of_the_original() -> None:
    line = {"session_id": "s", "turn": 2, "score": 1.0, "votes": [-1, 1, "fail", 1], "representative_eval": "Thanked."}
    judgement = read(line)
    assert isinstance(judgement, LoggedJudgement)
    assert judgement.verdict == 1
    assert judgement.votes == [(-1, ""), (1, "Thanked."), (None, ""), (1, "")]
    assert (judgement.hint, judgement.hints) == (None, [])


def test_a_hint_of_the_original() -> None:
    votes = [
        {"vote_id": 0, "score": 1, "hint": "Use metres.", "raw": "so: Use metres."},
        {"vote_id": 1, "score": -1, "hint": "", "raw": "none"},
        {"vote_id": 2, "score": None, "hint": "", "raw": ""},
    ]
    judgement = read({"session_id": "s", "turn": 2, "accepted": True, "hint": "Use metres.", "votes": votes})
    assert (judgement.verdict, judgement.hint, judgement.votes) == (None, "Use metres.", [])
    assert judgement.hints == [
        LoggedHint("so: Use metres.", True, "Use metres."),
        LoggedHint("none", False, None),
        LoggedHint("", None, None),
    ]
    dropped = read({"session_id": "s", "turn": 2, "accepted": False, "hint": "", "votes": votes})
    assert dropped.hint is None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"session_id": "s"', "not JSON at byte"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"[" * 100_000, "not JSON"),
        ({"session_id": "s", "turn": 1}, "neither a turn"),
        (TURN | {"session_id": ""}, "`session_id`"),
        (TURN | {"session_id": "x" * 300}, "`session_id`"),
        (TURN | {"session_id": 5}, "`session_id`"),
        (TURN | {"turn": 0}, "`turn`"),
        (TURN | {"turn": "1"}, "`turn`"),
        (TURN | {"timestamp": "yesterday"}, "`timestamp`"),
        (TURN | {"timestamp": "1969-01-01 00:00:00"}, "`timestamp`: before"),
        ({name: value for name, value in TURN.items() if name != "timestamp"}, "`timestamp`"),
        (TURN | {"messages": []}, "`messages`"),
        (TURN | {"messages": ["secret words"]}, "`messages.0`"),
        (TURN | {"messages": [{"content": "secret words"}]}, "`role`"),
        (TURN | {"response_text": ["secret words"]}, "`response_text`"),
        (TURN | {"id": "secret words"}, "`id`"),
        (TURN | {"status": "secret words"}, "`status`"),
        ({"session_id": "s", "turn": 1, "score": 2}, "`score`"),
        ({"session_id": "s", "turn": 1, "votes": [1, "secret words"]}, "`votes.1`"),
        ({"session_id": "s", "turn": 1, "votes": [True]}, "`votes.0`"),
        ({"session_id": "s", "turn": 1, "score": 1, "reward": 7}, "`reward`"),
    ],
)
def test_a_line_that_cannot_be_used_names_the_field_and_quotes_nothing(line: Any, reason: str) -> None:
    raw = line if isinstance(line, bytes) else json.dumps(line).encode()
    with pytest.raises(RecordUnusable) as error:
        read_line(raw, "default")
    assert reason in str(error.value)
    assert "secret words" not in str(error.value)
    assert len(str(error.value)) < 300


def test_a_line_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logged, "LONGEST_LINE", 100)
    with pytest.raises(RecordUnusable, match="longer than"):
        read(TURN)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(line=st.sampled_from([TURN, VOTE]), changed=st.data())
def test_whatever_a_field_holds_a_line_is_read_or_refused(line: dict[str, Any], changed: st.DataObject) -> None:
    field = changed.draw(st.sampled_from([*line, "id", "votes", "tools", "status", "sampling", "hint", "reward"]))
    with suppress(RecordUnusable):
        read(line | {field: changed.draw(JSON)})
