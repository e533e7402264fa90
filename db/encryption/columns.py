"""The columns that hold content, with their form and the key of their rows, and the columns that stay plain.

A test compares both lists with the schema: a new column of text, JSON or bytes has to be in one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.encryption.sealer import HEAD_BYTES, KEYED_BYTES
from db.content import MARK, SEALED_REST, ContentCodec, answer_row, base64_head, content_of, step_sample_row


class Form(Enum):
    TEXT = auto()
    JSON = auto()
    BYTES = auto()
    DIGEST = auto()  # of content: keyed rather than encrypted, as rows are found by it


@dataclass(frozen=True, slots=True)
class SealedTable:
    """
    Args:
        key: its primary key.
        place: what identifies a row, as those that write its content say it.
        columns: with content.
        named_by: columns beside the key that `place` needs.
        rows_at_once: the most whose content is in memory together.
    """

    name: str
    key: tuple[str, ...]
    place: Callable[[Mapping[str, Any]], object]
    columns: Mapping[str, Form]
    named_by: tuple[str, ...] = ()
    rows_at_once: int = 200

    def selected(self) -> str:
        """SQL: the row's key, what its place is made of, and its content, JSON as text."""
        content = [f"{name}::text AS {name}" if form is Form.JSON else name for name, form in self.columns.items()]
        return ", ".join(dict.fromkeys([*self.key, *self.named_by, *content]))


def _id(row: Mapping[str, Any]) -> object:
    return row["id"]


def _answer(row: Mapping[str, Any]) -> object:
    return answer_row(row["judgement_id"], row["kind"], row["index"])


_ANSWER_KEY = ("judgement_id", "kind", "index")

TOOL_LISTS = SealedTable("tool_lists", ("sha256",), lambda row: row["sha256"].hex(), {"tools": Form.JSON})
"""The table's key is itself a digest, to which turns refer."""

SEALED_TABLES = (
    SealedTable(
        "turns",
        ("id",),
        _id,
        {
            "error": Form.TEXT,
            "messages_added": Form.JSON,
            "response": Form.JSON,
            "sampling": Form.JSON,
            "prompt_ids": Form.BYTES,
            "response_ids": Form.BYTES,
            "logprobs": Form.BYTES,
            "response_digest": Form.DIGEST,
            "reply_digest": Form.DIGEST,
            "asked_digest": Form.DIGEST,
        },
    ),
    SealedTable(
        "session_prefixes",
        ("api_key_id", "prefix_hash", "turn_id"),
        lambda row: row["turn_id"],
        {"prefix_hash": Form.DIGEST},
    ),
    SealedTable("judgements", ("id",), _id, {"hint": Form.TEXT, "evidence_hash": Form.DIGEST}),
    SealedTable("votes", _ANSWER_KEY, _answer, {"raw": Form.TEXT}),
    SealedTable("hints", _ANSWER_KEY, _answer, {"raw": Form.TEXT, "text": Form.TEXT}),
    SealedTable("feedback", ("id",), _id, {"text": Form.TEXT}),
    # One of a judgement may be replaced by another, in the same row.
    SealedTable("samples", ("id",), lambda row: row["judgement_id"], {"hinted_prompts": Form.BYTES}, ("judgement_id",)),
    SealedTable(
        "step_samples",
        ("policy", "step", "sample_id"),
        lambda row: step_sample_row(row["policy"], row["step"], row["sample_id"]),
        {"advantages": Form.BYTES, "moves": Form.BYTES},
    ),
    SealedTable("probes", ("id",), _id, {"content": Form.JSON}),
    SealedTable("lessons", ("id",), _id, {"text": Form.TEXT, "digest": Form.DIGEST}),
    SealedTable(
        "yardstick",
        ("lesson_id", "source_turn_id"),
        lambda row: row["turn_id"],
        {"prompts": Form.BYTES},
        ("turn_id",),
    ),
    SealedTable("files", ("id",), _id, {"content": Form.BYTES, "digest": Form.DIGEST}, rows_at_once=4),
)

PLAIN_COLUMNS: Mapping[str, str] = {
    # Names that people and clients give; a session is found by its name, and its id follows from it.
    "sessions": "external_id identified_by policy state closed_why guarantee",
    "turns": "alias engine_id evidence finish_reason kind kind_reason matched_by outcome outcome_detail status"
    " tools_sha256 lessons",
    # Reasons in Clawloop's own words, without a quotation.
    "judgements": "recipe_hash verdict_why hint_why not_trainable outcome why",
    "comparisons": "signal_hash judge why",
    # Results of a trial on Clawloop's phrases or an operator's, without their text.
    "judge_trials": "digest judge found",
    "samples": "policy state reason",
    "steps": "policy state progress recipe_hash reason metrics",
    "step_samples": "policy dropped without_hint taught",
    "gate_checks": "policy name result reason figures",
    "episodes": "state ending reason artifact_sha256",
    "rollout_groups": "policy environment task kind state reason",
    "curriculum_kinds": "policy environment kind why",
    "rollouts": "policy environment paused_reason",
    "events": "policy kind detail",
    "lessons": "policy state why source",
    "practice": "lessons why",
    "yardstick": "why without",
    "votes": "kind",
    "hints": "kind",
    "feedback": "effect",
    # Digests of a client's random Idempotency-Key, and of the body after it: so a short comment cannot be guessed.
    "feedback_requests": "key_sha256 body_sha256 effect",
    "session_prefixes": "role",
    "tool_lists": "sha256",
    "probes": "policy",
    # Values that operators set, secrets and hashes of them, addresses, hashes of files.
    "policies": "id base_model aliases sampling pool paused_reason recipe_hash",
    "versions": "policy path sha256 origin_policy held_out_scores",
    "recipes": "hash name signal_hash train_hash content",
    "api_keys": "policy policies name prefix secret_sha256 scopes",
    "engines": "id url problem added_by",
    "engine_versions": "engine_id policy",
    "signing_keys": "name secret",
    "temporal_server": "namespace_id",
    "encryption": "check_value",
}
"""Columns of text, JSON or bytes that stay as they are, by table."""


_FORMS = {table.name: table.columns for table in (*SEALED_TABLES, TOOL_LISTS)}


class OpenedRow:
    """A row with content that is decrypted when it is read, which raises ContentUnreadable where no key opens it."""

    __slots__ = ("_columns", "_content", "_row")

    def __init__(self, row: Any, content: ContentCodec, columns: Mapping[str, tuple[Form, str, str]]) -> None:
        self._row = row
        self._content = content
        self._columns = columns

    def __getattr__(self, name: str) -> Any:
        stored = getattr(self._row, name)
        if stored is None or name not in self._columns:
            return stored
        form, column, key = self._columns[name]
        place = getattr(self._row, key)
        return _opened(self._content, stored, form, column, place.hex() if isinstance(place, bytes) else place)


def opened(connection: AsyncConnection, rows: Iterable[Any], **keys: str) -> list[Any]:
    """The rows, with content that is decrypted when it is read.

    Args:
        keys: by table with content, the rows' column that has the key to which the table's content is sealed.
    """
    content = content_of(connection)
    columns = {
        name: (form, f"{table}.{name}", key) for table, key in keys.items() for name, form in _FORMS[table].items()
    }
    return [OpenedRow(row, content, columns) for row in rows]


def _opened(content: ContentCodec, stored: Any, form: Form, column: str, place: object) -> Any:
    match form:
        case Form.TEXT:
            return content.read_text(stored, column, place)
        case Form.JSON:
            return content.read_json(stored, column, place)
        case Form.BYTES:
            return content.read_bytes(stored, column, place)
        case Form.DIGEST:
            return stored


def is_plain(column: str, form: Form) -> str:
    """SQL: whether the column holds content that is not encrypted."""
    match form:
        case Form.TEXT:
            return f"({column} NOT IN ('', 'erased') AND {_not_marked(column)})"
        case Form.JSON:
            return f"({column}::text NOT IN ('[]', '{{}}') AND json_typeof({column}) <> 'string')"
        case Form.BYTES:
            return f"(octet_length({column}) > 0 AND octet_length({column}) % 4 <> {SEALED_REST})"
        case Form.DIGEST:
            return f"octet_length({column}) NOT IN (0, {KEYED_BYTES})"


def is_sealed(column: str, form: Form) -> str:
    """SQL: whether the column holds an encrypted value."""
    match form:
        case Form.TEXT:
            return f"NOT {_not_marked(column)}"
        case Form.JSON:
            return f"json_typeof({column}) = 'string'"
        case Form.BYTES:
            return f"octet_length({column}) % 4 = {SEALED_REST}"
        case Form.DIGEST:
            return "false"


def is_sealed_by_another(column: str, form: Form, head: bytes) -> str:
    """SQL: whether the column holds a value that another key has encrypted than the one of this head."""
    match form:
        case Form.TEXT:
            begins = f"starts_with({column}, {_sql(MARK + base64_head(head))})"
        case Form.JSON:
            begins = f"""starts_with({column}::text, '"{base64_head(head)}')"""
        case Form.BYTES:
            begins = f"substr({column}, 1, {HEAD_BYTES}) = '\\x{head.hex()}'::bytea"
        case _:
            begins = "true"  # one line of digests serves all keys
    return f"({is_sealed(column, form)} AND NOT {begins})"


def sealed(content: ContentCodec, target: ContentCodec, stored: Any, form: Form, column: str, place: object) -> Any:
    """A column's value as another codec writes it; JSON as text.

    Raises:
        ContentUnreadable: no key opens it.
    """
    match form:
        case Form.TEXT:
            return target.write_text(content.read_text(stored, column, place), column, place)
        case Form.JSON:
            return target.write_json(content.json_text(stored, column, place), column, place)
        case Form.BYTES:
            return target.write_bytes(content.read_bytes(stored, column, place), column, place)
        case Form.DIGEST:
            return target.write_digest(stored)


def _not_marked(column: str) -> str:
    # Marked twice: a plain text that begins with the mark.
    return f"(NOT starts_with({column}, {_sql(MARK)}) OR starts_with({column}, {_sql(f'{MARK}:')}))"


def _sql(text: str) -> str:
    return "E'" + text.replace("\x1a", "\\x1a").replace(":", "\\:") + "'"  # a word after a colon would be a parameter
