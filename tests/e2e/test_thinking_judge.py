"""A judge that thinks, on a real engine: the thinking ends at its budget, and an answer follows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from clawloop.app.local.checks import choose_port
from clawloop.app.local.services.vllm import read_model
from clawloop.core.families.template import Thinking
from clawloop.core.judging.prompts import AnswerForm, vote_prompt
from clawloop.serving import judge
from clawloop.serving.endpoints import Endpoint
from clawloop.serving.judge import JudgeClient
from clawloop.serving.rendering import ThinkingProbe
from tests.e2e.conftest import running_engine
from tests.engine_options import engine_options
from tests.unit.judging.conversations import TURN, evidence

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1800)]

CONTEXT = 8192
# As Qwen3.5 has it: a reply begins with thinking, which is empty where a request switches it off.
SWITCH = """
{%- if add_generation_prompt -%}
    {%- if enable_thinking is defined and enable_thinking is false -%}
        {{- '<think>\\n\\n</think>\\n\\n' -}}
    {%- else -%}
        {{- '<think>\\n' -}}
    {%- endif -%}
{%- endif -%}
"""
BUDGET, LIMIT = 24, 40


@pytest.fixture(scope="module")
def thinking_model(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a template that can switch thinking off."""
    folder = tmp_path_factory.mktemp("thinking") / "tiny-random"
    shutil.copytree(tiny_model_path, folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().rstrip() + SWITCH)
    return folder


@pytest.fixture(scope="module")
def engine(thinking_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = engine_options(thinking_model, choose_port("vLLM", "127.0.0.1", 0, ""), max_model_len=CONTEXT)
    log = tmp_path_factory.mktemp("thinking-engine") / "vllm.log"
    with running_engine(thinking_model, options, log) as url:
        yield url


async def test_an_engine_of_ours_lets_its_judge_think_within_the_budget(
    engine: str, thinking_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = [Endpoint(engine, read_model(thinking_model).name)]
    async with ThinkingProbe(lambda policy: here) as probe:
        assert await probe.of("default") is Thinking.OPTIONAL

    prompt = vote_prompt(TURN, evidence(answer="No, in Python."), AnswerForm.FREE)
    fields = judge._thinking_fields(prompt, Thinking.OPTIONAL)
    body = {"model": here[0].model, "messages": prompt.messages, "max_tokens": LIMIT, "return_token_ids": True}
    async with httpx.AsyncClient(base_url=engine, timeout=600) as client:
        answer = await client.post("/v1/chat/completions", json=body | fields | {"thinking_token_budget": BUDGET})
    assert answer.status_code == 200, answer.text
    ended_at = thought(thinking_model, answer.json()["choices"][0])

    # Three opinions, as a judge worker asks for them; random weights may end in the middle of their thinking.
    async with JudgeClient(lambda policy: here, None) as thinker:
        assert await thinker.form("default", "auto") is AnswerForm.FREE
        opinions = await thinker.answers("default", prompt, 3, 0.6)
    assert len(opinions) == 3
    assert not any("think>" in opinion.text for opinion in opinions)
    with capsys.disabled():
        lengths = ", ".join(str(len(opinion.text)) for opinion in opinions)
        print(f"\nthinking ended at token {ended_at} of {BUDGET}; answers of {lengths} characters")  # noqa: T201


def thought(model: Path, choice: dict[str, Any]) -> int:
    """At which token the thinking ended."""
    end = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id("</think>")
    tokens: list[int] = choice["token_ids"]
    assert len(tokens) == LIMIT
    assert end in tokens[: BUDGET + 2], tokens
    assert choice["message"]["content"]
    return tokens.index(end)
