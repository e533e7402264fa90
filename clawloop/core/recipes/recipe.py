"""A recipe: the immutable settings that learning depends on, in tables.

`[signal]` is what judging and sample making depend on: samples stay usable while its hash is the same. `[train]` is
what a step depends on, `[gate]` what its version must pass; `[lessons]` is what prompts hold. A recipe has weights of
loss parts and advantage terms, no method name; deploy/recipes/ holds one file for each known method, with its formula.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, model_validator

from clawloop.core.errors import RecipeRejected
from clawloop.core.recipes.gate import TOKEN_LIMIT
from clawloop.core.recipes.gate import Gate as Gate
from clawloop.core.recipes.lessons import Lessons as Lessons
from clawloop.core.recipes.schedule import Schedule as Schedule
from clawloop.core.recipes.schedule import read_hours, read_zone
from clawloop.core.recipes.table import Count, Positive, Table, Weight, as_rejection

HintChoice: TypeAlias = Literal["sequence_optimal", "token_optimal", "shortest", "longest"]
JudgeForm: TypeAlias = Literal["auto", "free", "grammar", "examples"]
MOST_HINTS: Final = 3
"""Hints kept of a turn; each costs the trainer one more reading of the reply."""
CONTROL: Final = MOST_HINTS
"""Place of the control among a turn's hinted prompts: after all hints' places."""
# A recipe's file mostly has its name: file systems allow 255 bytes, of which `.toml` takes five. Temporal takes such a
# name too.
_LONGEST_NAME = 250
_STORED: Final = {"stored": True}


class Overlong(Table):
    """Penalty on long replies, added to the reward of samples with a verdict."""

    limit_tokens: Count
    """Replies of this many tokens or more have a penalty of −1, as do replies cut by length."""
    cache_tokens: Count
    """Width in tokens of the slope below `limit_tokens`, on which the penalty falls from 0 to −1."""


class Signal(Table):
    """Settings of judging and sample making."""

    verdicts: bool = True
    """Ask a judge for verdicts, and learn from them. A user's own rating replaces the judge's verdict."""
    hints: bool = True
    """Learn from what should have been known: from hints of a judge, or from the user's next message itself, as
    `hints_from` says."""
    m: Annotated[int, Field(ge=1, le=64)] = 3
    """Number of sampled votes, and of answers about a hint, in each judgement; 1 to 64."""
    votes: Literal["sampled", "direct"] = "sampled"
    """`sampled`: the majority of m votes. `direct`: one vote, from the probabilities of a one-token answer without
    reasoning; m is then for hints only, and the judge must be one that answers by grammar."""
    hints_needed: Count = 1
    """Number of the m answers about a hint that must contain one; above 1, a hint of a single answer is not used."""
    judge_form: JudgeForm = "auto"
    """Form of sampled votes and hints. `auto`: a judge that can think thinks, then answers freely; a judge that cannot
    writes only an answer, by grammar, or takes the form that `clawloop judge try` found best. `free`, `grammar` and
    `examples` (direct votes after twelve examples, for a small model) force one form on every judge."""
    hints_from: Literal["user", "any", "message"] = "user"
    """Sources of hints. `user`: the user's words alone, so that nobody teaches the model through a file or web page
    that a tool reads. `any`: tool output too, for agents whose tools read no text of strangers. `message`: no judge;
    what the user says next is itself read in place of a hint, and users' ratings are the reward beside it."""
    judge_temperature: Positive = 0.6
    """Temperature of sampled votes and of hints; a direct vote is read at temperature 1."""
    reward: Literal["verdict", "group", "outcome_process"] = "verdict"
    """The reward of a reply: its `verdict`; in a `group`, its verdict relative to the other responses to the prompt;
    with `outcome_process`, outcome + λ · mean vote."""
    process_weight: Weight = 1.0
    """λ, the weight of the mean vote beside the outcome; only with `outcome_process`."""
    baseline: Literal["none", "mean"] = "none"
    """`mean`: the policy's mean verdict so far is subtracted from verdicts other than 0; `none`: nothing is
    subtracted."""
    at_least_one: bool = True
    """A session that closes with judged turns but without a sample gives its turn with the clearest score as a
    sample."""
    overlong: Overlong | None = None
    episode_advantage: Literal["episode", "step"] = "episode"
    """Comparison of an episode's turns: with whole `episode`s of its group, so that all its turns have the same
    advantage, or only with the turns of the other episodes at the same index (`step`, which the recipe
    `outcome_process` has); a turn at an index that no other episode reached has its reward as it is."""

    @property
    def asks_for_hints(self) -> bool:
        """True if a judge is asked for hints."""
        return self.hints and self.hints_from != "message"

    @property
    def teaches_by_message(self) -> bool:
        """True if what the user says next is read in place of a hint."""
        return self.hints and self.hints_from == "message"

    @property
    def learns_from_words(self) -> bool:
        """True if a reply is judged by what its user says and rates alone, and not by what tools print."""
        return self.teaches_by_message and not self.verdicts

    @property
    def asks_judge(self) -> bool:
        """True if a judge is asked anything."""
        return self.verdicts or self.asks_for_hints

    @property
    def takes_ratings(self) -> bool:
        """True if a user's rating is the reward of a reply."""
        return self.verdicts or self.teaches_by_message


class Advantage(Table):
    """The terms of a token's advantage."""

    verdict_weight: Weight = 1.0
    """Weight of the reward, the same for each token of a reply; 0 leaves it out."""
    teacher_weight: Weight = 1.0
    """Weight of the teacher's gap, log π_T − log π_v of each token in nats; 0 leaves it out."""
    opd_clip: Positive = 2.0
    """The teacher's gap is clipped to ± this, in nats."""
    centre_gap: bool = False
    """Subtract from the teacher's gap its mean over the reply before it is clipped, so that what moves all tokens alike
    teaches nothing; of `train.distillation` the mean of the gaps that its ids are expected to have."""
    control: bool = False
    """Compare what a hint changes with what one changes that says nothing (`control`): the teacher is the version that
    answered, moved by the difference. A small model is moved by any hint, and learns that too. The reply is read once
    more."""
    teacher: Literal["policy", "base"] = "policy"
    """The teacher that reads the hint: `policy`, the version that answered, or the `base` model, which undoes what was
    learned."""
    spare_unlikely: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Reduction of a negative advantage for unlikely tokens: A < 0 is multiplied by 1 − this·(1 − μ); 0 to 1."""


class Distillation(Table):
    """Comparison of student and teacher over whole distributions."""

    top_k: Count = 50
    """Number of ids compared at each position, all others as one bin; less than the model's vocabulary."""
    top_k_of: Literal["student", "teacher", "overlap"] = "student"
    """Most likely ids to compare: those of the `student`, the version that answered; of the `teacher`, the same version
    with the hint; or the `overlap`, those of both, only with `divergence = "clipped"`."""
    divergence: Literal["reverse", "forward", "clipped"] = "reverse"
    """`reverse`: KL(student ‖ teacher). `forward`: KL(teacher ‖ student), which also relearns tokens that the student
    no longer produces, where they are among the compared ids. `clipped`: the clipped policy gradient over these ids,
    each with a ratio of its own and the teacher's gap as its advantage, at most ± `train.advantage.opd_clip`."""
    hint_choice: HintChoice = "sequence_optimal"
    """The hint that teaches, of those of a turn: the one whose reader has most of the top_k ids in common with the
    version that answered, over the reply (`sequence_optimal`) or at each token (`token_optimal`); or the `shortest`,
    or the `longest`. The reply is read once behind each hint that may be chosen."""

    hint_distance: Positive | None = None
    """A hint, or next message, that moves the reply's distributions further than this does not teach: mean KL of
    teacher and version that answered over the reply's tokens, in nats. It asks for another reply altogether, so it says
    little about this one. Depends on the model: on SmolLM2-135M requests that came next are mostly beyond 0.16, and
    complaints below. Unset, everything teaches."""

    spare_end: bool = False
    """Keep the tokens that end a turn or thinking out of the teacher's gap: a teacher that has read the hint may find
    them less likely, and a model that learns that never ends. In a replication every run with hints ended so, and none
    without; here the effect is not measured."""


class Loss(Table):
    """Weighted parts of the loss, and how tokens are clipped and averaged."""

    policy_gradient: Weight = 1.0
    """Weight of the clipped policy gradient; 0 leaves it out."""
    distillation: Weight = 0.0
    """Weight of the divergence from the teacher over whole distributions; 0 leaves it out."""
    kl: Weight = 0.02
    """Weight of the KL loss to the base model, k2; with 0 the distance is not measured either."""
    entropy: Weight = 0.0
    """Weight of a bonus for the entropy of each token's distribution, in nats; 0 leaves it out."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """For A < 0 a ratio under 1 − this gives no gradient."""
    clip_high: Weight = 0.28
    """For A > 0 a ratio over 1 + this gives no gradient."""
    dual_clip: Positive = 3.0
    """For A < 0 a ratio over this gives no gradient; above 1 + clip_high."""
    correction: Literal["none", "decoupled"] = "none"
    """`none`: ρ = π_θ/μ. `decoupled`: ρ = π_θ/π_0, times min(2, π_0/μ), π_0 as the step began; for several epochs, and
    where engine and trainer compute differently, e.g. with quantised weights."""
    aggregation: Literal["token", "sequence"] = "token"
    """Unit of equal weight in a step: each trained `token`, or each sample (`sequence`); all samples of an episode are
    one sequence."""


class Lora(Table):
    """Shape of the LoRA adapter on the seven projections q, k, v, o, gate, up and down."""

    rank: Count = 16
    """Rank of the adapter; `CLAWLOOP_MAX_LORA_RANK` at most."""
    alpha: Positive = 32.0
    """The adapter's product B·A is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Must be 0: dropout is not supported."""


class Optimiser(Table):
    """AdamW."""

    lr: Positive = 1e-4
    """Learning rate of AdamW, the same at every step."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate of AdamW's mean of gradients."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.98
    """Decay rate of AdamW's mean of squared gradients; the nearer to 1, the slower it forgets."""
    epsilon: Positive = 1e-8
    """Added to AdamW's divisor, the root of its mean of squared gradients. By default each weight moves by about lr at
    each step, also where its gradient is nothing but noise. With a value well above most gradients (the root mean
    square of a clipped one is grad_clip divided by the root of the number of weights) a weight moves in proportion to
    its gradient; lr is then to be larger."""
    weight_decay: Weight = 0.1
    """An update shrinks the adapter's weights by lr times this."""
    grad_clip: Positive = 1.0
    """A gradient with a larger norm is scaled down to this norm."""
    epochs: Count = 1
    """Number of passes of a step over its batch, with one update each."""


class Bounds(Table):
    """Limits beyond which a step makes no version; far above healthy values.

    Both figures are unbounded for a single token, so a token counts twice the bound at most: the mean exceeds the bound
    only if a large part of the tokens does.
    """

    kl: Positive = 10.0
    """A step makes no version above this mean distance of its tokens to the base model, in nats as k3 estimates it; a
    token counts twice this at most."""
    ratio: Positive = 10.0
    """A step makes no version above this mean π_θ/μ of its tokens, 1 when nothing has changed since they were sampled;
    a token counts twice this at most."""


class Train(Table):
    """Settings of a training step."""

    batch_samples: Annotated[int, Field(ge=1, le=10_000)] = 16
    """Number of samples of a step; 10,000 at most, since one claim looks at no more."""
    max_wait_hours: Annotated[float, Field(gt=0, le=87_600)] = 24.0
    """A smaller batch is claimed once its oldest sample has waited this long; ten years at most, so that the time is a
    valid date."""
    staleness_versions: Annotated[int, Field(ge=0)] = 4
    """A sample from next-state evidence expires when its version is more steps than this from the head; explicit
    feedback never does."""
    corrected_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of a batch's chat samples that are blamed or have a hint, below which no step is made of it: its praised
    samples expire, with the reason, and the others wait for the next batch. A recipe that learns from next messages
    counts the rated replies alone, from two on, and expires all that are not blamed: what is liked where it was rated
    is mostly liked where it was not. By `hindsight` SmolLM2-135M lost what it knows once most replies were
    praised: docs/results.md. 0 trains every batch."""
    batch_groups: Annotated[int, Field(ge=1, le=1_000)] = 8
    """Number of rollout groups of a step that learns from episodes; it takes all samples of a group or none, and none
    of a chat."""
    group_staleness_versions: Annotated[int, Field(ge=0)] = 8
    """A rollout group expires as a whole when the version of its oldest turn is more steps than this from the head."""
    drift: Positive = 1.0
    """Explicit feedback is dropped when the mean absolute log ρ over its response exceeds this, in nats."""
    train_thinking: bool = True
    """Must be true: thinking tokens cannot be distinguished from others, so they are trained like them."""
    kept_versions: Annotated[int, Field(ge=1, le=10_000)] = 3
    """Number of the newest versions on the path to the head that keep their files, for a roll-back; older ones are
    deleted once nothing needs them. 10,000 at most."""
    token_moves: bool = False
    """Store by how much a step changed the log-probability of each token it trained, in nats, 4 bytes a token. The
    trained replies are read once more with the new version, which the gate's numbers need anyway."""
    advantage: Advantage = Advantage()
    distillation: Distillation = Distillation()
    loss: Loss = Loss()
    lora: Lora = Lora()
    optimiser: Optimiser = Optimiser()
    bounds: Bounds = Bounds()
    schedule: Schedule | None = None

    @property
    def uses_rewards(self) -> bool:
        """True if a sample's reward gives it a gradient."""
        return self.loss.policy_gradient > 0 and self.advantage.verdict_weight > 0

    @property
    def uses_hints(self) -> bool:
        """True if a sample's hint gives it a gradient, so that a teacher has to score the hinted prompt."""
        return self.loss.distillation > 0 or self.uses_gap

    @property
    def uses_gap(self) -> bool:
        """True if the teacher's gap at the sampled tokens is trained."""
        return self.loss.policy_gradient > 0 and self.advantage.teacher_weight > 0

    def documents_read(self, places: Iterable[int]) -> tuple[int, ...]:
        """The places of a sample's hinted prompts behind which the reply is read: `places_read` and the control's."""
        given = set(places)
        read = self.places_read(given)
        return (*read, CONTROL) if read and self.advantage.control and CONTROL in given else read

    def places_read(self, places: Iterable[int]) -> tuple[int, ...]:
        """The hints of a sample behind which the reply is read, by their places: 0 is the longest."""
        known = sorted(set(places) - {CONTROL}) if self.uses_hints else []
        if self.loss.distillation > 0 and self.distillation.hint_choice == "shortest":
            return tuple(known[-1:])
        chosen_by_overlap = self.loss.distillation > 0 and self.distillation.hint_choice != "longest"
        return tuple(known if chosen_by_overlap else known[:1])

    def teacher_version(self, version: int) -> int:
        """The version that teaches a sample with a hint; 0 is the base model.

        Args:
            version: the version that answered.
        """
        return 0 if self.advantage.teacher == "base" else version

    def versions_read(self, version: int) -> frozenset[int]:
        """The versions that score a sample with a hint before it is trained; none if the recipe uses no hints.

        Args:
            version: the version that answered.
        """
        if not self.uses_hints:
            return frozenset()
        return frozenset({self.teacher_version(version), version})


class Recipe(Table):
    """One recipe; `signal.hash` and `train.hash` identify its tables, `hash` the whole."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    """A name for people, mostly the file's without `.toml`: lower-case letters, digits and `_`, a letter first; 250
    characters at most in a new recipe."""
    signal: Signal = Signal()
    train: Train = Train()
    gate: Gate = Gate()
    lessons: Lessons = Lessons()

    @model_validator(mode="after")
    def _check_consistency(self, info: ValidationInfo) -> Self:
        # RecipeRejected is no ValueError, so pydantic passes it on unchanged, with its field.
        problems = [*_unsupported_settings(self), *(() if info.context is _STORED else _contradictions(self))]
        if problems:
            raise RecipeRejected.of(problems)
        return self


def held_out_share(content: Mapping[str, Any]) -> float:
    """The held-out share of a stored recipe, also of one that cannot be used any more."""
    return float(content["gate"]["held_out"])


def read_recipe(text: str, name: str | None = None) -> Recipe:
    """A recipe from TOML.

    Args:
        name: of a recipe that says none.

    Raises:
        RecipeRejected: not TOML; an unknown or missing key, a wrong value, or keys that contradict each
            other. It names the dotted key and the nearest valid one.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeRejected(f"not TOML: {error}") from error
    return parse_recipe(content if name is None else {"name": name, **content})


def parse_recipe(content: Mapping[str, object]) -> Recipe:
    """A recipe from plain data, as parsed from TOML or JSON.

    Raises:
        RecipeRejected: see `read_recipe`.
    """
    return _parsed(content, None)


def parse_stored_recipe(content: Mapping[str, object]) -> Recipe:
    """A recipe from the database, checked when it was set: contradictions that are only rejected since are accepted.

    Raises:
        RecipeRejected: it asks for something the trainer does not support.
    """
    return _parsed(content, _STORED)


def _parsed(content: Mapping[str, object], context: Mapping[str, bool] | None) -> Recipe:
    try:
        return Recipe.model_validate(content, context=context)
    except ValidationError as error:
        raise as_rejection(error, Recipe) from error


def load_recipe(path: Path) -> Recipe:
    """A recipe from a TOML file; without `name` the file's name is the recipe's.

    Raises:
        RecipeRejected: see `read_recipe`; also if the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeRejected(f"{path} cannot be read: {error}") from error
    name = re.sub(r"[^a-z0-9]+", "_", path.stem.lower()).strip("_")
    return read_recipe(text, name if re.match("[a-z]", name) else None)


def toml_of(recipe: Recipe) -> str:
    """One dotted key a line, all keys with their values."""
    content = recipe.model_dump(mode="json", exclude_none=True)
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in _dotted(content))


def _dotted(content: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _dotted(value, f"{key}.")
        else:
            yield key, value


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


def _contradictions(recipe: Recipe) -> Iterator[RecipeRejected]:
    """Each contradiction between keys, with the key to change; also a name too long for a file.

    A key that would have no effect is rejected as well: whoever set it expected an effect. A key at its default is
    accepted, so that a stored recipe, which has all keys filled in, can be read again.
    """
    signal, train = recipe.signal, recipe.train
    if (length := len(recipe.name)) > _LONGEST_NAME:
        problem = f"{length} characters, but {_LONGEST_NAME} at most: it is mostly a file name too"
        yield RecipeRejected(problem, field="name")
    of_tables = (
        *_of_terms(signal, train),
        *_of_signal(signal),
        *_of_loss(train.loss, train),
        *_of_gate(recipe),
        *_of_lessons(recipe),
    )
    for holds, field, problem in of_tables:
        if holds:
            yield RecipeRejected(problem, field=field)
    if train.schedule is not None:
        yield from _of_schedule(train.schedule)


def _unsupported_settings(recipe: Recipe) -> Iterator[RecipeRejected]:
    """Settings that the trainer cannot follow, in new and in stored recipes."""
    if not recipe.train.train_thinking:
        # The ids that open and close a model's thinking are not recorded.
        yield RecipeRejected(
            "false is not supported: thinking tokens cannot be distinguished from others; set it to true or remove it",
            field="train.train_thinking",
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
        bool(advantage.verdict_weight) and not signal.takes_ratings,
        "train.advantage.verdict_weight",
        'needs signal.verdicts = true, or signal.hints_from = "message" for ratings, or set it to 0',
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
    is_clipped = bool(loss.distillation) and train.distillation.divergence == "clipped"
    yield (
        _changed(advantage, "opd_clip") and not (advantage.teacher_weight or is_clipped),
        "train.advantage.opd_clip",
        "has no effect while train.advantage.teacher_weight is 0, unless the divergence that is trained is clipped",
    )
    yield (
        advantage.centre_gap and not (advantage.teacher_weight or is_clipped),
        "train.advantage.centre_gap",
        "has no effect while train.advantage.teacher_weight is 0, unless the divergence that is trained is clipped",
    )
    yield (
        advantage.control and not (advantage.teacher_weight or loss.distillation),
        "train.advantage.control",
        "has no effect without a teacher: raise train.advantage.teacher_weight or train.loss.distillation",
    )
    yield (
        advantage.control and _changed(advantage, "teacher"),
        "train.advantage.control",
        'needs train.advantage.teacher = "policy": the control is read by the version that answered',
    )
    yield (
        bool(loss.distillation) and _changed(advantage, "teacher"),
        "train.advantage.teacher",
        'must be "policy" while train.loss.distillation is above 0: the version that answered is compared with itself',
    )
    yield (
        bool(loss.distillation) and train.distillation.top_k_of == "overlap" and not is_clipped,
        "train.distillation.top_k_of",
        '"overlap" needs train.distillation.divergence = "clipped"',
    )
    yield (
        train.distillation.spare_end and bool(loss.distillation) and not is_clipped,
        "train.distillation.spare_end",
        'needs train.distillation.divergence = "clipped": a whole distribution has no gap of single tokens',
    )
    yield (
        train.distillation.spare_end and advantage.centre_gap and bool(advantage.teacher_weight),
        "train.distillation.spare_end",
        "must be false with train.advantage.centre_gap at sampled tokens: centring would move the tokens it spares",
    )
    yield (
        train.distillation.spare_end and not train.uses_hints,
        "train.distillation.spare_end",
        "has no effect without a teacher: raise train.advantage.teacher_weight or train.loss.distillation",
    )
    yield (
        _changed(advantage, "spare_unlikely") and not loss.policy_gradient,
        "train.advantage.spare_unlikely",
        "has no effect while train.loss.policy_gradient is 0",
    )
    yield (
        bool(train.corrected_share) and signal.reward != "verdict",
        "train.corrected_share",
        f'must be 0 with signal.reward = "{signal.reward}": it compares replies, so that some are blamed always',
    )
    kept = train.distillation.model_copy(update={"spare_end": False})
    yield (
        kept != Distillation() and not loss.distillation,
        "train.distillation",
        "has no effect while train.loss.distillation is 0",
    )


def _of_signal(signal: Signal) -> Iterator[tuple[bool, str, str]]:
    samples_answers = signal.asks_for_hints or (signal.verdicts and signal.votes == "sampled")
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
        _changed(signal, "m") and signal.votes == "direct" and not signal.asks_for_hints,
        "signal.m",
        "has no effect: a direct vote is a single vote, and no judge is asked for hints",
    )
    yield _changed(signal, "m") and not signal.asks_judge, "signal.m", "has no effect: no judge is asked"
    yield (
        _changed(signal, "hints_needed") and not signal.asks_for_hints,
        "signal.hints_needed",
        "has no effect: no judge is asked for hints",
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
        _changed(signal, "judge_temperature") and not samples_answers,
        "signal.judge_temperature",
        "has no effect: there are neither sampled votes nor hints of a judge",
    )
    yield (
        _changed(signal, "judge_form") and not samples_answers,
        "signal.judge_form",
        "has no effect: there are neither sampled votes nor hints of a judge",
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
    is_clipped = bool(loss.distillation) and train.distillation.divergence == "clipped"
    for name in ("clip_low", "clip_high", "dual_clip", "correction"):
        yield (
            _changed(loss, name) and not (loss.policy_gradient or (is_clipped and name != "correction")),
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


def _of_lessons(recipe: Recipe) -> Iterator[tuple[bool, str, str]]:
    lessons, signal = recipe.lessons, recipe.signal
    for name in ("max_tokens", "shared", "from_corrections", "practice", "retire"):
        yield (
            _changed(lessons, name) and not lessons.enabled,
            f"lessons.{name}",
            "has no effect while lessons.enabled is false",
        )
    yield (
        lessons.from_corrections and not signal.hints,
        "lessons.from_corrections",
        "needs signal.hints = true: what a user corrects is known as a hint",
    )
    yield (
        lessons.from_corrections and signal.hints_from == "any",
        "lessons.from_corrections",
        'must be false with signal.hints_from = "any": what a tool printed must not become a lesson',
    )
    yield (
        lessons.practice and not recipe.train.uses_hints,
        "lessons.practice",
        "needs train.loss.distillation or train.advantage.teacher_weight above 0: the policy with the lessons teaches",
    )
    yield (
        lessons.practice and recipe.train.distillation.hint_distance is not None,
        "train.distillation.hint_distance",
        "leave it out with lessons.practice: a lesson moves the whole reply, and would never teach",
    )
    yield (
        lessons.retire and lessons.enabled and not lessons.practice,
        "lessons.retire",
        "needs lessons.practice = true: lessons are learned by practice only",
    )


def _changed(table: BaseModel, name: str) -> bool:
    return bool(getattr(table, name) != type(table).model_fields[name].default)


DEFAULT_RECIPE: Final = Recipe(
    name="hybrid",
    train=Train(
        advantage=Advantage(verdict_weight=0.1, teacher_weight=0.0, opd_clip=1.0, control=True, spare_unlikely=1.0),
        distillation=Distillation(top_k=4, divergence="clipped"),
        loss=Loss(kl=0.02, distillation=1.0),
        optimiser=Optimiser(lr=1e-3, beta1=0.5, epsilon=1e-4, grad_clip=0.05),
        corrected_share=0.25,
    ),
    gate=Gate(held_out=0.1, lr_backoff=0.25),
)
"""The recipe of a new policy; equals deploy/recipes/hybrid.toml."""

WITHOUT_JUDGE: Final = Recipe(
    name="hindsight",
    signal=Signal(verdicts=False, hints_from="message", at_least_one=False),
    train=DEFAULT_RECIPE.train.model_copy(
        update={
            "batch_samples": 8,
            "distillation": DEFAULT_RECIPE.train.distillation.model_copy(update={"hint_distance": 0.16}),
        }
    ),
    gate=DEFAULT_RECIPE.gate.model_copy(update={"held_out": 0.0}),
)
"""That of a new policy whose judge would be too weak; equals deploy/recipes/hindsight.toml."""
