"""Each family: its log-probs are those of transformers and PEFT, and its steps go on from their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from clawloop.core.contracts.training import BatchSample
from clawloop.core.errors import ModelUnsupported
from clawloop.core.recipes.recipe import Recipe
from clawloop.training.adapters.files import read_adapter
from clawloop.training.adapters.merge import merge
from clawloop.training.model.checkpoint import DECODER_PREFIX, read_family
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import PROJECTIONS, LoraShape, PolicyModel, adapter_tensors, set_adapter
from clawloop.training.packing import TokenSequence, collate
from clawloop.training.ranks import ignore_status
from clawloop.training.step_runner import StepRunner
from tests.training.families import FAMILIES, save_family
from tests.training.steps import RECIPE, completed, never, setup_of, step_of
from tests.training.tiny import VOCAB, random_sequences, relative_error, sample_id, save_checkpoint

CPU = torch.device("cpu")
LORA = LoraShape(rank=4, alpha=8.0)
# The first is longer than a sliding window of 16.
LENGTHS = [(30, 12), (5, 9), (9, 1), (14, 6)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp(request.param) / request.param, request.param)


def load(base: Path, dtype: torch.dtype = torch.float32) -> PolicyModel:
    return load_model(base, LORA, dtype=dtype, device=CPU, backend="transformers")


def whole_model(base: Path) -> PreTrainedModel:
    """The checkpoint as transformers itself loads it, towers included."""
    [name] = json.loads((base / "config.json").read_text())["architectures"]
    found: PreTrainedModel = getattr(transformers, name).from_pretrained(base, dtype=torch.float32)
    return found.eval()


def plain_logprobs(model: nn.Module, sequence: TokenSequence) -> Tensor:
    ids = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
    logits: Tensor = model(input_ids=ids).logits[0, len(sequence.prompt_ids) - 1 : -1]
    chosen = torch.tensor(sequence.response_ids)[:, None]
    return (logits / sequence.temperature).log_softmax(-1).gather(-1, chosen)[:, 0]


def own_logprobs(model: PolicyModel, sequence: TokenSequence) -> Tensor:
    return model(collate([sequence], [0], share_prefixes=False)).logprobs_N


def samples_of(base: Path, seed: int) -> list[BatchSample]:
    model = whole_model(base)
    samples = []
    for index, sequence in enumerate(random_sequences(LENGTHS, seed=seed)):
        with torch.no_grad():
            logprobs = plain_logprobs(model, sequence).clamp(max=0).tolist()
        hint = [*sequence.prompt_ids, 7, 8, 9] if index == 1 else None
        reward = 1.0 if index % 2 else -1.0
        samples.append(
            BatchSample(
                sample_id=sample_id(100 * seed + index),
                prompt_ids=sequence.prompt_ids,
                response_ids=sequence.response_ids,
                logprobs=logprobs,
                temperature=sequence.temperature,
                version=0,
                reward=reward,
                hinted_prompts={} if hint is None else {0: hint},
            )
        )
    return samples


def test_a_family_takes_steps_that_go_on_from_their_files(family: Path, tmp_path: Path) -> None:
    batches = [samples_of(family, seed) for seed in (1, 2)]
    setup = setup_of(family, tmp_path, backend="transformers")
    runner = StepRunner(setup)
    first = completed(runner.train(step_of(batches[0], 1), ignore_status, never))
    assert len(first.figures.samples) == len(LENGTHS)
    # On the base model, which answered, the ratio is 1.
    assert first.figures.ratio == pytest.approx(1, abs=1e-4)
    assert first.figures.micro_batches == len(LENGTHS)
    second = completed(runner.train(step_of(batches[1], 2, first.version), ignore_status, never))
    resumed = completed(StepRunner(setup).train(step_of(batches[1], 2, first.version), ignore_status, never))
    assert resumed.version == second.version

    # Log-probs are those of the whole model with the adapter as PEFT reads it.
    folder = tmp_path / second.version.path
    tensors = load_file(folder / "adapter_model.safetensors")
    tiny = FAMILIES[family.name]
    assert len(tensors) == 2 * tiny.adapted
    assert all(name.startswith(f"base_model.model.{tiny.prefix}") for name in tensors)
    ours = load(family)
    set_adapter(ours, read_adapter(folder).tensors)
    base = whole_model(family)
    for sequence in random_sequences(LENGTHS):
        with torch.no_grad():
            with ours.without_adapter():
                of_base = own_logprobs(ours, sequence)
            assert (of_base - plain_logprobs(base, sequence)).abs().max() < 1e-5
    names = [name for name, module in base.named_modules() if isinstance(module, nn.Linear)]
    adapted = {name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in tensors}
    assert adapted <= set(names)
    peft = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=sorted(adapted))).eval()
    read: Any = set_peft_model_state_dict(peft, tensors)  # type: ignore[func-returns-value]  # it does
    assert not read.unexpected_keys
    moved = 0.0
    for sequence in random_sequences(LENGTHS):
        with torch.no_grad():
            with_adapter = own_logprobs(ours, sequence)
            assert (with_adapter - plain_logprobs(peft, sequence)).abs().max() < 1e-5
            with ours.without_adapter():
                moved = max(moved, float((with_adapter - own_logprobs(ours, sequence)).abs().max()))
    assert moved > 1e-3


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text", "qwen3_5_text", "qwen3_moe"], indirect=True)
def test_recomputed_layers_give_the_same_gradient(family: Path) -> None:
    gradients = []
    for beyond in (0, None):
        model = load_model(family, LORA, dtype=torch.float32, device=CPU, recompute_beyond=beyond)
        for parameter in model.adapter_parameters().values():
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
        own_logprobs(model, random_sequences(LENGTHS)[0]).sum().backward()  # type: ignore[no-untyped-call]
        gradients.append({name: p.grad for name, p in model.adapter_parameters().items() if p.grad is not None})
        assert len(gradients[-1]) == len(model.adapter_parameters())
    assert relative_error(*gradients) < 1e-5


@pytest.mark.parametrize("family", ["gemma3", "llama"], indirect=True)
def test_an_adapter_is_merged_under_the_checkpoints_own_names(family: Path, tmp_path: Path) -> None:
    trained = completed(
        StepRunner(setup_of(family, tmp_path)).train(step_of(samples_of(family, 1), 1), ignore_status, never)
    )
    report = merge(family, tmp_path / trained.version.path, tmp_path / "merged")
    assert report.logit_change > 0
    assert read_family(tmp_path / "merged").model_type == family.name


def test_both_backends_compute_the_same_step(qwen3: Path, tmp_path: Path) -> None:
    batch = samples_of(qwen3, 1)
    recipe: Recipe = RECIPE
    trained = {
        backend: completed(
            StepRunner(setup_of(qwen3, tmp_path / backend, backend=backend)).train(
                step_of(batch, 1, recipe=recipe), ignore_status, never
            )
        )
        for backend in ("torchtune", "transformers")
    }
    ours, theirs = (step.figures for step in trained.values())
    assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    for sample, metrics in ours.samples.items():
        assert metrics.kl == pytest.approx(theirs.samples[sample].kl, abs=1e-6)
    adapters = [read_adapter(tmp_path / name / step.version.path).tensors for name, step in trained.items()]
    assert relative_error(*[dict(adapter) for adapter in adapters]) < 1e-5


def test_log_probs_and_gradients_of_both_backends_agree(qwen3: Path) -> None:
    models = [
        load_model(qwen3, LORA, dtype=torch.float32, device=CPU, backend=backend)
        for backend in ("torchtune", "transformers")
    ]
    shaken = {
        name: 0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))
        for name, tensor in adapter_tensors(models[0]).items()
    }
    found = []
    for model in models:
        set_adapter(model, shaken)
        logprobs = torch.cat([own_logprobs(model, sequence) for sequence in random_sequences(LENGTHS)])
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
        gradients = {name: p.grad for name, p in model.adapter_parameters().items() if p.grad is not None}
        found.append((logprobs.detach(), gradients))
    assert (found[0][0] - found[1][0]).abs().max() < 1e-5
    assert relative_error(found[0][1], found[1][1]) < 1e-5


def test_the_backend_follows_the_family_unless_it_is_set(qwen3: Path, tmp_path: Path) -> None:
    assert read_family(qwen3).backend == "torchtune"
    assert read_family(qwen3, "transformers").backend == "transformers"
    assert read_family(save_family(tmp_path / "llama", "llama")).backend == "torchtune"
    gemma = save_family(tmp_path / "gemma", "gemma3_text")
    assert read_family(gemma).backend == "transformers"
    with pytest.raises(ModelUnsupported, match="Gemma3ForCausalLM"):
        read_family(gemma, "torchtune")
    mistral = save_family(tmp_path / "mistral", "mistral")
    assert read_family(mistral).backend == "transformers"
    assert read_family(mistral, max_tokens=16).backend == "torchtune"
    # A long context is RoPE scaling, of which the packed decoder has Llama 3's alone.
    yarn = save_checkpoint(tmp_path / "yarn")
    config = json.loads((yarn / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    (yarn / "config.json").write_text(json.dumps(config))
    assert read_family(yarn).backend == "transformers"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, r"family 'bert'; the trainer knows gemma3, "),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClassification, no text generator",
        ),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quantised weights, which are served and not trained",
        ),
        ({"intermediate_size": 96}, "mismatched keys, the first is"),
        ({"num_hidden_layers": 4}, "missing keys, the first is"),
        ({"hidden_act": "none"}, "transformers cannot load"),
    ],
)
def test_a_model_that_no_backend_computes_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    path = save_family(tmp_path / "llama", "llama")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelUnsupported, match=message):
        load(path)


def test_every_family_is_tried() -> None:
    # A mixture that also sees is Qwen3.5's mixture in Qwen3.5's wrapper; both are tried alone.
    assert set(DECODER_PREFIX) - set(FAMILIES) == {"qwen3_5_moe"}
    assert len(PROJECTIONS) == 7
    assert VOCAB < 256
