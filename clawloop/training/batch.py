"""The samples of a step, as sequences to be read.

Knows nothing about models or losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clawloop.errors import SampleUnusable
from clawloop.training.packing.collate import TokenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One judged response, as a step takes it.

    Args:
        key: its id, for errors and metrics; different for each sample of a batch.
        prompt_ids, response_ids: the engine's own.
        behaviour_logprobs: recorded when sampling, one for each response token.
        temperature: recorded when sampling.
        version: the version that answered; 0 is the base model. It is the teacher of its own hint.
        reward: what the verdict came to; None if it says nothing.
        hinted_prompt_ids: the prompt with the hint in it; None if there is no hint.
        response_mask: True = trained; None: every response token is.
        explicit: it comes from explicit feedback: it does not age, but is dropped if the policy has drifted.

    Raises:
        SampleUnusable: lengths disagree.
    """

    key: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    behaviour_logprobs: Sequence[float]
    temperature: float
    version: int
    reward: float | None
    hinted_prompt_ids: Sequence[int] | None = None
    response_mask: Sequence[bool] | None = None
    explicit: bool = False

    def __post_init__(self) -> None:
        for what, values in (("log-probs", self.behaviour_logprobs), ("mask", self.response_mask)):
            if values is not None and len(values) != len(self.response_ids):
                raise SampleUnusable(
                    self.key, f"{what} of length {len(values)} for {len(self.response_ids)} response tokens"
                )

    def sequence(self) -> TokenSequence:
        return TokenSequence(self.key, self.prompt_ids, self.response_ids, self.temperature)

    def hinted_sequence(self) -> TokenSequence:
        """The same response after the prompt with the hint; only if there is one."""
        assert self.hinted_prompt_ids is not None
        return TokenSequence(f"{self.key} with hint", self.hinted_prompt_ids, self.response_ids, self.temperature)
