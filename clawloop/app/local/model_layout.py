"""The layout of engines and trainer on this machine, and what `clawloop up` starts of it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from clawloop.app.layout.memory import Layout, Process, Role, gibibytes
from clawloop.app.layout.model_folder import read_model_shape, read_served_copy
from clawloop.app.layout.plan import plan
from clawloop.app.layout.request import (
    Gpus,
    Request,
    TrainingNeeds,
    dtype_of,
    limits_for,
    needs_of,
    require_decoupled_weights,
)
from clawloop.app.local import checks, parts
from clawloop.app.local.keys_file import ensure_engine_secret
from clawloop.app.local.machine import Device, Gpu, environment_device, find_gpus, memory_bytes
from clawloop.app.local.parts import LOOPBACK, JudgeEngine
from clawloop.app.local.services.vllm import (
    GUARD_SECRET,
    GUARD_SECRETS,
    EngineOptions,
    ModelFacts,
    max_num_seqs,
    read_model,
)
from clawloop.app.local.supervision.supervisor import Part
from clawloop.core.errors import FamilyUnknown, ModelUnsupported, SetupError
from clawloop.core.families.chat_format import ChatOptions
from clawloop.core.recipes.recipe import Recipe, require_rank
from clawloop.serving.engine_secret import read_secrets
from clawloop.training.model.checkpoint import read_family
from clawloop.training.options import Dtype, Quantisation

# Layout ---------------------------------------------------------------------------------------------------------------
# The layout of engines and trainer on this machine, as `clawloop plan` computes it for any.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of serving and training; None: chosen by model, recipe and machine.

    Args:
        device: None: the one this environment was set up for.
        serve_gpus, judge_gpus, train_gpus: indices of GPUs.
        serve_model: a quantised copy of the model, which engines serve; None: the model itself.
        judge_model: a model folder of the judge engine; None: the base model judges.
        engine_arguments: further arguments of every engine; they override others.
        dtype: of weights and arithmetic.
        max_model_len: longest context of engines, in tokens.
        max_sample_tokens: longest sample the trainer reads.
        micro_batch_tokens: what the trainer reads at once.
        quantise: the trainer's base model, to 4 bits.
        max_loras: versions with running requests at the same time.
        policies: that the engines answer for.
        max_lora_rank: highest rank of an adapter that engines load.
        memory: bytes that may be taken on a machine without GPUs; None: all of it.
        train: whether there is a trainer.
        chat: template and parsers of engines, instead of those of the model's family.
    """

    device: Device | None = None
    serve_gpus: tuple[int, ...] | None = None
    judge_gpus: tuple[int, ...] | None = None
    train_gpus: tuple[int, ...] | None = None
    serve_model: Path | None = None
    judge_model: Path | None = None
    engine_arguments: tuple[str, ...] = ()
    dtype: str | None = None
    max_model_len: int | None = None
    max_sample_tokens: int | None = None
    micro_batch_tokens: int = 8192
    quantise: Quantisation | None = None
    max_loras: int | None = None
    policies: int = 1
    max_lora_rank: int = 16
    memory: int | None = None
    train: bool = True
    chat: ChatOptions | None = None

    @property
    def quantised(self) -> bool:
        """Engines and trainer compute with different weights."""
        return self.quantise is not None or self.serve_model is not None


def lay_out(options: ModelOptions, model: Path, recipe: Recipe | None, environment: Mapping[str, str]) -> Layout:
    """The layout of a model's processes on this machine.

    Args:
        recipe: None: adapters may have any rank that engines load.
        environment: of the processes; its CUDA_VISIBLE_DEVICES says which GPUs may be used.

    Raises:
        SetupError: the model does not fit, a GPU is missing or in use, or options contradict each other.
        RecipeRejected: engines cannot load adapters of this recipe.
    """
    shape = read_model_shape(model, options.chat)
    needs = None
    if recipe is not None:
        require_rank(recipe, options.max_lora_rank)
        if options.quantised:
            require_decoupled_weights(recipe)
    if options.train:
        needs = TrainingNeeds(rank=options.max_lora_rank) if recipe is None else needs_of(recipe)
    served = None
    if options.serve_model is not None:
        served = read_served_copy(options.serve_model, model, shape, options.chat)
    gpus = _gpus(options, environment)
    request = Request(
        model=shape,
        limits=limits_for(
            shape,
            needs,
            max_model_len=options.max_model_len,
            max_sample_tokens=options.max_sample_tokens,
            micro_batch_tokens=options.micro_batch_tokens,
            max_loras=options.max_loras,
            max_lora_rank=options.max_lora_rank,
            policies=options.policies,
        ),
        gpus=None if gpus is None else _sets(options, gpus),
        memory=memory_bytes() if options.memory is None else options.memory,
        training=needs,
        dtype=dtype_of(options.dtype, shape.dtype, on_gpus=gpus is not None),
        judge_model=None if options.judge_model is None else read_model_shape(options.judge_model),
        serve_model=served,
        quantise=options.quantise,
    )
    layout = plan(request)
    if gpus is None:
        return layout
    _require_free(layout, gpus)
    return replace(layout, processes=tuple(_named(process, gpus) for process in layout.processes))


def widest_dtype() -> Dtype:
    """The most exact type in which engines and trainer compute on the device of this environment."""
    return "bfloat16" if environment_device() is Device.CUDA else "float32"


def _gpus(options: ModelOptions, environment: Mapping[str, str]) -> tuple[Gpu, ...] | None:
    if (options.device or environment_device()) is Device.CUDA:
        return find_gpus(environment)
    sets = {"serve": options.serve_gpus, "judge": options.judge_gpus, "train": options.train_gpus}
    for name, indices in sets.items():
        if indices is not None:
            raise SetupError(f"--{name}-gpus: the models run on the CPU; `make setup DEVICE=cuda` installs for GPUs")
    return None


def _sets(options: ModelOptions, gpus: tuple[Gpu, ...]) -> Gpus:
    sizes = tuple(gpu.bytes for gpu in gpus)
    return Gpus(sizes=sizes, serve=options.serve_gpus, judge=options.judge_gpus, train=options.train_gpus)


def _require_free(layout: Layout, gpus: tuple[Gpu, ...]) -> None:
    for index, (device, gpu) in enumerate(zip(layout.devices, gpus, strict=True)):
        used = layout.used(index)
        if used > gpu.free:
            raise SetupError(
                f"{device.name}: the plan takes {gibibytes(used)}, other programs leave {gibibytes(gpu.free)} of "
                f"{gibibytes(gpu.bytes)}: stop those that nvidia-smi lists, or choose GPUs by CUDA_VISIBLE_DEVICES"
            )


def _named(process: Process, gpus: tuple[Gpu, ...]) -> Process:
    """The process with its GPUs' names for CUDA, if not all GPUs of the machine are visible."""
    if not process.gpus:
        return process
    visible = ",".join(gpus[index].name for index in process.gpus)
    return replace(process, environment={**process.environment, "CUDA_VISIBLE_DEVICES": visible})


# Engines and trainer --------------------------------------------------------------------------------------------------
# The engines and the trainer that `clawloop up` starts, as the layout of this machine says.


@dataclass(frozen=True, slots=True)
class PlannedModels:
    """Engines and trainer of this machine.

    Args:
        engines: all parts that are vLLM, the judge's too.
        urls: of the engines that serve policies.
        base_model: the name by which they serve it.
        seqs: sequences that each of them computes at once.
        judge: None: there is no judge engine.
        trained_model: folder of the base weights; None: no trainer.
    """

    layout: Layout
    engines: tuple[Part, ...]
    urls: tuple[str, ...]
    base_model: str
    seqs: int
    judge: JudgeEngine | None
    trained_model: Path | None

    @property
    def trainer(self) -> Process | None:
        return next((process for process in self.layout.processes if process.role is Role.TRAINER), None)

    @property
    def trainer_waits(self) -> bool:
        """True if trainer and engine share a GPU: the engine takes its memory first, since vLLM would not start if the
        trainer held more than its part at that moment."""
        return self.layout.kind == "cuda" and self.trainer is not None and len(self.layout.on(self.trainer.gpus[0])) > 1


def plan_models(
    model: ModelFacts,
    wanted: ModelOptions,
    recipe: Recipe | None,
    environment: Mapping[str, str],
    engine_port: int,
    data: Path,
) -> PlannedModels:
    """
    Args:
        data: holds the engines' secrets, and the adapters that they may load.
        recipe: as for `lay_out`.
        environment: of all parts.
        engine_port: of the first engine, others follow; 0 takes free ones.

    Raises:
        SetupError: a model is unusable or does not fit, a port is taken, or options contradict each other.
    """
    untrained = why_untrained(model.path) if wanted.train else None
    if untrained is not None:
        wanted = replace(wanted, train=False)
    # Under the name of what is trained: versions belong to that.
    served = model if wanted.serve_model is None else replace(model, path=wanted.serve_model)
    judging = served if wanted.judge_model is None else model_in(wanted.judge_model)
    if environment.get("CLAWLOOP_JUDGE_URL") and (wanted.judge_model or wanted.judge_gpus):
        option = "--judge-model" if wanted.judge_model else "--judge-gpus"
        raise SetupError(f"{option} and CLAWLOOP_JUDGE_URL name two judges: leave one out")
    layout = lay_out(wanted, model.path, recipe, environment)
    if untrained is not None:
        layout = replace(layout, notes=(*layout.notes, untrained))
    serving = [process for process in layout.processes if process.role in (Role.ENGINE, Role.JUDGE)]
    guards, adapters = _guards(environment, data), (data / "adapters").resolve()
    # The secret changes with each start: its clients are started here too, and get it in their environment.
    judge_secret = environment.get(GUARD_SECRET) or secrets.token_urlsafe(32)
    count = sum(process.role is Role.ENGINE for process in serving)
    engines: list[Part] = []
    urls: dict[Role, list[str]] = {Role.ENGINE: [], Role.JUDGE: []}
    seqs: list[int] = []
    for number, process in enumerate(serving):
        # One after another from the port that was asked for.
        asked = engine_port and engine_port + number
        port = checks.choose_port("vLLM", LOOPBACK, asked, "--engine-port")
        judges = process.role is Role.JUDGE
        name = parts.JUDGE_ENGINE if judges else parts.numbered(parts.ENGINE, number, count)
        guard = {GUARD_SECRET: judge_secret} if judges else guards
        guarded = {**process.environment, **guard, "CLAWLOOP_ENGINE_ADAPTERS": str(adapters)}
        engine = EngineOptions(port, process.arguments, guarded, wanted.engine_arguments)
        if not judges:
            seqs.append(max_num_seqs(engine))
        where = ", ".join(layout.devices[gpu].name for gpu in process.gpus) or "CPU"
        engines.append(parts.vllm(name, judging if judges else served, engine, where, environment))
        urls[process.role].append(f"http://{LOOPBACK}:{port}")
    return PlannedModels(
        layout=layout,
        engines=tuple(engines),
        urls=tuple(urls[Role.ENGINE]),
        base_model=model.name,
        seqs=min(seqs),
        judge=next((JudgeEngine(url, judging.name, judge_secret) for url in urls[Role.JUDGE]), None),
        trained_model=model.path if wanted.train else None,
    )


def _guards(environment: Mapping[str, str], data: Path) -> dict[str, str]:
    """The variable that gives engines their secrets: the operator's own, or a file that is made once.

    Raises:
        SetupError: the operator's file cannot be read, or everybody may read it.
    """
    if secret := environment.get(GUARD_SECRET):
        return {GUARD_SECRET: secret}
    path = Path(environment[GUARD_SECRETS]) if environment.get(GUARD_SECRETS) else ensure_engine_secret(data).resolve()
    try:
        read_secrets(path)
    except SetupError as error:
        raise SetupError(f"{GUARD_SECRETS}: {error}") from None
    return {GUARD_SECRETS: str(path)}


def model_in(folder: Path, chat: ChatOptions | None = None) -> ModelFacts:
    """
    Raises:
        SetupError: the folder holds no model that can be served.
    """
    checks.require_model(folder, chat)
    return read_model(folder, chat)


def why_untrained(model: Path) -> str | None:
    """The note that a model is served and not trained, if the trainer knows no model of its family; else None.

    Raises:
        SetupError: the trainer knows the family, and not this model of it.
    """
    try:
        read_family(model)
    except FamilyUnknown as error:
        return f"{error}: it is served and its turns are recorded, and nothing is trained"
    except ModelUnsupported as error:
        raise SetupError(f"--model: {error}; to serve and record it without training: --no-train") from error
    return None
