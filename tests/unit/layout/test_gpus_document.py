"""docs/gpus.md says what `clawloop plan` says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from clawloop.app.layout.memory import Role
from clawloop.app.layout.model_folder import ModelShape
from clawloop.app.layout.plan import plan
from clawloop.app.layout.request import Limits
from tests.unit.layout.shapes import GIB, QWEN3_4B, decoder, request

DOCUMENT = (Path(__file__).resolve().parents[3] / "docs" / "gpus.md").read_text(encoding="utf-8")
ROW = r"^\| (\d+) \| ([\d,]+) \| ([^|]*) \| ([\d.]+) \| ([\d.]+) \| ([\d,]+) \|$"
ROWS = re.findall(ROW, DOCUMENT, flags=re.MULTILINE)
# Of a weight in AWQ with groups of 128: half a byte, and 2.5 bytes for scale and zero of a group.
AWQ_BYTES = 0.5 + 2.5 / 128
QWEN3_32B = decoder(vocab=151936, width=5120, inner=25600, layers=64, heads=64, kv_heads=8, head_dim=128, tied=False)


def test_the_table_has_rows() -> None:
    assert [row[0] for row in ROWS] == ["16", "24", "24", "24", "48", "80"]


def in_awq(model: ModelShape) -> ModelShape:
    small = model.lora.weights
    return replace(model, stored_bytes=2 * (model.parameters - small) + int(small * AWQ_BYTES), quantised="awq")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} GiB {row[2]}".strip())
def test_one_gpu_holds_what_the_table_says(row: tuple[str, ...]) -> None:
    size, context, options, *sizes, cached = (word.replace(",", "") for word in row)
    limits = Limits(max_model_len=int(context), max_sample_tokens=int(context))
    asked = request(QWEN3_4B, (int(size),), limits=limits)
    if "--quantise nf4" in options:
        asked = replace(asked, quantise="nf4")
    if "--serve-model" in options:
        asked = replace(asked, serve_model=in_awq(QWEN3_4B))
    layout = plan(asked)
    assert [f"{process.bytes / GIB:.1f}" for process in layout.processes] == sizes
    assert layout.processes[0].cached_tokens == int(cached)


def test_eight_gpus_take_the_sets_and_the_judge_of_the_example() -> None:
    [command] = re.findall(r'^make up ARGS="(.*--judge-model.*)"$', DOCUMENT, flags=re.MULTILINE)
    given = dict(re.findall(r"--(\w+)-gpus ([\d,]+)", command))
    serve, judge, train = (tuple(map(int, given[role].split(","))) for role in ("serve", "judge", "train"))
    asked = request(QWEN3_4B, (80,) * 8, serve=serve, judge=judge, train=train, judge_model=QWEN3_32B)
    placed = {(process.role, process.gpus) for process in plan(asked).processes}
    assert placed == {
        *((Role.ENGINE, (gpu,)) for gpu in serve),
        (Role.JUDGE, judge),
        (Role.TRAINER, train),
    }
