"""Classifies a turn as main or side, with the reason: side are the chores that a client does without a person.

Reads request bodies before they are validated. A chore is known by what its client says of it (headers, metadata),
else by how its prompt begins: no person's message begins so by chance, and one that quotes such a prompt has other text
in front. A prompt of a client that nobody knows may only look like a chore, and people ask for summaries, too: such a
turn is main, and `looks_like_chore` keeps it from being taken for feedback.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import orjson
from pydantic import JsonValue

from clawloop.core.contracts.turns import KindDecision, Message, TurnKind
from clawloop.core.turns.canonical import is_aside, is_volatile, own_words, text_parts

_STAMP = re.compile(r"\[[A-Z][a-z]{2} \d{4}-\d\d-\d\d \d\d:\d\d [^\]\n]{1,40}\] ")  # OpenClaw puts it before user text


_KINDS = {kind.value: kind for kind in TurnKind}


@dataclass(frozen=True, slots=True)
class SidePattern:
    """Pattern that recognises one kind of side prompt.

    Args:
        name: for people.
        place: the message to match: the system message that opens a request without tools; or a line of the one that
            opens a sub-agent's; or the last user message, or its last text part, which also covers the tool calls that
            follow it; or the only message besides system messages of a request for at most `PROBE_TOKENS` tokens
            without tools, which it must equal; or a user message that a client writes on its own and whose reply a
            person reads: the turn is main, and the message no reaction to the one before.
        begins: how the message's text begins.
        contains: what the text must contain as well.
        common: an application's own system prompt may begin so, too.
    """

    name: str
    place: Literal["system", "agent", "user", "probe", "note"]
    begins: str
    contains: tuple[str, ...] = ()
    common: bool = False


SIDE_PATTERNS = (
    # OpenClaw 2026.9; the second heartbeat is that of 2026.3 and before.
    SidePattern(
        "heartbeat", "user", "Follow the heartbeat monitor scratch context when provided.", ("reply NO_REPLY",)
    ),
    SidePattern("heartbeat", "user", "Read HEARTBEAT.md if it exists", ("reply HEARTBEAT_OK",)),
    SidePattern("heartbeat", "user", "[OpenClaw heartbeat poll]"),  # a heartbeat in the history
    SidePattern("memory flush", "user", "Pre-compaction memory flush.", ("durable memories", "NO_REPLY")),
    SidePattern(
        "compaction",
        "system",
        "You are a context summarization assistant.",
        ("ONLY output the structured summary",),
    ),
    SidePattern("title", "system", "Generate a concise session title (", ("Return only the title",)),
    SidePattern("recap", "system", "Write an Activity recap for someone scanning their tasks"),
    # Codex, where a proxy drops its headers.
    SidePattern("compaction", "user", "You are performing a CONTEXT CHECKPOINT COMPACTION."),
    # Claude Code.
    SidePattern("compaction", "user", "CRITICAL: Respond with TEXT ONLY", ("Do NOT call any tools",)),
    SidePattern("compaction", "user", "Your task is to create a detailed summary of the conversation so far"),
    SidePattern("compaction", "user", "Your task is to create a detailed summary of this conversation"),
    SidePattern("recap", "user", "The user stepped away and is coming back. Recap in"),
    SidePattern("suggestion", "user", "[SUGGESTION MODE: Suggest what the user might naturally type next"),
    SidePattern("notification", "note", "<system-reminder>\n[SYSTEM NOTIFICATION - NOT USER INPUT]"),
    SidePattern("memory", "user", "IMPORTANT: This message and these instructions are NOT part of the actual user"),
    SidePattern("page", "user", "Web page content:\n---\n"),
    SidePattern("topic", "system", "Analyze if this message indicates a new conversation topic."),
    SidePattern("title", "system", "Generate a concise, sentence-case title"),
    SidePattern("title", "system", "Summarize this coding conversation in under 50 characters."),
    SidePattern("title", "system", "Generate a concise, technical issue title"),
    SidePattern("hook", "system", "You are evaluating a hook in Claude Code."),
    SidePattern("safety check", "system", "You are a security monitor for autonomous AI coding agents."),
    SidePattern("transcript", "user", "Summarize this portion of a Claude Code session transcript."),
    SidePattern("probe", "probe", "quota"),
    SidePattern("probe", "probe", "test"),
    SidePattern("probe", "probe", "ping"),
    SidePattern("probe", "probe", "hi"),
    # OpenCode; the summary of 1.18 quotes the conversation.
    SidePattern("title", "system", "You are a title generator. You output ONLY a thread title."),
    SidePattern("compaction", "system", "You are an anchored context summarization assistant"),
    SidePattern("compaction", "user", "Here is the conversation so far:\n\n<conversation>", ("<template>",)),
    SidePattern(
        "compaction", "system", "You are a helpful AI assistant tasked with summarizing conversations.", common=True
    ),
    SidePattern("notification", "note", "Continue if you have next steps, or stop and ask for clarification"),
    SidePattern("compaction", "user", "Provide a detailed prompt for continuing our conversation above."),
    SidePattern("summary", "system", "Summarize what was done in this conversation. Write like a pull request"),
    # Qwen Code and Gemini CLI.
    SidePattern("compaction", "system", "You are the component that summarizes internal chat history"),
    SidePattern("compaction", "user", "First, reason in your scratchpad. Then, generate the <state_snapshot>"),
    SidePattern("compaction", "user", "You are the component that summarizes a conversation when its context window"),
    SidePattern(
        "summary",
        "user",
        "Please analyze the conversation history above and generate",
        ("project summary in markdown",),
    ),
    SidePattern("memory", "user", "Managed memory has TWO directories.", ("managed memory",)),
    SidePattern("memory", "agent", "You are now acting as the managed memory extraction subagent"),
    SidePattern("sub-agent", "agent", "You are a general-purpose subagent working for a parent agent."),
    SidePattern("sub-agent", "agent", "You are a forked worker process. Follow the directive"),
    SidePattern("sub-agent", "agent", "You are a subagent spawned by a workflow orchestration script."),
    SidePattern(
        "next speaker", "user", "Analyze *only* the content and structure of your immediately preceding response"
    ),
    SidePattern("tool output", "user", "Summarize the following tool output to be a maximum of"),
    # Cline, in a text part behind results of tools and what it says of the machine.
    SidePattern("compaction", "user", '<explicit_instructions type="summarize_task">'),
    SidePattern("compaction", "user", '<explicit_instructions type="condense">'),
    # Aider.
    SidePattern("compaction", "system", "*Briefly* summarize this partial conversation about programming."),
    SidePattern("compaction", "system", "Briefly summarize this partial conversation about programming."),
    SidePattern("commit message", "system", "You are an expert software engineer that generates concise", ("commit",)),
    # Hermes; the second title is the older one.
    SidePattern("title", "system", "You name chat sessions. Given the user's opening message"),
    SidePattern("title", "system", "Generate a short, descriptive title", ("conversation",)),
    SidePattern("compaction", "user", "You are a summarization agent creating a context checkpoint"),
    SidePattern("compaction", "user", "Create a structured handoff summary for a later assistant"),
    SidePattern("memory", "user", "Review the conversation above and consider saving to memory if appropriate."),
    SidePattern("skills", "user", "Review the conversation above and update the skill library."),
    SidePattern("memory", "user", "Review the conversation above and update two things:", ("**Memory**", "**Skills**")),
    SidePattern("sub-agent", "agent", "You are a focused subagent working on a specific delegated task."),
    SidePattern("notification", "note", "[ASYNC DELEGATION COMPLETE"),
    SidePattern("notification", "note", "[ASYNC DELEGATION BATCH COMPLETE"),
    SidePattern("notification", "note", "[IMPORTANT: Background process "),
    SidePattern("notification", "note", "[System: Your previous "),
    SidePattern("notification", "note", "[System: The previous response was cut off"),
    SidePattern("notification", "note", "[System: Continue now."),
    # Open WebUI.
    SidePattern(
        "title", "user", "### Task:\nGenerate a concise title summarizing the chat history", ("<chat_history>",)
    ),
    SidePattern("title", "user", "### Task:\nGenerate a concise, 3-5 word title", ("<chat_history>",)),
    SidePattern("tags", "user", "### Task:\nGenerate 1-3 broad tags", ("<chat_history>",)),
    SidePattern("follow-ups", "user", "### Task:\nSuggest 3-5 relevant follow-up", ("<chat_history>",)),
    SidePattern(
        "queries", "user", "### Task:\nAnalyze the chat history to determine the necessity of generating search"
    ),
    SidePattern("autocompletion", "user", "### Task:\nYou are an autocompletion system."),
    SidePattern("emoji", "user", "Your task is to reflect the speaker's likely facial expression"),
)
PROBE_TOKENS = 1

_TURN_METADATA = "x-codex-turn-metadata"
# What Codex says of itself in the headers above, or a proxy that drops them has in the body.
_CODEX_METADATA = "client_metadata"
# Characters that are read at the beginning and at the end of a longer text.
_LOOKED_AT = 600
# What looks like a chore: the words of each, in a text that is about the conversation. Each pattern is searched alone,
# so that the time stays linear in the text.
_CHAT = r"(conversation|chat|session|discussion|dialog(ue)?|thread|transcript|exchange)"
# Nothing that has its name from one: a session's token, a dialog's title.
_ENDS = r"(?=\s*($|[.,:;!?()\n]|(above|and|as|before|for|in|into|or|so|that|to|using|which|with)\b))"
_THE_CHAT = rf"(conversation|chat|discussion|dialogue|transcript){_ENDS}"
_THIS_CHAT = (
    rf"((this|our) (whole |entire )?{_CHAT}{_ENDS}"
    rf"|the (above |preceding |previous |following |current |whole |entire |full )?{_THE_CHAT}"
    rf"|{_CHAT} (above|so far)\b|(conversation|chat|message) history\b)"
)
# Where an order begins.
_ORDER = r"(^|[.:;!?\n-]\s*|\b(please|now|must|should|to|and|is to) )"
_ABOUT_CHATS = re.compile(rf"\b({_CHAT}|messages|history)\b")
_ABOUT_WHAT_WAS_SAID = re.compile(rf"\b({_CHAT}|messages|history|so far|above|context|previous|earlier)\b")
# `compact` and `checkpoint` are words of people, too ("the checkpoint above is wrong"): they count only in an order.
_SUMMARY = re.compile(
    r"\b(summar(y|ies|i[sz]e[sd]?|i[sz]ing|i[sz]ation)|recap|tl;?dr|compaction)\b"
    r"|(^|[.:;!?\n]\s*|\bplease |\bnow |\bmust |\bto )(compact|condense|compress) "
    r"|\b(create|write|generate|produce|prepare|perform(ing)?)\b[^.]{0,60}\b(hand-?off|checkpoint)\b"
)
_TITLE = re.compile(
    r"\b(generate|create|write|suggest|give|provide|propose|pick|choose|come up with|return|output|reply)\b"
    r"[^.]{0,80}\b(title|headline|tags?|topics?|labels?|keywords|follow-?ups?)\b"
)
_ASKED_ABOUT_CHATS = ((_SUMMARY, _ABOUT_WHAT_WAS_SAID), (_TITLE, _ABOUT_CHATS))
_KEEP = r"(add|append|capture|collect|compile|note|produce|record|remember|save|store|update|write)"
_ALONE = tuple(
    re.compile(pattern)
    for pattern in (
        # Of clients that keep memories and skills: an order to look the conversation over, or to keep something of it.
        r"\b(review|analy[sz]e|scan|examine|reflect on|evaluate|look back|look over|go (through|over))\b[^.]{0,80}"
        r"\b(conversation|transcript|dialog(ue)?|discussion|(chat|session|message) history|this (chat|session)"
        r"|(chat|session) (above|so far))\b",
        rf"{_ORDER}(extract|distil|distill|gather|identify|infer|list|pull out|{_KEEP})\b[^.]{{0,120}}\b{_THIS_CHAT}",
        rf"{_ORDER}{_KEEP}\b[^.]{{0,80}}\b((long-?term|user|persistent) memor(y|ies)|worth remembering)\b",
        r"\b(facts?|learn(ed|t)?|memor(y|ies)|remember(ed|ing)?)\b[^.]{0,40}\babout (the|this) user\b",
        # Names.
        rf"\b(name|title|headline|label)( for)? {_THIS_CHAT}",
        rf"\b(give|assign) (this|our) {_CHAT} an?\b[^.]{{0,40}}\b(name|title|headline|label|tag)\b",
        # Tools that a client is to show to the model.
        r"\b(decide|select|choose|pick|determine|identify|list|which)\b[^.]{0,80}"
        r"\btools? (are|can|do|does|for|help|is|needed|relevant|should|that|to|which|would)\b"
        r"(?=[\s\S]*\b(in|as|valid|only|return|output) (an? )?json\b)",
        # What is to be searched for, or asked elsewhere.
        r"\bstand-?alone (question|query)\b",
        r"\b(rephrase|rewrite|reformulate|turn|convert)\b[^.]{0,80}\b(question|query|message)\b[^.]{0,80}"
        r"\b(search quer(y|ies)|self-contained|(without|independent of) the (conversation|context|chat|history))\b",
        # Work that goes on elsewhere, or with less context.
        r"\b(continuation|resumption|hand-?off|hand-?over) (prompt|notes?|brief|message|document)\b",
        rf"{_ORDER}(write|draft|prepare|create|compose|leave|generate)\b[^.]{{0,80}}"
        rf"\b(for|lets?|so that|allows?|helps?) (the|an?|your) (next|new|later|future|fresh)"
        rf" (session|agent|assistant|model|llm)( continue\b|{_ENDS})",
        r"\b((context|token)( window| limit| budget)?( (is|will|be|has|been|was|runs|running|almost|nearly|now|soon))*"
        r" (full|used up|reached|out|exhausted)|(out of|end of (the|your)) context)\b"
        r"(?=[\s\S]*\b(write|record|save|note|list|describe|store|preserve)\b)",
    )
)
# A summary of the conversation in other languages: how it is asked for, and words for a conversation.
_SUMMARY_ELSEWHERE = tuple(
    (re.compile(asked), re.compile(about))
    for asked, about in (
        (
            r"zusammenfass|\bfass\w*\b.*\bzusammen\b",
            r"unterhaltung|gespräch|konversation|chat|dialog|diskussion|verlauf",
        ),
        (
            r"\brésum|\brécapitul|\bsynthèse\b",
            r"\b(conversation|discussion|échanges?|dialogue|chat|historique|session)\b",
        ),
        (r"\bresum(e|en|ir|a)\b|\bresúm", r"\b(conversación|charla|diálogo|sesión|historial|(el|este|nuestro) chat)\b"),
        (r"[总總][结結]|摘要|概括|归纳|概述|小结", r"[对對][话話]|聊天|[会會][话話]|交谈|[讨討][论論]|上文|上述"),
    )
)
_DOUBTFUL = "looks like a summary request: no feedback unless a later request holds it with its reply"


def classify(
    headers: Mapping[str, str], body: Mapping[str, JsonValue], *, side_alias: bool, patterns: bool = True
) -> KindDecision:
    """The kind of a turn: as the client names it, else by the model alias, a header or a known side prompt, else main.

    Args:
        headers: names in lower case.
        side_alias: the request names a model alias that means side turns.
        patterns: False ignores headers and known side prompts of chores: an episode is trained whatever its task reads
            like, and an agent in it may have sub-agents.
    """
    unknown = ""
    for place, value in (
        ("header X-Turn-Type", headers.get("x-turn-type")),
        ("body turn_type", body.get("turn_type")),
    ):
        if not isinstance(value, str) or not value.strip():
            continue
        name = value.strip().lower()
        if name in _KINDS:
            return KindDecision(_KINDS[name], f"{place}: {name}{unknown}")
        unknown += f" ({place} {value.strip()[:40]!r} is neither main nor side)"
    if side_alias:
        return KindDecision(TurnKind.SIDE, f"model name for side turns{unknown}")
    if patterns:
        if (chore := _named_chore(headers, body)) is not None:
            return KindDecision(TurnKind.SIDE, f"{chore}{unknown}")
        messages = _messages(body)
        pattern = _side_pattern(body, messages)
        if pattern is not None and not (pattern.place == "system" and _may_be_an_applications(pattern, messages)):
            return KindDecision(TurnKind.SIDE, f"known side prompt: {pattern.name}{unknown}")
        answered = any(message.get("role") == "assistant" for message in messages)
        if pattern is not None or (answered and looks_like_chore(messages)):
            return KindDecision(TurnKind.MAIN, f"{_DOUBTFUL}{unknown}")
    return KindDecision(TurnKind.MAIN, f"no sign of a side turn{unknown}")


def last_said(messages: Sequence[Message]) -> Message | None:
    """The last message that stays; not a system's, which clients add at the end as well."""
    said = (message for message in reversed(messages) if message.get("role") not in ("system", "developer"))
    return next((message for message in said if not is_volatile(message)), None)


def looks_like_chore(messages: Sequence[Message]) -> bool:
    """True if the last message may be a client's request for a summary, a title or the like, or a person's."""
    last = last_said(messages)
    if last is None or last.get("role") != "user" or _is_note(last):
        return False
    text = _user_text(last)
    if len(text) > 2 * _LOOKED_AT:
        text = f"{text[:_LOOKED_AT]}\n{text[-_LOOKED_AT:]}"
    text = text.lower()
    asked_about = (*_ASKED_ABOUT_CHATS, *_SUMMARY_ELSEWHERE)
    return any(pattern.search(text) for pattern in _ALONE) or any(
        asked.search(text) and about.search(text) for asked, about in asked_about
    )


def is_side_prompt(message: Message) -> bool:
    """True if a message in a history is a client's own, whether its reply is there or not: no reaction of a person."""
    if message.get("role") != "user":
        return False
    return _is_note(message) or _match_user(message) is not None


def _is_note(message: Message) -> bool:
    """True if a client wrote a user message on its own, and a person reads the reply."""
    return is_aside(message) or _match("note", _user_text(message)) is not None


def begins_as_chore(messages: Sequence[Message]) -> bool:
    """True if the system message is that of a known chore, or an application's that begins so."""
    return bool(messages) and _match_opening(messages[0]) is not None


def _named_chore(headers: Mapping[str, str], body: Mapping[str, JsonValue]) -> str | None:
    """The chore that the client names as the request's kind; None if it names none."""
    own = body.get(_CODEX_METADATA)
    metadata = own if isinstance(own, dict) else {}
    told = _json_object(headers.get(_TURN_METADATA) or metadata.get(_TURN_METADATA))
    kind = told.get("request_kind")
    if isinstance(kind, str) and kind and kind not in ("turn", "subagent_turn"):
        return f"header {_TURN_METADATA}: request_kind={kind[:40]}"
    agent = headers.get("x-openai-subagent") or metadata.get("x-openai-subagent") or told.get("subagent_kind")
    if agent or told.get("thread_source") == "subagent" or kind == "subagent_turn":
        return f"sub-agent of Codex: {str(agent or 'spawned')[:40]}"
    if headers.get("x-openai-memgen-request", "").strip().lower() == "true":
        return "header x-openai-memgen-request: memory of Codex"
    if guardian := headers.get("x-codex-guardian", "").strip():
        return f"header x-codex-guardian: {guardian[:40]}"
    if compaction := headers.get("x-claude-code-compaction", "").strip():
        return f"header x-claude-code-compaction: {compaction[:40]}"
    name = headers.get("x-claude-code-request-class", "").strip()
    if name and name != "main":
        return f"header x-claude-code-request-class: {name[:40]}"
    if headers.get("x-claude-code-agent-id", "").strip() or headers.get("x-claude-code-parent-agent-id", "").strip():
        return "sub-agent of Claude Code"
    if headers.get("x-parent-session-id", "").strip():
        return "header x-parent-session-id: sub-agent of OpenCode"
    return None


def _json_object(value: JsonValue) -> dict[str, JsonValue]:
    try:
        parsed: JsonValue = orjson.loads(value) if isinstance(value, str) and len(value) <= 64 * 1024 else value
    except orjson.JSONDecodeError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _messages(body: Mapping[str, JsonValue]) -> list[Message]:
    raw = body.get("messages")
    return [message for message in raw if isinstance(message, dict)] if isinstance(raw, list) else []


def _may_be_an_applications(pattern: SidePattern, messages: Sequence[Message]) -> bool:
    """True if people may talk under this system prompt: it is a common one, or they have gone on after a reply."""
    last = last_said(messages)
    answered = any(message.get("role") == "assistant" for message in messages)
    person = last is not None and last.get("role") == "user" and not looks_like_chore(messages)
    return pattern.common or (answered and person)


def _side_pattern(body: Mapping[str, JsonValue], messages: Sequence[Message]) -> SidePattern | None:
    users = (m for m in reversed(messages) if m.get("role") == "user" and not is_volatile(m))
    last = next(users, None)
    if last is not None and (pattern := _match_user(last)) is not None:
        return pattern
    if messages and (pattern := _match_agent(messages[0])) is not None:
        return pattern
    if body.get("tools") or not messages:
        return None
    return _match_opening(messages[0]) or _probe(body, messages)


def _match_opening(message: Message) -> SidePattern | None:
    """The chore whose system message this is."""
    if message.get("role") not in ("system", "developer"):
        return None
    # Claude Code puts a line about who it is in front of its chores' own prompt, as a text part of its own.
    texts = [text.lstrip() for text in text_parts(message)]
    for text in ("".join(texts), *texts, *(line for line in "".join(texts).split("\n", 2)[1:])):
        if (pattern := _match("system", text)) is not None:
            return pattern
    return None


def _match_agent(message: Message) -> SidePattern | None:
    """The kind of sub-agent whose system message this is: a line of it begins so."""
    if message.get("role") not in ("system", "developer"):
        return None
    text = "\n" + "".join(text_parts(message))
    return next((known for known in SIDE_PATTERNS if known.place == "agent" and f"\n{known.begins}" in text), None)


def _probe(body: Mapping[str, JsonValue], messages: Sequence[Message]) -> SidePattern | None:
    said = [message for message in messages if message.get("role") not in ("system", "developer")]
    most = body.get("max_tokens", body.get("max_completion_tokens"))
    if len(said) != 1 or said[0].get("role") != "user" or most != PROBE_TOKENS:
        return None
    text = _user_text(said[0]).strip().lower()
    return next((known for known in SIDE_PATTERNS if known.place == "probe" and text == known.begins), None)


def _match_user(message: Message) -> SidePattern | None:
    """The side prompt that a user message is, or that its last text part is."""
    return _match("user", _user_text(message)) or _match("user", "".join(text_parts(message)[-1:]).lstrip())


def _match(place: Literal["system", "user", "note"], text: str) -> SidePattern | None:
    for pattern in SIDE_PATTERNS:
        begins = pattern.place == place and text.startswith(pattern.begins)
        if begins and all(part in text for part in pattern.contains):
            return pattern
    return None


def _user_text(message: Message) -> str:
    text = "".join(text_parts(own_words(message))).lstrip()
    stamp = _STAMP.match(text)
    return text[stamp.end() :] if stamp else text
