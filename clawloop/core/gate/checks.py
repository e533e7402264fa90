"""Computes the gate's checks of a candidate: a step's numbers, a replay of held-out turns, probes."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from statistics import median

from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema

from clawloop.core.contracts.training import (
    CheckResult,
    GateCheck,
    HeldOutScore,
    JudgedReply,
    ProbeAnswer,
    ProbeContent,
    StepFigures,
)
from clawloop.core.recipes.recipe import Gate

# Numbers --------------------------------------------------------------------------------------------------------------
# The check of a step's numbers: loss, gradient norm, and how far the version moved.
#
# Medians, clipped means and shares of tokens only: the mean of an unbounded figure can be that of one token.


NUMBERS = "numbers"


def check_numbers(figures: StepFigures, gate: Gate) -> GateCheck:
    """The check that a step's numbers are within the recipe's limits."""
    parent, base = figures.to_parent, figures.to_base
    measured = {
        "loss": figures.loss,
        "grad_norm": figures.grad_norm,
        "parent_distance": None if parent is None else parent.mean,
        "parent_median": None if parent is None else parent.median,
        "token_share": None if parent is None else parent.share,
        "base_distance": None if base is None else base.mean,
        "base_median": None if base is None else base.median,
    }
    limits = {
        "loss": ("|loss|", gate.loss),
        "grad_norm": ("gradient norm", gate.grad_norm),
        "parent_distance": ("distance to the parent", gate.parent_distance),
        "token_share": (f"share of tokens over {gate.token_distance:g} nats from the parent", gate.token_share),
        "base_distance": ("distance to the base", gate.base_distance),
    }
    beyond = [
        f"{words} {value:.3g}, limit {limit:g} (gate.{key})"
        for key, (words, limit) in limits.items()
        # `not <=`, so that NaN is beyond every limit.
        if (value := measured[key]) is not None and not abs(value) <= limit
    ]
    reason = "; ".join(beyond) if beyond else "within limits"
    return GateCheck(NUMBERS, CheckResult.FAILED if beyond else CheckResult.PASSED, reason, measured)


# Replay ---------------------------------------------------------------------------------------------------------------
# The replay of held-out turns: whether a version prefers blamed replies more than its parent did.
#
# A paired, studentised bootstrap (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, section 12.5) over
# turns that were never trained: each turn is scored under both versions. Turns of one session, or of one rollout
# group, change alike, so that their mean counts once, and these means are drawn anew, of praised and blamed turns each
# among themselves: with eight turns in each of 16 sessions, whose changes correlate by 0.4, drawing turns called 24 %
# of versions worse that were not, and drawing means 6 %. Plain percentiles of the draws called 6 to 12 % of versions
# worse that were not, with as few means as there are; divided by their standard errors, as here, the draws call 5 to 6
# % worse, and 8 % where a few change much more than the others.

REPLAY = "replay"
MIN_TURNS = 32
"""Fewest turns of a replay: with fewer only a collapse would show, which the step's numbers show as well."""
MIN_OF_EACH = 8
"""Fewest sessions or groups with praised turns, and with blamed turns: the spread of fewer is unknown. With 4, one
version in seven was called worse."""
MARGIN = 0.01
"""A smaller loss, in nats a token, rejects nothing, however sure: once a policy has learned what there is, its steps
are so small and so alike on all turns that a loss of 0.001 was significant, three times in a row."""
_ALPHA = 0.05
_DRAWS = 1000


def lacking_turns(turns: Sequence[tuple[int, object]]) -> GateCheck | None:
    """The check's result where there are too few held-out turns to decide by, so that none need be scored; else None.

    Args:
        turns: verdict and unit of each, see `HeldOutScore`.
    """
    of_verdict = {sign: [unit for verdict, unit in turns if verdict * sign > 0] for sign in (1, -1)}
    praised, blamed = (len(units) for units in of_verdict.values())
    counts: Mapping[str, float | None] = {"praised": praised, "blamed": blamed}
    held_out = f"{praised} praised and {blamed} blamed turns held out"
    if praised + blamed < MIN_TURNS:
        return GateCheck(REPLAY, CheckResult.NOT_ENOUGH, f"{held_out}, {MIN_TURNS} are needed", counts)
    sessions = [len({unit for unit in units if unit is not None}) + units.count(None) for units in of_verdict.values()]
    if min(sessions) < MIN_OF_EACH:
        found = f"of {sessions[0]} and {sessions[1]} sessions or groups, {MIN_OF_EACH} of each are needed"
        return GateCheck(REPLAY, CheckResult.NOT_ENOUGH, f"{held_out}, {found}", counts)
    return None


def check_replay(scores: Sequence[HeldOutScore], seed: str) -> GateCheck:
    """Fails if the bootstrap says at 95 % that the version prefers the blamed over the praised more than its parent,
    by more than `MARGIN`.

    Args:
        seed: of the draws: the same turns and version give the same result.
    """
    if (lacking := lacking_turns([(score.verdict, score.unit) for score in scores])) is not None:
        return lacking
    of_praised = [score for score in scores if score.verdict > 0]
    of_blamed = [score for score in scores if score.verdict < 0]
    counts: Mapping[str, float | None] = {"praised": len(of_praised), "blamed": len(of_blamed)}
    praised, blamed = _means_of_units(of_praised), _means_of_units(of_blamed)
    change, error = _difference(praised, blamed)
    bound = change + _factor(praised, blamed, change, seed) * error
    figures: Mapping[str, float | None] = {**counts, "change": change, "upper_bound": bound}
    words = f"preference for praised over blamed replies changed by {change:+.3f} nats a token, at most {bound:+.3f}"
    return GateCheck(REPLAY, CheckResult.FAILED if bound < -MARGIN else CheckResult.PASSED, f"{words} (95 %)", figures)


def _means_of_units(scores: Sequence[HeldOutScore]) -> list[float]:
    """The mean change of each session's or group's turns."""
    changes: defaultdict[object, list[float]] = defaultdict(list)
    for place, score in enumerate(scores):
        changes[place if score.unit is None else score.unit].append(score.change)
    return [sum(values) / len(values) for values in changes.values()]


def _factor(praised: Sequence[float], blamed: Sequence[float], change: float, seed: str) -> float:
    """Distance of the one-sided 95 % bound above the change, in standard errors."""
    rng = random.Random(seed)
    drawn = []
    for _ in range(_DRAWS):
        again, error = _difference(rng.choices(praised, k=len(praised)), rng.choices(blamed, k=len(blamed)))
        # Without any spread the draw is the change itself, or says nothing of how far off it is.
        drawn.append((again - change) / error if error > 0 else 0.0)
    return -sorted(drawn)[math.ceil(_ALPHA * _DRAWS) - 1]


def _difference(praised: Sequence[float], blamed: Sequence[float]) -> tuple[float, float]:
    """The difference of the means, and its standard error."""
    means = [sum(values) / len(values) for values in (praised, blamed)]
    variance = sum(
        sum((value - mean) ** 2 for value in values) / ((len(values) - 1) * len(values))
        for values, mean in zip((praised, blamed), means, strict=True)
    )
    return means[0] - means[1], math.sqrt(variance)


# Content of answers ---------------------------------------------------------------------------------------------------
# Check of an answer against the content that its probe asks for.
#
# Patterns are matched by pydantic's regular expressions, which take time linear in the answer for every pattern.


def is_right(content: ProbeContent, text: str) -> bool | None:
    """True if the text passes each of the probe's checks; None if the probe has none."""
    if not content.is_checked:
        return None
    folded = text.casefold()
    return (
        all(part.casefold() in folded for part in content.contains)
        and (content.regex is None or _matches(content.regex, text))
        and (content.exact is None or content.exact.strip() == text.strip())
    )


def pattern_problem(pattern: str) -> str | None:
    """The problem with a pattern; None if it can be used."""
    try:
        _validator(pattern)
    except SchemaError as error:
        return " ".join(str(error).split())[:300]
    return None


@lru_cache(maxsize=256)
def _validator(pattern: str) -> SchemaValidator:
    return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))


def _matches(pattern: str, text: str) -> bool:
    try:
        _validator(pattern).validate_python(text)
    except ValidationError:
        return False
    return True


# Probes ---------------------------------------------------------------------------------------------------------------
# The check by probes: what a version answers to fixed prompts, beside its parent's answers and the base model's.
#
# A version is rejected on evidence alone: by a sign test over the probes on which the two differ (McNemar's exact
# test), one for each of content, the judge's preference, broken replies and tool calls. Content is compared with the
# base model, too, and so are broken replies: what each of many versions loses may be too little for a test, and
# together much. A recipe may also bound what is lost beside the base model, where a loss too small for a test is too
# large for the operator. A shorter answer may be what was learned, and decides nothing: one that shrank too far has
# lost its content. A longer one may be what was learned, too, if the verdicts on longer replies say so, and otherwise
# its length is bounded beside the base model's.

PROBES = "probes"
MIN_COMPARED = 10
"""Fewest pairs by which the judge's preference decides: its votes are noisy, and ties are common."""
_GRAM = 4
_PARENT, _BASE = "its parent", "the base model"
# Shorter answers repeat too little to tell a list from a loop.
_MIN_WORDS = 20
# An answer that repeats more than this loops; tables and lists of similar lines stay below it.
_REPEATED_SHARE = 0.5
# A shorter text of one character may be an answer: a number, or a line of dots.
_SHORTEST_RUN = 20
_SAME_SHARE = 0.9
MIN_LENGTHS = 8
"""Fewest probes with checked content whose median length decides."""
LENGTH_MARGIN = 16
"""A median answer that grew by so many words or fewer is not too long: a greeting before three words is no growth."""
MIN_JUDGED, MIN_PRAISED = 16, 8
"""Fewest judged, and praised, replies that say whether longer ones are liked better: of replies that nobody likes the
longer ones may still be on the way to what is wanted."""
_LIKED_Z = 2.33
"""One-sided 99 %: it is looked at for each version, so that 95 % would let one of 20 grow by luck."""


@dataclass(frozen=True, slots=True)
class ProbePair:
    """A probe's answers.

    Args:
        right_parent, right: whether the content is right; None if the probe has no content check.
        right_base: likewise of the base model; None also where it is the parent.
        preferred: 1 if the judge prefers the version's answer, −1 the parent's, 0 neither; None if it was not asked.
    """

    content: ProbeContent
    parent: ProbeAnswer
    version: ProbeAnswer
    right_parent: bool | None = None
    right: bool | None = None
    preferred: int | None = None
    right_base: bool | None = None


@dataclass(frozen=True, slots=True)
class AnswerScores:
    """Scores of an answer, without its text.

    Args:
        words: number of its words.
        broken: it is empty, loops, or is thinking without an end.
        valid_calls: see `has_valid_calls`.
    """

    words: int
    cut: bool
    repeated: float
    broken: bool
    valid_calls: bool

    @property
    def is_faulty(self) -> bool:
        return self.broken or self.cut

    @classmethod
    def of(cls, answer: ProbeAnswer) -> AnswerScores:
        words, repeated = len(answer.text.split()), repeated_share(answer.text)
        return cls(words, answer.cut, repeated, is_broken(answer), has_valid_calls(answer))


@dataclass(frozen=True, slots=True)
class ProbeScores:
    """Scores of a probe's answers, without their text.

    Args:
        tools: whether the probe offers tools.
        right_parent, right, preferred, right_base: as in the pair of answers.
        base: the base model's answer to a probe with checked content; None where it is the parent.
        general: it is one of the general questions.
    """

    parent: AnswerScores
    version: AnswerScores
    tools: bool
    right_parent: bool | None
    right: bool | None
    preferred: int | None
    right_base: bool | None = None
    base: AnswerScores | None = None
    general: bool = False

    @classmethod
    def of(cls, pair: ProbePair) -> ProbeScores:
        parent, version = AnswerScores.of(pair.parent), AnswerScores.of(pair.version)
        tools = bool(pair.content.tools)
        return cls(parent, version, tools, pair.right_parent, pair.right, pair.preferred, pair.right_base)


def check_probes(
    scores: Sequence[ProbeScores],
    content_loss: float = 1.0,
    length_growth: float = math.inf,
    judged: Sequence[JudgedReply] = (),
) -> GateCheck:
    """Fails if a test says at 95 %, corrected for their number, that the version answers worse than its parent, if it
    lost more than `content_loss` beside the base model, or if its answers grew by more than `length_growth`.

    Args:
        content_loss: the recipe's `gate.content_loss`; 1 allows every loss. It bounds what is lost of an operator's
            probes and of the general questions each by itself: many of one kind must not outweigh a loss of the other.
        length_growth: the recipe's `gate.length_growth`.
        judged: see `_too_long`.
    """
    checked = [each for each in scores if each.right is not None and each.right_parent is not None]
    compared = [each for each in scores if each.preferred is not None]
    with_tools = [each for each in scores if each.tools]
    tests = _tests(scores, checked, compared, with_tools)
    level = _ALPHA / max(len(tests), 1)
    failed = [
        f"{words}: {worse} of {worse + better} probes on which the version and {other} differ (p = {chance:.2g})"
        for words, other, worse, better in tests
        if (chance := sign_test(worse, better)) <= level
    ]
    general = [each for each in checked if each.general]
    failed += _beyond("probes", [each for each in checked if not each.general], content_loss)
    failed += _beyond("general questions", general, content_loss, by_chance=True)
    failed += _too_long(checked, length_growth, judged)
    figures = _figures(scores, checked, compared, with_tools)
    if failed:
        return GateCheck(PROBES, CheckResult.FAILED, "; ".join(failed), figures)
    told = f"{len(scores)} probes asked"
    if checked:
        told += f", content right {sum(bool(each.right) for each in checked)} of {len(checked)}, "
        told += f"the parent's {sum(bool(each.right_parent) for each in checked)}"
        if any(each.right_base is not None for each in checked):
            told += f", the base model's {sum(bool(each.right_base) for each in checked)}"
    if general:
        told += f"; of {len(general)} general questions {sum(bool(each.right) for each in general)} right"
    if compared:
        wins, losses = (sum(each.preferred == sign for each in compared) for sign in (1, -1))
        told += f"; the judge prefers it {wins} times, its parent {losses} times of {len(compared)}"
    # With fewer probes even a version that fails all of them could not be distinguished from chance.
    enough = len(compared) >= MIN_COMPARED or sign_test(len(checked), 0) <= level
    if not enough:
        fewest = f"{MIN_COMPARED} compared or {_fewest(level)} with checked content"
        told += f"; too few to reject by: {fewest} are needed"
    result = CheckResult.PASSED if enough else CheckResult.NOT_ENOUGH
    return GateCheck(PROBES, result, told, figures)


def _tests(
    scores: Sequence[ProbeScores],
    checked: Sequence[ProbeScores],
    compared: Sequence[ProbeScores],
    with_tools: Sequence[ProbeScores],
) -> list[tuple[str, str, int, int]]:
    """Faults to test: name, compared version, and number of probes that are worse and that are better."""
    tests = _tests_of_form(scores) if scores else []
    lost, gained = _lost_and_gained([(bool(each.right_parent), bool(each.right)) for each in checked])
    if checked:
        tests.append(("wrong content", _PARENT, lost, gained))
    # A version that loses nothing itself must not be rejected for its parents' losses, or they could not be mended.
    if lost > gained and (beside_base := [each for each in checked if each.right_base is not None]):
        counts = _lost_and_gained([(bool(each.right_base), bool(each.right)) for each in beside_base])
        tests.append(("wrong content", _BASE, *counts))
    if with_tools:
        invalid = [(not each.version.valid_calls, not each.parent.valid_calls) for each in with_tools]
        tests.append(("invalid tool calls", _PARENT, *_differ(invalid)))
    if len(compared) >= MIN_COMPARED:
        worse, better = (sum(each.preferred == sign for each in compared) for sign in (-1, 1))
        tests.append(("answers the judge likes less", _PARENT, worse, better))
    return tests


def _tests_of_form(scores: Sequence[ProbeScores]) -> list[tuple[str, str, int, int]]:
    """Tests for answers that loop, are empty or are cut, also where one is thinking without an end.

    A version that has no more of them than its parent is not rejected for its parents' faults, or they could not be
    mended; one that has is compared with the base model, too, where that was asked.
    """
    words = "looping, empty or cut answers"
    worse, better = _differ([(each.version.is_faulty, each.parent.is_faulty) for each in scores])
    tests = [(words, _PARENT, worse, better)]
    beside_base = [(each.version.is_faulty, each.base.is_faulty) for each in scores if each.base is not None]
    if worse > better and beside_base:
        tests.append((words, _BASE, *_differ(beside_base)))
    return tests


def _too_long(checked: Sequence[ProbeScores], length_growth: float, judged: Sequence[JudgedReply]) -> list[str]:
    """A reason if the version's answers grew beyond the limit and nothing says that longer ones are wanted.

    Answers as long as the parent's are no growth, however long they are.

    Args:
        judged: the policy's newest replies with a verdict, of a judge or a rating; with too few of them, as where no
            judge is asked and nobody rates, the limit alone decides.
    """
    few = len(judged) < MIN_JUDGED
    if len(checked) < MIN_LENGTHS or not (few or liked_longer(judged) is False):
        return []
    version, parent, base = (
        median(each.words for each in answers)
        for answers in (
            [each.version for each in checked],
            [each.parent for each in checked],
            [each.parent if each.base is None else each.base for each in checked],
        )
    )
    if version <= parent or version <= max(length_growth * base, base + LENGTH_MARGIN):
        return []
    told = f"longer answers: {version:g} words at the median, the base model's {base:g}"
    told += f", limit {length_growth:g} times (gate.length_growth); "
    unknown = f"{len(judged)} verdicts or ratings say whether longer ones are liked better, {MIN_JUDGED} are needed"
    return [told + (unknown if few else "longer replies are not liked better")]


def liked_longer(judged: Sequence[JudgedReply]) -> bool | None:
    """True if longer replies are liked better, by a rank test (Mann and Whitney) at 99 %; None with too few of them."""
    count, praised = len(judged), sum(reply.verdict > 0 for reply in judged)
    if count < MIN_JUDGED or praised < MIN_PRAISED:
        return None
    blamed = count - praised
    lengths = Counter(reply.tokens for reply in judged)
    rank, below = {}, 0
    for tokens in sorted(lengths):
        rank[tokens] = below + (lengths[tokens] + 1) / 2
        below += lengths[tokens]
    above = sum(rank[reply.tokens] for reply in judged if reply.verdict > 0) - praised * (praised + 1) / 2
    ties = sum(each**3 - each for each in lengths.values()) / (count * (count - 1))
    deviation = math.sqrt(praised * blamed / 12 * (count + 1 - ties))
    return deviation > 0 and above - praised * blamed / 2 > _LIKED_Z * deviation


def _beyond(kind: str, checked: Sequence[ProbeScores], content_loss: float, *, by_chance: bool = False) -> list[str]:
    """A reason if a version lost more content than its recipe allows; empty if not, or with too few probes to tell.

    A parent that lost as much itself, e.g. one that was released by hand, does not keep out a version that loses
    nothing more.

    Args:
        by_chance: some answers change with any change of the weights: the loss less its standard error counts.
    """
    lost, gained = _lost_and_gained([(bool(each.right_parent), bool(each.right)) for each in checked])
    # Too few probes if the allowance is less than one probe: no version is rejected for one answer.
    if lost <= gained or len(checked) * content_loss < 1:
        return []
    # Where the parent is the base model, its answers are the parent's.
    base = [each.right_parent if each.right_base is None else each.right_base for each in checked]
    lost, gained = _lost_and_gained([(bool(of), bool(each.right)) for of, each in zip(base, checked, strict=True)])
    if lost - gained - (math.sqrt(lost + gained) if by_chance else 0) <= len(checked) * content_loss:
        return []
    told = f"lost content: {lost - gained} of {len(checked)} {kind} beside the base model"
    return [f"{told}, limit {content_loss:.3g} (gate.content_loss)"]


def _lost_and_gained(right: Sequence[tuple[bool, bool]]) -> tuple[int, int]:
    """Number of pairs that are right before and wrong now, and the reverse."""
    return sum(before and not now for before, now in right), sum(now and not before for before, now in right)


@dataclass(frozen=True, slots=True)
class AskedProbes:
    """
    Args:
        scores: of the probes that were answered.
        problems: one for each probe that was not answered, or not compared.
        seconds: how long asking took.
        note: why the general questions do not count; empty if they do.
        judged: the newest replies with a verdict.
    """

    scores: Sequence[ProbeScores]
    problems: Sequence[str]
    seconds: float
    note: str = ""
    judged: Sequence[JudgedReply] = ()


def check_asked(asked: AskedProbes, gate: Gate) -> GateCheck:
    """The check by the probes that were answered; problems are named with their number."""
    counted = Counter(asked.problems)
    notes = [f"{count} probes: {problem}" for problem, count in counted.items()]
    noted = "; ".join(notes + [asked.note] * bool(asked.note))
    if not asked.scores:
        return not_asked(noted or "there is no probe, nor a praised turn to ask again").timed(asked.seconds)
    check = check_probes(asked.scores, gate.content_loss, gate.length_growth, asked.judged)
    return (check.noting(noted) if noted else check).timed(asked.seconds)


def not_asked(reason: str) -> GateCheck:
    """The check of a version that could not be asked, e.g. because no engine has it."""
    return GateCheck(PROBES, CheckResult.NOT_ENOUGH, f"not asked: {reason}", {"asked": 0})


def sign_test(worse: int, better: int) -> float:
    """The chance of `worse` or more of the differing probes, were either side as likely."""
    count = worse + better
    return sum(comb(count, more) for more in range(worse, count + 1)) / float(2**count)


def repeated_share(text: str) -> float:
    """Share of the text's four-word sequences that it had before; 0 for a short text."""
    words = text.split()
    if len(words) < _MIN_WORDS:
        return 0.0
    grams = [tuple(words[at : at + _GRAM]) for at in range(len(words) - _GRAM + 1)]
    return 1 - len(set(grams)) / len(grams)


def is_of_one_character(text: str) -> bool:
    """True if a text is long enough to tell, and nearly all of it is one repeated character."""
    characters = Counter("".join(text.split()))
    return characters.total() >= _SHORTEST_RUN and max(characters.values()) >= _SAME_SHARE * characters.total()


def is_broken(answer: ProbeAnswer) -> bool:
    """True if the answer is empty, as thinking without an end is, or repeats itself."""
    if not answer.text.strip():
        return not answer.tool_calls
    return repeated_share(answer.text) > _REPEATED_SHARE or is_of_one_character(answer.text)


def has_valid_calls(answer: ProbeAnswer) -> bool:
    """True if each tool call names a tool and has a JSON object as its arguments; also without calls."""
    return all(name and _is_object(arguments) for name, arguments in answer.tool_calls)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def _differ(bad: Sequence[tuple[bool, bool]]) -> tuple[int, int]:
    """Number of pairs in which the first answer alone is bad, and the second alone."""
    return sum(first and not second for first, second in bad), sum(second and not first for first, second in bad)


def _figures(
    scores: Sequence[ProbeScores],
    checked: Sequence[ProbeScores],
    compared: Sequence[ProbeScores],
    with_tools: Sequence[ProbeScores],
) -> Mapping[str, float | None]:
    answers, parents = [each.version for each in scores], [each.parent for each in scores]
    based = [each.base.words for each in checked if each.base is not None]
    return {
        "asked": len(scores),
        "checked": len(checked),
        "right": _share([bool(each.right) for each in checked]),
        "parent_right": _share([bool(each.right_parent) for each in checked]),
        "base_right": _share([bool(each.right_base) for each in checked if each.right_base is not None]),
        "general": sum(each.general for each in checked),
        "general_right": _share([bool(each.right) for each in checked if each.general]),
        "compared": len(compared),
        "preferred": sum(each.preferred == 1 for each in compared),
        "parent_preferred": sum(each.preferred == -1 for each in compared),
        "median_words": median([each.version.words for each in checked]) if checked else None,
        "parent_median_words": median([each.parent.words for each in checked]) if checked else None,
        "base_median_words": median(based) if based else None,
        "broken": _share([answer.broken for answer in answers]),
        "parent_broken": _share([answer.broken for answer in parents]),
        "words": _share([answer.words for answer in answers]),
        "parent_words": _share([answer.words for answer in parents]),
        "cut": _share([answer.cut for answer in answers]),
        "parent_cut": _share([answer.cut for answer in parents]),
        "repeated": _share([answer.repeated for answer in answers]),
        "parent_repeated": _share([answer.repeated for answer in parents]),
        "valid_calls": _share([each.version.valid_calls for each in with_tools]),
        "parent_valid_calls": _share([each.parent.valid_calls for each in with_tools]),
    }


def _share(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _fewest(level: float) -> int:
    return next(count for count in range(1, 64) if sign_test(count, 0) <= level)
