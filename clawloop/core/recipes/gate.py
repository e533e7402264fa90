"""The table `[gate]` of a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from clawloop.core.recipes.table import Count, Positive, Table

TOKEN_LIMIT = 5.0
"""Most nats that one token counts in a distance between versions: e⁵ = 148 times more or less likely. Beyond that a
token is as good as unlearned, and the excess says nothing about the other tokens."""

LEAST_SCALE = 1e-9
"""The learning rate is lowered to this share of the recipe's at most."""


class Gate(Table):
    """Checks that a version must pass before it answers, and the consequences if it does not."""

    parent_distance: Positive = 0.4
    """A version is rejected above this mean distance from its parent, over the step's tokens, in nats; a token counts 5
    at most."""
    base_distance: Positive = 3.0
    """A version is rejected above this mean distance from the base model, over the step's tokens, in nats; a token
    counts 5 at most. Not measured while `train.loss.kl` is 0."""
    token_distance: Positive = 2.0
    """A token has moved far if its log-probability differs from the parent's by more than this, in nats."""
    token_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """A version is rejected if more than this share of the step's tokens has moved far from its parent."""
    loss: Positive = 1000.0
    """A version is rejected above this loss of its step, whatever its sign."""
    grad_norm: Positive = 1000.0
    """A version is rejected above this gradient norm of its step, before clipping."""
    held_out: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Share of sessions, and of groups of responses, whose judged turns are never trained: a version must not prefer
    the blamed among their replies more than its parent did. At most 0.5, so that more is left to learn from."""
    replay_turns: Annotated[int, Field(ge=32, le=1000)] = 40
    """Number of held-out turns, the newest ones, that a version is compared with its parent on; scoring 40 takes about
    half as long as the rest of a step of 16 samples."""
    drawn_probes: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of praised turns whose requests are asked again of each version and its parent, for the judge to compare,
    beside the probes of `clawloop probe add`; a comparison decides from 10 pairs on."""
    probe_tokens: Annotated[int, Field(ge=16, le=4096)] = 256
    """Longest answer to a probe, in tokens."""
    general_probes: bool = True
    """Ask each version general questions, those of ours that the base model knows: what a policy learns must not cost
    what its model knew. The base model is asked once, with 24 tokens each, and knows those of which both of two sampled
    answers are right; a model that knows fewer than 8 of them is not watched this way."""
    content_loss: Annotated[float, Field(gt=0, le=1)] = 0.05
    """A version is rejected if it answers more than this share of the probes with checked content wrongly that the base
    model answers rightly, less those of which the reverse holds; of an operator's probes and of the general ones each
    by themselves. Of the general ones the loss less its standard error counts, the square root of the number of answers
    that differ. It applies from as many probes on as make one probe allowed (20 with 0.05). 1: the sign test alone
    decides."""
    length_growth: Annotated[float, Field(gt=1)] = 1.5
    """A version is rejected if the median answer to probes with checked content has more than this times the words of
    the base model's, and 16 words more, unless of 16 replies with a verdict or rating, or more, the longer ones are the
    better liked: what grows without being asked for ends in replies that never stop. Fewer such replies, as without a
    judge and ratings, leave it to this limit alone."""
    canary_share: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Share of the conversations that get a new version first, while the others stay on the one before, until verdicts
    say that it is better, as good or worse; worse is a roll-back. No batch is claimed meanwhile. 0: all get it."""
    canary_hours: Annotated[float, Field(gt=0, le=8760)] = 24.0
    """A canary that verdicts have not decided ends after this long; then all conversations get the version."""
    pause_after: Count = 3
    """Training pauses after this many steps in a row without an accepted version; until then it goes on from the
    parent, with other samples."""
    lr_backoff: Annotated[float, Field(gt=0, le=1)] = 0.5
    """After each step in a row without an accepted version the next step's learning rate is multiplied by this; the
    next accepted version ends it. 1 leaves the learning rate as it is."""

    @property
    def asks_probes(self) -> bool:
        """True if a version is asked probes even where an operator added none."""
        return self.general_probes or self.drawn_probes > 0

    def lr_scale(self, rejections: int) -> float:
        """Factor of the learning rate after `rejections` steps in a row without an accepted version.

        Never 0, which hundreds of rejections would reach: a step without any change would pass the gate only by luck.
        """
        return max(self.lr_backoff**rejections, LEAST_SCALE)
