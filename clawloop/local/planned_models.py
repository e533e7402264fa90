"""The engines and the trainer that `clawloop up` starts, as the layout of this machine says."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from clawloop.errors import ModelUnsupported, SetupError
from clawloop.families.chat_format import ChatOptions
from clawloop.layout.parts import Layout, Process, Role
from clawloop.local import checks, parts
from clawloop.local.keys_file import ensure_engine_secret
from clawloop.local.model_layout import ModelOptions, lay_out
from clawloop.local.parts import LOOPBACK, JudgeEngine
from clawloop.local.services.vllm import (
    GUARD_SECRET,
    GUARD_SECRETS,
    EngineOptions,
    ModelFacts,
    max_num_seqs,
    read_model,
)
from clawloop.local.supervision.part import Part
from clawloop.recipes.recipe import Recipe
from clawloop.serving.engine_secret import read_secrets
from clawloop.training.model.families import read_family


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
    if wanted.train:
        _require_trainable(model.path)
    # Under the name of what is trained: versions belong to that.
    served = model if wanted.serve_model is None else replace(model, path=wanted.serve_model)
    judging = served if wanted.judge_model is None else model_in(wanted.judge_model)
    if environment.get("CLAWLOOP_JUDGE_URL") and (wanted.judge_model or wanted.judge_gpus):
        option = "--judge-model" if wanted.judge_model else "--judge-gpus"
        raise SetupError(f"{option} and CLAWLOOP_JUDGE_URL name two judges: leave one out")
    layout = lay_out(wanted, model.path, recipe, environment)
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


def _require_trainable(model: Path) -> None:
    """
    Raises:
        SetupError: the trainer does not support the model's architecture.
    """
    try:
        read_family(model)
    except ModelUnsupported as error:
        raise SetupError(f"--model: {error}; to serve and record it without training: --no-train") from error
