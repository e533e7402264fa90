"""Plans for a machine: `plan` and what `up` takes from it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from clawloop.app.cli.worker import worker_app
from clawloop.app.layout.memory import Layout, PartName, Role
from clawloop.app.layout.model_folder import ModelShape
from clawloop.app.layout.plan import Shortage, arrange, plan, remedies
from clawloop.app.layout.request import ENGINE_RANKS, Gpus, Limits, Request, TrainingNeeds, limits_for, needs_of
from clawloop.core.errors import SetupError
from clawloop.core.families.chat_format import ChatFormat
from clawloop.core.families.template import Thinking
from clawloop.core.recipes.recipe import DEFAULT_RECIPE, WITHOUT_JUDGE, Recipe
from tests.unit.layout.folders import PHI3, QWEN3, Shapes, phi3_tensors, qwen3_tensors, write_folder
from tests.unit.layout.shapes import GIB, LLAMA_70B, QWEN3_4B, SMALL, decoder, request
from tests.verbs import clawloop, refusal

# Layouts of models that people run, and what holds for every layout.

LIMITS = st.builds(
    lambda context, sample, budget, loras, rank: Limits(
        max_model_len=context,
        max_sample_tokens=min(sample, context),
        micro_batch_tokens=budget,
        max_loras=loras,
        max_lora_rank=rank,
    ),
    st.integers(256, 40960),
    st.integers(256, 40960),
    st.integers(1, 32768),
    st.integers(2, 8),
    st.sampled_from([rank for rank in ENGINE_RANKS if rank >= 16]),
)
MODELS = st.builds(
    decoder,
    vocab=st.sampled_from([1024, 32_000, 151_936]),
    width=st.sampled_from([128, 1024, 4096]),
    inner=st.sampled_from([384, 3072, 14336]),
    layers=st.integers(1, 48),
    heads=st.sampled_from([8, 32]),
    kv_heads=st.sampled_from([2, 8]),
    head_dim=st.sampled_from([64, 128]),
    tied=st.booleans(),
)
NEEDS = st.builds(TrainingNeeds, rank=st.integers(1, 16), compares_distributions=st.booleans(), entropy=st.booleans())
SHORT = Limits(max_model_len=32768, max_sample_tokens=4096, micro_batch_tokens=4096)
SIZES = st.lists(st.floats(0.5, 200), min_size=1, max_size=8).map(tuple)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    sizes = draw(st.none() | SIZES)
    asked = request(
        draw(MODELS),
        sizes,
        limits=draw(LIMITS),
        training=draw(st.none() | NEEDS),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        memory=draw(st.floats(0.5, 200)),
    )
    if asked.training is not None:
        asked = replace(asked, quantise=draw(st.sampled_from([None, "nf4"])))
    if sizes is None or len(sizes) < 3 or draw(st.booleans()):
        return asked
    order = tuple(draw(st.permutations(range(len(sizes)))))
    assert asked.gpus is not None
    train = order[2:] if asked.training else None
    sets = Gpus(sizes=asked.gpus.sizes, serve=order[:1], judge=order[1:2], train=train)
    return replace(asked, gpus=sets)


@given(requests())
@settings(max_examples=300, deadline=None)
def test_what_is_planned_fits_and_adds_up(asked: Request) -> None:
    found = arrange(asked)
    if isinstance(found, Shortage):
        assert found.needed > found.device.usable
        return
    for index, device in enumerate(found.devices):
        assert found.used(index) <= device.usable
        assert found.used(index) == sum(part.bytes for process in found.on(index) for part in process.parts)
    held = [index for process in found.processes for index in process.gpus]
    assert len(held) == len(set(held)) or len(found.devices) == 1
    engines = [process for process in found.processes if process.role is Role.ENGINE]
    assert engines
    assert all(engine.cached_tokens >= asked.limits.max_model_len for engine in engines)
    assert any(process.role is Role.TRAINER for process in found.processes) == (asked.training is not None)
    assert all(part.bytes >= 0 for process in found.processes for part in process.parts)


@given(requests(), st.integers(0, 7), st.floats(0.1, 100))
@settings(max_examples=200, deadline=None)
def test_more_memory_never_makes_what_fits_not_fit(asked: Request, which: int, more: float) -> None:
    added = int(more * GIB)
    if asked.gpus is None:
        larger = replace(asked, memory=asked.memory + added)
    else:
        sizes = list(asked.gpus.sizes)
        sizes[which % len(sizes)] += added
        larger = replace(asked, gpus=replace(asked.gpus, sizes=tuple(sizes)))
    if isinstance(arrange(asked), Layout):
        assert isinstance(arrange(larger), Layout)


@given(requests())
@settings(max_examples=100, deadline=None)
def test_each_remedy_that_is_named_makes_it_fit(asked: Request) -> None:
    if isinstance(arrange(asked), Layout):
        return
    named = list(remedies(asked))
    assert named
    for remedy in named:
        assert isinstance(arrange(remedy.request), Layout), remedy.words
        assert remedy.words
    with pytest.raises(SetupError) as refused:
        plan(asked)
    assert all(remedy.words in str(refused.value) for remedy in named)


@given(requests(), st.integers(256, 40960))
@settings(max_examples=100, deadline=None)
def test_a_shorter_context_never_makes_what_fits_not_fit(asked: Request, tokens: int) -> None:
    limits = asked.limits
    context = min(tokens, limits.max_model_len)
    shorter = replace(limits, max_model_len=context, max_sample_tokens=min(context, limits.max_sample_tokens))
    if isinstance(arrange(asked), Layout):
        assert isinstance(arrange(replace(asked, limits=shorter)), Layout)


def test_one_gpu_is_shared_and_the_engine_is_told_the_size_of_its_cache() -> None:
    found = plan(request(QWEN3_4B, (80,)))
    engine, trainer = found.processes
    assert [engine.gpus, trainer.gpus] == [(0,), (0,)]
    cache = engine.arguments.index("--kv-cache-memory-bytes")
    assert int(engine.arguments[cache + 1]) == engine.part(PartName.KV)
    share = float(engine.arguments[engine.arguments.index("--gpu-memory-utilization") + 1])
    # vLLM's start needs this share free beside a trainer that holds all of its own.
    assert share * found.devices[0].bytes <= found.devices[0].bytes - trainer.bytes
    assert engine.bytes / found.devices[0].bytes - share < 0.01


def test_eight_gpus_are_parted_half_and_half() -> None:
    found = plan(request(QWEN3_4B, (80,) * 8))
    assert [process.gpus for process in found.processes] == [(0,), (1,), (2,), (3,), (4, 5, 6, 7)]
    assert found.ranks == "replicated"
    trainer = found.processes[-1]
    assert trainer.arguments[-4:] == ("--nproc", "4", "--ranks", "replicated")
    assert trainer.environment["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert all("--kv-cache-memory-bytes" not in process.arguments for process in found.processes)


@pytest.mark.parametrize(("sizes", "serves", "trains"), [((24, 80), 0, 1), ((80, 24), 1, 0)])
def test_of_two_gpus_the_larger_one_trains_what_the_smaller_one_cannot(
    sizes: tuple[float, ...], serves: int, trains: int
) -> None:
    engine, trainer = plan(request(QWEN3_4B, sizes)).processes
    assert (engine.gpus, trainer.gpus) == ((serves,), (trains,))


def test_a_model_larger_than_a_gpu_is_cut_and_divided() -> None:
    found = plan(request(LLAMA_70B, (80,) * 8, limits=SHORT))
    engine, trainer = found.processes
    assert engine.gpus == (0, 1, 2, 3)
    assert engine.arguments[engine.arguments.index("--tensor-parallel-size") + 1] == "4"
    assert trainer.gpus == (4, 5, 6, 7)
    assert found.ranks == "sharded"
    assert not any("by transformers" in note for note in found.notes)
    mixture = replace(LLAMA_70B, architecture="MixtralForCausalLM")
    notes = plan(request(mixture, (80,) * 8, limits=SHORT)).notes
    assert any(
        "MixtralForCausalLM is trained by transformers and PEFT" in note and "memory was measured" in note
        for note in notes
    )


def test_a_judge_has_its_gpus_and_no_adapters() -> None:
    found = plan(request(QWEN3_4B, (80,) * 4, serve=(0,), judge=(1, 2), train=(3,)))
    engine, judge, trainer = found.processes
    assert (judge.role, judge.gpus) == (Role.JUDGE, (1, 2))
    assert "--enable-lora" in engine.arguments
    assert "--enable-lora" not in judge.arguments
    assert judge.part(PartName.LORA) == 0
    assert trainer.gpus == (3,)


def test_gpus_that_nothing_takes_are_named() -> None:
    found = plan(request(LLAMA_70B, (80,) * 8, limits=SHORT, serve=(0, 1, 2, 3, 4), train=(5, 6, 7)))
    assert found.processes[0].gpus == (0, 1, 2, 3)
    assert "GPU 4 is idle: the engines of its set take whole groups of GPUs" in found.notes
    found = plan(request(QWEN3_4B, (80,) * 3, serve=(0,), train=(2,)))
    assert "GPU 1 is in no set, and left alone" in found.notes


@pytest.mark.parametrize(
    ("chat", "said"),
    [
        (ChatFormat(Thinking.NEVER, None, None), "tools of requests are left out, and named in X-Clawloop-Ignored"),
        (ChatFormat(Thinking.NEVER, None, None, unread_tools=True), "requests whose model may call tools are refused"),
        (ChatFormat(Thinking.NEVER, "hermes", None), None),
    ],
)
def test_a_note_says_what_becomes_of_tools(chat: ChatFormat, said: str | None) -> None:
    notes = plan(request(replace(QWEN3_4B, chat=chat), (80,))).notes
    about_tools = [note for note in notes if "tools" in note and note != f"the model {chat}"]
    assert [note.startswith(str(said)) for note in about_tools] == ([] if said is None else [True])


def test_a_note_says_what_size_of_model_the_default_rate_was_measured_on() -> None:
    default, own = needs_of(DEFAULT_RECIPE), needs_of(Recipe(name="own"))
    assert needs_of(WITHOUT_JUDGE).default_rate

    def notes(model: ModelShape, training: TrainingNeeds | None) -> list[str]:
        found = plan(request(model, (80,), training=training)).notes
        return [note for note in found if "learning rate" in note]

    [note] = notes(QWEN3_4B, default)
    assert "a model of 135M parameters alone" in note
    assert "moves the adapter by 0.5 at most" in note
    assert notes(QWEN3_4B, own) == notes(QWEN3_4B, None) == notes(SMALL, default) == []


def kept_on_cpu(model: ModelShape, memory: float, limits: Limits) -> int:
    """Tokens of the largest micro-batch of which no layer is computed again; 0: all are."""
    layout = plan(request(model, None, memory=memory, limits=limits))
    assert layout.used(0) <= layout.devices[0].usable
    [trainer] = [process for process in layout.processes if process.role is Role.TRAINER]
    given = dict(zip(trainer.arguments, trainer.arguments[1:], strict=False))
    return int(given.get("--recompute-beyond", "0"))


def test_the_trainer_on_a_cpu_keeps_the_layers_that_memory_has_room_for() -> None:
    model = decoder(vocab=49152, width=576, inner=1536, layers=30, heads=9, kv_heads=3, head_dim=64)
    limits = Limits(max_model_len=8192, max_sample_tokens=8192)
    kept = [kept_on_cpu(model, memory, limits) for memory in (8, 24, 512)]
    assert 500 < kept[0] < kept[1] < kept[2]
    assert kept[2] == limits.micro_batch  # all that it may ever read at once
    mixed = replace(model, architecture="Gemma3ForCausalLM")
    assert kept_on_cpu(mixed, 512, limits) == 0  # a sample at a time, by transformers
    on_gpus = plan(request(QWEN3_4B, (80, 80))).processes[-1]
    assert "--recompute-beyond" not in on_gpus.arguments


def test_a_refusal_names_the_part_the_numbers_and_ways_out() -> None:
    with pytest.raises(SetupError) as refused:
        plan(request(QWEN3_4B, (30,)))
    said = str(refused.value)
    assert said.startswith("Qwen3-4B does not fit: GPU 0 has 28.5 GiB to use, engine 0 and trainer need ")
    assert "the largest part is the trainer's activations" in said
    assert "--max-sample-tokens " in said
    assert "--gpus 30,30" in said
    assert "a GPU of " in said


def test_the_cheapest_limit_is_named_first() -> None:
    limits = Limits(max_model_len=16384, max_sample_tokens=16384, micro_batch_tokens=16384)
    asked = request(QWEN3_4B, (40,), limits=limits)
    fitting = next(size for size in range(20, 80) if isinstance(arrange(with_gpu(asked, size)), Layout))
    first = next(remedies(with_gpu(asked, fitting - 1)))
    assert first.words == "--micro-batch-tokens 8192"


def with_gpu(asked: Request, gib: int) -> Request:
    assert asked.gpus is not None
    return replace(asked, gpus=replace(asked.gpus, sizes=(gib * GIB,)))


@pytest.mark.parametrize(("memory", "contexts"), [(16, 2), (64, 4), (2000, 64)])
def test_without_gpus_the_cache_grows_with_the_memory_until_all_requests_fit(memory: float, contexts: int) -> None:
    limits = Limits(max_model_len=8192, max_sample_tokens=4096)
    model = decoder(vocab=151_936, width=1024, inner=3072, layers=28, heads=16, kv_heads=8, head_dim=128)
    [engine, *_] = plan(request(model, None, limits=limits, memory=memory)).processes
    assert engine.cached_tokens // 8192 == contexts


def test_without_gpus_a_larger_cache_displaces_nothing() -> None:
    large = request(SMALL, None, memory=100)
    least = arrange(replace(large, memory=1))
    assert isinstance(least, Shortage)
    needed = sum(process.bytes for process in least.processes)
    found = plan(replace(large, memory=int(needed / 0.95) + 1))
    assert [process.bytes for process in found.processes] == [process.bytes for process in least.processes]


def test_without_gpus_all_processes_share_the_memory() -> None:
    found = plan(request(SMALL, None, memory=8))
    assert found.kind == "cpu"
    assert [process.role for process in found.processes[:2]] == [Role.ENGINE, Role.TRAINER]
    assert {process.role for process in found.processes[2:]} == {Role.SERVICE}
    services = {process.name: process.bytes for process in found.processes[2:]}
    assert "combined worker" in services
    assert 0.9 * GIB < sum(services.values()) < 1.1 * GIB  # measured: 1.2 GB with an idle trainer
    assert "--no-enable-chunked-prefill" not in found.processes[0].arguments
    with pytest.raises(SetupError, match=r"memory has 1\.9 GiB to use.*a machine with \d+ GiB of memory"):
        plan(request(SMALL, None, memory=2))


def test_without_a_trainer_all_gpus_serve() -> None:
    found = plan(request(QWEN3_4B, (24, 24), training=None))
    assert [process.gpus for process in found.processes] == [(0,), (1,)]
    assert found.version_bytes == 0


def test_a_mixture_of_experts_needs_gpus() -> None:
    mixture = replace(SMALL, experts=8)
    with pytest.raises(SetupError, match=r"small is a mixture of experts, and vLLM on a CPU crashes .*: it needs GPUs"):
        plan(request(mixture, None))
    assert plan(request(mixture, (80,))).kind == "cuda"


def test_linear_attention_needs_gpus() -> None:
    hybrid = replace(SMALL, architecture="Qwen3_5ForCausalLM")
    with pytest.raises(SetupError, match=r"small has layers of linear attention: vLLM on a CPU .*: it needs GPUs"):
        plan(request(hybrid, None))
    assert plan(request(hybrid, (80,))).kind == "cuda"


def test_routed_experts_get_no_adapters_and_it_is_said() -> None:
    mixture = decoder(
        vocab=1000, width=64, inner=128, layers=2, heads=4, kv_heads=2, head_dim=16, experts=8,
        architecture="Qwen3MoeForCausalLM",
    )  # fmt: skip
    found = plan(request(mixture, (80,)))
    [note] = [note for note in found.notes if note.startswith("8 routed experts a layer get no adapters")]
    assert note.endswith("are what is trained")
    in_4_bits = plan(replace(request(mixture, (80,)), quantise="nf4"))
    assert f"{note}, and what is kept in 4 bits" in in_4_bits.notes


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ({"serve": (0,), "train": (0, 1)}, "GPU 0 is in --serve-gpus and --train-gpus"),
        ({"serve": (2,)}, "--serve-gpus: there is no GPU 2, --gpus lists 2"),
        ({"serve": (0, 1)}, "no GPU is left for the trainer"),
        ({"train": (0, 1)}, "no GPU is left for engines"),
        ({"judge": (0, 1)}, "no GPU is left for engines and the trainer"),
    ],
)
def test_sets_that_cannot_be_are_refused(sets: dict[str, tuple[int, ...]], said: str) -> None:
    with pytest.raises(SetupError) as refused:
        plan(request(SMALL, (80, 80), serve=sets.get("serve"), judge=sets.get("judge"), train=sets.get("train")))
    assert said in str(refused.value)


def test_one_gpu_has_no_sets() -> None:
    with pytest.raises(SetupError, match="with one GPU engine and trainer share it"):
        plan(request(SMALL, (80,), train=(0,)))


@pytest.mark.parametrize(
    ("policies", "asked", "slots", "in_memory"),
    [(1, None, 4, 8), (2, None, 4, 8), (10, None, 20, 40), (20, None, 32, 64), (20, 8, 8, 40), (100, None, 32, 200)],
)
def test_engines_have_room_for_the_active_version_and_the_candidate_of_each_policy(
    policies: int, asked: int | None, slots: int, in_memory: int
) -> None:
    limits = limits_for(QWEN3_4B, TrainingNeeds(), policies=policies, max_loras=asked)
    planned = plan(replace(request(QWEN3_4B, (80,)), limits=limits))
    [engine] = [process for process in planned.processes if process.role is Role.ENGINE]
    words = " ".join(engine.arguments)
    assert f"--max-loras {slots} --max-cpu-loras {in_memory}" in words


# `clawloop plan` as people and programs run it, and that the programs it names take the arguments it names.

_PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for arguments in json.load(sys.stdin):
    make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_folder(tmp_path_factory.mktemp("models") / "Tiny"))


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--gpus", "80"),
        ("--gpus", "24,24,24", "--serve-gpus", "0", "--judge-gpus", "1", "--train-gpus", "2"),
        ("--gpus", "80,80,80,80,80,80,80,80"),
        ("--gpus", "80", "--no-train"),
        ("--gpus", "80", "--dtype", "bfloat16"),
        ("--dtype", "float32"),
        ("--policies", "20"),
        ("--gpus", "80", "--policies", "20"),
    ],
)
def test_people_get_a_table_within_80_columns(model: str, options: tuple[str, ...]) -> None:
    done = clawloop("plan", "--model", model, *options)
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert "KV cache" in done.stdout
    assert ("trainer" in done.stdout) == ("--no-train" not in options)


def test_programs_get_the_same_as_data(model: str) -> None:
    done = clawloop("plan", "--model", model, "--gpus", "80,40", "--json")
    data = json.loads(done.stdout)
    assert data["device"] == "cuda"
    assert [device["bytes"] for device in data["devices"]] == [80 * 2**30, 40 * 2**30]
    engine, trainer = data["processes"]
    assert (engine["name"], engine["role"], engine["gpus"]) == ("engine 0", "engine", [0])
    assert sum(part["bytes"] for part in engine["parts"]) == engine["bytes"] == data["devices"][0]["used_bytes"]
    assert trainer["environment"]["CUDA_VISIBLE_DEVICES"] == "1"
    assert data["version_bytes_on_disk"] == 12 * 16 * 2 * 152


def test_a_recipe_decides_rank_and_logits(model: str, tmp_path: Path) -> None:
    recipe = tmp_path / "wide.toml"
    recipe.write_text('name = "wide"\n[train.lora]\nrank = 64\n[train.loss]\ndistillation = 0.5\n')
    data = json.loads(clawloop("plan", "--model", model, "--gpus", "80", "--recipe", str(recipe), "--json").stdout)
    engine, trainer = data["processes"]
    assert engine["arguments"][engine["arguments"].index("--max-lora-rank") + 1] == "64"
    adapter = next(part for part in trainer["parts"] if part["name"] == "adapter and AdamW")
    assert adapter["bytes"] == 16 * 64 * 2 * 152


OLMO2 = {**QWEN3, "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}


@pytest.mark.parametrize(("config", "tensors"), [(OLMO2, qwen3_tensors()), (PHI3, phi3_tensors())])
def test_a_family_that_the_trainer_does_not_know_is_served_alone(
    config: dict[str, object], tensors: Shapes, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "other", config, tensors)
    done = clawloop("plan", "--model", str(folder), "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert "trainer" not in [process["name"] for process in data["processes"]]
    [note] = [note for note in data["notes"] if "nothing is trained" in note]
    assert f"is of the family '{config['model_type']}'; the trainer knows gemma3" in note


def test_what_cannot_fit_is_one_line(model: str) -> None:
    said = refusal(clawloop("plan", "--model", model, "--gpus", "1"))
    assert "Tiny does not fit: GPU 0 has 0.9 GiB to use" in said
    assert said.endswith("GiB")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--gpus", "80,much"), "'80,much': give the GiB of each GPU"),
        (("--gpus", "80,0"), "give the GiB of each GPU"),
        (("--gpus", "nan"), "give the GiB of each GPU"),
        (("--gpus", "80,80", "--serve-gpus", "0,0"), "'0,0' names a GPU twice"),
        (("--gpus", "80,80", "--train-gpus", "one"), "give indices from 0 on"),
        (("--train-gpus", "0"), "give the size of each GPU"),
    ],
)
def test_wrong_usage_names_the_option(model: str, options: tuple[str, ...], said: str) -> None:
    done = clawloop("plan", "--model", model, *options)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--gpus", "80,80", "--serve-gpus", "0", "--train-gpus", "0,1"), "GPU 0 is in --serve-gpus and --train-gpus"),
        (("--gpus", "80,80", "--no-train", "--train-gpus", "0"), "--train-gpus and --no-train contradict each other"),
        (("--max-model-len", "9999"), "--max-model-len 9999: Tiny was made for 4096 tokens"),
        (("--dtype", "int8"), "--dtype int8: use float32 or bfloat16"),
        (("--gpus", "80", "--dtype", "int8"), "--dtype int8: use bfloat16"),
        (
            ("--gpus", "80", "--dtype", "float32"),
            "--dtype float32: vLLM's LoRA kernels on CUDA compute in 16 bits alone: use bfloat16, or leave --dtype out",
        ),
        (("--gpus", "80,80", "--judge-model", "MODEL"), "--judge-model: the judge engine needs GPUs of its own"),
        (("--max-loras", "1"), "--max-loras 1: at least 2"),
        (("--max-lora-rank", "24"), "--max-lora-rank 24: engines take one of 1, 8, 16"),
        (("--max-lora-rank", "8"), "--max-lora-rank 8: the recipe's adapters have rank 16: give 16"),
        (("--recipe", "nowhere.toml"), "nowhere.toml cannot be read"),
    ],
)
def test_settings_that_cannot_be_are_one_line(model: str, options: tuple[str, ...], said: str) -> None:
    given = [model if word == "MODEL" else word for word in options]
    assert said in refusal(clawloop("plan", "--model", model, *given))


def engine_arguments() -> list[tuple[str, ...]]:
    short = Limits(max_model_len=32768, max_sample_tokens=4096)
    layouts = [
        plan(request(QWEN3_4B, (80,))),
        plan(request(QWEN3_4B, (80,) * 4, serve=(0, 1), judge=(2,), train=(3,))),
        plan(request(LLAMA_70B, (80,) * 8, limits=short)),
        plan(request(QWEN3_4B, None, memory=256)),
    ]
    return [
        process.arguments
        for layout in layouts
        for process in layout.processes
        if process.role in ("engine", "judge engine")
    ]


@pytest.mark.slow  # imports all of vLLM
def test_vllm_takes_the_arguments_of_engines() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PARSE],
        input=json.dumps(engine_arguments()),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


def test_the_trainer_takes_its_arguments() -> None:
    trainer = plan(request(QWEN3_4B, (80,) * 4)).processes[-1]
    command = typer.main.get_command(worker_app)
    assert isinstance(command, typer.core.TyperGroup)
    parsed = command.commands["trainer"].make_context("trainer", list(trainer.arguments))
    assert parsed.params["nproc"] == 2
    assert parsed.params["max_tokens"] == 32768
    assert parsed.params["micro_batch_tokens"] == 8192
    assert parsed.params["device"] == "cuda"
    on_cpu = next(each for each in plan(request(QWEN3_4B, None)).processes if each.role is Role.TRAINER)
    parsed = command.commands["trainer"].make_context("trainer", list(on_cpu.arguments))
    assert parsed.params["recompute_beyond"] > 0


# docs/gpus.md says what `clawloop plan` says.

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


def test_what_the_user_says_next_is_read_as_one_hint_and_each_recipe_reads_its_control() -> None:
    assert (needs_of(DEFAULT_RECIPE).hints, needs_of(WITHOUT_JUDGE).hints) == (3 + 1, 1 + 1)
