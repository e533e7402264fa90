"""The check by probes: what a version answers to fixed prompts, beside its parent's answers.

A version is rejected on evidence alone: by a sign test over the probes on which the two differ (McNemar's exact test),
one for each of content, the judge's preference, broken replies and tool calls. Length decides nothing: a shorter answer
may be what was learned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb

from clawloop.contracts.probes import ProbeAnswer, ProbeContent
from clawloop.contracts.training import CheckName, CheckResult, GateCheck

MIN_COMPARED = 10
"""With fewer pairs the judge's preference decides nothing: its votes are noisy, and ties are common."""
_ALPHA = 0.05
_GRAM = 4
# Shorter answers repeat too little to tell a list from a loop.
_MIN_WORDS = 20
# An answer that repeats more than this loops; tables and lists of similar lines stay below it.
_REPEATED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class ProbePair:
    """A probe's answers.

    Args:
        right_parent, right: whether the content is right; None if the probe has no content check.
        preferred: 1 if the judge prefers the version's answer, −1 the parent's, 0 neither; None if it was not asked.
    """

    content: ProbeContent
    parent: ProbeAnswer
    version: ProbeAnswer
    right_parent: bool | None = None
    right: bool | None = None
    preferred: int | None = None


def check_probes(pairs: Sequence[ProbePair]) -> GateCheck:
    """Fails if a test says at 95 %, corrected for their number, that the version answers worse than its parent."""
    checked = [pair for pair in pairs if pair.right is not None and pair.right_parent is not None]
    compared = [pair for pair in pairs if pair.preferred is not None]
    with_tools = [pair for pair in pairs if pair.content.tools]
    tests = {
        "wrong content": (
            sum(bool(pair.right_parent) and not pair.right for pair in checked),
            sum(bool(pair.right) and not pair.right_parent for pair in checked),
        ),
        "looping or empty answers": _differ(pairs, is_broken),
        "invalid tool calls": _differ(with_tools, lambda answer: not has_valid_calls(answer)),
    }
    if len(compared) >= MIN_COMPARED:
        worse = sum(pair.preferred == -1 for pair in compared)
        tests["answers the judge likes less"] = (worse, sum(pair.preferred == 1 for pair in compared))
    level = _ALPHA / len(tests)
    chances = {words: sign_test(*counts) for words, counts in tests.items()}
    failed = [
        f"{words}: {tests[words][0]} of {sum(tests[words])} probes on which the version and its parent differ "
        f"(p = {chance:.2g})"
        for words, chance in chances.items()
        if chance <= level
    ]
    figures = _figures(pairs, checked, compared, with_tools)
    if failed:
        return GateCheck(CheckName.PROBES, CheckResult.FAILED, "; ".join(failed), figures)
    told = f"{len(pairs)} probes asked"
    if checked:
        told += f", content right {sum(bool(pair.right) for pair in checked)} of {len(checked)}, "
        told += f"the parent's {sum(bool(pair.right_parent) for pair in checked)}"
    if compared:
        wins, losses = (sum(pair.preferred == sign for pair in compared) for sign in (1, -1))
        told += f"; the judge prefers it {wins} times, its parent {losses} times of {len(compared)}"
    # With fewer probes even a version that fails all of them could not be told from chance.
    enough = len(compared) >= MIN_COMPARED or sign_test(len(checked), 0) <= level
    if not enough:
        fewest = f"{MIN_COMPARED} compared or {_fewest(level)} with checked content"
        told += f"; too few to reject by: {fewest} are needed"
    result = CheckResult.PASSED if enough else CheckResult.NOT_ENOUGH
    return GateCheck(CheckName.PROBES, result, told, figures)


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
    """Whether the answer says nothing or repeats itself."""
    return not (answer.text.strip() or answer.tool_calls) or repeated_share(answer.text) > _REPEATED_SHARE


def has_valid_calls(answer: ProbeAnswer) -> bool:
    """Whether each tool call names a tool and has a JSON object as its arguments; true without calls."""
    return all(name and _is_object(arguments) for name, arguments in answer.tool_calls)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def _differ(pairs: Sequence[ProbePair], is_bad: Callable[[ProbeAnswer], bool]) -> tuple[int, int]:
    """How many version's answers are bad whose parent's are not, and the reverse."""
    bad = [(is_bad(pair.version), is_bad(pair.parent)) for pair in pairs]
    return sum(version and not parent for version, parent in bad), sum(
        parent and not version for version, parent in bad
    )


def _figures(
    pairs: Sequence[ProbePair],
    checked: Sequence[ProbePair],
    compared: Sequence[ProbePair],
    with_tools: Sequence[ProbePair],
) -> Mapping[str, float | None]:
    answers, parents = [pair.version for pair in pairs], [pair.parent for pair in pairs]
    tools, parent_tools = [pair.version for pair in with_tools], [pair.parent for pair in with_tools]
    return {
        "asked": len(pairs),
        "checked": len(checked),
        "right": _share([bool(pair.right) for pair in checked]),
        "parent_right": _share([bool(pair.right_parent) for pair in checked]),
        "compared": len(compared),
        "preferred": sum(pair.preferred == 1 for pair in compared),
        "parent_preferred": sum(pair.preferred == -1 for pair in compared),
        "words": _share([len(answer.text.split()) for answer in answers]),
        "parent_words": _share([len(answer.text.split()) for answer in parents]),
        "cut": _share([answer.cut for answer in answers]),
        "parent_cut": _share([answer.cut for answer in parents]),
        "repeated": _share([repeated_share(answer.text) for answer in answers]),
        "parent_repeated": _share([repeated_share(answer.text) for answer in parents]),
        "valid_calls": _share([has_valid_calls(answer) for answer in tools]),
        "parent_valid_calls": _share([has_valid_calls(answer) for answer in parent_tools]),
    }


def _share(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _fewest(level: float) -> int:
    return next(count for count in range(1, 64) if sign_test(count, 0) <= level)
