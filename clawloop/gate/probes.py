"""The check by probes: what a version answers to fixed prompts, beside its parent's answers and the base model's.

A version is rejected on evidence alone: by a sign test over the probes on which the two differ (McNemar's exact test),
one for each of content, the judge's preference, broken replies and tool calls. Content is compared with the base model,
too: what each of many versions loses may be too little for a test, and together much. A recipe may also bound what is
lost beside the base model, where a loss too small for a test is too large for the operator. Length decides nothing: a
shorter answer may be what was learned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb

from clawloop.contracts.gate_checks import CheckName, CheckResult, GateCheck
from clawloop.contracts.probes import ProbeAnswer, ProbeContent

MIN_COMPARED = 10
"""Fewest pairs by which the judge's preference decides: its votes are noisy, and ties are common."""
_ALPHA = 0.05
_GRAM = 4
_PARENT = "its parent"
# Shorter answers repeat too little to tell a list from a loop.
_MIN_WORDS = 20
# An answer that repeats more than this loops; tables and lists of similar lines stay below it.
_REPEATED_SHARE = 0.5


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
        valid_calls: see `has_valid_calls`.
    """

    words: int
    cut: bool
    repeated: float
    broken: bool
    valid_calls: bool

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
    """

    parent: AnswerScores
    version: AnswerScores
    tools: bool
    right_parent: bool | None
    right: bool | None
    preferred: int | None
    right_base: bool | None = None

    @classmethod
    def of(cls, pair: ProbePair) -> ProbeScores:
        parent, version = AnswerScores.of(pair.parent), AnswerScores.of(pair.version)
        tools = bool(pair.content.tools)
        return cls(parent, version, tools, pair.right_parent, pair.right, pair.preferred, pair.right_base)


def check_probes(scores: Sequence[ProbeScores], content_loss: float = 1.0) -> GateCheck:
    """Fails if a test says at 95 %, corrected for their number, that the version answers worse than its parent, or if
    it lost more than `content_loss` beside the base model.

    Args:
        content_loss: the recipe's `gate.content_loss`; 1 allows every loss.
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
    failed += _beyond(checked, content_loss)
    figures = _figures(scores, checked, compared, with_tools)
    if failed:
        return GateCheck(CheckName.PROBES, CheckResult.FAILED, "; ".join(failed), figures)
    told = f"{len(scores)} probes asked"
    if checked:
        told += f", content right {sum(bool(each.right) for each in checked)} of {len(checked)}, "
        told += f"the parent's {sum(bool(each.right_parent) for each in checked)}"
        if any(each.right_base is not None for each in checked):
            told += f", the base model's {sum(bool(each.right_base) for each in checked)}"
    if compared:
        wins, losses = (sum(each.preferred == sign for each in compared) for sign in (1, -1))
        told += f"; the judge prefers it {wins} times, its parent {losses} times of {len(compared)}"
    # With fewer probes even a version that fails all of them could not be told from chance.
    enough = len(compared) >= MIN_COMPARED or sign_test(len(checked), 0) <= level
    if not enough:
        fewest = f"{MIN_COMPARED} compared or {_fewest(level)} with checked content"
        told += f"; too few to reject by: {fewest} are needed"
    result = CheckResult.PASSED if enough else CheckResult.NOT_ENOUGH
    return GateCheck(CheckName.PROBES, result, told, figures)


def _tests(
    scores: Sequence[ProbeScores],
    checked: Sequence[ProbeScores],
    compared: Sequence[ProbeScores],
    with_tools: Sequence[ProbeScores],
) -> list[tuple[str, str, int, int]]:
    """Faults to test: name, compared version, and number of probes that are worse and that are better."""
    tests = [("looping or empty answers", _PARENT, *_differ(scores, lambda answer: answer.broken))] if scores else []
    lost, gained = _lost_and_gained([(bool(each.right_parent), bool(each.right)) for each in checked])
    if checked:
        tests.append(("wrong content", _PARENT, lost, gained))
    # A version that loses nothing itself must not be rejected for its parents' losses, or they could not be mended.
    if lost > gained and (beside_base := [each for each in checked if each.right_base is not None]):
        counts = _lost_and_gained([(bool(each.right_base), bool(each.right)) for each in beside_base])
        tests.append(("wrong content", "the base model", *counts))
    if with_tools:
        tests.append(("invalid tool calls", _PARENT, *_differ(with_tools, lambda answer: not answer.valid_calls)))
    if len(compared) >= MIN_COMPARED:
        worse, better = (sum(each.preferred == sign for each in compared) for sign in (-1, 1))
        tests.append(("answers the judge likes less", _PARENT, worse, better))
    return tests


def _beyond(checked: Sequence[ProbeScores], content_loss: float) -> list[str]:
    """A reason if a version lost more content than its recipe allows; empty if not, or with too few probes to tell.

    A parent that lost as much itself, e.g. one that was released by hand, does not keep out a version that loses
    nothing more.
    """
    lost, gained = _lost_and_gained([(bool(each.right_parent), bool(each.right)) for each in checked])
    # Too few probes if the allowance is less than one probe: no version is rejected for one answer.
    if lost <= gained or len(checked) * content_loss < 1:
        return []
    # Where the parent is the base model, its answers are the parent's.
    base = [each.right_parent if each.right_base is None else each.right_base for each in checked]
    lost, gained = _lost_and_gained([(bool(of), bool(each.right)) for of, each in zip(base, checked, strict=True)])
    if lost - gained <= len(checked) * content_loss:
        return []
    told = f"lost content: {lost - gained} of {len(checked)} probes beside the base model"
    return [f"{told}, limit {content_loss:.3g} (gate.content_loss)"]


def _lost_and_gained(right: Sequence[tuple[bool, bool]]) -> tuple[int, int]:
    """Number of pairs that are right before and wrong now, and the reverse."""
    return sum(before and not now for before, now in right), sum(now and not before for before, now in right)


def not_asked(reason: str) -> GateCheck:
    """The check of a version that could not be asked, e.g. because no engine has it."""
    return GateCheck(CheckName.PROBES, CheckResult.NOT_ENOUGH, f"not asked: {reason}", {"asked": 0})


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


def is_broken(answer: ProbeAnswer) -> bool:
    """True if the answer is empty or repeats itself."""
    return not (answer.text.strip() or answer.tool_calls) or repeated_share(answer.text) > _REPEATED_SHARE


def has_valid_calls(answer: ProbeAnswer) -> bool:
    """True if each tool call names a tool and has a JSON object as its arguments; also without calls."""
    return all(name and _is_object(arguments) for name, arguments in answer.tool_calls)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def _differ(scores: Sequence[ProbeScores], is_bad: Callable[[AnswerScores], bool]) -> tuple[int, int]:
    """Number of probes with a bad answer of the version only, and with a bad answer of its parent only."""
    bad = [(is_bad(each.version), is_bad(each.parent)) for each in scores]
    return sum(version and not parent for version, parent in bad), sum(
        parent and not version for version, parent in bad
    )


def _figures(
    scores: Sequence[ProbeScores],
    checked: Sequence[ProbeScores],
    compared: Sequence[ProbeScores],
    with_tools: Sequence[ProbeScores],
) -> Mapping[str, float | None]:
    answers, parents = [each.version for each in scores], [each.parent for each in scores]
    return {
        "asked": len(scores),
        "checked": len(checked),
        "right": _share([bool(each.right) for each in checked]),
        "parent_right": _share([bool(each.right_parent) for each in checked]),
        "base_right": _share([bool(each.right_base) for each in checked if each.right_base is not None]),
        "compared": len(compared),
        "preferred": sum(each.preferred == 1 for each in compared),
        "parent_preferred": sum(each.preferred == -1 for each in compared),
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
