"""Main or side: the client's word, the model alias, known side prompts, else main; and always a reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from pydantic import JsonValue

from clawloop.core.contracts.turns import Message, TurnKind
from clawloop.core.turns.classify import classify, is_side_prompt, looks_like_chore
from clawloop.core.turns.next_state import next_states
from tests.chats import SEED, VOLATILE, Recorder, assistant, calls, json_values, system, tool, user
from tests.openclaw_chats import (
    AFTER_HEARTBEATS,
    COMPACTED,
    COMPACTION,
    COMPACTION_REQUEST,
    FIRST,
    FLUSH_REQUEST,
    HEARTBEAT,
    HEARTBEAT_REQUEST,
    MEMORY_FLUSH,
    OLD_HEARTBEAT,
    POLL,
    RECAP_REQUEST,
    SECOND,
    TITLE,
    TOOLS,
)

MAIN, SIDE = TurnKind.MAIN, TurnKind.SIDE


def in_parts(*texts: str) -> Message:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


@pytest.mark.parametrize(
    ("headers", "body", "side_alias", "kind", "reason"),
    [
        ({"x-turn-type": "side"}, {"turn_type": "main"}, False, SIDE, "header X-Turn-Type: side"),
        ({"x-turn-type": " Main "}, {}, True, MAIN, "header X-Turn-Type: main"),
        ({}, {"turn_type": "side"}, False, SIDE, "body turn_type: side"),
        ({}, {"turn_type": "main"}, True, MAIN, "body turn_type: main"),
        ({}, {}, True, SIDE, "model name for side turns"),
        ({}, {}, False, MAIN, "no sign of a side turn"),
        ({"x-turn-type": ""}, {"turn_type": None}, False, MAIN, "no sign of a side turn"),
        ({}, {"turn_type": 5}, False, MAIN, "no sign of a side turn"),
        (
            {"x-turn-type": "heartbeat"},
            {"turn_type": "side"},
            False,
            SIDE,
            "body turn_type: side (header X-Turn-Type 'heartbeat' is neither main nor side)",
        ),
        (
            {},
            {"turn_type": "x\0" + "y" * 100},
            True,
            SIDE,
            "model name for side turns (body turn_type 'x\\x00" + "y" * 38 + "' is neither main nor side)",
        ),
    ],
)
def test_the_first_rule_that_applies_decides_and_is_the_reason(
    headers: dict[str, str], body: dict[str, JsonValue], side_alias: bool, kind: TurnKind, reason: str
) -> None:
    decision = classify(headers, body, side_alias=side_alias)
    assert (decision.kind, decision.reason) == (kind, reason)


@pytest.mark.parametrize(
    ("messages", "tools", "name"),
    [
        (HEARTBEAT_REQUEST, TOOLS, "heartbeat"),
        ([*SECOND[:-1], assistant("Reply #2"), user(OLD_HEARTBEAT)], TOOLS, "heartbeat"),
        ([*HEARTBEAT_REQUEST[:2], calls("exec"), tool("exec", "x"), VOLATILE], TOOLS, "heartbeat"),
        (FLUSH_REQUEST, TOOLS, "memory flush"),
        (COMPACTION_REQUEST, None, "compaction"),
        (COMPACTION_REQUEST, [], "compaction"),
        (RECAP_REQUEST, None, "recap"),
        ([system(TITLE), user("hello")], None, "title"),
        (
            [system("You are a title generator. You output ONLY a thread title. Nothing else."), user("x")],
            None,
            "title",
        ),
        (
            [user("### Task:\nGenerate a concise, 3-5 word title.\n<chat_history>\nUSER: x\n</chat_history>")],
            None,
            "title",
        ),
    ],
)
def test_known_side_prompts_are_side(messages: list[Message], tools: JsonValue, name: str) -> None:
    decision = classify({}, {"messages": list(messages), "tools": tools}, side_alias=False)
    assert (decision.kind, decision.reason) == (SIDE, f"known side prompt: {name}")


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        (FIRST, TOOLS),
        (SECOND, TOOLS),
        (COMPACTED, TOOLS),
        (AFTER_HEARTBEATS, TOOLS),
        ([user(f"What does this mean: {HEARTBEAT}")], None),
        ([user(f"> {MEMORY_FLUSH}")], None),
        ([user("Pre-compaction memory flush. What is that?")], None),
        ([user("Read HEARTBEAT.md if it exists and tell me what is in it")], TOOLS),
        ([user("Follow the heartbeat monitor scratch context when provided. Why?")], TOOLS),
        ([user(f"Summarise: {COMPACTION}")], None),
        ([user(COMPACTION)], None),
        ([user("Write an Activity recap for someone scanning their tasks")], None),
        ([user("Generate a concise, 3-5 word title for my essay")], None),
        ([system(COMPACTION), user("hello")], TOOLS),  # an agent that opens like this, with tools
        ([system("You are a context summarization assistant. Chat with people."), user("hello")], None),
        ([user("hello"), system(COMPACTION)], None),
        ([user(HEARTBEAT), assistant("NO_REPLY"), user("hello")], TOOLS),
        ([], None),
    ],
)
def test_ordinary_requests_are_main_whatever_they_quote(messages: list[Message], tools: JsonValue) -> None:
    decision = classify({}, {"messages": list(messages), "tools": tools}, side_alias=False)
    assert (decision.kind, decision.reason) == (MAIN, "no sign of a side turn")


def test_a_side_prompt_is_known_in_the_history_too() -> None:
    assert is_side_prompt(user(f"[Fri 2026-11-20 11:19 UTC] {POLL}"))
    assert is_side_prompt(AFTER_HEARTBEATS[1])
    assert not is_side_prompt(AFTER_HEARTBEATS[2])
    assert not is_side_prompt(assistant(POLL))


@given(json_values, json_values, json_values)
def test_no_body_raises(turn_type: JsonValue, messages: JsonValue, content: JsonValue) -> None:
    classify({}, {"turn_type": turn_type, "messages": messages}, side_alias=False)
    classify({}, {"messages": [messages, {"role": "user", "content": content}]}, side_alias=False)


COMPACT_CLAUDE = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\n- You already have all the context."
COMPACT_CODEX = "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary for another LLM."
CODEX = "x-codex-turn-metadata"
TALK = [user("What time is it?"), assistant("Ten.")]


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({CODEX: '{"request_kind":"compaction"}'}, "header x-codex-turn-metadata: request_kind=compaction"),
        ({CODEX: '{"request_kind":"memory"}'}, "header x-codex-turn-metadata: request_kind=memory"),
        ({CODEX: '{"request_kind":"turn","thread_source":"subagent"}'}, "sub-agent of Codex: spawned"),
        ({CODEX: '{"request_kind":"turn","subagent_kind":"review"}'}, "sub-agent of Codex: review"),
        ({"x-openai-subagent": "collab_spawn"}, "sub-agent of Codex: collab_spawn"),
        ({"x-openai-memgen-request": "true"}, "header x-openai-memgen-request: memory of Codex"),
        ({"x-codex-guardian": "review"}, "header x-codex-guardian: review"),
        ({"x-claude-code-agent-id": "ad2c"}, "sub-agent of Claude Code"),
        ({"x-claude-code-request-class": "auxiliary"}, "header x-claude-code-request-class: auxiliary"),
        ({"x-claude-code-compaction": "auto"}, "header x-claude-code-compaction: auto"),
        ({"x-parent-session-id": "ses_1"}, "header x-parent-session-id: sub-agent of OpenCode"),
    ],
)
def test_a_client_says_what_its_chores_are(headers: dict[str, str], reason: str) -> None:
    body: dict[str, JsonValue] = {"messages": [*TALK, user("Go on.")], "tools": TOOLS}
    decision = classify(headers, body, side_alias=False)
    assert (decision.kind, decision.reason) == (SIDE, reason)
    assert classify({**headers, "x-turn-type": "main"}, body, side_alias=False).kind is MAIN
    assert classify(headers, body, side_alias=False, patterns=False).kind is MAIN


def test_codex_says_the_same_in_the_body() -> None:
    said: dict[str, JsonValue] = {CODEX: '{"request_kind":"compaction"}'}
    decision = classify({}, {"messages": [user("x")], "client_metadata": said}, side_alias=False)
    assert decision.reason == "header x-codex-turn-metadata: request_kind=compaction"


@pytest.mark.parametrize(
    "headers",
    [
        {CODEX: '{"request_kind":"turn","thread_source":"user"}'},
        {CODEX: "no JSON"},
        {CODEX: "[1]"},
        {CODEX: '{"request_kind":5}'},
        {"x-claude-code-request-class": "main"},
        {"x-claude-code-agent-id": " "},
        {"x-claude-code-context-compacted": "auto"},  # of the first turn after a compaction, a person's
        {"x-openai-subagent": ""},
    ],
)
def test_a_persons_turn_in_such_a_client_is_main(headers: dict[str, str]) -> None:
    assert classify(headers, {"messages": [*TALK, user("Go on.")]}, side_alias=False).kind is MAIN


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"messages": [*TALK, user(COMPACT_CLAUDE)], "tools": TOOLS}, "compaction"),
        ({"messages": [*TALK, user(COMPACT_CODEX)]}, "compaction"),
        ({"messages": [*TALK, user("The user stepped away and is coming back. Recap in under 40 words.")]}, "recap"),
        (
            {"messages": [*TALK, user("[SUGGESTION MODE: Suggest what the user might naturally type next]")]},
            "suggestion",
        ),
        ({"messages": [system("Analyze if this message indicates a new conversation topic. If"), user("hi")]}, "topic"),
        (
            {
                "messages": [
                    system("You are Claude Code.\nGenerate a concise, sentence-case title (3-7 words)"),
                    user("x"),
                ]
            },
            "title",
        ),
        ({"messages": [user("quota")], "max_tokens": 1}, "probe"),
        ({"messages": [user("Test")], "max_completion_tokens": 1}, "probe"),
        ({"messages": [system("You are a title generator. You output ONLY a thread title."), user("x")]}, "title"),
        (
            {"messages": [system("You are the component that summarizes internal chat history into"), *TALK]},
            "compaction",
        ),
        (
            {"messages": [*TALK, user('<explicit_instructions type="summarize_task">\nNow')], "tools": TOOLS},
            "compaction",
        ),
        (
            {
                "messages": [
                    *TALK,
                    in_parts("[list_files] Result: a.txt", '<explicit_instructions type="condense">\nNow'),
                ]
            },
            "compaction",
        ),
        (
            {"messages": [system("*Briefly* summarize this partial conversation about programming."), user("x")]},
            "compaction",
        ),
        (
            {"messages": [system("Briefly summarize this partial conversation about programming. Give"), user("x")]},
            "compaction",
        ),
        (
            {
                "messages": [
                    system("You are a context summarization agent."),
                    user("Here is the conversation so far:\n\n<conversation>\n[User]: x\n</conversation>\n<template>"),
                ]
            },
            "compaction",
        ),
        (
            {"messages": [*TALK, user("Managed memory has TWO directories. Read managed memory.")], "tools": TOOLS},
            "memory",
        ),
        (
            {"messages": [system("You are a general-purpose subagent working for a parent agent. Do"), user("Look.")]},
            "sub-agent",
        ),
        (
            {
                "messages": [
                    system("You are Hermes.\nYou are a focused subagent working on a specific delegated task.\nDo it."),
                    user("Look."),
                ],
                "tools": TOOLS,
            },
            "sub-agent",
        ),
        ({"messages": [*TALK, user("Review the conversation above and update the skill library. Be")]}, "skills"),
        (
            {
                "messages": [
                    *TALK,
                    in_parts(
                        "<system-reminder>x</system-reminder>",
                        "Create a structured handoff summary for a later assistant",
                    ),
                ]
            },
            "compaction",
        ),
        ({"messages": [system("You name chat sessions. Given the user's opening message, write"), user("x")]}, "title"),
        (
            {
                "messages": [
                    user("### Task:\nGenerate a concise title summarizing the chat history.\n<chat_history>\nUSER: x")
                ]
            },
            "title",
        ),
    ],
)
def test_the_chores_of_named_clients_are_known_by_their_text(body: dict[str, JsonValue], name: str) -> None:
    decision = classify({}, body, side_alias=False)
    assert (decision.kind, decision.reason) == (SIDE, f"known side prompt: {name}")


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [user("quota")]},
        {"messages": [user("What is my quota?")], "max_tokens": 1},
        {"messages": [*TALK, user("test")], "max_tokens": 1},
        {"messages": [user("test")], "max_tokens": 1, "tools": TOOLS},
        {"messages": [user("Why does it say: CRITICAL: Respond with TEXT ONLY?")]},
        {"messages": [*TALK, in_parts("Why?", 'It says <explicit_instructions type="condense">')]},
    ],
)
def test_what_people_ask_is_no_probe(body: dict[str, JsonValue]) -> None:
    assert classify({}, body, side_alias=False).kind is MAIN


@pytest.mark.parametrize(
    ("text", "looks"),
    [
        ("Summarize our conversation so far.", True),
        ("Please provide a detailed summary of the above discussion, so that another model can go on.", True),
        ("Generate a short title for this chat. Reply with the title only.", True),
        ("Compress the history into a handoff note.", True),
        ("Suggest three follow-up questions for this conversation.", True),
        ("Create a checkpoint of this session for the next agent.", True),
        ("Review the conversation above and store what is worth remembering.", True),
        ("Look over our transcript: is there anything for the wiki?", True),
        ("Review the parser and the session module.", False),
        ("The checkpoint above is wrong, you deleted my file.", False),
        ("No! The context manager is wrong, make the class compact.", False),
        ("No, that was wrong.", False),
        ("Give the function a better name.", False),
        ("Write a test for the parser.", False),
        ("Thanks!", False),
    ],
)
def test_a_request_may_look_like_a_chore_and_stays_main(text: str, looks: bool) -> None:
    decision = classify({}, {"messages": [*TALK, user(text)]}, side_alias=False)
    assert decision.kind is MAIN
    assert decision.reason.startswith("looks like a summary request") is looks
    assert looks_like_chore([*TALK, user(text), VOLATILE]) is looks
    assert looks_like_chore([*TALK, user(text), {"role": "system", "content": "# Environment"}]) is looks
    assert not looks_like_chore([*TALK, user(text), calls("exec"), tool("exec", "x")])


SUMMARISER = system("You are a helpful AI assistant tasked with summarizing conversations. Be kind.")
TITLER = system("Generate a concise, sentence-case title (3-7 words) for what is said.")


def test_an_application_may_have_the_system_prompt_of_a_chore() -> None:
    """What its people say is main, and is taken for feedback once it is held with its reply."""
    doubtful = "looks like a summary request: no feedback unless a later request holds it with its reply"
    first = classify({}, {"messages": [SUMMARISER, user("Sum up: Ann met Bob.")]}, side_alias=False)
    assert (first.kind, first.reason) == (MAIN, doubtful)
    for opening in (SUMMARISER, TITLER):
        after = classify({}, {"messages": [opening, *TALK, user("Shorter, please.")]}, side_alias=False)
        assert (after.kind, after.reason) == (MAIN, doubtful)
    assert classify({}, {"messages": [TITLER, user("x")]}, side_alias=False).kind is SIDE
    compacting: list[JsonValue] = [
        SUMMARISER,
        *TALK,
        user("Provide a detailed prompt for continuing our conversation above."),
    ]
    assert classify({}, {"messages": compacting}, side_alias=False).kind is SIDE


@pytest.mark.parametrize(
    "text",
    [
        "<task-notification>\n<status>completed</status>\n<summary>The conversation.</summary>\n</task-notification>",
        "[ASYNC DELEGATION BATCH COMPLETE — deleg_1]\nA summary of the conversation.",
        "Continue if you have next steps, or stop and ask for clarification if you are unsure how to proceed.",
        "[System: Your previous response was truncated by the output limit.]",
        "<command-name>/compact</command-name>\n<command-message>compact</command-message>",
    ],
)
def test_a_clients_note_is_no_reaction_and_no_chore(text: str) -> None:
    decision = classify({}, {"messages": [*TALK, user(text)], "tools": TOOLS}, side_alias=False)
    assert (decision.kind, decision.reason) == (MAIN, "no sign of a side turn")
    assert is_side_prompt(user(text))
    assert is_side_prompt(in_parts(text, "No, that was wrong.")) is not text.startswith("<")


@given(json_values)
def test_any_metadata_is_read(value: JsonValue) -> None:
    classify({CODEX: str(value)}, {"messages": value, "client_metadata": {CODEX: value}}, side_alias=False)
    classify({}, {"messages": [user("x")], "client_metadata": value, "max_tokens": value}, side_alias=False)


def test_a_clients_notification_is_answered_in_a_main_turn_and_is_no_reaction() -> None:
    note = user("<system-reminder>\n[SYSTEM NOTIFICATION - NOT USER INPUT]\nThe agent is done.\n</system-reminder>")
    assert is_side_prompt(note)
    assert classify({}, {"messages": [*TALK, note], "tools": TOOLS}, side_alias=False).kind is MAIN
    recorder = Recorder()
    asked = [user("Look around.")]
    first = recorder.record(asked, assistant("The agent looks."))
    noted = [*asked, assistant("The agent looks."), note]
    second = recorder.record(noted, assistant("It found nothing."))
    later = [*noted, assistant("It found nothing."), user("No.")]
    assert next_states(SEED, noted, recorder.turns[:1]) == {}
    assert next_states(SEED, later, recorder.turns) == {second: [user("No.")]}
    assert first != second
