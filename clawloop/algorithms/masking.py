"""Which positions are scored, and which response tokens are trained.

Knows nothing about losses. A response's first token is predicted by the prompt's last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clawloop.errors import StreamsUnusable


def predicting_positions(prompt_tokens: int, response_tokens: int) -> slice:
    """The positions of prompt + response whose logits predict the response's tokens, one for each.

    Raises:
        StreamsUnusable: no prompt token, so that nothing predicts the first response token; or no response.
    """
    if prompt_tokens < 1 or response_tokens < 1:
        raise StreamsUnusable(f"{prompt_tokens} prompt and {response_tokens} response tokens: nothing to score")
    return slice(prompt_tokens - 1, prompt_tokens - 1 + response_tokens)


@dataclass(frozen=True, slots=True)
class ThinkingTokens:
    """The ids that open and close a model's thinking."""

    opening_id: int
    closing_id: int


def response_mask(
    response_ids: Sequence[int],
    *,
    train_thinking: bool,
    thinking: ThinkingTokens | None = None,
    begins_thinking: bool = False,
) -> Tensor:
    """True where a response token is trained.

    Args:
        response_ids: the ids the engine sampled.
        train_thinking: thinking tokens are sampled tokens, and trained like others unless this is False.
        thinking: the model's thinking marks; None for a model that has none.
        begins_thinking: the prompt's template has opened the thinking already.

    Returns:
        bool[T]. All False when the reply was cut inside its thinking and thinking is not trained.
    """
    if train_thinking or thinking is None:
        return torch.ones(len(response_ids), dtype=torch.bool)
    inside = begins_thinking
    trained: list[bool] = []
    for token_id in response_ids:
        inside = inside or token_id == thinking.opening_id
        trained.append(not inside)
        if token_id == thinking.closing_id:
            inside = False
    return torch.tensor(trained, dtype=torch.bool)
