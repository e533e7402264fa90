"""Splits a turn into what it shares with its parent and what it adds, so that storage grows with a conversation's
length and not with its square.

Sharing is exact, JSON text for text and id for id: messages that are merely equivalent are stored again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from clawloop.contracts.turns import Message
from db.arrays import ID_BYTES, shared_ids


@dataclass(frozen=True, slots=True)
class Conversation:
    """The parts of a turn that a later turn may share.

    Args:
        messages: of the request, each as its exact JSON text.
        response: likewise; None if there was no reply.
        prompt_ids, response_ids: encoded by db.arrays; None if unknown.
        tools_sha256: key of the request's tool list; None if it had none.
    """

    messages: tuple[str, ...]
    response: str | None
    prompt_ids: bytes | None
    response_ids: bytes | None
    tools_sha256: bytes | None

    @property
    def texts(self) -> tuple[str, ...]:
        return self.messages if self.response is None else (*self.messages, self.response)

    @property
    def tokens(self) -> bytes:
        return (self.prompt_ids or b"") + (self.response_ids or b"")

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory, as if nothing were shared."""
        # One character outside Latin-1 makes every character of a text take two or four bytes.
        tokens = len(self.prompt_ids or b"") + len(self.response_ids or b"")
        return sum(map(sys.getsizeof, self.texts)) + tokens

    def request(self) -> list[Message]:
        return [json.loads(text) for text in self.messages]

    def reply(self) -> Message | None:
        return None if self.response is None else json.loads(self.response)


@dataclass(frozen=True, slots=True)
class Delta:
    """
    Args:
        messages_kept: number of the parent's texts the request begins with.
        messages_added: the texts after those.
        prompt_shared: number of the parent's tokens the prompt begins with; None exactly when `prompt_ids` is None.
        prompt_ids: the ids after those; None if the prompt's ids are unknown.
    """

    messages_kept: int
    messages_added: tuple[str, ...]
    prompt_shared: int | None
    prompt_ids: bytes | None

    def rebuilt_messages(self, parent: Conversation | None) -> tuple[str, ...]:
        kept = () if parent is None else parent.texts[: self.messages_kept]
        return (*kept, *self.messages_added)

    def rebuilt_prompt_ids(self, parent: Conversation | None) -> bytes | None:
        if self.prompt_ids is None or not parent or not self.prompt_shared:
            return self.prompt_ids
        return parent.tokens[: self.prompt_shared * ID_BYTES] + self.prompt_ids


def delta(conversation: Conversation, parent: Conversation | None) -> Delta:
    """The part of `conversation` to store when `parent` is stored."""
    kept = 0 if parent is None else _equal_from_start(parent.texts, conversation.messages)
    prompt = conversation.prompt_ids
    shared = None
    if prompt is not None:
        shared = 0 if parent is None else shared_ids(parent.tokens, prompt)
        prompt = prompt[shared * ID_BYTES :]
    return Delta(kept, conversation.messages[kept:], shared, prompt)


def _equal_from_start(left: Sequence[str], right: Sequence[str]) -> int:
    count = 0
    for left_text, right_text in zip(left, right, strict=False):
        if left_text != right_text:
            break
        count += 1
    return count
