"""The yardstick of a lesson: what it did when it was new, and how much of that a version without it still lacks.

Measured on replies that the policy gave with the lesson when the lesson was new: how much likelier the lesson made each
of them is its effect (an estimate of the Kullback-Leibler divergence a reply), and how much less likely a later version
finds them without the lesson, than the version that was new with it, is what is left of the effect. The same replies
are scored under each version, so that chance moves all figures alike. What a version learns besides moves them too:
other words make them less likely, so that a lesson stays too long, and training that only makes the policy surer of its
usual replies makes them likelier, so that it may go too early.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from clawloop.core.contracts.lessons import EffectLeft, Finding, LessonState, Yardstick

NEEDED = 8
"""Replies by which a lesson is measured."""
MOST_TRIED = 3 * NEEDED
"""Requests that are tried for them: those of which no reply can be scored are no reason to practise nothing."""
LEARNED_SHARE = 0.2
"""Of the effect: a version that lacks at most so much says by itself what the lesson made an earlier one say."""
GROWN_SHARE = 0.4
"""Of the effect: a version that lacks more has forgotten a lesson that was learned."""
VERSIONS_TO_LEARN = 2
"""In a row, each lacking at most `LEARNED_SHARE`, before a lesson leaves the prompt."""
VERSIONS_THAT_FAILED = 3
"""That practised a lesson and still lack it, before that is said."""
# Student's t at 97.5 % for seven degrees of freedom; with more replies than `NEEDED` the interval is a little too wide.
_T_95 = 2.365


@dataclass(frozen=True, slots=True)
class ReplyScores:
    """Log-probs of a whole reply that was given with a lesson, in nats.

    Args:
        first: the version that was scored with the lesson and without it.
        with_lesson: under that version.
        without: by version, that one among them.
    """

    first: int
    with_lesson: float
    without: Mapping[int, float]

    def lacks(self, version: int) -> float:
        """How much less likely the version finds the reply without the lesson than the first one did with it."""
        return self.with_lesson - self.without[version]


def read_yardstick(
    state: LessonState,
    since: int,
    replies: Sequence[ReplyScores],
    path: Sequence[int],
    practised_in: Collection[int],
) -> Yardstick:
    """What is known of a lesson's effect, and what follows from it for this state.

    Args:
        since: versions up to it say nothing against an active lesson; the version since which a learned one is learned.
        path: the active version and its ancestors.
        practised_in: versions whose step had samples that the lesson taught.
    """
    if len(replies) < NEEDED:
        return Yardstick(len(replies), Finding.NOT_MEASURED)
    # A later measuring, e.g. after replies were erased, finds less of what is learned by then.
    first = sorted(reply.first for reply in replies)[NEEDED - 1]
    effects = [reply.lacks(reply.first) for reply in replies if reply.first <= first]
    effect, half = fmean(effects), _T_95 * stdev(effects) / sqrt(len(effects))
    if effect - half <= 0:
        return Yardstick(len(replies), Finding.NO_EFFECT, first, effect, effect - half, effect + half)
    left = []
    for version in sorted(path):
        scored = [reply for reply in replies if version in reply.without and version > reply.first]
        whole = sum(reply.lacks(reply.first) for reply in scored)
        if len(scored) >= NEEDED and whole > 0:  # replies of a later measuring may show no effect that one could lack
            left.append(EffectLeft(version, sum(reply.lacks(version) for reply in scored) / whole))
    counted = [] if state is LessonState.LEARNED else [one for one in left if one.version > since]
    learned = _learned_by(counted)
    if state is LessonState.LEARNED:
        finding = _grown(left)
    else:
        finding = Finding.LEARNED if learned else _not_learned(counted, practised_in)
    return Yardstick(len(replies), finding, first, effect, effect - half, effect + half, tuple(left), learned)


def _learned_by(counted: Sequence[EffectLeft]) -> tuple[EffectLeft, ...]:
    """The first versions in a row that learned a lesson which none after them has forgotten; empty: it is not learned.

    All are gone through, not the newest alone: several may become active at once, e.g. when a pin ends.
    """
    learned: tuple[EffectLeft, ...] = ()
    in_a_row: list[EffectLeft] = []
    for one in counted:
        in_a_row = [*in_a_row, one] if one.share <= LEARNED_SHARE else []
        if one.share > GROWN_SHARE:
            learned = ()
        elif not learned and len(in_a_row) == VERSIONS_TO_LEARN:
            learned = tuple(in_a_row)
    return learned


def _not_learned(counted: Sequence[EffectLeft], practised_in: Collection[int]) -> Finding:
    lacking = [one for one in counted if one.version in practised_in and one.share > LEARNED_SHARE]
    return Finding.NOT_LEARNED if len(lacking) >= VERSIONS_THAT_FAILED else Finding.HAS_EFFECT


def _grown(left: Sequence[EffectLeft]) -> Finding:
    return Finding.GROWN if left and left[-1].share > GROWN_SHARE else Finding.LEARNED


def why_learned(yardstick: Yardstick) -> str:
    """Why a lesson leaves the prompt, for people."""
    first, second = yardstick.learned_by
    return (
        f"learned: versions {first.version} and {second.version} lack {first.share:.0%} and {second.share:.0%} of its"
        f" effect in version {yardstick.version}"
    )


def why_grown(yardstick: Yardstick) -> str:
    """Why a learned lesson is in the prompt again, for people."""
    newest = yardstick.left[-1]
    return f"forgotten: version {newest.version} lacks {newest.share:.0%} of its effect again"


def in_words(yardstick: Yardstick) -> str:
    """The finding for people; empty where a lesson is not measured at all."""
    match yardstick.finding:
        case Finding.NOT_MEASURED:
            return f"not measured yet: {yardstick.replies} of {NEEDED} replies" if yardstick.replies else ""
        case Finding.NO_EFFECT:
            return f"no measurable effect ({_interval(yardstick)}): it stays a note"
    measured = f"effect {_interval(yardstick)} in version {yardstick.version}"
    if yardstick.left:
        newest = yardstick.left[-1]
        measured += f"; version {newest.version} lacks {newest.share:.0%} of it"
    if yardstick.finding is Finding.NOT_LEARNED:
        measured += f"; {VERSIONS_THAT_FAILED} versions could not learn it: it stays a note"
    return measured


def _interval(yardstick: Yardstick) -> str:
    return f"{yardstick.effect:.1f} nats a reply, {yardstick.low:.1f} to {yardstick.high:.1f}"
