"""Plays the agent in the sandbox: asks the model, runs the Python it calls for, until it answers.

Any OpenAI client would do; this one needs the standard library only. Exit codes: 0 it answered, 3 it used all its
turns, 75 the gateway could not be reached.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

TURNS = 6
PYTHON_SECONDS = 10
OUTPUT = 2000
# The gateway holds requests while an engine restarts, and answers 503 with Retry-After after that.
ATTEMPTS = 8
TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python code; returns what it prints.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}


def main() -> int:
    with open("/task/prompt.txt", encoding="utf-8") as file:  # noqa: PTH123
        messages: list[dict[str, Any]] = [{"role": "user", "content": file.read()}]
    for _ in range(TURNS):
        message = ask(messages)
        messages.append(message)
        calls = message.get("tool_calls") or []
        if not calls:
            with open("/work/answer.txt", "w", encoding="utf-8") as file:  # noqa: PTH123
                file.write(message.get("content") or "")
            return 0
        messages += [{"role": "tool", "tool_call_id": call.get("id"), "content": run(call)} for call in calls]
    return 3


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": "policy", "messages": messages, "tools": [TOOL], "max_tokens": 512}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    for attempt in range(ATTEMPTS):
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
                return message
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429:
                sys.exit(f"the gateway refuses: {error.code} {error.read(500)!r}")
        except (OSError, ValueError) as error:
            sys.stderr.write(f"the gateway does not answer: {error}\n")
        time.sleep(min(10, 0.5 * 2**attempt))
    sys.exit(75)


def run(call: dict[str, Any]) -> str:
    try:
        code = json.loads(call["function"]["arguments"])["code"]
    except (KeyError, TypeError, ValueError):
        return "error: the arguments must be a JSON object with `code`"
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", str(code)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PYTHON_SECONDS,
            check=False,
            cwd="/tmp",
        )
    except subprocess.TimeoutExpired:
        return f"error: stopped after {PYTHON_SECONDS} s"
    except (OSError, ValueError) as error:
        return f"error: {error}"
    return (done.stdout + done.stderr).strip()[-OUTPUT:]


if __name__ == "__main__":
    sys.exit(main())
