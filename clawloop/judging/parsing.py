"""A judge's raw answer, read.

Knows nothing about what was judged. The rule: thinking is taken out; then the answer must *end* with the
required form, on lines of its own and with the mark of its prompt. So a form that the judge quotes on the
way, or that is followed by more text, or that was cut off, does not count, and of several answers the last
one does. No evidence contains the mark, so no quotation of evidence is an answer. What cannot be read is
None: a missing vote, never a zero. Every function takes time linear in the answer.
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
_LONGEST_HINT_LINES = HINT_LIMIT * 2  # a hint and the white space that is folded away in it
_NONE_WORDS = frozenset({"none", "no hint", "n/a", "no", "nothing", "null"})


@dataclass(frozen=True, slots=True)
class HintVote:
    """A judge's opinion on whether there is a hint.

    Args:
        accepted: the judge says that there is one.
        text: the hint; None exactly when it is not accepted.
    """

    accepted: bool
    text: str | None


def parse_vote(answer: str, prompt: JudgePrompt) -> Vote | None:
    """The vote an answer gives, or None."""
    said = without_leading_thinking(answer)
    if prompt.form is AnswerForm.GRAMMAR:
        # Bare digits carry no mark. They are safe because the engine lets the judge write nothing else.
        bare = said.strip() if len(said) <= _LONGEST_VERDICT else ""
        return _VOTES[bare] if bare in VOTE_CHOICES else None
    line = _last_line(said, _LONGEST_VERDICT)
    loose = r"[\s*_`]{0,4}"  # never a sign: a minus that is skipped would turn the vote around
    form = rf"verdict{loose}{prompt.mark}{loose}[:：]{loose}([+\-−–﹣－]?[01])[\s.。!]{{0,2}}"
    match = re.fullmatch(form, line, re.IGNORECASE)
    return None if match is None else _VOTES.get(match[1])


def parse_hint(answer: str, prompt: JudgePrompt) -> HintVote | None:
    """The hint an answer gives, or that it gives none, or None if it cannot be read."""
    said = without_leading_thinking(answer).rstrip(_DECORATION)
    last = _last_line(said, _LONGEST_HINT_LINES)
    if re.fullmatch(rf"no\s+hint\W{{0,3}}{prompt.mark}\W{{0,2}}", last, re.IGNORECASE):
        return HintVote(accepted=False, text=None)
    # A hint may go over several lines, but it is one paragraph and the end of the answer.
    end = said
    if len(said) > _LONGEST_HINT_LINES:
        end = said[-_LONGEST_HINT_LINES:].partition("\n")[2]  # begin with a whole line
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
    """The last line that says anything, without decoration; empty if there is none or it is too long."""
    end = text.rstrip(_DECORATION)
    line = end[end.rfind("\n") + 1 :]
    return "" if len(line) > longest else line.strip(_DECORATION)
