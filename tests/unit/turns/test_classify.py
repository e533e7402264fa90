"""Main or side: the client's word, the model alias, known side prompts, else main; and always a reason."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from pydantic import JsonValue

from clawloop.core.contracts.turns import Message, TurnKind
from clawloop.core.judging.evidence import words_of
from clawloop.core.turns.canonical import canonical
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


# The patterns were written for the phrases before the empty comment; the others were written apart from them.
CHORES_OF_UNKNOWN_CLIENTS = (
    "Extract the key facts about the user from this conversation",
    "Update the long-term memory with anything useful from this chat",
    "Distill the above conversation into notes",
    "Decide which tools are relevant for this request and answer in JSON",
    "Write a continuation prompt for the next session",
    "The context window is almost full. Write down everything that is needed to go on",
    "Name this conversation in five words",
    "Rephrase the follow up question to be a standalone question",
    "Fasse unsere Unterhaltung zusammen.",
    "Résumez la conversation ci-dessus.",
    "Resume la conversación anterior.",
    "请总结上面的对话",
    "總結一下我們的對話",
    #
    "Pull out any lasting preferences the user mentioned in this chat and return them as a JSON list.",
    "Save anything worth remembering about the user to your notes before this session ends.",
    "Rewrite the user's last message as a search query that can be understood without the conversation.",
    "You are about to run out of context. Record the state of the work so that you can pick it up again.",
    "Come up with a short name for this chat.",
    "Condense the dialogue above to its main points.",
    "From the list below, select the tools that help to answer the user. Reply as JSON.",
    "Fasse den bisherigen Chat kurz zusammen.",
    "Résume notre discussion jusqu'ici en quelques phrases.",
    "Haz un resumen de nuestra charla hasta ahora.",
    "请把以上聊天记录总结成几句话。",
    "Given the chat history and the latest user question, formulate a standalone question which can be understood"
    " without the chat history.",
    "Draft a brief that lets a new agent continue this work in the next session.",
    "List the facts about me that came up in our conversation so that they can be stored in memory.",
    "Erstelle eine Zusammenfassung der Unterhaltung.",
    "Identify the topics of the conversation and output them as tags.",
    "Produce a memory entry with the decisions made in this discussion.",
    "What should be remembered about this user? Answer with bullet points.",
    "Write the hand-off document for your successor.",
    "Generate a five-word label describing what this chat is about.",
    "Which of these tools does the request need? Output only JSON.",
    "Zusammenfassung des bisherigen Gesprächs in drei Sätzen, bitte.",
    "Fais la synthèse de l'échange ci-dessus.",
    "Resume lo que hemos hablado en esta conversación.",
    "用三句话概括之前的讨论内容。",
    "Convert the last user message into a self-contained query.",
    "Token limit reached. Preserve all details needed to resume.",
    "Compile the user's goals and constraints stated in the dialogue.",
    "Collect what the user likes and dislikes from our chat and write it to memory.",
    "Your context is nearly full: store all open tasks in a file before it is cleared.",
    "Suggest a title for this thread, at most six words.",
    "Pick the tools needed for the next step and output valid JSON.",
    "Turn the last question into a search query.",
    "Prepare a handover note so a colleague can take over.",
    "Note every decision taken in the conversation above.",
    "Give this conversation a name.",
    "Schreib eine kurze Zusammenfassung dieses Chats.",
    "Peux-tu récapituler la conversation ?",
    "Hazme un resumen de esta conversación.",
    "请概述我们到目前为止的聊天内容。",
    "Extract action items from the transcript.",
    "Does this session contain facts about the user worth keeping? List them.",
    "Remember the important points of this discussion for later.",
)
REACTIONS_OF_PEOPLE = (
    "No. Return the name from the previous function.",
    "Summarise this article",
    "What did we talk about?",
    "Choose the tool that reads JSON, not this one",
    "Let us resume our discussion.",
    "总结一下这篇文章",
    "The context manager is full of bugs, write it again.",
    #
    "No, the tool you chose is wrong, use grep.",
    "Update the README with the new flag.",
    "Rephrase that, it is too long.",
    "Extract the dates from this file.",
    "The context manager leaks memory, fix it.",
    "You forgot what I said earlier: answer in German.",
    "Das ist falsch, fasse dich kürzer.",
    "Write down the steps for the deployment.",
    "Name the variable `total` in this function.",
    "Non, la fonction précédente était mieux.",
    "No me gusta, hazlo más corto.",
    "不对，请重新写这个函数。",
    "Continue with the next file.",
    "Which tools did you use?",
    "Give the previous test another name.",
    "Remember to run the tests before you answer.",
    "Save the notes to notes.md.",
    "Résume cet article en trois phrases.",
    "No, list the files in the directory first.",
    "Your note about the session token was wrong.",
    "Store the results in a JSON file.",
    "Update the docs of the chat endpoint.",
    "That is the wrong tool, pick another.",
    "Write a new agent class.",
    "Name the exchange rate column fx.",
    "Store the user id in the session.",
    "Name the dialog `Settings`.",
    "Create a cookie for each new session.",
    "Save the token in the current session.",
    "The context is wrong, list the variables again.",
    "Fass die drei Spalten zusammen.",
    "Non, la discussion n'est pas le sujet, corrige le test.",
    "总结得不对，再读一遍文件。",
    "No, the chat should scroll to the bottom.",
    "Extract a helper from the session handler.",
    "Write the new model to disk.",
    "The token is not written to the cookie, save it there.",
    "Name this test after what it shows.",
    "Rewrite the query without the join.",
    "List the tools directory as JSON please, not as text.",
    "That is not what the document says.",
    "Add the conversation id to the log line.",
    "Which discussion do you mean?",
    "Update the thread pool size.",
    "You should have read the transcript file first.",
    "Save the chat messages in SQLite.",
    "Nein, die Zusammenfassung im Bericht fehlt noch.",
    "Esto no es correcto, resume solo el segundo capítulo.",
    "这个摘要太长了。",
    "Label the axes.",
    "The dialog closes too early.",
    "Give the exchange class a shorter name.",
    "Create a factory for the new session type.",
)


@pytest.mark.parametrize(
    ("text", "looks"),
    [(text, True) for text in CHORES_OF_UNKNOWN_CLIENTS] + [(text, False) for text in REACTIONS_OF_PEOPLE],
)
def test_a_chore_of_a_client_that_nobody_knows_only_looks_like_one(text: str, looks: bool) -> None:
    decision = classify({}, {"messages": [*TALK, user(text)], "tools": TOOLS}, side_alias=False)
    assert decision.kind is MAIN
    assert decision.reason.startswith("looks like a summary request") is looks
    assert not is_side_prompt(user(text))


def test_a_long_text_is_looked_through_in_no_time() -> None:
    parts = ("list ", "write the ", "tools ", "context is ", "this chat ", "fass ", "to ", "remember ")
    began = time.process_time()
    for part in parts:
        looks_like_chore([user(part * 200_000)])
    assert time.process_time() - began < 2


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


OF_CODEX = (
    '<subagent_notification>\n{"agent_id": "a1", "status": {"completed": "A summary."}}\n</subagent_notification>',
    "<turn_aborted>\nThe user interrupted the previous turn on purpose.\n</turn_aborted>",
    "<user_shell_command>\n<command>\nls\n</command>\n<result>\nExit code: 0\n</result>\n</user_shell_command>",
    "<environment_context>\n  <cwd>/srv</cwd>\n  <shell>bash</shell>\n</environment_context>",
    "<skill>\n<name>log</name>\nAdd a summary of this conversation to the log.\n</skill>",
    '<hook_prompt hook_run_id="1">The tests fail.</hook_prompt>',
    '<codex_internal_context source="extension">\nGo on.\n</codex_internal_context>',
    "# AGENTS.md instructions for /srv\n\n<INSTRUCTIONS>\nBe brief.\n</INSTRUCTIONS>",
)


@pytest.mark.parametrize("text", OF_CODEX)
def test_what_codex_says_in_a_users_name_is_neither_next_state_nor_words(text: str) -> None:
    recorder = Recorder()
    asked = [user("Look around.")]
    first = recorder.record(asked, assistant("I look."))
    note, said = user(text), user("No, not there.")
    later = [*asked, assistant("I look."), note]
    assert next_states(SEED, later, recorder.turns) == {}
    assert words_of([note], ()) is None
    assert next_states(SEED, [*later, said], recorder.turns) == {first: [said]}
    beside = user(f"{text}\n\nNo, not there.")
    assert next_states(SEED, [*later[:-1], beside], recorder.turns) == {first: [beside]}
    for message in (said, beside, in_parts(text, "No, not there."), in_parts("No, not there.", text)):
        assert words_of([message], ()) == "No, not there."
    assert canonical(beside) == beside  # Codex sends it again as it was


@pytest.mark.parametrize(
    "text",
    [
        "<task-notification>\n<status>completed</status>\n<summary>The conversation.</summary>\n</task-notification>",
        "[ASYNC DELEGATION BATCH COMPLETE — deleg_1]\nA summary of the conversation.",
        "Continue if you have next steps, or stop and ask for clarification if you are unsure how to proceed.",
        "[System: Your previous response was truncated by the output limit.]",
        "<command-name>/compact</command-name>\n<command-message>compact</command-message>",
        *OF_CODEX,
    ],
)
def test_a_clients_note_is_no_reaction_and_no_chore(text: str) -> None:
    decision = classify({}, {"messages": [*TALK, user(text)], "tools": TOOLS}, side_alias=False)
    assert (decision.kind, decision.reason) == (MAIN, "no sign of a side turn")
    assert is_side_prompt(user(text))
    assert is_side_prompt(in_parts(text, "No, that was wrong.")) is not text.startswith(("<", "#"))
    assert is_side_prompt(user(f"{text}\nNo, that was wrong.")) is not text.startswith(("<", "#"))


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
