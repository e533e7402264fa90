"""Parses a judge's raw answer.

Thinking is removed; then the answer must *end* with the required form, on lines of its own and with the mark of its
prompt. So a form that is quoted earlier, followed by more text, or cut off does not count, and of several answers the
last one does. No evidence contains the mark, so no quotation of evidence is an answer. An answer that cannot be read
is None: a missing vote, never a zero. Every function takes time linear in the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from clawloop.judging.prompts import HINT_LIMIT, VOTE_CHOICES, AnswerForm, JudgePrompt
from clawloop.turns.thinking import without_leading_thinking

Vote: TypeAlias = Literal[-1, 0, 1]

_VOTES: dict[str, Vote] = {"1": 1, "+1": 1, "0": 0, "-1": -1, "−1": -1, "–1": -1, "﹣1": -1, "－1": -1}
_DECORATION = " \t\r\n*_`\"'“”"
_LONGEST_VERDICT = 100  # characters of a line that may still be `verdict mark: N` with decoration
_LONGEST_HINT_LINES = HINT_LIMIT * 2  # a hint with white space that is collapsed later
_NONE_WORDS = frozenset({"none", "no hint", "n/a", "no", "nothing", "null"})


@dataclass(frozen=True, slots=True)
class HintVote:
    """A judge's answer to whether there is a hint.

    Args:
        accepted: there is one.
        text: the hint; None exactly when there is none.
    """

    accepted: bool
    text: str | None


def parse_vote(answer: str, prompt: JudgePrompt) -> Vote | None:
    """The vote of an answer; None if it cannot be read."""
    text = without_leading_thinking(answer)
    if prompt.form is AnswerForm.GRAMMAR:
        # Bare digits carry no mark. They are safe because the engine's grammar allows nothing else.
        bare = text.strip() if len(text) <= _LONGEST_VERDICT else ""
        return _VOTES[bare] if bare in VOTE_CHOICES else None
    line = _last_line(text, _LONGEST_VERDICT)
    loose = r"[\s*_`]{0,4}"  # never a sign: skipping a minus would invert the vote
    form = rf"verdict{loose}{prompt.mark}{loose}[:：]{loose}([+\-−–﹣－]?[01])[\s.。!]{{0,2}}"
    match = re.fullmatch(form, line, re.IGNORECASE)
    return None if match is None else _VOTES.get(match[1])


def parse_hint(answer: str, prompt: JudgePrompt) -> HintVote | None:
    """The hint of an answer, or that there is none; None if the answer cannot be read."""
    body = without_leading_thinking(answer).rstrip(_DECORATION)
    last = _last_line(body, _LONGEST_HINT_LINES)
    if re.fullmatch(rf"no\s+hint\W{{0,3}}{prompt.mark}\W{{0,2}}", last, re.IGNORECASE):
        return HintVote(accepted=False, text=None)
    # A hint may have several lines, but it is one paragraph and the end of the answer.
    end = body
    if len(body) > _LONGEST_HINT_LINES:
        end = body[-_LONGEST_HINT_LINES:].partition("\n")[2]  # begin with a complete line
    paragraph = re.split(r"\n[ \t\r]*\n", end)[-1]
    forms = list(
        re.finditer(rf"^[ \t*_`]*hint\s+{prompt.mark}\W{{0,3}}?[:：]", paragraph, re.IGNORECASE | re.MULTILINE)
    )
    if not forms:
        return None
    text = " ".join(paragraph[forms[-1].end() :].strip(_DECORATION).split())
    if text.casefold().strip(".") in _NONE_WORDS:
        return HintVote(accepted=False, text=None)
    if not any(character.isalnum() for character in text) or len(text) > HINT_LIMIT:
        return None
    return None if prompt.mark in text.casefold() else HintVote(accepted=True, text=text)


def _last_line(text: str, longest: int) -> str:
    """The last line with any text, without decoration; empty if there is none or it is too long."""
    end = text.rstrip(_DECORATION)
    line = end[end.rfind("\n") + 1 :]
    return "" if len(line) > longest else line.strip(_DECORATION)
