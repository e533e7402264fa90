"""Steps on a model in memory: each begins from its parent's files, whatever came before it."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from torch.utils.checkpoint import checkpoint

from clawloop.core.adapters.directory import WEIGHTS_FILE
from clawloop.core.contracts.training import BatchSample, VersionRef, YardstickReply
from clawloop.core.errors import (
    AdapterUnreadable,
    AdapterUnusable,
    DiskFull,
    NothingToTrain,
    RecipeRejected,
    SetupError,
    StepDiverged,
    TrainerUnavailable,
)
from clawloop.core.gate.checks import MIN_TURNS
from clawloop.core.ids import new_sample_id
from clawloop.core.recipes.recipe import Bounds, Distillation, Lora, Loss, Optimiser, Recipe
from clawloop.training import step_runner
from clawloop.training.adapters import files
from clawloop.training.model import decoder
from clawloop.training.model.port import PolicyModel
from clawloop.training.ranks import ignore_status
from clawloop.training.scoring import score_replies
from clawloop.training.step_runner import StepRunner
from tests.training.steps import (
    RECIPE,
    ROUNDED_GRADIENT,
    Reported,
    completed,
    gradient_error,
    never,
    samples_of,
    setup_of,
    step_of,
)
from tests.training.tiny import VOCAB, save_checkpoint


@pytest.fixture(scope="module")
def batches(qwen3: Path) -> dict[int, list[BatchSample]]:
    return {n: samples_of(qwen3, n) for n in (1, 2, 3)}


def take(
    model: StepRunner, samples: list[BatchSample], n: int, parent: VersionRef | None, **named: object
) -> VersionRef:
    step = step_of(samples, n, parent, **named)  # type: ignore[arg-type]
    return completed(model.train(step, ignore_status, never)).version


def test_steps_of_several_policies_on_one_model_do_not_influence_each_other(
    qwen3: Path, batches: dict[int, list[BatchSample]], tmp_path: Path
) -> None:
    alone = StepRunner(setup_of(qwen3, tmp_path / "alone"))
    first = take(alone, batches[1], 1, None)
    second = take(alone, batches[2], 2, first)
    shared = StepRunner(setup_of(qwen3, tmp_path / "shared"))
    other = take(shared, batches[3], 1, None, policy="other")
    again = take(shared, batches[1], 1, None)
    other = take(shared, batches[1], 2, other, policy="other")
    assert again == first
    assert take(shared, batches[2], 2, again) == second
    assert first.path == f"default/v1-{first.sha256[:12]}"
    assert (tmp_path / "shared" / other.path / "adapter_model.safetensors").exists()
    # A policy's first adapter is its own.
    assert take(shared, batches[1], 1, None, policy="third").sha256 != first.sha256


def test_a_step_is_not_begun_without_room_for_its_version(
    qwen3: Path, batches: dict[int, list[BatchSample]], tmp_path: Path
) -> None:
    setup = setup_of(qwen3, tmp_path / "adapters").model_copy(update={"kept_free_bytes": 2**60})
    with pytest.raises(DiskFull, match=r"kept free for chats: make room, or lower CLAWLOOP_MIN_FREE_DISK_GIB"):
        StepRunner(setup).train(step_of(batches[1], 1, None), ignore_status, never)
    assert list((tmp_path / "adapters").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "raised"),
    [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, TrainerUnavailable)],
    ids=["full", "over quota", "broken"],
)
def test_a_version_that_cannot_be_written_says_whether_the_disk_is_full(
    qwen3: Path,
    batches: dict[int, list[BatchSample]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    raised: type[Exception],
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "_write_file", fail)
    with pytest.raises(raised, match="version 1 cannot be written"):
        StepRunner(setup_of(qwen3, tmp_path)).train(step_of(batches[1], 1, None), ignore_status, never)
    assert list((tmp_path / "default").iterdir()) == []


def test_a_failed_step_does_not_change_the_next_one(
    qwen3: Path, batches: dict[int, list[BatchSample]], tmp_path: Path
) -> None:
    undisturbed = StepRunner(setup_of(qwen3, tmp_path / "undisturbed"))
    expected = take(undisturbed, batches[2], 2, take(undisturbed, batches[1], 1, None))
    model = StepRunner(setup_of(qwen3, tmp_path / "interrupted"))
    first = take(model, batches[1], 1, None)
    # Two epochs, the second of which is out of bounds: the weights in memory have moved by then.
    wild = RECIPE.model_copy(
        update={
            "train": RECIPE.train.model_copy(
                update={"optimiser": Optimiser(lr=0.5, epochs=3), "bounds": Bounds(kl=0.1)},
            )
        }
    )
    with pytest.raises(StepDiverged, match=r"KL|ratio"):
        model.train(step_of(batches[3], 2, first, recipe=wild), ignore_status, never)
    reported = Reported()
    stops_at = "step 2: training, micro-batch 3 of 5"
    with pytest.raises(TrainerUnavailable, match="between two micro-batches"):
        model.train(step_of(batches[2], 2, first), reported, lambda: reported[-1:] == [stops_at])
    assert not list((tmp_path / "interrupted" / "default").glob("v2-*"))
    assert take(model, batches[2], 2, first) == expected
    # Killed after the rename, before the commit: the files are there already.
    assert take(model, batches[2], 2, first) == expected


def test_a_sample_that_cannot_be_trained_is_left_out_with_its_reason(
    qwen3: Path, batches: dict[int, list[BatchSample]], tmp_path: Path
) -> None:
    model = StepRunner(setup_of(qwen3, tmp_path, max_tokens=60))
    given = batches[1]
    bad = {
        "vocabulary": replace(given[0], response_ids=[9999] * len(given[0].response_ids)),
        "tokens, the trainer takes 60": replace(given[1], prompt_ids=[1] * 60),
        "log-probs of length": replace(given[2], logprobs=[-1.0] * 99),
        "73 tokens, the trainer takes 60": replace(given[3], hinted_prompts={0: [1] * 52}, reward=None),
    }
    trained = completed(model.train(step_of([*bad.values(), *given[4:]], 1), ignore_status, never))
    assert len(trained.figures.samples) == 5
    for (reason, sample), found in zip(bad.items(), trained.figures.dropped.values(), strict=True):
        assert reason in found
        assert sample.sample_id in trained.figures.dropped
    without = completed(StepRunner(setup_of(qwen3, tmp_path / "b")).train(step_of(given[4:], 1), ignore_status, never))
    assert trained.version.sha256 == without.version.sha256
    with pytest.raises(NothingToTrain, match="no sample of 4 can be trained: "):
        model.train(step_of(list(bad.values()), 1), ignore_status, never)


def test_a_sample_whose_hint_is_too_long_is_trained_on_its_verdict(
    qwen3: Path, batches: dict[int, list[BatchSample]], tmp_path: Path
) -> None:
    hinted = next(place for place, sample in enumerate(batches[1]) if sample.hinted_prompts and sample.reward)
    trained = []
    for name, hint in (("long", {0: [1] * 60}), ("none", dict[int, list[int]]())):
        samples = [*batches[1]]
        samples[hinted] = replace(samples[hinted], hinted_prompts=hint)
        model = StepRunner(setup_of(qwen3, tmp_path / name, max_tokens=60))
        trained.append(completed(model.train(step_of(samples, 1), ignore_status, never)))
    assert [step.figures.dropped for step in trained] == [{}, {}]
    assert trained[0].version.sha256 == trained[1].version.sha256
    ((sample, why),) = trained[0].figures.without_hint.items()
    assert sample == batches[1][hinted].sample_id
    assert why.endswith("tokens, the trainer takes 60")
    assert trained[1].figures.without_hint == {}


def test_an_unusable_adapter_is_refused_with_the_reason(
    qwen3: Path, batches: dict[int, list[BatchSample]], tmp_path: Path
) -> None:
    model = StepRunner(setup_of(qwen3, tmp_path))
    first = take(model, batches[1], 1, None)
    wider = RECIPE.model_copy(update={"train": RECIPE.train.model_copy(update={"lora": Lora(rank=8, alpha=8.0)})})
    with pytest.raises(AdapterUnusable, match=r"version 1 has LoRA of rank 4.*asks for rank 8.*roll back"):
        model.train(step_of(batches[2], 2, first, recipe=wider), ignore_status, never)
    # From version 0 any shape can begin.
    take(model, batches[2], 2, None, recipe=wider)
    other = StepRunner(setup_of(save_checkpoint(tmp_path / "other", seed=1), tmp_path))
    with pytest.raises(AdapterUnusable, match="another tiny"):
        take(other, batches[2], 2, first)
    with pytest.raises(AdapterUnusable, match=r"holds .*, expected 0000"):
        take(model, batches[2], 2, replace(first, sha256="0" * 64))
    hinted = [replace(sample, version=1) for sample in batches[3]]
    with pytest.raises(AdapterUnusable, match="version 1 is the teacher of a hint"):
        model.train(step_of(hinted, 3), ignore_status, never)


def test_a_step_waits_for_a_disk_that_is_gone(
    qwen3: Path, batches: dict[int, list[BatchSample]], tmp_path: Path
) -> None:
    model = StepRunner(setup_of(qwen3, tmp_path))
    first = take(model, batches[1], 1, None)
    folder = (tmp_path / first.path).parent
    gone = folder.rename(tmp_path / "gone")
    with pytest.raises(AdapterUnreadable, match="cannot be read: No such file"):
        take(model, batches[2], 2, first)
    gone.rename(folder)
    weights = tmp_path / first.path / WEIGHTS_FILE
    content = weights.read_bytes()
    weights.unlink()
    weights.mkdir()  # what the disk says is not that there is no such file
    with pytest.raises(AdapterUnreadable, match="cannot be read: Is a directory"):
        take(model, batches[2], 2, first)
    weights.rmdir()
    weights.write_bytes(content)
    assert take(model, batches[2], 2, first).n == 2


def test_an_earlier_version_is_the_teacher_of_its_own_answers(
    qwen3: Path, batches: dict[int, list[BatchSample]], tmp_path: Path
) -> None:
    model = StepRunner(setup_of(qwen3, tmp_path))
    first = take(model, batches[1], 1, None)
    second = take(model, batches[2], 2, first)
    by_base = take(model, batches[3], 3, second)
    answered = [replace(sample, version=1) for sample in batches[3]]
    by_first = take(model, answered, 3, second, teachers={1: first})
    assert by_first.sha256 != by_base.sha256
    shutil.rmtree(tmp_path / first.path)
    with pytest.raises(AdapterUnusable, match="cannot be read"):
        take(model, answered, 3, second, teachers={1: first})


def test_a_model_is_loaded_again_when_its_files_change(batches: dict[int, list[BatchSample]], tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base")
    model = StepRunner(setup_of(base, tmp_path / "adapters"))
    first = take(model, batches[1], 1, None)
    save_checkpoint(base, seed=1)
    assert take(model, batches[1], 1, None).sha256 != first.sha256
    with pytest.raises(AdapterUnusable, match="another tiny"):
        take(model, batches[2], 2, first)


@pytest.mark.parametrize(("beyond", "again"), [(0, True), (10_000, False)])
def test_a_step_computes_layers_again_as_its_setup_says(
    beyond: int,
    again: bool,
    qwen3: Path,
    batches: dict[int, list[BatchSample]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[object] = []

    def noted(function: Callable[..., object], *arguments: object, **named: Any) -> object:
        computed.append(function)
        return checkpoint(function, *arguments, **named)

    monkeypatch.setattr(decoder, "checkpoint", noted)
    take(StepRunner(setup_of(qwen3, tmp_path, recompute_beyond=beyond)), batches[1], 1, None)
    assert any(isinstance(function, decoder.TransformerSelfAttentionLayer) for function in computed) == again


def test_a_policy_of_another_base_waits_for_its_own_trainer(
    qwen3: Path, batches: dict[int, list[BatchSample]], tmp_path: Path
) -> None:
    model = StepRunner(setup_of(qwen3, tmp_path))
    with pytest.raises(TrainerUnavailable, match=r"has 'tiny', the policy's base is 'Qwen/Qwen3-4B'.*--base-model"):
        take(model, batches[1], 1, None, base_model="Qwen/Qwen3-4B")
    by_folder = setup_of(qwen3, tmp_path, base_model=None)
    by_folder.require_base(qwen3.name)
    by_folder.require_base(f"someone/{qwen3.name}")
    with pytest.raises(TrainerUnavailable):
        by_folder.require_base("tiny")


def test_unusable_settings_are_refused_with_the_reason(tmp_path: Path, qwen3: Path) -> None:
    with pytest.raises(SetupError, match=r"--model: .* has no readable config.json"):
        setup_of(tmp_path, tmp_path).check()
    (tmp_path / "config.json").write_text((qwen3 / "config.json").read_text())
    with pytest.raises(SetupError, match=r"neither model.safetensors"):
        setup_of(tmp_path, tmp_path).check()


def test_a_top_k_not_below_the_vocabulary_size_is_refused_with_its_key(
    qwen3: Path, batches: dict[int, list[BatchSample]], tmp_path: Path
) -> None:
    model = StepRunner(setup_of(qwen3, tmp_path))

    def comparing(top_k: int) -> Recipe:
        train = RECIPE.train.model_copy(
            update={"loss": Loss(policy_gradient=0.0, distillation=1.0), "distillation": Distillation(top_k=top_k)}
        )
        return Recipe.model_construct(name="topk", signal=RECIPE.signal, train=train)

    for top_k in (VOCAB, VOCAB + 7):
        with pytest.raises(RecipeRejected, match=r"recipe set.*training resume") as raised:
            model.train(step_of(batches[1], 1, recipe=comparing(top_k)), ignore_status, never)
        assert raised.value.field == "train.distillation.top_k"
    assert completed(
        model.train(step_of(batches[1], 1, recipe=comparing(VOCAB - 1)), ignore_status, never)
    ).figures.samples


def test_a_recipe_without_a_reference_or_hints_takes_steps(
    qwen3: Path, batches: dict[int, list[BatchSample]], tmp_path: Path
) -> None:
    plain = Recipe(name="plain", train=RECIPE.train.model_copy(update={"loss": Loss(kl=0.0)}))
    model = StepRunner(setup_of(qwen3, tmp_path))
    trained = completed(model.train(step_of(batches[1], 1, recipe=plain), ignore_status, never))
    assert trained.figures.kl is None
    assert trained.figures.tokens == sum(len(sample.response_ids) for sample in batches[1])


def held_out_turns(samples: Sequence[BatchSample]) -> list[BatchSample]:
    """As many as a replay needs, each of a session of its own."""
    return [
        replace(sample, reward=1.0 if place % 2 else -1.0, sample_id=new_sample_id(), unit=uuid4())
        for place, sample in zip(range(MIN_TURNS), itertools.cycle(samples), strict=False)
    ]


def test_held_out_turns_are_scored_under_parent_and_version_and_change_no_step(
    qwen3: Path, batches: dict[int, list[BatchSample]], tmp_path: Path
) -> None:
    without = StepRunner(setup_of(qwen3, tmp_path / "without"))
    first = take(without, batches[1], 1, None)
    second = take(without, batches[2], 2, first)
    runner = StepRunner(setup_of(qwen3, tmp_path / "with"))
    assert take(runner, batches[1], 1, None) == first
    held_out = held_out_turns(batches[3])
    too_long = replace(held_out[0], prompt_ids=[1] * 10_000, sample_id=new_sample_id())
    step = replace(step_of(batches[2], 2, first), held_out=[*held_out, too_long])
    trained = completed(runner.train(step, ignore_status, never))
    assert trained.version == second
    assert len(trained.held_out) == len(held_out)
    assert all(score.verdict and score.parent < 0 and score.version < 0 for score in trained.held_out)
    assert any(score.change != 0 for score in trained.held_out)
    assert trained.held_out_seconds is not None
    assert trained.figures.distance_seconds is not None
    assert 0 < trained.held_out_seconds + trained.figures.distance_seconds < trained.seconds
    # The next step sees under its parent what this one saw under its version.
    after = replace(step_of(batches[1], 3, second), held_out=held_out)
    again = completed(runner.train(after, ignore_status, never))
    assert [score.parent for score in again.held_out] == pytest.approx([score.version for score in trained.held_out])


def test_replies_that_lessons_are_measured_by_are_scored_and_change_no_step(
    qwen3: Path, batches: dict[int, list[BatchSample]], tmp_path: Path
) -> None:
    without = StepRunner(setup_of(qwen3, tmp_path / "without"))
    first = take(without, batches[1], 1, None)
    second = take(without, batches[2], 2, first)
    runner = StepRunner(setup_of(qwen3, tmp_path / "with"))
    assert take(runner, batches[1], 1, None) == first
    taught = [replace(sample, sample_id=new_sample_id(), hinted_prompts={}) for sample in batches[3][:3]]
    replies = [
        YardstickReply(one, replace(one, prompt_ids=one.prompt_ids[1:]), new=place > 0)
        for place, one in enumerate(taught)
    ]
    trained = completed(runner.train(replace(step_of(batches[2], 2, first), yardstick=replies), ignore_status, never))
    assert trained.version == second
    assert [score.reply for score in trained.yardstick] == [one.sample_id for one in taught]
    known, *new = trained.yardstick
    assert (known.taught, known.plain) == (None, None)
    for score in new:
        assert score.taught is not None
        assert score.plain is not None
        assert score.taught != score.plain != score.version
    # Of the whole reply, so that the next step sees under its parent what this one saw under its version.
    again = [replace(reply, new=True) for reply in replies]
    after = completed(runner.train(replace(step_of(batches[1], 3, second), yardstick=again), ignore_status, never))
    assert [score.plain for score in after.yardstick] == pytest.approx([score.version for score in trained.yardstick])


@pytest.mark.parametrize("known", [0, 5, MIN_TURNS])
def test_what_is_known_of_the_parent_is_not_scored_again(
    known: int, qwen3: Path, batches: dict[int, list[BatchSample]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = StepRunner(setup_of(qwen3, tmp_path))
    turns = held_out_turns(batches[3])
    scored: list[int] = []

    def counting(model: PolicyModel, samples: Sequence[BatchSample], *more: Any) -> dict[int, float]:
        scored.append(len(samples))
        return score_replies(model, samples, *more)

    monkeypatch.setattr(step_runner, "score_replies", counting)
    parent_scores = {turn.sample_id: -float(place) for place, turn in enumerate(turns[:known])}
    step = replace(step_of(batches[1], 1), held_out=turns, parent_scores=parent_scores)
    trained = completed(runner.train(step, ignore_status, never))
    assert scored == ([MIN_TURNS - known] if known < MIN_TURNS else []) + [MIN_TURNS]
    assert [score.sample for score in trained.held_out] == [turn.sample_id for turn in turns]
    assert [score.parent for score in trained.held_out[:known]] == [-float(place) for place in range(known)]


def test_too_few_held_out_turns_are_not_scored(
    qwen3: Path, batches: dict[int, list[BatchSample]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = StepRunner(setup_of(qwen3, tmp_path))
    turns = held_out_turns(batches[3])
    one_session = [replace(turn, unit=turns[0].unit) for turn in turns]
    monkeypatch.delattr(step_runner, "score_replies")
    for held_out in (turns[:-1], one_session):
        trained = completed(runner.train(replace(step_of(batches[1], 1), held_out=held_out), ignore_status, never))
        assert trained.held_out == []


def test_a_wrong_gradient_is_seen(qwen3: Path, batches: dict[int, list[BatchSample]], tmp_path: Path) -> None:
    """By what the tests on GPUs compare; a loss before the update says little of it."""

    def made(name: str, samples: list[BatchSample]) -> Path:
        return tmp_path / name / take(StepRunner(setup_of(qwen3, tmp_path / name)), samples, 1, None).path

    right = made("right", batches[1])
    assert gradient_error(made("again", batches[1]), right) == 0
    for place, sample in enumerate(batches[1]):
        others = [other for other in batches[1] if other is not sample]
        assert gradient_error(made(f"without {place}", others), right) > 10 * ROUNDED_GRADIENT["float32"]
    for half in (0, 1):
        assert gradient_error(made(f"half {half}", batches[1][half::2]), right) > 2 * ROUNDED_GRADIENT["bfloat16"]
