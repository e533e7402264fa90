"""From a judge's raw answers to a verdict."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from clawloop.core.errors import EngineAnswerUnusable
from clawloop.core.judging.prompts import HINT_LIMIT, VOTE_CHOICES, AnswerForm, JudgePrompt
from clawloop.core.turns.thinking import without_leading_thinking

# Answers --------------------------------------------------------------------------------------------------------------
# Parses a judge's raw answer.
#
# Thinking is removed; then the answer must *end* with the required form, on lines of its own and with the mark of its
# prompt. So a form that is quoted earlier, followed by more text, or cut off does not count, and of several answers
# the last one does. No evidence contains the mark, so no quotation of evidence is an answer. An answer that cannot be
# read is None: a missing vote, never a zero. Every function takes time linear in the answer.

Vote: TypeAlias = Literal[-1, 0, 1]

_VOTES: dict[str, Vote] = {"1": 1, "+1": 1, "0": 0, "-1": -1, "−1": -1, "–1": -1, "﹣1": -1, "－1": -1}
_DECORATION = " \t\r\n*_`\"'“”"
_LONGEST_VERDICT = 100  # characters of a line that may still be `verdict mark: N` with decoration
MOST_HINT_LINES = 3  # hints of one answer
_LONGEST_HINT_LINES = HINT_LIMIT * 2 * MOST_HINT_LINES  # hints with white space that is collapsed later
_NONE_WORDS = frozenset({"none", "no hint", "n/a", "no", "nothing", "null"})


@dataclass(frozen=True, slots=True)
class HintVote:
    """A judge's answer to whether there is a hint.

    Args:
        accepted: there is one.
        text: the hints, one a line; None exactly when there is none.
    """

    accepted: bool
    text: str | None

    @property
    def hints(self) -> list[str]:
        return [] if self.text is None else self.text.split("\n")


def parse_vote(answer: str, prompt: JudgePrompt) -> Vote | None:
    """The vote of an answer; None if it cannot be read."""
    text = without_leading_thinking(answer)
    if prompt.form is not AnswerForm.FREE:
        # Bare digits carry no mark. They are safe because the engine's grammar allows nothing else.
        bare = text.strip() if len(text) <= _LONGEST_VERDICT else ""
        return _VOTES[bare] if bare in VOTE_CHOICES else None
    line = _last_line(text, _LONGEST_VERDICT)
    loose = r"[\s*_`]{0,4}"  # never a sign: skipping a minus would invert the vote
    form = rf"verdict{loose}{prompt.mark}{loose}[:：]{loose}([+\-−–﹣－]?[01])[\s.。!]{{0,2}}"
    match = re.fullmatch(form, line, re.IGNORECASE)
    return None if match is None else _VOTES.get(match[1])


def parse_hint(answer: str, prompt: JudgePrompt) -> HintVote | None:
    """The hints of an answer, or that there is none; None if the answer cannot be read."""
    body = without_leading_thinking(answer).rstrip(_DECORATION)
    last = _last_line(body, _LONGEST_HINT_LINES)
    if re.fullmatch(rf"no\s+hint\W{{0,3}}{prompt.mark}\W{{0,2}}", last, re.IGNORECASE):
        return HintVote(accepted=False, text=None)
    # A hint may have several lines, but all hints are one paragraph and the end of the answer.
    end = body
    if len(body) > _LONGEST_HINT_LINES:
        end = body[-_LONGEST_HINT_LINES:].partition("\n")[2]  # begin with a complete line
    paragraph = re.split(r"\n[ \t\r]*\n", end)[-1]
    forms = list(
        re.finditer(rf"^[ \t*_`]*hint\s+{prompt.mark}\W{{0,3}}?[:：]", paragraph, re.IGNORECASE | re.MULTILINE)
    )
    if not forms:
        return None
    ends = [*(form.start() for form in forms[1:]), len(paragraph)]
    texts = [
        " ".join(paragraph[form.end() : end].strip(_DECORATION).split()) for form, end in zip(forms, ends, strict=True)
    ]
    if len(texts) == 1 and texts[0].casefold().strip(".") in _NONE_WORDS:
        return HintVote(accepted=False, text=None)
    # The last form must hold a hint, as of an answer that corrects itself; earlier ones count where they do.
    usable = [text if _is_hint(text, prompt.mark) else None for text in texts[-MOST_HINT_LINES:]]
    return None if usable[-1] is None else HintVote(accepted=True, text="\n".join(filter(None, usable)))


def _is_hint(text: str, mark: str) -> bool:
    is_text = any(character.isalnum() for character in text) and text.casefold().strip(".") not in _NONE_WORDS
    return is_text and len(text) <= HINT_LIMIT and mark not in text.casefold()


def _last_line(text: str, longest: int) -> str:
    """The last line with any text, without decoration; empty if there is none or it is too long."""
    end = text.rstrip(_DECORATION)
    line = end[end.rfind("\n") + 1 :]
    return "" if len(line) > longest else line.strip(_DECORATION)


# Verdicts -------------------------------------------------------------------------------------------------------------
# Decides a verdict from votes.
#
# Scores are in [−1, 1]. A missing vote is None and is not counted: not as a zero, nor in a mean.

_TIE = 1e-9  # probabilities closer than this are equal: they come from float32 log-probs


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a turn.

    Args:
        verdict: −1, 0 or 1; None without a valid vote.
        expected: mean of the valid votes, or of a direct vote's distribution; None without a verdict.
        reward: the verdict as a number; for a rating its exact score.
        why: for people, e.g. "2 of 3 votes bad".
    """

    verdict: Vote | None
    expected: float | None
    reward: float | None
    why: str


def signed(verdict: int) -> str:
    """A verdict as people read it: `+1`, `0` or `-1`."""
    return f"{verdict:+d}" if verdict else "0"


def in_words(verdict: int) -> str:
    """A verdict in a sentence: `good`, `neutral` or `bad`."""
    return {1: "good", 0: "neutral", -1: "bad"}[verdict]


def majority(votes: Sequence[Vote | None]) -> Verdict:
    """The most frequent valid vote; 0 in a tie for the first place; no verdict without a valid vote."""
    valid = [vote for vote in votes if vote is not None]
    if not valid:
        return Verdict(None, None, None, "no valid vote")
    expected = sum(valid) / len(valid)
    (leader, most), *others = Counter(valid).most_common()
    missing = f", {len(votes) - len(valid)} missing" if len(valid) < len(votes) else ""
    if others and others[0][1] == most:
        return Verdict(0, expected, 0.0, f"vote tie{missing}")
    return Verdict(leader, expected, float(leader), f"{most} of {len(valid)} votes {in_words(leader)}{missing}")


def direct_vote(logprobs: Mapping[Vote, float]) -> Verdict:
    """The verdict of a constrained answer's distribution: its likeliest choice; 0 in a tie.

    Args:
        logprobs: of each of the three choices at temperature 1. They are renormalised, so it does not matter whether
            the engine reports them before or after its grammar masked other tokens.

    Raises:
        EngineAnswerUnusable: a choice is missing, or the numbers are no distribution.
    """
    if set(logprobs) != {-1, 0, 1}:
        raise EngineAnswerUnusable(f"a direct vote needs log-probs of -1, 0 and 1, not of {sorted(logprobs)}")
    peak = max(logprobs.values())
    if not all(value <= 0.001 for value in logprobs.values()) or not math.isfinite(peak):
        raise EngineAnswerUnusable(f"not log-probs: {dict(logprobs)}")
    weights: dict[Vote, float] = {choice: math.exp(value - peak) for choice, value in logprobs.items()}
    mass = sum(weights.values())
    expected = (weights[1] - weights[-1]) / mass
    leaders = [choice for choice, weight in weights.items() if weight / mass > 1 / mass - _TIE]
    leader: Vote = leaders[0] if len(leaders) == 1 else 0
    return Verdict(leader, expected, float(leader), f"direct vote {expected:+.2f}")


def choice_logprobs(first_token: Mapping[str, float]) -> dict[Vote, float] | None:
    """Log-probs of the three choices, from those of the first token of a GRAMMAR answer.

    Most tokenizers write "-1" as two tokens, so a first token "-" means −1; if both spellings are reported, their
    probabilities are added. None if the engine did not report all three choices.
    """
    spellings: dict[Vote, tuple[str, ...]] = {1: ("1",), 0: ("0",), -1: ("-", "-1")}
    logprobs: dict[Vote, float] = {}
    for choice, texts in spellings.items():
        reported = [first_token[text] for text in texts if text in first_token]
        if not reported:
            return None
        peak = max(reported)
        total = sum(math.exp(value - peak) for value in reported) if peak > -math.inf else 1.0
        logprobs[choice] = peak + math.log(total)
    return logprobs


def rated(score: float) -> Verdict:
    """The verdict of a user's explicit score; no judge is asked.

    Raises:
        ValueError: the score is outside [−1, 1].
    """
    if not -1 <= score <= 1:
        raise ValueError(f"a score must be in [-1, 1], not {score}")
    verdict: Vote = 1 if score > 0 else -1 if score < 0 else 0
    return Verdict(verdict, float(score), float(score), f"rated {score:+.2f} by the user")
