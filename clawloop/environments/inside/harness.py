"""Plays the agent in the sandbox: asks the model, runs what it calls for, until it answers.

Any OpenAI client would do; this one needs the standard library only. `harness.json` beside it says which tools there
are and how they are run: a program for each call, or one, a session, that answers all calls. Exit codes: 0 it answered,
3 it used all its turns, 4 a reply was cut at its limit of tokens, 75 the gateway did not answer or the session crashed,
which is not the agent's failure.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

OUTPUT = 2000
# Longer than the gateway holds requests while an engine restarts, and far below the sandbox's own time limit: an engine
# that is away must not look like an agent that is slow.
PATIENCE_SECONDS = 180.0
LONGEST_PAUSE = 10.0
# What is wrong with the request itself, e.g. a conversation that is too long, and so with the agent.
AGENTS_ERRORS = (400, 413, 422)


def main() -> int:
    with open("/task/harness.json", encoding="utf-8") as file:  # noqa: PTH123
        config = json.load(file)
    with open("/task/prompt.txt", encoding="utf-8") as file:  # noqa: PTH123
        prompt = file.read()
    session = Session(config["session"]) if "session" in config else None
    messages: list[dict[str, Any]] = [user(prompt) if session is None else session.opening(prompt)]
    for _ in range(config["turns"]):
        message, finish = ask(messages, config)
        if finish == "length":
            return 4
        messages.append(message)
        calls = message.get("tool_calls") or []
        if not calls:
            if config["answer"]:
                with open(config["answer"], "w", encoding="utf-8") as file:  # noqa: PTH123
                    file.write(message.get("content") or "")
            return 0
        if session is not None:
            messages += session.answer(calls)
            if session.ended:
                return 0
        else:
            messages += [tool_message(call, run(call, config)) for call in calls]
    return 3


def ask(messages: list[dict[str, Any]], config: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The model's message, and why it ended."""
    fields = json.loads(os.environ.get("REQUEST_FIELDS", "{}"))
    body = {"model": "policy", "messages": messages, "tools": config["tools"], "max_tokens": config["max_tokens"]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps({**body, **fields}).encode(),
        headers={
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    give_up = time.monotonic() + float(os.environ.get("PATIENCE_SECONDS", PATIENCE_SECONDS))
    pause = 0.5
    while (left := give_up - time.monotonic()) > 0:
        try:
            with urllib.request.urlopen(request, timeout=left) as answer:
                choice = json.load(answer)["choices"][0]
                return choice["message"], choice.get("finish_reason")
        except urllib.error.HTTPError as error:
            if error.code in AGENTS_ERRORS:
                sys.exit(f"the gateway refuses: {error.code} {error.read(500)!r}")
            sys.stderr.write(f"the gateway answers {error.code}\n")
        except (OSError, ValueError, http.client.HTTPException) as error:
            sys.stderr.write(f"the gateway does not answer: {error}\n")
        time.sleep(min(pause, max(0.0, give_up - time.monotonic())))
        pause = min(2 * pause, LONGEST_PAUSE)
    sys.exit(os.EX_TEMPFAIL)


def run(call: dict[str, Any], config: dict[str, Any]) -> str:
    argument = config["argument"]
    try:
        given = json.loads(call["function"]["arguments"])[argument]
    except (KeyError, TypeError, ValueError):
        return f"error: the arguments must be a JSON object with `{argument}`"
    try:
        done = subprocess.run(
            [*config["program"], str(given)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=config["seconds"],
            check=False,
            cwd=config["folder"],
        )
    except subprocess.TimeoutExpired:
        return f"error: stopped after {config['seconds']} s"
    except (OSError, ValueError) as error:
        return f"error: {error}"
    return (done.stdout + done.stderr).strip()[-OUTPUT:]


class Session:
    """A program that runs during the whole episode: a line for each call, a line for each answer."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
        self._first = self._read()
        self.ended = False

    def opening(self, prompt: str) -> dict[str, Any]:
        """The first message: the task and what the program shows at its start."""
        return user(f"{prompt}\n\n{self._first['text']}", self._first.get("picture"))

    def answer(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One message for each call until one ends the session, and one with the newest picture if there are any."""
        messages, picture = [], None
        for call in calls:
            said = self._call(call)
            messages.append(tool_message(call, said["text"]))
            picture = said.get("picture", picture)
            self.ended = said.get("ended", False)
            if self.ended:
                break
        return messages if picture is None else [*messages, user("", picture)]

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        try:
            asked = {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
        except (KeyError, TypeError, ValueError):
            asked = {}
        if not isinstance(asked.get("arguments"), dict):
            return {"text": "error: the arguments must be a JSON object"}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        except OSError:
            sys.exit(os.EX_TEMPFAIL)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:  # it crashed, which no call of the agent's should make it do
            sys.exit(os.EX_TEMPFAIL)
        answer: dict[str, Any] = json.loads(line)
        return answer


def user(text: str, picture: str | None = None) -> dict[str, Any]:
    if picture is None:
        return {"role": "user", "content": text}
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    return {"role": "user", "content": [*([{"type": "text", "text": text}] if text else []), shown]}


def tool_message(call: dict[str, Any], content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.get("id"), "content": content}


if __name__ == "__main__":
    sys.exit(main())
