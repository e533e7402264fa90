"""A request names its session in the order of docs/learning.md, and no two keys share one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from api.wire.messages import translate_messages
from api.wire.responses import translate_responses
from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource
from clawloop.core.ids import ApiKeyId
from clawloop.core.turns.canonical import seed_digest
from clawloop.core.turns.identify import conversation_session_id, ends_session, identify, named_session_id, namespace
from tests.chats import KEY, OTHER_KEY, VOLATILE, assistant, json_values, turn, user
from tests.openclaw_chats import (
    COMPACTED,
    COMPACTION_REQUEST,
    DEMO_LINE,
    FIRST,
    HEARTBEAT_REQUEST,
    MAIN_LINE,
    SECOND,
    UUID_ID,
    affinity,
)

Headers = dict[str, str]
Body = dict[str, JsonValue]


def session_of(headers: Headers, body: Body, key: ApiKeyId = KEY) -> UUID:
    return named_session_id(key, identify(headers, body))


def chat(*messages: Message) -> Body:
    return {"messages": list(messages)}


EVERYTHING: Body = {
    "prompt_cache_key": f"{UUID_ID}:3",
    "session_id": "body",
    "metadata": {"session_id": "meta"},
    "messages": list(FIRST),
    "user": "ann",
}


@pytest.mark.parametrize(
    ("headers", "without", "source", "value"),
    [
        ({"x-session-id": " s1 ", "x-session-affinity": "a"}, (), SessionSource.HEADER, "s1"),
        ({"x-session-id": " ", "x-session-affinity": "a"}, (), SessionSource.AFFINITY, "a"),
        ({}, (), SessionSource.CACHE_KEY, UUID_ID),
        ({}, ("prompt_cache_key",), SessionSource.BODY, "body"),
        ({}, ("prompt_cache_key", "session_id"), SessionSource.METADATA, "meta"),
        ({}, ("prompt_cache_key", "session_id", "metadata"), SessionSource.OPENCLAW, "side-demo"),
        ({}, ("prompt_cache_key", "session_id", "metadata", "messages"), SessionSource.CONVERSATION, None),
    ],
)
def test_the_first_value_that_names_the_session_counts(
    headers: Headers, without: tuple[str, ...], source: SessionSource, value: str | None
) -> None:
    body = {field: said for field, said in EVERYTHING.items() if field not in without}
    narrowing = ("user=ann",) if source is SessionSource.CONVERSATION else ()
    assert identify(headers, body) == SessionEvidence(source, value, narrowing)


@pytest.mark.parametrize(
    ("body", "source", "value"),
    [
        ({"session_id": "chat 1"}, SessionSource.BODY, "chat 1"),
        ({"metadata": {"session_id": "chat 1"}}, SessionSource.METADATA, "chat 1"),
        ({}, SessionSource.CACHE_KEY, UUID_ID),
    ],
)
def test_a_session_that_is_named_is_not_that_of_a_cache_key_without_a_count(
    body: Body, source: SessionSource, value: str
) -> None:
    """An application may have one cache key for all its conversations."""
    assert identify({}, {"prompt_cache_key": UUID_ID, **body}) == SessionEvidence(source, value)


@pytest.mark.parametrize("wrong", [None, "", "  ", 5, True, ["a"], {"id": "a"}])
def test_an_empty_value_or_one_of_the_wrong_type_names_nothing(wrong: JsonValue) -> None:
    body: Body = {"session_id": wrong, "metadata": {"session_id": wrong}, "prompt_cache_key": wrong, "user": wrong}
    assert identify({}, body) == SessionEvidence(SessionSource.CONVERSATION, None)
    assert identify({}, {"metadata": wrong, "messages": wrong}).value is None


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (affinity(f"{UUID_ID}:0"), {}),
        (affinity(f"{UUID_ID}:12"), {}),
        (affinity(UUID_ID), {}),  # compaction summaries
        ({"x-session-affinity": UUID_ID.upper()}, {}),
        ({}, {"prompt_cache_key": f"{UUID_ID}:4"}),
        ({}, {"messages": list(HEARTBEAT_REQUEST)}),
    ],
)
def test_all_places_of_an_openclaw_id_name_one_session(headers: Headers, body: Body) -> None:
    assert session_of(headers, body) == session_of(affinity(f"{UUID_ID}:0"), {})


@pytest.mark.parametrize(
    ("headers", "messages"),
    [
        (affinity("side-demo:0"), FIRST),
        (affinity("side-demo:2"), COMPACTED),
        (affinity("side-demo"), COMPACTION_REQUEST),
        ({}, FIRST),
        ({}, SECOND),
        ({}, COMPACTED),
    ],
)
def test_openclaw_ids_need_not_be_uuids(headers: Headers, messages: list[Message]) -> None:
    evidence = identify(headers, {"messages": list(messages)})
    assert evidence.value == "side-demo"
    assert named_session_id(KEY, evidence) == session_of(affinity("side-demo:0"), {})


@pytest.mark.parametrize("length", range(55, 80))
def test_long_openclaw_ids_are_one_session_though_it_cuts_them_at_64(length: int) -> None:
    whole = ("abcdefghij" * 8)[:length]
    sent = [whole[:64], *(whole[: 64 - len(suffix)] + suffix for suffix in (":0", ":10", ":999"))]
    line = DEMO_LINE.replace("sessionId=side-demo", f"sessionId={whole}")
    sessions = {session_of(affinity(value), {}) for value in sent} | {session_of({}, chat(user(f"x\n\n{line}")))}
    assert len(sessions) == 1


def test_the_affinity_of_other_clients_is_taken_whole() -> None:
    one, other = {"x-session-affinity": "tenant:1"}, {"x-session-affinity": "tenant:2"}
    assert identify(one, {}).value == "tenant:1"
    assert session_of(one, {}) != session_of(other, {})


def test_cache_keys_of_another_form_only_narrow() -> None:
    evidence = identify({}, {"prompt_cache_key": "tenant:1", "safety_identifier": "s", "user": "u"})
    assert evidence == SessionEvidence(
        SessionSource.CONVERSATION, None, ("user=u", "safety_identifier=s", "prompt_cache_key=tenant:1")
    )
    assert identify({}, {"prompt_cache_key": "66b452d0"}).source is SessionSource.CONVERSATION


def test_one_value_in_header_body_and_metadata_is_one_session_but_not_openclaws() -> None:
    sessions = {
        session_of({"x-session-id": "a"}, {}),
        session_of({}, {"session_id": "a"}),
        session_of({}, {"metadata": {"session_id": "a"}}),
    }
    assert len(sessions) == 1
    assert session_of({"x-session-affinity": "a"}, {}) not in sessions


@pytest.mark.parametrize(
    "messages",
    [
        [user("hello"), assistant("hi"), user(f"x\n\n{DEMO_LINE}")],  # not the first user message
        [user(f"{DEMO_LINE}\nWhat is this line?")],  # not at its end
        [user(f"What is this: {DEMO_LINE}")],  # not a line of its own
        [user(DEMO_LINE.replace("sessionId=", "sessionID="))],
        [user(DEMO_LINE.replace("sessionId=side-demo", "sessionId="))],
        [user(DEMO_LINE.replace("sessionId=side-demo", "sessionId=a b"))],
        [user(DEMO_LINE.replace("session=agent:", "session="))],
        [user("Runtime: sessionId=side-demo")],
        [user("Runtime: session=agent:main | and then | sessionId=side-demo")],
        [{"role": "system", "content": DEMO_LINE}, user("hello")],
        [assistant(DEMO_LINE)],
        [user(f"{DEMO_LINE} | long={'x' * 16 * 1024}")],
        ["Runtime: ", {"role": "user"}, {"role": "user", "content": 5}],
        COMPACTION_REQUEST,
        [],
    ],
)
def test_only_openclaws_own_line_names_a_session(messages: list[JsonValue]) -> None:
    assert identify({}, {"messages": messages}).source is SessionSource.CONVERSATION


def test_openclaws_line_is_found_behind_volatile_messages_and_in_content_parts() -> None:
    parts: Message = {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": MAIN_LINE}]}
    assert identify({}, chat(VOLATILE, parts)).value == UUID_ID


@pytest.mark.parametrize("value", ["x" * 257, "x" * 10**6, "a\0b", "a\nb", "\ud800"])
def test_values_that_cannot_be_stored_as_they_are_still_name_one_session(value: str) -> None:
    evidence = identify({}, {"session_id": value})
    assert evidence.value is not None
    assert evidence.value.startswith("sha256:")
    assert len(evidence.value) < 100
    assert session_of({}, {"session_id": value}) == session_of({"x-session-id": value}, {})
    assert session_of({}, {"session_id": value}) != session_of({}, {"session_id": value + "x"})
    assert identify({}, {"session_id": "x" * 256}).value == "x" * 256


def test_a_session_that_nothing_names_has_no_named_id() -> None:
    with pytest.raises(ValueError, match="no value names"):
        named_session_id(KEY, SessionEvidence(SessionSource.CONVERSATION, None))
    assert conversation_session_id(turn(1)) == conversation_session_id(turn(1))
    assert conversation_session_id(turn(1)) != conversation_session_id(turn(2))


@pytest.mark.parametrize(
    ("headers", "body", "ends"),
    [
        ({"x-session-done": "1"}, {}, True),
        ({"x-session-done": " Yes "}, {}, True),
        ({"x-session-done": "0"}, {"session_done": "on"}, True),
        ({}, {"session_done": True}, True),
        ({}, {"session_done": 1}, True),
        ({}, {"session_done": "TRUE"}, True),
        ({}, {"session_done": False}, False),
        ({}, {"session_done": 2}, False),
        ({}, {"session_done": None}, False),
        ({}, {"session_done": ["true"]}, False),
        ({"x-session-done": "false"}, {}, False),
        ({}, {}, False),
    ],
)
def test_a_session_ends_when_the_client_marks_its_last_turn(headers: Headers, body: Body, ends: bool) -> None:
    assert ends_session(headers, body) is ends


bodies = st.fixed_dictionaries(
    {},
    optional={
        field: json_values | st.just("a") | st.just(f"{UUID_ID}:1")
        for field in ("prompt_cache_key", "session_id", "metadata", "messages", "user", "session_done")
    },
)
header_values = st.dictionaries(
    st.sampled_from(["x-session-id", "x-session-affinity", "x-client-request-id", "x-session-done"]),
    st.text(max_size=5),
)


@given(header_values, bodies)
def test_two_keys_never_share_a_session_and_no_body_raises(headers: Headers, body: Body) -> None:
    evidence = identify(headers, body)
    ends_session(headers, body)
    assert (evidence.value is None) is (evidence.source is SessionSource.CONVERSATION)
    if evidence.value is not None:
        assert named_session_id(KEY, evidence) == named_session_id(KEY, evidence)
        assert named_session_id(KEY, evidence) != named_session_id(OTHER_KEY, evidence)


THREAD = "01a21fa2-c872-7043-8735-df825e1c7ad0"
PARENT = "01a21fa2-c74c-7b03-bb3e-b467ddadbb84"


@pytest.mark.parametrize(
    ("headers", "body", "source", "value"),
    [
        ({"thread-id": THREAD, "session-id": PARENT}, {"prompt_cache_key": PARENT}, SessionSource.THREAD, THREAD),
        ({"session-id": THREAD}, {}, SessionSource.CODEX_SESSION, THREAD),
        ({"conversation_id": THREAD, "session_id": THREAD}, {}, SessionSource.CODEX_SESSION, THREAD),
        ({}, {"client_metadata": {"thread_id": THREAD, "session_id": PARENT}}, SessionSource.THREAD, THREAD),
        ({}, {"prompt_cache_key": THREAD.upper()}, SessionSource.CACHE_KEY, THREAD),
        ({"x-claude-code-session-id": PARENT}, {}, SessionSource.CLAUDE_CODE, PARENT),
        ({"x-session-id": "own", "thread-id": THREAD}, {}, SessionSource.HEADER, "own"),
    ],
)
def test_codex_and_claude_code_name_their_conversations(
    headers: dict[str, str], body: dict[str, JsonValue], source: SessionSource, value: str
) -> None:
    assert identify(headers, body) == SessionEvidence(source, value)


def test_a_cache_key_alone_names_one_conversation_of_each_opening() -> None:
    """An application has one key for all its conversations; Codex one for each, and a compaction keeps its opening."""
    asked: list[JsonValue] = [{"role": "system", "content": "You code."}, {"role": "user", "content": "The time?"}]
    later: list[JsonValue] = [*asked, {"role": "assistant", "content": "Ten."}, {"role": "user", "content": "Thanks."}]
    compacted: list[JsonValue] = [*asked, {"role": "user", "content": "A summary."}, {"role": "user", "content": "No."}]
    other: list[JsonValue] = [asked[0], {"role": "user", "content": "The date?"}]
    sessions = [session_of({}, {"prompt_cache_key": UUID_ID, "messages": each}) for each in (asked, later, compacted)]
    assert len(set(sessions)) == 1
    assert session_of({}, {"prompt_cache_key": UUID_ID, "messages": other}) not in sessions
    assert session_of({}, {"prompt_cache_key": PARENT, "messages": asked}) not in sessions
    counted = [session_of({}, {"prompt_cache_key": f"{UUID_ID}:1", "messages": each}) for each in (asked, other)]
    assert len(set(counted)) == 1


CAPTURES = Path(__file__).parents[2] / "clients" / "captures"


def captured(client: str) -> list[tuple[Headers, Body]]:
    """The headers and chat requests of a real client."""
    requests = json.loads((CAPTURES / f"{client}.json").read_text())
    if client.startswith("codex"):
        return [(each["headers"], translate_responses(each["body"], (), []).body) for each in requests]
    return [(each["headers"], translate_messages(each["body"], ()).body) for each in requests]


@pytest.mark.parametrize("client", ["codex_compaction", "codex_review", "claude_code_agent", "claude_code_compact"])
def test_a_proxy_that_drops_headers_moves_no_conversation_whose_body_names_it(client: str) -> None:
    for headers, body in captured(client):
        assert body["messages"]
        assert session_of({}, body) == session_of(headers, body)


def test_with_a_cache_key_alone_a_proxy_that_drops_headers_begins_another_session() -> None:
    requests = captured("codex_compaction")
    named = {session_of(headers, body) for headers, body in requests}
    alone = [{name: value for name, value in body.items() if name != "client_metadata"} for _, body in requests]
    dropped = {session_of({}, body) for body in alone}
    assert (len(named), len(dropped)) == (1, 1)  # a compaction is among them
    assert named != dropped


@pytest.mark.parametrize("value", ["default", "", "1", "a b"])
def test_headers_of_these_names_that_hold_no_uuid_name_nothing(value: str) -> None:
    headers = {"thread-id": value, "session-id": value, "conversation_id": value}
    assert identify(headers, {}).source is SessionSource.CONVERSATION


def test_a_chosen_policy_has_sessions_and_prefixes_of_its_own() -> None:
    by_name, by_messages = identify({"x-session-id": "s"}, {}), identify({}, {"user": "policy:anna"})
    policies = (None, "anna", "berta")
    named = {named_session_id(KEY, replace(by_name, policy=policy)) for policy in policies}
    seeds = {
        seed_digest(namespace(KEY, replace(by_messages, policy=policy)), by_messages.narrowing) for policy in policies
    }
    assert (len(named), len(seeds)) == (3, 3)
    assert namespace(KEY, by_name) == KEY
    assert namespace(OTHER_KEY, replace(by_name, policy="anna")) != namespace(KEY, replace(by_name, policy="anna"))
