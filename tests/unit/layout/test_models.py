"""Model folders and quantised copies: sizes, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from clawloop.app.layout.memory import PartName
from clawloop.app.layout.model_folder import KvShape, read_model_shape
from clawloop.app.local.machine import Device
from clawloop.app.local.model_layout import ModelOptions, lay_out, plan_models
from clawloop.app.local.services.vllm import read_model
from clawloop.app.local.tiny_model import ensure_tiny_model
from clawloop.core.errors import RecipeRejected, SetupError
from clawloop.core.families.template import Thinking
from clawloop.core.recipes.recipe import Loss, Recipe, Train
from clawloop.training.model.checkpoint import read_architecture
from tests.unit.layout.folders import PHI3, QWEN3, attention, mlp, phi3_tensors, qwen3_tensors, write_folder
from tests.unit.layout.test_memory import AWQ, write_quantised
from tests.verbs import clawloop, refusal

# A model's shape from its folder, and folders that are none.


def test_sizes_come_from_the_tensors(tmp_path: Path) -> None:
    shape = read_model_shape(write_folder(tmp_path / "Tiny"))
    layer = 8 * (16 + 8 + 8 + 16) + 3 * 8 * 16 + 4
    assert shape.name == "Tiny"
    assert shape.parameters == shape.text_parameters == 100 * 8 + 8 + 2 * layer
    assert (shape.vocab, shape.width, shape.layers, shape.inner) == (100, 8, 2, 16)
    assert (shape.query, shape.key, shape.heads, shape.kv_heads, shape.head_dim) == (16, 8, 4, 2, 4)
    assert shape.lora.parameters(1) == 2 * (24 + 16 + 16 + 24 + 3 * 24)
    assert shape.kv == KvShape(full=2 * (8 + 8))
    assert (shape.tied, shape.head_norm, shape.chat.thinking, shape.experts) == (True, True, Thinking.OPTIONAL, 0)
    assert shape.dtype == "bfloat16"


def test_it_agrees_with_the_trainers_architecture(tmp_path: Path) -> None:
    folder = ensure_tiny_model(tmp_path)
    shape, architecture = read_model_shape(folder), read_architecture(folder)
    assert (shape.vocab, shape.width) == (architecture.vocab_size, architecture.hidden_size)
    assert (shape.inner, shape.layers) == (architecture.intermediate_size, architecture.num_hidden_layers)
    assert shape.query == architecture.num_attention_heads * architecture.head_dim
    assert shape.key == architecture.num_key_value_heads * architecture.head_dim
    assert shape.dtype == "float32"


def test_a_tied_matrix_that_is_stored_twice_counts_once(tmp_path: Path) -> None:
    doubled = qwen3_tensors() | {"lm_head.weight": (100, 8)}
    once = read_model_shape(write_folder(tmp_path / "once"))
    assert read_model_shape(write_folder(tmp_path / "twice", QWEN3, doubled)).parameters == once.parameters
    untied = read_model_shape(write_folder(tmp_path / "untied", {**QWEN3, "tie_word_embeddings": False}, doubled))
    assert untied.parameters == once.parameters + 800


def test_shards_are_those_of_the_index(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "sharded")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "left-over.safetensors").write_bytes(b"of another download")
    names = dict.fromkeys(qwen3_tensors(), "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert read_model_shape(folder).layers == 2
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(SetupError, match=r"lacks 1 files of weights, the first is gone\.safetensors"):
        read_model_shape(folder)


def test_routed_experts_hold_memory_and_get_no_adapters(tmp_path: Path) -> None:
    config = {
        **QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
    }
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (100, 8)}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        tensors |= attention(prefix) | mlp(f"{prefix}.mlp.shared_expert", inner=10)
        for expert in range(4):
            tensors |= mlp(f"{prefix}.mlp.experts.{expert}", inner=6)
    shape = read_model_shape(write_folder(tmp_path / "mixture", config, tensors))
    assert shape.experts == 4
    assert shape.inner == 10 + 2 * 6  # a token passes the shared expert and two others
    assert shape.lora.parameters(1) == 2 * (24 + 16 + 16 + 24 + 3 * 18)
    assert shape.parameters == 800 + 2 * (8 * 48 + 3 * 8 * 10 + 4 * 3 * 8 * 6)


def test_the_trainer_loads_no_towers(tmp_path: Path) -> None:
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": QWEN3}
    text = {name.replace("model.", "model.language_model.", 1): shape for name, shape in qwen3_tensors().items()}
    tower = {
        **attention("model.vision_tower.encoder.layers.0", query=64),
        "model.multi_modal_projector.weight": (5, 5),
    }
    shape = read_model_shape(write_folder(tmp_path / "sees", config, text | tower))
    assert shape.parameters - shape.text_parameters == 8 * (64 + 8 + 8 + 64) + 25
    assert shape.query == 16


def test_windows_and_linear_layers_cache_less(tmp_path: Path) -> None:
    kinds = {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}
    shape = read_model_shape(write_folder(tmp_path / "windows", {**QWEN3, **kinds}))
    assert shape.kv == KvShape(full=16, sliding=16, window=512)
    unused = {"sliding_window": 512, "use_sliding_window": False}
    assert read_model_shape(write_folder(tmp_path / "unused", {**QWEN3, **unused})).kv == KvShape(full=32)
    linear = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_value_head_dim": 8,
        "linear_key_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    }
    tensors = {name: shape for name, shape in qwen3_tensors().items() if "layers.0.self_attn" not in name}
    shape = read_model_shape(write_folder(tmp_path / "linear", {**QWEN3, **linear}, tensors))
    assert shape.kv == KvShape(full=16, state=2 * 4 * 8 * 8 + (2 * 2 * 8 + 4 * 8) * 3)


def remove(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def config_with(**changed: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({**QWEN3, **changed}))

    return change


def write(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (remove("config.json"), "holds no model, config.json is missing"),
        (remove("model.safetensors"), r"has no weights \(\*\.safetensors\): download the model again"),
        (remove("tokenizer.json"), r"has no tokenizer \(tokenizer\.json\)"),
        (write("tokenizer.json", '{"model": {"vo'), r"tokenizer\.json cannot be read: .*: download the model again"),
        (remove("chat_template.jinja"), "has no chat template, so it cannot chat"),
        (write("config.json", "{"), r"config\.json cannot be read"),
        (write("config.json", "[]"), "does not describe a language model"),
        (write("model.safetensors", "cut off"), "the weights in .* cannot be read"),
        (config_with(architectures=None), "does not describe a language model"),
        (config_with(vocab_size=None), "does not describe a language model, vocab_size is missing"),
        (
            config_with(quantization_config={"quant_method": "mxfp4"}),
            "quantised by 'mxfp4', whose memory",
        ),
    ],
)
def test_what_is_no_complete_model_is_one_clear_line(change: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    change(folder)
    with pytest.raises(SetupError, match=said) as refused:
        read_model_shape(folder)
    assert "\n" not in str(refused.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="there is no model folder"):
        read_model_shape(tmp_path / "nowhere")


def test_fused_projections_have_the_sizes_of_those_apart(tmp_path: Path) -> None:
    fused = read_model_shape(write_folder(tmp_path / "fused", PHI3, phi3_tensors()))
    apart = read_model_shape(write_folder(tmp_path / "apart"))
    assert (fused.query, fused.key, fused.inner, fused.kv) == (apart.query, apart.key, apart.inner, apart.kv)
    assert fused.parameters == apart.parameters - 8 - 2 * 4  # the norms, which this one lacks
    assert fused.lora.parameters(1) == 2 * (24 + 24)  # of o and down


@pytest.mark.parametrize("features", [32, 48])
def test_an_architecture_without_projections_of_its_own_is_one_clear_line(features: int, tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": (100, 8), "model.layers.0.self_attn.qkv_proj.weight": (features, 8)}
    if features == 48:  # not those of its heads
        tensors["model.layers.0.self_attn.o_proj.weight"] = (8, 16)
    folder = write_folder(tmp_path / "fused", PHI3, tensors)
    with pytest.raises(SetupError, match="is a Phi3ForCausalLM, whose attention has no q_proj and o_proj of its own"):
        read_model_shape(folder)


# A quantised copy that engines serve: planned in its own bytes, and refused where it is no copy.

DECOUPLED = Recipe(name="decoupled", train=Train(loss=Loss(correction="decoupled")))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A model and its copy in AWQ."""
    return write_folder(tmp_path / "Tiny"), write_quantised(tmp_path / "Tiny-AWQ", AWQ)[0]


def options(copy: Path | None) -> ModelOptions:
    return ModelOptions(device=Device.CPU, dtype="bfloat16", memory=64 * 2**30, serve_model=copy)


def test_engines_hold_the_copy_and_the_trainer_the_model(folders: tuple[Path, Path]) -> None:
    model, copy = folders
    whole, engine_only = (lay_out(options(served), model, DECOUPLED, {}).processes for served in (None, copy))
    weights = [process.part(PartName.WEIGHTS) for process in (*whole[:2], *engine_only[:2])]
    assert weights[2] < weights[0]
    assert weights[3] == weights[1]
    # Everything but the weights is the model's.
    assert [part for part in whole[0].parts if part.name is not PartName.WEIGHTS] == [
        part for part in engine_only[0].parts if part.name is not PartName.WEIGHTS
    ]
    assert "--engines-quantised" in engine_only[1].arguments
    assert "--engines-quantised" not in whole[1].arguments


def test_up_starts_the_engine_on_the_copy_under_the_models_name(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model, copy = folders
    planned = plan_models(read_model(model), options(copy), DECOUPLED, {}, 0, tmp_path)
    [engine] = planned.engines
    command = engine.prepare().command
    assert command[command.index("--model") + 1] == str(copy)
    assert command[command.index("--served-model-name") + 1] == planned.base_model == "Tiny"
    assert planned.trained_model == model


def edit(name: str, change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def edited(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edited


def other_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}!")


def other_tokens(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 1}}}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (edit("config.json", lambda config: config.update(vocab_size=99)), "no copy of Tiny: token ids 99, not 100"),
        (edit("config.json", lambda config: config.update(num_hidden_layers=3)), "layers 3, not 2"),
        (edit("config.json", lambda config: config.update(architectures=["OtherForCausalLM"])), "OtherForCausalLM"),
        (other_template, "its chat template is another"),
        (other_tokens, "gives tokens other ids"),
    ],
)
def test_what_is_no_copy_is_refused(change: Callable[[Path], None], said: str, folders: tuple[Path, Path]) -> None:
    model, copy = folders
    change(copy)
    with pytest.raises(SetupError, match=f"--serve-model: .*{said}"):
        lay_out(options(copy), model, DECOUPLED, {})


def test_a_copy_that_is_not_quantised_and_a_model_that_is_are_refused(folders: tuple[Path, Path]) -> None:
    model, copy = folders
    again = shutil.copytree(model, model.parent / "again")
    with pytest.raises(SetupError, match="again is not quantised"):
        lay_out(options(again), model, DECOUPLED, {})
    with pytest.raises(SetupError, match="served and not trained: give the unquantised model to --model"):
        lay_out(options(None), copy, DECOUPLED, {})


def test_a_recipe_that_is_not_decoupled_is_refused(folders: tuple[Path, Path]) -> None:
    model, copy = folders
    with pytest.raises(RecipeRejected, match=r"different weights.*set \"decoupled\""):
        lay_out(options(copy), model, Recipe(name="plain"), {})


def test_plan_takes_both_and_says_what_the_recipe_needs(folders: tuple[Path, Path]) -> None:
    model, copy = (str(folder) for folder in folders)
    said = clawloop("plan", "--model", model, "--serve-model", copy, "--quantise", "nf4", "--gpus", "80").stdout
    words = " ".join(said.split())
    assert "in awq and bfloat16" in words
    assert "in 4 bits and bfloat16" in words
    assert 'the recipe needs train.loss.correction = "decoupled"' in words
    assert "--quantise nf4" in words
    refused = refusal(clawloop("plan", "--model", model, "--quantise", "nf4", "--no-train"))
    assert "--quantise and --no-train contradict each other" in refused
