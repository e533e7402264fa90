"""Base models that come with a chat template are told from tuned ones by the token that it writes behind a reply."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from clawloop.app.local.checks import why_endless
from clawloop.app.local.tiny_model import ensure_tiny_model
from clawloop.core.families.chat_format import ChatOptions

TEMPLATES = Path(__file__).parents[1] / "unit" / "families" / "templates"
CHATML = ("<|endoftext|>", "<|im_end|>")
# Template → the special tokens that end a document and a turn.
FAMILIES = {
    "qwen2_5": CHATML,
    "qwen3": CHATML,
    "qwen3_coder": CHATML,
    "qwen3_instruct_2507": CHATML,
    "qwen3_5_think": CHATML,
    "qwen3_5_nothink": CHATML,
    "smollm2": CHATML,
    "lfm2_v2": CHATML,
    "strict": CHATML,
    "llama3_1": ("<|end_of_text|>", "<|eot_id|>"),
    "llama3_2": ("<|end_of_text|>", "<|eot_id|>"),
    "gemma3": ("<eos>", "<end_of_turn>"),
    "gemma4": ("<eos>", "<turn|>"),
    "gpt_oss": ("<|endoftext|>", "<|return|>"),
    "minimax_m2": ("<eos>", "[e~["),
}
# One token ends both, or, with GLM, none is written behind a reply.
ALIKE = {
    "mistral_nemo": "</s>",
    "ministral_3_reasoning": "</s>",
    "granite_4": "<|end_of_text|>",
    "deepseek_v3_1": "<｜end▁of▁sentence｜>",
    "deepseek_r1_distill": "<｜end▁of▁sentence｜>",
    "glm4moe": "<|endoftext|>",
}


def write(folder: Path, template: str, special: Sequence[str], eos: str, ends: Sequence[str]) -> Path:
    """A folder whose tokenizer calls one token its end, and whose generation ends at some."""
    added = [{"id": 100 + index, "content": token, "special": True} for index, token in enumerate(special)]
    ids = {token["content"]: token["id"] for token in added}
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": eos}}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[token] for token in ends]}))
    shutil.copyfile(TEMPLATES / f"{template}.jinja", folder / "chat_template.jinja")
    return folder


@pytest.mark.parametrize(("template", "document", "turn"), [(name, *ends) for name, ends in FAMILIES.items()])
def test_a_base_model_is_told_from_a_tuned_one(template: str, document: str, turn: str, tmp_path: Path) -> None:
    special = ("<|im_start|>", document, turn)
    said = why_endless(write(tmp_path, template, special, document, [document]))
    assert said is not None
    assert f"looks like a base model, whose replies may not end: its chat template ends them by {turn}, which" in said
    assert "add 102 to eos_token_id in its generation_config.json" in said
    assert why_endless(write(tmp_path, template, special, document, [document, turn])) is None
    assert why_endless(write(tmp_path, template, special, turn, [document])) is None  # engines end there as well


@pytest.mark.parametrize(("template", "end"), ALIKE.items())
def test_where_documents_end_as_replies_do_nothing_is_said(template: str, end: str, tmp_path: Path) -> None:
    assert why_endless(write(tmp_path, template, [end], end, [end])) is None


def test_every_kept_template_is_tested() -> None:
    assert {*FAMILIES, *ALIKE} == {path.stem for path in TEMPLATES.glob("*.jinja")}


def test_an_operators_template_counts_instead_of_the_models(tmp_path: Path) -> None:
    folder = write(tmp_path, "qwen3", CHATML, "<|endoftext|>", ["<|endoftext|>"])
    own = folder / "own.jinja"
    own.write_text("{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}")
    assert why_endless(folder, ChatOptions(own)) is None


def test_of_what_is_not_known_nothing_is_said(tmp_path: Path) -> None:
    assert why_endless(tmp_path) is None
    assert why_endless(ensure_tiny_model(tmp_path)) is None
    folder = write(tmp_path, "qwen3", CHATML, "<|endoftext|>", [])
    (folder / "chat_template.jinja").write_text("{{ raise_exception('of another form') }}")
    assert why_endless(folder) is None
    (folder / "tokenizer.json").unlink()
    assert why_endless(folder) is None
