"""The tiny model is reproducible, encodes any UTF-8, and renders chats as Qwen3 does."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from clawloop.app.layout.model_folder import read_model_shape
from clawloop.app.local.checks import require_model
from clawloop.app.local.services.vllm import read_model
from clawloop.app.local.tiny_model import ensure_tiny_model, write_tiny_model
from clawloop.core.families.chat_format import ChatFormat
from clawloop.core.families.template import Thinking

Message = dict[str, object]


class Chat(Protocol):
    """Renders messages to text."""

    def __call__(self, *messages: Message, tools: list[Message] | None = None, go: bool = True) -> str: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def chat(folder: Path) -> Chat:
    template = (folder / "chat_template.jinja").read_text()

    def render(*messages: Message, tools: list[Message] | None = None, go: bool = True) -> str:
        rendered, _ = render_jinja_template(
            [list(messages)], tools=tools, chat_template=template, add_generation_prompt=go
        )
        text = rendered[0]
        assert isinstance(text, str)
        return text

    return render


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_same_seed_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, seed=0)
    assert digests(tmp_path) == digests(folder)


def test_another_seed_gives_other_weights_under_another_name(folder: Path, tmp_path: Path) -> None:
    other = ensure_tiny_model(tmp_path, seed=1)
    assert other.name == "tiny-random-1"
    differing = {name for name, digest in digests(other).items() if digest != digests(folder)[name]}
    assert differing == {"model.safetensors"}


def test_an_existing_model_is_not_written_again(folder: Path) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert ensure_tiny_model(folder.parent) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_concurrent_callers_both_get_a_complete_model(tmp_path: Path, folder: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(lambda _: ensure_tiny_model(tmp_path), range(4)))
    assert made == {tmp_path / "tiny-random"}
    assert digests(made.pop()) == digests(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-random"]


def test_it_passes_require_model_and_has_the_expected_properties(folder: Path) -> None:
    require_model(folder)
    facts = read_model(folder)
    assert facts.name == "tiny-random"
    assert facts.chat == ChatFormat(Thinking.NEVER, "hermes", None)
    shape = read_model_shape(folder)
    assert shape.dtype == "float32"
    assert shape.context_tokens >= 32768
    assert shape.kv.full == 2 * 4 * 2 * 32


def test_weights_are_neither_flat_nor_trivial(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    assert all(np.isfinite(matrix).all() for matrix in weights.values())
    norms = [vector for name, vector in weights.items() if "norm" in name]
    assert len(norms) == 17
    assert all(vector.std() > 0.1 for vector in norms)
    assert "lm_head.weight" not in weights  # tied
    config = json.loads((folder / "config.json").read_text())
    assert weights["model.embed_tokens.weight"].shape == (config["vocab_size"], 128)


def test_generation_defaults_are_those_of_qwen3(folder: Path) -> None:
    shipped = json.loads((folder / "generation_config.json").read_text())
    assert (shipped["temperature"], shipped["top_k"], shipped["top_p"]) == (0.6, 20, 0.95)


@given(text=st.text(max_size=80))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_round_trips(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("token", ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</think>"])
def test_markup_is_one_token(token: str, tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(f"{token}", add_special_tokens=False).ids) == 1


def test_a_plain_chat(chat: Chat) -> None:
    assert chat({"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_a_generation_prompt_no_reply_is_begun(chat: Chat) -> None:
    assert chat({"role": "user", "content": "Hi"}, go=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_a_developer_message_is_a_system_message(chat: Chat) -> None:
    user: Message = {"role": "user", "content": "Hi"}
    assert chat({"role": "developer", "content": "x"}, user) == chat({"role": "system", "content": "x"}, user)


def test_text_parts_are_joined_by_line_breaks(chat: Chat) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat({"role": "user", "content": parts}) == chat({"role": "user", "content": "one\ntwo"})


def test_tools_are_listed_in_the_first_system_message(chat: Chat) -> None:
    tool: Message = {"type": "function", "function": {"name": "wetter", "description": "für Köln"}}
    with_system = chat({"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}, tools=[tool])
    assert with_system.startswith("<|im_start|>system\nBe kind.\n\n# Tools\n")
    assert '<tools>\n{"type": "function", "function": {"name": "wetter", "description": "für Köln"}}\n</tools>' in (
        with_system
    )
    assert with_system.count("<|im_start|>system") == 1
    alone = chat({"role": "user", "content": "Hi"}, tools=[tool])
    assert alone.startswith("<|im_start|>system\n# Tools\n")


@pytest.mark.parametrize("arguments", [{"city": "Köln"}, '{"city": "Köln"}'])
def test_tool_calls_are_in_hermes_format_with_results_in_one_user_message(chat: Chat, arguments: object) -> None:
    calls = [
        {"id": str(n), "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        for n in range(2)
    ]
    text = chat(
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "0", "content": "sun"},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "rain"}]},
    )
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert text == (
        "<|im_start|>user\nWeather?<|im_end|>\n"
        f"<|im_start|>assistant\n{call}\n{call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "thought",
    [
        {"content": "<think>\nhm\n</think>\n\nyes"},
        {"content": "yes", "reasoning_content": "hm"},
        {"content": "yes", "reasoning": "hm"},
    ],
)
def test_only_the_current_turns_thinking_is_kept(chat: Chat, thought: Message) -> None:
    answer: Message = {"role": "assistant", **thought}
    question: Message = {"role": "user", "content": "Sure?"}
    earlier = chat(question, answer, {"role": "user", "content": "Really?"})
    assert "hm" not in earlier
    assert "<|im_start|>assistant\nyes<|im_end|>\n" in earlier
    running = chat(question, answer, {"role": "tool", "content": "ok"})
    assert "<|im_start|>assistant\n<think>\nhm\n</think>\n\nyes<|im_end|>\n" in running
