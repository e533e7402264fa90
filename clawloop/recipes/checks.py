"""What a recipe must not say: keys that contradict each other, and unknown keys with the ones probably meant.

Knows nothing about files. A key that would have no effect is refused as well: whoever wrote it meant
something. One that stands at its default is not, so that a stored recipe, all keys filled in, reads back.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from clawloop.errors import RecipeRejected

if TYPE_CHECKING:
    from clawloop.recipes.recipe import Loss, Recipe, Signal, Train


# Comparing takes a second for each million characters, and recipes come over HTTP too.
_NAME_LIMIT = 100
# A recipe is a file called after it: file systems take 255 bytes, and five of them are `.toml`. Temporal and the tables
# people see take such a name too.
_LONGEST_NAME = 250
# What the same setting is called in other trainers' files, where that is not near enough to our name.
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
    """Each contradiction, with the key to change; and a name that its file could not have."""
    signal, train = recipe.signal, recipe.train
    if (length := len(recipe.name)) > _LONGEST_NAME:
        problem = f"{length} characters, but {_LONGEST_NAME} at most, so that a file can be called after it"
        yield RecipeRejected(problem, field="name")
    for holds, field, problem in (*_of_terms(signal, train), *_of_signal(signal), *_of_loss(train.loss, train)):
        if holds:
            yield RecipeRejected(problem, field=field)


def impossibilities(recipe: Recipe) -> Iterator[RecipeRejected]:
    """What cannot be done, however the recipe came here."""
    if not recipe.train.train_thinking:
        # Nowhere is it recorded which ids open and close a model's thinking.
        yield RecipeRejected(
            "thinking cannot be told from other tokens, so it is trained like them; set it to true or leave it out",
            field="train.train_thinking",
        )


def require_rank(recipe: Recipe, largest: int) -> None:
    """Raise RecipeRejected if engines would refuse every version this recipe makes.

    Args:
        largest: the rank engines take.
    """
    if (rank := recipe.train.lora.rank) > largest:
        raise RecipeRejected(
            f"{rank}, but engines take {largest} at most, and would load no version: set CLAWLOOP_MAX_LORA_RANK here "
            "and where `clawloop up` runs, and --max-lora-rank of engines of your own",
            field="train.lora.rank",
        )


def _of_terms(signal: Signal, train: Train) -> Iterator[tuple[bool, str, str]]:
    advantage, loss = train.advantage, train.loss
    terms = advantage.verdict_weight or advantage.teacher_weight
    yield not (signal.verdicts or signal.hints), "signal", "without verdicts and hints nothing is learned"
    yield (
        signal.verdicts and not advantage.verdict_weight,
        "signal.verdicts",
        "verdicts are asked for, but train.advantage.verdict_weight is 0",
    )
    yield (
        bool(advantage.verdict_weight) and not signal.verdicts,
        "train.advantage.verdict_weight",
        "needs signal.verdicts = true",
    )
    yield (
        signal.hints and not (advantage.teacher_weight or loss.distillation),
        "signal.hints",
        "hints are asked for, but neither teacher_weight nor distillation uses them",
    )
    yield (
        bool(advantage.teacher_weight) and not signal.hints,
        "train.advantage.teacher_weight",
        "needs signal.hints = true",
    )
    yield bool(loss.distillation) and not signal.hints, "train.loss.distillation", "needs signal.hints = true"
    yield (
        bool(terms) and not loss.policy_gradient,
        "train.loss.policy_gradient",
        "is 0, so the weights of train.advantage have no effect",
    )
    yield (
        bool(loss.policy_gradient) and not terms,
        "train.loss.policy_gradient",
        "has no effect while all weights of train.advantage are 0",
    )
    yield (
        _changed(advantage, "teacher") and not signal.hints,
        "train.advantage.teacher",
        "has no effect without signal.hints",
    )
    yield (
        _changed(advantage, "opd_clip") and not advantage.teacher_weight,
        "train.advantage.opd_clip",
        "has no effect while teacher_weight is 0",
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
        "chooses by score, so it needs signal.verdicts = true",
    )
    yield (
        not signal.verdicts and signal.reward != "verdict",
        "signal.reward",
        "needs signal.verdicts = true",
    )
    yield (
        not signal.verdicts and _changed(signal, "votes"),
        "signal.votes",
        "has no effect without signal.verdicts",
    )
    yield (
        _changed(signal, "m") and signal.votes == "direct" and not signal.hints,
        "signal.m",
        "has no effect: a direct vote is one vote, and there are no hints",
    )
    yield (
        _changed(signal, "hints_needed") and not signal.hints,
        "signal.hints_needed",
        "has no effect without signal.hints",
    )
    yield (
        signal.hints_needed > signal.m,
        "signal.hints_needed",
        f"{signal.hints_needed}, but there are only signal.m = {signal.m} answers about a hint",
    )
    yield (
        _changed(signal, "judge_temperature") and signal.votes == "direct" and not signal.hints,
        "signal.judge_temperature",
        "has no effect: a direct vote is read at 1, and there are no hints",
    )
    yield (
        _changed(signal, "process_weight") and signal.reward != "outcome_process",
        "signal.process_weight",
        'needs reward = "outcome_process"',
    )
    yield (
        signal.baseline == "mean" and signal.reward == "group",
        "signal.baseline",
        "a group is its own baseline",
    )
    yield (
        signal.baseline == "mean" and signal.reward == "outcome_process",
        "signal.baseline",
        'is of verdicts; reward = "outcome_process" adds votes to an outcome',
    )
    yield (
        signal.baseline == "mean" and not signal.verdicts,
        "signal.baseline",
        "needs signal.verdicts = true",
    )
    yield (
        signal.hints and signal.reward != "verdict",
        "signal.hints",
        f'only verdicts count for reward = "{signal.reward}": it needs hints = false',
    )
    if signal.overlong is not None:
        yield not signal.verdicts, "signal.overlong", "is added to verdicts; needs signal.verdicts = true"
        yield (
            signal.overlong.cache_tokens > signal.overlong.limit_tokens,
            "signal.overlong.cache_tokens",
            "the slope does not fit below limit_tokens",
        )


def _of_loss(loss: Loss, train: Train) -> Iterator[tuple[bool, str, str]]:
    yield (
        not loss.policy_gradient and not loss.distillation,
        "train.loss",
        "neither policy_gradient nor distillation: nothing is trained",
    )
    for name in ("clip_low", "clip_high", "dual_clip", "correction"):
        yield (
            _changed(loss, name) and not loss.policy_gradient,
            f"train.loss.{name}",
            "has no effect while policy_gradient is 0",
        )
    yield (
        _changed(train.bounds, "kl") and not loss.kl,
        "train.bounds.kl",
        "has no effect while train.loss.kl is 0: the distance is not measured then",
    )
    yield (
        loss.dual_clip <= 1 + loss.clip_high,
        "train.loss.dual_clip",
        "must be above 1 + clip_high, else it undoes the clip",
    )
    yield (
        loss.correction == "decoupled" and train.optimiser.epochs == 1,
        "train.loss.correction",
        "with train.optimiser.epochs = 1 the decoupled ratio is always 1 and nothing is ever clipped",
    )
    # The same batch on the same checkpoint must give the same adapter, and the engine samples without dropout.
    yield train.lora.dropout > 0, "train.lora.dropout", "the trainer drops nothing out; set it to 0 or leave it out"


def _changed(table: BaseModel, name: str) -> bool:
    return bool(getattr(table, name) != type(table).model_fields[name].default)


def rejected(error: ValidationError, model: type[BaseModel]) -> RecipeRejected:
    """One problem pydantic found, as the key's own name and what was probably meant.

    An unknown key first: where one is misspelt, another is missing only because of that.
    """
    problem = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
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
    """The key of that name, but for its case, or of the same meaning; else the one with the nearest name."""
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
