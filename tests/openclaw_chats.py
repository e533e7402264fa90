"""Requests of OpenClaw 2026.9.6, as it sent them to an OpenAI-compatible server; long texts are shortened.

From two runs: one-shot turns with `--session-id side-demo`, and its resident gateway with a heartbeat every minute
and a context small enough for memory flush and compaction.
"""

from __future__ import annotations

from pydantic import JsonValue

from clawloop.core.contracts.turns import Message
from tests.chats import VOLATILE, assistant, system, user

UUID_ID = "66b452d0-dccc-4cbf-92ad-b1bd0a509b4f"

_HOST = "host=vm | os=Linux 6.18.44 (x64) | node=v24.16.0 | active_node=unknown | model=gw/m | shell=bash"
DEMO_LINE = f"Runtime: agent=main | session=agent:main:explicit:side-demo | sessionId=side-demo | {_HOST}"
MAIN_LINE = f"Runtime: agent=main | session=agent:main:main | sessionId={UUID_ID} | {_HOST}"

AGENT_PROMPT = system("<!-- openclaw:attempt:STABLE -->\nYou are a personal assistant running inside OpenClaw.")
TOOLS: JsonValue = [{"type": "function", "function": {"name": "exec", "parameters": {"type": "object"}}}]

POLL = "[OpenClaw heartbeat poll]"
HEARTBEAT = (
    "Follow the heartbeat monitor scratch context when provided. Recurring tasks are automations; create or change "
    "their schedules with the automations tool, not heartbeat scratch. Do not infer or repeat old tasks from prior "
    "chats. If nothing needs attention, reply NO_REPLY.\nCurrent time: Friday, November 20th, 2026 - 11:18 AM (UTC)\n"
    "Reference UTC: 2026-11-20 11:18 UTC"
)
OLD_HEARTBEAT = (
    "Read HEARTBEAT.md if it exists (workspace context). Follow it strictly. Do not infer or repeat old tasks from "
    "prior chats. If nothing needs attention, reply HEARTBEAT_OK.\nCurrent time: Thursday, March 5th, 2026 - 17:59"
)
MEMORY_FLUSH = (
    "Pre-compaction memory flush. Store durable memories only in memory/2026-11-20.md (create memory/ if needed). "
    "If nothing to store, reply with NO_REPLY.\nCurrent time: Friday, November 20th, 2026 - 11:18 AM (UTC)"
)
COMPACTION = (
    "You are a context summarization assistant. Your task is to read a conversation between a user and an AI "
    "assistant, then produce a structured summary following the exact format specified.\n\n"
    "Do NOT continue the conversation. ONLY output the structured summary."
)
RECAP = "Write an Activity recap for someone scanning their tasks: what was done here, and where it stands now."
TITLE = (
    "Generate a concise session title (3-6 words, max 60 characters) from the user's first message. No emoji. "
    "Return only the title."
)

FIRST_USER = user(f"[Fri 2026-11-20 11:18 UTC] Message 1 about apples\n\n{DEMO_LINE}")
SECOND_USER = user("[Fri 2026-11-20 11:18 UTC] Message 2 about apples")


def affinity(value: str) -> dict[str, str]:
    """The headers of an agent turn with `sendSessionAffinityHeaders`."""
    return {"session_id": value, "x-client-request-id": value, "x-session-affinity": value}


FIRST: list[Message] = [AGENT_PROMPT, FIRST_USER, VOLATILE]
SECOND: list[Message] = [AGENT_PROMPT, FIRST_USER, assistant("Reply #1"), SECOND_USER, VOLATILE]

HEARTBEAT_REQUEST: list[Message] = [AGENT_PROMPT, user(f"{HEARTBEAT}\n\n{MAIN_LINE}"), VOLATILE]
# The history keeps polls instead of heartbeats, two of them in one message, and drops their NO_REPLY.
AFTER_HEARTBEATS: list[Message] = [
    AGENT_PROMPT,
    {
        "role": "user",
        "content": [
            {"type": "text", "text": f"[Fri 2026-11-20 11:19 UTC] {POLL}"},
            {"type": "text", "text": POLL},
            {"type": "text", "text": MAIN_LINE},
        ],
    },
    user("[Fri 2026-11-20 11:20 UTC] To the main session"),
    VOLATILE,
]
FLUSH_REQUEST: list[Message] = [*SECOND[:-1], assistant("Reply #2"), user(MEMORY_FLUSH)]
COMPACTION_REQUEST: list[Message] = [
    system(COMPACTION),
    {
        "role": "user",
        "content": [
            {"type": "text", "text": f"<conversation>\n[User]: Message 1\n\n{DEMO_LINE}\n</conversation>\n\n…"}
        ],
    },
]
COMPACTED: list[Message] = [
    AGENT_PROMPT,
    {
        "role": "user",
        "content": [
            {
                "type": "text",
                "text": "The conversation history before this point was compacted into the following summary:\n\n"
                "<summary>\n## Goal\napples\n</summary>",
            },
            {"type": "text", "text": DEMO_LINE},
        ],
    },
    assistant("Reply #2"),
    user("[Fri 2026-11-20 11:19 UTC] After all that"),
    VOLATILE,
]
RECAP_REQUEST: list[Message] = [system(RECAP), user('{"previousRecap":"","messages":["user: Message 1 about apples"]}')]
