"""Chats for tests of sessions, parents and next states: constructors of messages, and hypothesis strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from uuid import UUID

from hypothesis import strategies as st
from pydantic import JsonValue

from clawloop.core.contracts.turns import Message, TurnKind
from clawloop.core.ids import ApiKeyId, TurnId
from clawloop.core.turns.canonical import extend_digest, prefix_digests, response_digest, seed_digest
from clawloop.core.turns.next_state import NextState, next_states
from clawloop.core.turns.parents import Candidate

KEY = ApiKeyId(UUID(int=0xA))
OTHER_KEY = ApiKeyId(UUID(int=0xB))
SEED = seed_digest(KEY, ())

VOLATILE: Message = {
    "role": "user",
    "content": [
        {
            "type": "text",
            "text": "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nActive exec sessions: none\n"
            "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>",
        }
    ],
}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calls(*names: str) -> Message:
    """An assistant message with tool calls; a call's id contains its tool's name."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}} for name in names
        ],
    }


def tool(name: str, result: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{name}", "content": result}


def turn(n: int) -> TurnId:
    """The n-th turn id; sorts by n, as real ids sort by time."""
    return TurnId(UUID(int=n))


@dataclass(frozen=True, slots=True)
class LaterRequest:
    """A request of the session after the turn in question."""

    turn_id: TurnId
    kind: TurnKind
    messages: Sequence[Message]


def next_state(
    seed: bytes, turn_id: TurnId, turns: Sequence[Candidate], later: Sequence[LaterRequest]
) -> NextState | None:
    """The messages after a turn's response in the first main request of `later` that contains it, else None."""
    for request in sorted(later, key=lambda request: request.turn_id):
        if request.kind is not TurnKind.MAIN:
            continue
        earlier = [turn for turn in turns if turn.turn_id < request.turn_id]
        state = next_states(seed, request.messages, earlier).get(turn_id)
        if state is not None:
            return NextState(request.turn_id, state)
    return None


class Recorder:
    """Numbers turns from 1 and records of each what the ledger stores."""

    def __init__(self, seed: bytes = SEED) -> None:
        self.seed = seed
        self.turns: list[Candidate] = []
        self.requests: list[LaterRequest] = []
        self._numbers = count(1)

    def record(self, messages: Sequence[Message], response: Message, kind: TurnKind = TurnKind.MAIN) -> TurnId:
        """Record a complete turn: its request and its response."""
        digest = response_digest(response)
        turn_id = self.ask(messages, kind)
        prefixes = prefix_digests(self.seed, messages)
        reply = extend_digest(prefixes[-1] if prefixes else self.seed, response)
        self.turns.append(Candidate(turn_id, kind, digest, reply))
        return turn_id

    def ask(self, messages: Sequence[Message], kind: TurnKind = TurnKind.MAIN) -> TurnId:
        """Record a request without a response."""
        turn_id = turn(next(self._numbers))
        self.requests.append(LaterRequest(turn_id, kind, messages))
        return turn_id


_letters = st.text(st.sampled_from("ab1: é\n\0\ud800"), max_size=4)

json_values: st.SearchStrategy[JsonValue] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _letters,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_letters, inner, max_size=3),
    max_leaves=6,
)

_odd_texts = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</th", "a", " ", "\u00a0", "{}", "[1]", "1", '"']),
    max_size=8,
).map("".join)
_parts: st.SearchStrategy[JsonValue] = st.one_of(
    _odd_texts.map(lambda text: {"type": "text", "text": text}),
    st.just({"type": "image_url", "image_url": {"url": "data:,"}}),
    st.just({"type": "thinking", "thinking": "hm"}),
    json_values.map(lambda value: {"type": value}),
    json_values,
)

odd_messages: st.SearchStrategy[Message] = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | json_values,
        "content": _odd_texts | st.lists(_parts, max_size=4) | json_values,
        "tool_calls": st.lists(
            json_values
            | st.fixed_dictionaries(
                {},
                optional={
                    "id": _odd_texts | json_values,
                    "function": json_values
                    | st.fixed_dictionaries({}, optional={"name": json_values, "arguments": _odd_texts | json_values}),
                },
            ),
            max_size=3,
        )
        | json_values,
        "tool_call_id": json_values,
        "name": json_values,
        "reasoning_content": json_values,
    },
)
"""Messages of any JSON shape, often almost valid."""

plain_messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(user, _letters),
    st.builds(assistant, _letters),
    st.builds(calls, st.sampled_from(["read", "exec"])),
    st.builds(tool, st.sampled_from(["read", "exec"]), _letters),
)

exchanges: st.SearchStrategy[list[tuple[list[Message], Message]]] = st.lists(
    st.tuples(
        st.lists(st.builds(user, st.sampled_from(["a", "b", "c"])), min_size=1, max_size=2),
        st.builds(assistant, st.sampled_from(["ok", "yes", "no"])),
    ),
    min_size=1,
    max_size=6,
)
"""Conversations as (new messages, response); a small vocabulary, so that responses repeat."""
