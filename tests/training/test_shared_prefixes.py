"""Sharing prefixes changes a step's cost and not its result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clawloop.app.local.tiny_model import ensure_tiny_model
from clawloop.core.contracts.training import BatchSample, StepFigures
from clawloop.core.recipes.recipe import Loss, Optimiser, Train
from clawloop.training import packing
from clawloop.training.batch import plain_sequence
from clawloop.training.model import decoder
from clawloop.training.model.decoder import TorchtuneModel, load_torchtune_model
from clawloop.training.model.port import LoraShape
from clawloop.training.packing import Limits, TokenSequence, collate, plan_micro_batches
from clawloop.training.scoring import ScoringPass, hinted_member, shard_batch
from clawloop.training.setup import TrainerSetup
from clawloop.training.step import make_optimizer, train_step
from tests.training.chat_session import session_turns
from tests.training.tiny import (
    VOCAB,
    as_samples,
    random_batch,
    random_sequences,
    relative_error,
    save_checkpoint,
    session_batch,
    shake_adapter,
)

RECIPE = Train(loss=Loss(kl=0.1, entropy=0.01), optimiser=Optimiser(grad_clip=1e9))


def load(path: Path) -> TorchtuneModel:
    model = load_torchtune_model(path, LoraShape(rank=4, alpha=8.0), dtype=torch.float32, device=torch.device("cpu"))
    shake_adapter(model)
    return model


def gradients(model: TorchtuneModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.adapter_parameters().items() if p.grad is not None}


def both_ways(
    model: TorchtuneModel, samples: list[BatchSample], limits: Limits
) -> tuple[StepFigures, StepFigures, float]:
    """A step's reports with and without sharing, and how far their gradients are apart."""
    reports, found = [], []
    for share in (True, False):
        before = {name: p.detach().clone() for name, p in model.adapter_parameters().items()}
        of_kind = Limits(limits.budget_tokens, limits.max_tokens, limits.vocab_size, share_prefixes=share)
        optimizer = make_optimizer(model, RECIPE.optimiser)
        reports.append(train_step(model, optimizer, samples, RECIPE, of_kind, parent=1))
        found.append(gradients(model))
        with torch.no_grad():
            for name, parameter in model.adapter_parameters().items():
                parameter.copy_(before[name])
    return reports[0], reports[1], relative_error(found[0], found[1])


@st.composite
def families(draw: st.DrawFn) -> list[TokenSequence]:
    """Sequences that leave one another anywhere, also inside a response; some equal."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    documents: list[list[int]] = []
    for _ in range(draw(st.integers(2, 6))):
        kept: list[int] = []
        if documents:
            model = draw(st.sampled_from(documents))
            kept = model[: draw(st.integers(0, len(model)))]
        new = torch.randint(0, VOCAB, (draw(st.integers(0 if len(kept) > 1 else 2, 12)),), generator=generator)
        documents.append([*kept, *new.tolist()])
    cuts = [draw(st.integers(1, len(ids) - 1)) for ids in documents]
    return [
        TokenSequence(str(index), ids[:cut], ids[cut:], 0.6 + 0.2 * index)
        for index, (ids, cut) in enumerate(zip(documents, cuts, strict=True))
    ]


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MIN_SHARED_TOKENS", 1)
    monkeypatch.setattr(decoder, "_CPU_QUERY_CHUNK", 3)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("checkpoint", ["qwen3", "qwen2"])
def test_scores_and_gradients_along_any_prefix_tree_are_those_of_separate_documents(
    checkpoint: str, request: pytest.FixtureRequest
) -> None:
    model = load(request.getfixturevalue(checkpoint))

    @settings(deadline=None, max_examples=40)
    @given(families())
    def holds(sequences: list[TokenSequence]) -> None:
        found = []
        everyone = range(len(sequences))
        weights = torch.linspace(0.5, 1.5, sum(len(sequence.response_ids) for sequence in sequences))
        for share in (True, False):
            model.zero_grad()
            reading = model(collate(sequences, everyone, share_prefixes=share), entropies=True)
            (reading.logprobs_N * weights).sum().backward()
            found.append((reading.logprobs_N.detach(), reading.entropies_N.detach(), gradients(model)))
        (logprobs, entropies, gradient), (plain_logprobs, plain_entropies, plain_gradient) = found
        assert (logprobs - plain_logprobs).abs().max() < 1e-5
        assert (entropies - plain_entropies).abs().max() < 1e-5
        assert relative_error(gradient, plain_gradient) < 1e-5

    holds()


@pytest.mark.parametrize("checkpoint", ["qwen3", "qwen2"])
@pytest.mark.parametrize("budget", [4096, 150])
def test_sharing_prefixes_does_not_change_a_step_over_a_session_and_a_group(
    checkpoint: str, budget: int, request: pytest.FixtureRequest
) -> None:
    model = load(request.getfixturevalue(checkpoint))
    samples = session_batch(model)
    shared, apart, off = both_ways(model, samples, Limits(budget, 256, VOCAB))
    assert shared.micro_batches < apart.micro_batches or budget == 4096
    assert shared.loss == pytest.approx(apart.loss, abs=1e-5)
    assert shared.grad_norm == pytest.approx(apart.grad_norm, rel=1e-5)
    assert off < 1e-5


def test_sharing_prefixes_cuts_twenty_turns_of_a_real_client_to_a_third_of_the_tokens(tmp_path: Path) -> None:
    turns = session_turns(ensure_tiny_model(tmp_path), 20, hints=True)
    sequences, hinted = [sequence for sequence, _ in turns], [ids for _, ids in turns]
    model = load(save_checkpoint(tmp_path / "base", vocab=1024, positions=4096))
    samples = as_samples(model, sequences, hinted=hinted)
    shared, apart, off = both_ways(model, samples, Limits(40_000, 4096, 1024))
    with_sharing, without_sharing = (
        len(collate(sequences, range(20), share_prefixes=share).tokens_S) for share in (True, False)
    )
    assert without_sharing == sum(sequence.input_tokens for sequence in sequences)
    assert without_sharing / with_sharing > 3
    hints = tuple(hinted_member(index) for index, ids in enumerate(hinted) if ids is not None)
    passes = [ScoringPass(version=0, reference=True), ScoringPass(version=0, hinted=hints)]
    passes.append(ScoringPass(version=0, reference=True, hinted=hints))
    scored = shard_batch(samples, Limits(40_000, 4096, 1024), passes, rank=0, world_size=1).scored
    plain, taught, joined = (sum(len(pack.tokens_S) for pack in scored[one]) for one in passes)
    assert plain == with_sharing
    assert (plain + taught) / joined > 1.2
    assert shared.loss == pytest.approx(apart.loss, abs=1e-5)
    assert off < 1e-5


def test_prompts_that_each_fill_the_budget_share_a_micro_batch(tmp_path: Path) -> None:
    tokenizer = ensure_tiny_model(tmp_path)
    sequences = [sequence for sequence, _ in session_turns(tokenizer, 20, system_words=4000)]
    setup = TrainerSetup(model=tokenizer, adapters=tmp_path)
    limits = Limits(setup.micro_batch_tokens, 40_960, 1024)
    # OpenClaw's smallest request is 35 KB.
    assert min(sequence.input_tokens for sequence in sequences) > limits.budget_tokens
    read = [len(collate(sequences, members).tokens_S) for members in plan_micro_batches(sequences, limits)]
    assert sum(sequence.input_tokens for sequence in sequences) / sum(read) > 3
    longest = max(sequence.input_tokens for sequence in sequences)
    assert max(read) <= longest + limits.budget_tokens // 2


def test_memory_for_the_backward_pass_of_attention_grows_with_the_input_tokens() -> None:
    def kept(branches: int) -> tuple[int, int]:
        """Bytes, and tokens read."""
        prompt = random_sequences([(512, 1)])[0].prompt_ids
        sequences = [TokenSequence(str(n), [*prompt, *[n + 1] * 40], [1, 2], 1.0) for n in range(branches)]
        layout = collate(sequences, range(branches)).layout
        read = sum(layout.lengths)
        q, k, v = (torch.randn(1, 2, read, 16, requires_grad=True) for _ in range(3))
        storages: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            decoder.attend_along_branches(q, k, v, mask=layout, dropout_p=0.0, is_causal=False)
        return sum(storages.values()), read

    (lone, few), (shared, many) = kept(1), kept(12)
    assert many > few + 11 * 40
    assert shared / lone < 1.5 * many / few


def test_a_batch_without_common_prefixes_is_packed_as_without_sharing(qwen3: Path) -> None:
    sequences = [plain_sequence(sample) for sample in random_batch(load(qwen3))]
    limits = [Limits(60, 256, VOCAB, share_prefixes=share) for share in (True, False)]
    assert plan_micro_batches(sequences, limits[0]) == plan_micro_batches(sequences, limits[1])
    for members in plan_micro_batches(sequences, limits[0]):
        shared, apart = (collate(sequences, members, share_prefixes=share) for share in (True, False))
        assert shared.layout == apart.layout
        assert torch.equal(shared.tokens_S, apart.tokens_S)
        assert torch.equal(shared.rows_N, apart.rows_N)


def test_a_groups_prompt_is_computed_once(qwen3: Path) -> None:
    prompt = random_sequences([(60, 1)])[0].prompt_ids
    members = [TokenSequence(str(n), prompt, [n, 5, 6, 7], 1.0) for n in range(4)]
    packed = collate(members, range(4))
    assert len(packed.tokens_S) == 60 + 4 * 3
    # The first token of all four responses is predicted at the prompt's last position.
    assert len({rows[0].item() for rows in packed.split(packed.rows_N).values()}) == 1


def test_micro_batches_keep_sessions_together_and_count_shared_tokens_once() -> None:
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        found: list[int] = torch.randint(0, VOCAB, (count,), generator=generator).tolist()
        return found

    histories = [ids(100), ids(100)]
    sequences = []
    for turn in range(6):  # two sessions, their turns in turn
        histories[turn % 2] += ids(10)
        sequences.append(TokenSequence(str(turn), [*histories[turn % 2], *ids(5)], ids(6), 1.0))
    # Each session reads 130 tokens of history and 5 + 5 for each turn.
    assert plan_micro_batches(sequences, Limits(160, 256, VOCAB)) == ((0, 2, 4), (1, 3, 5))
    # Together they need 320; what shares nothing is held to the budget, however long the longest is.
    assert plan_micro_batches(sequences, Limits(270, 256, VOCAB)) == ((0, 2, 4), (1, 3, 5))
    # Beside the longest of a session, 140, the two others add 20, half of 40.
    assert plan_micro_batches(sequences, Limits(40, 256, VOCAB)) == ((0, 2, 4), (1, 3, 5))
    assert len(plan_micro_batches(sequences, Limits(38, 256, VOCAB))) == 4
    assert plan_micro_batches(sequences, Limits(320, 256, VOCAB)) == ((0, 1, 2, 3, 4, 5),)
    assert len(plan_micro_batches(sequences, Limits(160, 256, VOCAB, share_prefixes=False))) == 6


def test_only_samples_that_share_most_tokens_exceed_the_budget() -> None:
    def like(*parts: tuple[int, int]) -> TokenSequence:
        """Parts of (id, how often) and a response of one token."""
        return TokenSequence("x", [token for token, often in parts for _ in range(often)], [1], 1.0)

    chats = [like((1, 40), (2, 760)), like((1, 40), (3, 360))]  # two with a system prompt of 40 tokens
    assert plan_micro_batches(chats, Limits(800, 1000, VOCAB)) == ((0,), (1,))
    turns = [like((1, 800)), like((1, 700), (2, 90))]
    assert plan_micro_batches(turns, Limits(800, 1000, VOCAB)) == ((0, 1),)
    # The long one is nothing to the short ones beside it.
    strangers = [like((1, 700)), *(like((2, 60), (3 + n, 20)) for n in range(4))]
    for members in plan_micro_batches(strangers, Limits(800, 1000, VOCAB)):
        assert len(collate(strangers, members).tokens_S) <= 800
