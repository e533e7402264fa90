"""Computes, before the transaction, all of a turn's row that needs no database."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource, TurnKind, TurnOutcome, TurnRecord
from clawloop.core.errors import RecordUnusable
from clawloop.core.ids import ApiKeyId, TurnId
from clawloop.core.turns.canonical import History, extend_digest, response_digest, seed_digest
from clawloop.core.turns.continued import whole_reply
from clawloop.core.turns.files import ContentFile, take_files
from clawloop.core.turns.identify import named_session_id, namespace
from db.content import PLAIN, ContentCodec, exact_json, ids_to_bytes
from db.turns.read import Conversation


@dataclass(frozen=True)
class Request:
    """The facts that determine a turn's session and parent: the key, the session evidence, the messages.

    Args:
        before: only turns older than this one can be parents; None for a request received now.
    """

    key: ApiKeyId
    evidence: SessionEvidence
    messages: Sequence[Message]
    before: TurnId | None = None

    @cached_property
    def seed(self) -> bytes:
        return seed_digest(namespace(self.key, self.evidence), self.evidence.narrowing)

    @cached_property
    def history(self) -> History:
        return History(self.seed, self.messages)

    @cached_property
    def answers(self) -> list[tuple[bytes, bytes]]:
        """Two digests of each assistant message: of all messages up to it, and of the message alone."""
        return list(zip(self.history.replies, self.history.alone.values(), strict=True))

    @cached_property
    def replies(self) -> set[bytes]:
        """Digests of the assistant messages among these messages."""
        return {alone for _, alone in self.answers}


@dataclass(frozen=True)
class PreparedTurn:
    """A turn record, and what follows from it alone.

    Args:
        record: with references in place of files.
        content: how its content is stored.
        files: of each message.
    """

    record: TurnRecord
    content: ContentCodec = PLAIN
    files: Sequence[tuple[ContentFile, ...]] = ()

    @classmethod
    def checked(cls, record: TurnRecord, content: ContentCodec = PLAIN) -> PreparedTurn:
        """
        Raises:
            RecordUnusable: PostgreSQL can never store a value, or our code cannot read the turn.
        """
        try:
            messages, files = take_files(record.messages)
            prepared = cls(replace(record, messages=messages) if any(files) else record, content, files)
            prepared.conversation, prepared.marks, prepared.response_digest, prepared.outcome  # noqa: B018
        except RecordUnusable:
            raise
        except Exception as error:  # a bug; it would fail again each time, and hold up the turns beside this one
            raise RecordUnusable(f"{type(error).__name__} in our own code while the turn was read") from error
        return prepared

    def without_prompt(self) -> PreparedTurn:
        """The turn without the tokens of its prompt, which held a lesson that was erased since."""
        return replace(self, record=replace(self.record, prompt_ids=None))

    @cached_property
    def marks(self) -> frozenset[bytes]:
        """Two turns of one conversation share one of these, or one's `asked` has one of the other's, as far as their
        records tell."""
        record, history = self.record, self.request.history
        if record.evidence.source is not SessionSource.CONVERSATION:
            return frozenset({named_session_id(record.api_key_id, record.evidence).bytes})
        digests = {*history.replies, history.whole, self.reply_digest}
        return frozenset(digest for digest in digests if digest is not None)

    @cached_property
    def asked(self) -> frozenset[bytes]:
        """Requests whose replies its request may hold in other words. Conversations that begin alike share some."""
        is_named = self.record.evidence.source is not SessionSource.CONVERSATION
        return frozenset() if is_named else frozenset(self.request.history.asked)

    @cached_property
    def first_choice(self) -> TurnId:
        """First turn of the request; all its choices use it, so that they find the same session and parent."""
        return self.record.group_id or self.record.turn_id

    @cached_property
    def request(self) -> Request:
        record = self.record
        return Request(record.api_key_id, record.evidence, record.messages, self.first_choice)

    @cached_property
    def tools(self) -> str | None:
        return None if self.record.tools is None else exact_json(self.record.tools)

    @cached_property
    def conversation(self) -> Conversation:
        """
        Raises:
            RecordUnusable: PostgreSQL can never store a value.
        """
        record = self.record
        return Conversation(
            messages=tuple(exact_json(message) for message in record.messages),
            response=None if record.response is None else exact_json(record.response),
            prompt_ids=None if record.prompt_ids is None else ids_to_bytes(record.prompt_ids),
            response_ids=None if record.response_ids is None else ids_to_bytes(record.response_ids),
            tools_sha256=None if self.tools is None else self._tools_key(self.tools),
            lessons=tuple(lesson.id for lesson in record.lessons),
        )

    def _tools_key(self, tools: str) -> bytes:
        return self.content.write_digest(hashlib.sha256(tools.encode()).digest())

    @cached_property
    def response_digest(self) -> bytes | None:
        return None if self._whole_reply is None else response_digest(self._whole_reply[1])

    @cached_property
    def reply_digest(self) -> bytes | None:
        """Digest of the conversation up to and including the reply."""
        if self._whole_reply is None:
            return None
        before, reply = self._whole_reply
        whole = self.request.history.whole
        if len(before) < len(self.record.messages):
            whole = self.request.history.before(len(before))
        return extend_digest(whole, reply)

    @property
    def goes_on(self) -> bool:
        """The client began the reply, so that its place is not behind the request."""
        return self._whole_reply is not None and len(self._whole_reply[0]) < len(self.record.messages)

    @cached_property
    def _whole_reply(self) -> tuple[Sequence[Message], Message] | None:
        """The conversation and the reply as the client's next request has them; None if it can have none."""
        record = self.record
        if record.kind is TurnKind.PRACTICE:
            return None
        return None if record.response is None else whole_reply(record.messages, record.response, record.sampling)

    @cached_property
    def outcome(self) -> tuple[TurnOutcome, str | None]:
        """The turn's outcome and its reason when it is inserted."""
        record = self.record
        if record.kind is TurnKind.SIDE:
            return TurnOutcome.SIDE, record.kind_reason
        if record.kind is TurnKind.PRACTICE:
            return TurnOutcome.HELD_OUT if record.lessons else TurnOutcome.SAMPLED, record.kind_reason
        if record.response is None:
            # An engine's error may quote what it was asked, and reasons are stored as they are.
            why = None if self.content.is_on else record.error
            return TurnOutcome.NOT_TRAINABLE, f"no reply: {why or record.status}"
        return TurnOutcome.WAITING, None
