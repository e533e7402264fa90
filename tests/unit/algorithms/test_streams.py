"""Streams and scores refuse impossible values with a typed error that names them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clawloop.core.algorithms.advantages import teacher_gap, with_advantage
from clawloop.core.algorithms.losses import Divisor, kl_over_top_k, step_loss
from clawloop.core.algorithms.scoring import Scores, most_likely, score
from clawloop.core.algorithms.streams import Streams, logprobs_T
from clawloop.core.errors import StepDiverged, StreamsUnusable
from clawloop.core.recipes.recipe import Advantage, Loss, Train

MASK = torch.tensor([True, False, True])
STREAMS = [
    "behaviour_logprob_T",
    "advantage_T",
    "teacher_logprob_T",
    "answered_logprob_T",
    "reference_logprob_T",
    "prox_logprob_T",
]


def topk(**changes: Tensor | None) -> Streams:
    values: dict[str, Tensor | None] = {
        "teacher_topk_ids_TK": torch.tensor([[0, 1], [1, 2], [3, 0]]),
        "teacher_topk_logprobs_TK": torch.full((3, 2), 0.3).log(),
        "teacher_tail_T": torch.full((3,), 0.4).log(),
    }
    values.update(changes)
    return Streams(response_mask_T=MASK, **values)


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize(
    ("value", "why"),
    [
        (torch.tensor([-1.0, -1.0]), "shape"),
        (torch.full((3, 1), -1.0), "shape"),
        (torch.tensor([-1.0, float("nan"), -1.0]), "not finite"),
        (torch.tensor([-1.0, float("-inf"), -1.0]), "not finite"),
        (torch.tensor([-1, -1, -1]), "not a float"),
        (torch.full((3,), -1.0, requires_grad=True), "carries a gradient"),
    ],
)
def test_a_stream_of_wrong_shape_kind_or_value_is_refused(name: str, value: Tensor, why: str) -> None:
    with pytest.raises(StreamsUnusable, match=f"{name}.*{why}"):
        Streams(response_mask_T=MASK, **{name: value})


@pytest.mark.parametrize("name", [name for name in STREAMS if name != "advantage_T"])
def test_a_probability_above_one_is_refused(name: str) -> None:
    with pytest.raises(StreamsUnusable, match="above 0"):
        Streams(response_mask_T=MASK, **{name: torch.tensor([-1.0, 0.1, -1.0])})


@pytest.mark.parametrize("mask_T", [torch.ones(3), torch.ones(1, 3, dtype=torch.bool)])
def test_a_mask_that_is_not_bool_over_tokens_is_refused(mask_T: Tensor) -> None:
    with pytest.raises(StreamsUnusable, match="response_mask_T"):
        Streams(response_mask_T=mask_T)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"teacher_tail_T": None}, "together"),
        ({"teacher_topk_ids_TK": None}, "together"),
        ({"teacher_topk_ids_TK": torch.tensor([[0], [1], [2]])}, "top-K ids"),
        ({"teacher_topk_ids_TK": torch.tensor([[0, 0], [1, 2], [3, 0]])}, "twice"),
        ({"teacher_topk_ids_TK": torch.tensor([[0, -1], [1, 2], [3, 0]])}, "not token ids"),
        ({"teacher_topk_ids_TK": torch.zeros(3, 2)}, "not token ids"),
        ({"teacher_tail_T": torch.full((3,), 0.1).log()}, "add up"),
        ({"teacher_topk_logprobs_TK": torch.full((3, 2), float("nan"))}, "not finite"),
    ],
)
def test_a_top_k_target_that_is_no_distribution_is_refused(changes: dict[str, Tensor | None], why: str) -> None:
    assert topk().teacher_tail_T is not None
    with pytest.raises(StreamsUnusable, match=why):
        topk(**changes)


def test_trained_keeps_the_masked_in_tokens_of_every_stream() -> None:
    streams = topk(behaviour_logprob_T=torch.tensor([-1.0, -2.0, -3.0])).trained()
    assert len(streams) == streams.trained_tokens == 2
    assert streams.behaviour_logprob_T is not None
    assert streams.behaviour_logprob_T.tolist() == [-1.0, -3.0]
    assert streams.teacher_topk_ids_TK is not None
    assert streams.teacher_topk_ids_TK.tolist() == [[0, 1], [3, 0]]
    assert streams.advantage_T is None
    assert len(topk().to("cpu")) == 3


def test_a_list_of_log_probs_becomes_a_stream() -> None:
    assert logprobs_T([-0.5, 0.0], name="behaviour_logprob_T").tolist() == [-0.5, 0.0]


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_is_not_above_zero_is_refused(temperature: float) -> None:
    with pytest.raises(StreamsUnusable, match="temperature"):
        score(torch.zeros(1, 4), torch.tensor([0]), temperature=temperature)


@pytest.mark.parametrize("ids_T", [[4], [-1], [0, 1], []])
def test_ids_that_do_not_fit_the_logits_are_refused(ids_T: list[int]) -> None:
    logits_TV = torch.zeros(len(ids_T) if len(ids_T) != 2 else 1, 4)
    with pytest.raises(StreamsUnusable):
        score(logits_TV, torch.tensor(ids_T, dtype=torch.int64), temperature=1.0)


def test_a_top_k_that_leaves_no_tail_is_refused() -> None:
    with pytest.raises(StreamsUnusable, match="no tail"):
        most_likely(torch.zeros(2, 4), 4)
    with pytest.raises(StreamsUnusable, match="no tail"):
        score(torch.zeros(1, 4), torch.tensor([0]), temperature=1.0, topk_ids_TK=torch.arange(4).unsqueeze(0))


def test_a_forward_pass_that_is_not_finite_is_a_diverged_step() -> None:
    with pytest.raises(StepDiverged, match="logprob_T"):
        score(torch.tensor([[float("nan"), 0.0]]), torch.tensor([1]), temperature=1.0)


def test_a_loss_that_overflows_is_a_diverged_step_that_names_part_and_sample() -> None:
    streams = Streams(
        response_mask_T=torch.tensor([True]),
        behaviour_logprob_T=torch.tensor([-1.0]),
        advantage_T=torch.tensor([1.0]),
        reference_logprob_T=torch.tensor([-1.0]),
    )
    scores = Scores(logprob_T=torch.tensor([-1e30]))
    with pytest.raises(StepDiverged, match="kl loss of sample 0"):
        step_loss([(scores, streams)], Train(), Divisor(1, 1))


def test_parts_that_lack_what_they_need_are_refused() -> None:
    one = torch.tensor([True])
    scores = Scores(logprob_T=torch.tensor([-1.0]))
    with pytest.raises(StreamsUnusable, match="no ratio"):
        step_loss([(scores, Streams(response_mask_T=one, advantage_T=torch.ones(1)))], Train(), Divisor(1, 1))
    full = Streams(response_mask_T=one, advantage_T=torch.ones(1), behaviour_logprob_T=torch.tensor([-1.0]))
    with pytest.raises(StreamsUnusable, match="prox_logprob_T"):
        step_loss([(scores, full)], Train(loss=Loss(correction="decoupled")), Divisor(1, 1))
    with pytest.raises(StreamsUnusable, match="entropy"):
        step_loss([(scores, full)], Train(loss=Loss(entropy=0.01)), Divisor(1, 1))
    with pytest.raises(StreamsUnusable, match="teacher's ids"):
        step_loss(
            [(Scores(logprob_T=torch.full((3,), -1.0)), topk())], Train(loss=Loss(distillation=1.0)), Divisor(2, 1)
        )


def test_advantages_of_disagreeing_or_missing_streams_are_refused() -> None:
    with pytest.raises(StreamsUnusable, match="2 teacher log-probs for 3"):
        teacher_gap(torch.zeros(2), torch.zeros(3), 2.0)
    with pytest.raises(StreamsUnusable, match="reward nan"):
        with_advantage(Streams(response_mask_T=MASK), float("nan"), Advantage())
    with pytest.raises(StreamsUnusable, match="of the version that answered"):
        with_advantage(Streams(response_mask_T=MASK, teacher_logprob_T=torch.full((3,), -1.0)), None, Advantage())
    with pytest.raises(StreamsUnusable, match="recorded when sampling"):
        with_advantage(Streams(response_mask_T=MASK), -1.0, Advantage(spare_unlikely=0.5))


def test_scores_of_disagreeing_shapes_are_refused() -> None:
    with pytest.raises(StreamsUnusable, match="come together"):
        Scores(logprob_T=torch.zeros(2), tail_T=torch.zeros(2))
    with pytest.raises(StreamsUnusable, match="entropy_T"):
        Scores(logprob_T=torch.zeros(2), entropy_T=torch.zeros(3))
    with pytest.raises(StreamsUnusable, match="student top-K"):
        kl_over_top_k(torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, 4), torch.zeros(2))
