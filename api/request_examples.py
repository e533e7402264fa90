"""An example of the body of each request that has one, by method and path, for the OpenAPI description.

A test sends each of them: what stands here is accepted.
"""

from __future__ import annotations

from pydantic import JsonValue

_CHAT: list[JsonValue] = [{"role": "user", "content": "Explain the tides in one sentence."}]

REQUEST_EXAMPLES: dict[str, JsonValue] = {
    "POST /v1/chat/completions": {"model": "policy", "messages": _CHAT, "stream": False},
    "POST /v1/completions": {"model": "policy", "prompt": "Once upon", "max_tokens": 32},
    "POST /v1/messages": {"model": "policy", "max_tokens": 256, "messages": _CHAT},
    "POST /v1/messages/count_tokens": {"model": "policy", "messages": _CHAT},
    "POST /v1/responses": {"model": "policy", "input": "Explain the tides in one sentence."},
    "POST /v1/responses/input_tokens": {"model": "policy", "input": "Explain the tides in one sentence."},
    "POST /v1/feedback": {
        "response_id": "chatcmpl-01980000000070008000000000000000",
        "rating": "down",
        "text": "Too long.",
    },
    "POST /admin/v1/engines": {"url": "http://127.0.0.1:8101", "require_guard": False},
    "POST /admin/v1/engines/{engine}/drain": {"undo": False, "force": False},
    "PUT /admin/v1/worker/artifacts/{digest}": "",  # an archive without files
    "POST /admin/v1/keys": {"scopes": ["chat"], "name": "my agent", "policy": "default"},
    "PUT /admin/v1/keys/{prefix}/limits": {"requests_per_minute": 60, "tokens_per_minute": 100_000, "concurrency": 4},
    "POST /admin/v1/training/pause": {"reason": "On holiday until Monday."},
    "POST /admin/v1/training/resume": {"retry": False},
    "POST /admin/v1/policies": {"name": "anna", "like": "default"},
    "POST /admin/v1/policies/{policy}/roll-back": {"version": 0},
    "POST /admin/v1/policies/{policy}/release": {"version": 3},
    "POST /admin/v1/policies/{policy}/pin": {"version": 0},
    "POST /admin/v1/policies/{policy}/recipe": {"name": "combined", "train": {"batch_samples": 16}},
    "POST /admin/v1/policies/{policy}/probes": {
        "probes": [
            {"prompt": "What is 2 + 2?", "contains": ["4"]},
            {"prompt": "Name a prime number below 10.", "regex": "\\b[2357]\\b"},
        ]
    },
    "POST /admin/v1/policies/{policy}/versions/{version}/compare": {"prompts": ["Explain the tides."]},
    "POST /admin/v1/judge/history": {"turns": 20, "apply": False},
    "POST /admin/v1/rollouts/start": {"environment": "terminal", "size": 8, "groups": 2, "barren": 20},
    "POST /admin/v1/rollouts/pause": {"reason": "The engine is needed for chats."},
}
