"""Checks of a recipe: keys that contradict each other, settings the trainer does not support, unknown keys.

A key that would have no effect is rejected as well: whoever set it expected an effect. A key at its default is
accepted, so that a stored recipe, which has all keys filled in, can be read again.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from clawloop.errors import RecipeRejected
from clawloop.recipes.schedule import read_hours, read_zone

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from clawloop.recipes.recipe import Loss, Recipe, Schedule, Signal, Train


TOKEN_LIMIT = 5.0
"""What one token counts at most in a distance between versions, in nats: e⁵ = 148 times more or less likely. Beyond
that a token is as good as unlearned, and how far beyond says nothing about the others."""

# Comparing takes a second for each million characters, and recipes also arrive over HTTP.
_NAME_LIMIT = 100
# A recipe's file mostly has its name: file systems allow 255 bytes, of which `.toml` takes five. Temporal takes such a
# name too.
_LONGEST_NAME = 250
# Names of the same settings in other trainers, where they are too different from ours for a close match.
_OTHER_NAMES = {
    "learning_rate": "lr",
    "batch_size": "batch_samples",
    "max_grad_norm": "grad_clip",
    "num_train_epochs": "epochs",
    "kl_coef": "kl",
    "r": "rank",
    "lora_r": "rank",
    "lora_alpha": "alpha",
    "lambda": "process_weight",
}


def contradictions(recipe: Recipe) -> Iterator[RecipeRejected]:
    """Each contradiction between keys, with the key to change; also a name too long for a file."""
    signal, train = recipe.signal, recipe.train
    if (length := len(recipe.name)) > _LONGEST_NAME:
        problem = f"{length} characters, but {_LONGEST_NAME} at most: it is mostly a file name too"
        yield RecipeRejected(problem, field="name")
    of_tables = (*_of_terms(signal, train), *_of_signal(signal), *_of_loss(train.loss, train), *_of_gate(recipe))
    for holds, field, problem in of_tables:
        if holds:
            yield RecipeRejected(problem, field=field)
    if train.schedule is not None:
        yield from _of_schedule(train.schedule)


def unsupported_settings(recipe: Recipe) -> Iterator[RecipeRejected]:
    """Settings that the trainer cannot follow, in new and in stored recipes."""
    if not recipe.train.train_thinking:
        # It is not recorded which ids open and close a model's thinking.
        yield RecipeRejected(
            "false is not supported: thinking tokens cannot be distinguished from others; set it to true or remove it",
            field="train.train_thinking",
        )


def require_rank(recipe: Recipe, largest: int) -> None:
    """Raise RecipeRejected if engines would refuse every version made with this recipe.

    Args:
        largest: the largest rank that engines accept.
    """
    if (rank := recipe.train.lora.rank) > largest:
        raise RecipeRejected(
            f"{rank}, but engines take {largest} at most and would load no version: lower it, or raise "
            "CLAWLOOP_MAX_LORA_RANK here and where `clawloop up` runs, and --max-lora-rank of engines of your own",
            field="train.lora.rank",
        )


def require_decoupled(recipe: Recipe, why: str, remedy: str) -> None:
    """Raise RecipeRejected if the recipe takes the engine's log-probs for the policy's.

    Args:
        why: they are not.
        remedy: how the recipe is changed here.
    """
    loss = recipe.train.loss
    if loss.policy_gradient > 0 and loss.correction != "decoupled":
        raise RecipeRejected(
            f'"{loss.correction}", but {why}: their difference would be clipped as if it were learned; set '
            f'"decoupled" {remedy}',
            field="train.loss.correction",
        )


def _of_terms(signal: Signal, train: Train) -> Iterator[tuple[bool, str, str]]:
    advantage, loss = train.advantage, train.loss
    terms = advantage.verdict_weight or advantage.teacher_weight
    yield not (signal.verdicts or signal.hints), "signal", "nothing to learn from: set verdicts or hints to true"
    yield (
        signal.verdicts and not advantage.verdict_weight,
        "signal.verdicts",
        "has no effect while train.advantage.verdict_weight is 0: raise that weight or set verdicts to false",
    )
    yield (
        bool(advantage.verdict_weight) and not signal.verdicts,
        "train.advantage.verdict_weight",
        "needs signal.verdicts = true, or set it to 0",
    )
    yield (
        signal.hints and not (advantage.teacher_weight or loss.distillation),
        "signal.hints",
        "has no effect: raise train.advantage.teacher_weight or train.loss.distillation, or set it to false",
    )
    yield (
        bool(advantage.teacher_weight) and not signal.hints,
        "train.advantage.teacher_weight",
        "needs signal.hints = true, or set it to 0",
    )
    yield (
        bool(loss.distillation) and not signal.hints,
        "train.loss.distillation",
        "needs signal.hints = true, or set it to 0",
    )
    yield (
        bool(terms) and not loss.policy_gradient,
        "train.loss.policy_gradient",
        "is 0, so train.advantage has no effect: set it above 0, or verdict_weight and teacher_weight to 0",
    )
    yield (
        bool(loss.policy_gradient) and not terms,
        "train.loss.policy_gradient",
        "has no effect while both weights of train.advantage are 0: set it to 0, or raise one of them",
    )
    yield (
        _changed(advantage, "teacher") and not signal.hints,
        "train.advantage.teacher",
        "has no effect while signal.hints is false",
    )
    yield (
        _changed(advantage, "opd_clip") and not advantage.teacher_weight,
        "train.advantage.opd_clip",
        "has no effect while train.advantage.teacher_weight is 0",
    )
    yield (
        _changed(advantage, "spare_unlikely") and not loss.policy_gradient,
        "train.advantage.spare_unlikely",
        "has no effect while train.loss.policy_gradient is 0",
    )
    yield (
        _changed(train, "distillation") and not loss.distillation,
        "train.distillation",
        "has no effect while train.loss.distillation is 0",
    )


def _of_signal(signal: Signal) -> Iterator[tuple[bool, str, str]]:
    yield (
        signal.at_least_one and not signal.verdicts,
        "signal.at_least_one",
        "needs signal.verdicts = true, or set it to false: it chooses a turn by its votes",
    )
    yield (
        not signal.verdicts and signal.reward != "verdict",
        "signal.reward",
        f'"{signal.reward}" needs signal.verdicts = true',
    )
    yield (
        not signal.verdicts and _changed(signal, "votes"),
        "signal.votes",
        "has no effect while signal.verdicts is false",
    )
    yield (
        _changed(signal, "m") and signal.votes == "direct" and not signal.hints,
        "signal.m",
        "has no effect: a direct vote is a single vote, and signal.hints is false",
    )
    yield (
        _changed(signal, "hints_needed") and not signal.hints,
        "signal.hints_needed",
        "has no effect while signal.hints is false",
    )
    yield (
        _changed(signal, "hints_from") and not signal.hints,
        "signal.hints_from",
        "has no effect while signal.hints is false",
    )
    yield (
        signal.hints_needed > signal.m,
        "signal.hints_needed",
        f"{signal.hints_needed}, but only signal.m = {signal.m} answers about a hint are asked for",
    )
    yield (
        _changed(signal, "judge_temperature") and signal.votes == "direct" and not signal.hints,
        "signal.judge_temperature",
        "has no effect: a direct vote is read at temperature 1, and signal.hints is false",
    )
    yield (
        _changed(signal, "judge_form") and not signal.hints and (signal.votes == "direct" or not signal.verdicts),
        "signal.judge_form",
        "has no effect: there are neither sampled votes nor hints",
    )
    yield (
        _changed(signal, "process_weight") and signal.reward != "outcome_process",
        "signal.process_weight",
        'needs signal.reward = "outcome_process"',
    )
    yield (
        signal.baseline == "mean" and signal.reward == "group",
        "signal.baseline",
        'must be "none" with signal.reward = "group": a group is its own baseline',
    )
    yield (
        signal.baseline == "mean" and signal.reward == "outcome_process",
        "signal.baseline",
        'must be "none" with signal.reward = "outcome_process": the baseline is a mean of verdicts',
    )
    yield (
        signal.baseline == "mean" and not signal.verdicts,
        "signal.baseline",
        '"mean" needs signal.verdicts = true',
    )
    yield (
        signal.hints and signal.reward != "verdict",
        "signal.hints",
        f'must be false with signal.reward = "{signal.reward}", which learns from verdicts only',
    )
    if signal.overlong is not None:
        yield not signal.verdicts, "signal.overlong", "needs signal.verdicts = true: the penalty is added to verdicts"
        yield (
            signal.overlong.cache_tokens > signal.overlong.limit_tokens,
            "signal.overlong.cache_tokens",
            "must be at most signal.overlong.limit_tokens",
        )


def _of_loss(loss: Loss, train: Train) -> Iterator[tuple[bool, str, str]]:
    yield (
        not loss.policy_gradient and not loss.distillation,
        "train.loss",
        "nothing is trained: set policy_gradient or distillation above 0",
    )
    for name in ("clip_low", "clip_high", "dual_clip", "correction"):
        yield (
            _changed(loss, name) and not loss.policy_gradient,
            f"train.loss.{name}",
            "has no effect while train.loss.policy_gradient is 0",
        )
    yield (
        _changed(train.bounds, "kl") and not loss.kl,
        "train.bounds.kl",
        "has no effect while train.loss.kl is 0: then the distance is not measured",
    )
    yield (
        loss.dual_clip <= 1 + loss.clip_high,
        "train.loss.dual_clip",
        f"must be above 1 + train.loss.clip_high = {1 + loss.clip_high:g}",
    )
    # The same batch on the same version must give the same adapter, and the engine samples without dropout.
    yield train.lora.dropout > 0, "train.lora.dropout", "dropout is not supported; set it to 0 or remove it"


def _of_schedule(schedule: Schedule) -> Iterator[RecipeRejected]:
    for field, read in (("hours", read_hours), ("time_zone", read_zone)):
        value: str = getattr(schedule, field)
        try:
            if value or field != "hours":
                read(value)
        except ValueError as error:
            yield RecipeRejected(str(error), field=f"train.schedule.{field}")
    if not (schedule.hours or schedule.versions_a_day or schedule.chat_seconds):
        yield RecipeRejected("has no effect: set hours, versions_a_day or chat_seconds", field="train.schedule")
    elif _changed(schedule, "time_zone") and not (schedule.hours or schedule.versions_a_day):
        problem = "has no effect without train.schedule.hours or train.schedule.versions_a_day"
        yield RecipeRejected(problem, field="train.schedule.time_zone")


def _of_gate(recipe: Recipe) -> Iterator[tuple[bool, str, str]]:
    gate = recipe.gate
    yield (
        _changed(gate, "base_distance") and not recipe.train.loss.kl,
        "gate.base_distance",
        "has no effect while train.loss.kl is 0: then the distance to the base model is not measured",
    )
    yield (
        bool(gate.held_out) and not recipe.signal.verdicts,
        "gate.held_out",
        "has no effect while signal.verdicts is false: held-out turns are compared by their verdicts",
    )
    yield (
        _changed(gate, "replay_turns") and not gate.held_out,
        "gate.replay_turns",
        "has no effect while gate.held_out is 0",
    )
    yield (
        bool(gate.canary_share) and not recipe.signal.verdicts,
        "gate.canary_share",
        "has no effect while signal.verdicts is false: a canary is compared by its verdicts",
    )
    yield (
        _changed(gate, "canary_hours") and not gate.canary_share,
        "gate.canary_hours",
        "has no effect while gate.canary_share is 0",
    )
    for name in ("parent_distance", "base_distance"):
        yield (
            getattr(gate, name) >= TOKEN_LIMIT and _changed(gate, name),
            f"gate.{name}",
            f"rejects nothing: a token counts {TOKEN_LIMIT:g} at most, so set it below that",
        )


def _changed(table: BaseModel, name: str) -> bool:
    return bool(getattr(table, name) != type(table).model_fields[name].default)


def as_rejection(error: ValidationError, model: type[BaseModel]) -> RecipeRejected:
    """Pydantic's problems, each with the dotted key and the nearest valid key or value.

    Unknown keys come first: a misspelt key can make a required one missing.
    """
    problems = sorted(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    return RecipeRejected.of([_rejection(problem, model) for problem in problems])


def _rejection(problem: ErrorDetails, model: type[BaseModel]) -> RecipeRejected:
    path = [str(part) for part in problem["loc"]]
    field = ".".join(path)
    if problem["type"] == "extra_forbidden":
        if (near := _near_key(path, model)) is not None:
            return RecipeRejected("unknown key", field=field, near=near)
        here = [key[-1] for key in _keys(model, ()) if key[:-1] == tuple(path[:-1])]
        return RecipeRejected(f"unknown key; the keys here are {', '.join(here)}", field=field)
    near = None
    if problem["type"] == "literal_error":
        choices = [choice.strip("'") for choice in problem["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        near = next(iter(get_close_matches(str(problem["input"]).lower()[:_NAME_LIMIT], choices, n=1)), None)
    return RecipeRejected(problem["msg"][0].lower() + problem["msg"][1:], field=field, near=near)


def _near_key(path: list[str], model: type[BaseModel]) -> str | None:
    """The key with the same name in another case or table, or with the same meaning; else the most similar name."""
    known = list(_keys(model, ()))
    here = [key for key in known if key[:-1] == tuple(path[:-1])]
    name = path[-1].lower()[:_NAME_LIMIT]
    for keys, likeness in ((here, 1.0), (known, 1.0), (here, 0.6), (known, 0.6)):
        match = get_close_matches(_OTHER_NAMES.get(name, name), [key[-1] for key in keys], n=1, cutoff=likeness)
        if match:
            return ".".join(next(key for key in keys if key[-1] == match[0]))
    return None


def _keys(model: type[BaseModel], prefix: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _keys(kind, (*prefix, name))
