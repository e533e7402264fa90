"""Chooses a turn's hints, and inserts them into the prompt.

A hint is trivial if it only repeats the verdict, the request or the reply: the teacher learns nothing from it. A
repeated verdict is recognised in English; in another language such a hint passes, and has little effect.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from clawloop.core.contracts.turns import Message
from clawloop.core.errors import RecordUnusable
from clawloop.core.judging.evidence import Evidence, cut_middle, harmless, has_control_tokens
from clawloop.core.judging.voting import HintVote
from clawloop.core.recipes.recipe import MOST_HINTS
from clawloop.core.turns.canonical import is_volatile

# In place of a hint it asks for nothing, so that what it changes is the effect of the lead-in and of being spoken to.
CONTROL_HINT = "Okay."
SHORTEST = 10  # characters; a hint must be longer: a shorter one says "redo" rather than how
LEAD_IN = "\n\nKeep in mind: "
# Characters of a user's next message: some 500 tokens of English. A correction is short; what is longer mostly holds
# something pasted, and the trainer reads all of it once more.
LONGEST_MESSAGE = 2_000

# Scripts without spaces between words: each character counts as a word.
_UNSPACED = re.compile("([぀-ヿ㐀-䶿一-鿿가-힣豈-﫿฀-๿])")
_VERDICT_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
    a about again all an and answer assistant at bad be better but by complained correct corrected did
    didn do does doesn done error failed feedback fine good great happy has have hint i improve
    improved in incorrect is isn it its like liked made make mistake more much needs next not of ok
    okay perfect poor previous quality redo reply response right satisfied should so t thanked
    thanks that the this time to try unhappy unsatisfied user very wanted was wasn well were what
    with wrong you your
    """,
    )
)


@dataclass(frozen=True, slots=True)
class HintChoice:
    """The hints of a turn, or why there is none.

    Args:
        texts: at most MOST_HINTS, the longest first; empty if there is no hint.
        answered: at least as many answers could be parsed as a hint needs. Without `texts`, True means that there is no
            hint, and False that it is not known whether there is one.
        why: for people.
    """

    texts: tuple[str, ...]
    answered: bool
    why: str

    @property
    def text(self) -> str | None:
        """The hints, one a line, as they are stored; None if there is none."""
        return "\n".join(self.texts) or None


NOT_ASKED = HintChoice((), answered=False, why="no hint asked for")


def choose_hints(
    votes: Sequence[HintVote | None], evidence: Evidence, needed: int = 1, *, from_tools: bool = False
) -> HintChoice:
    """All usable hints, each once, at most MOST_HINTS: the first of each answer before the second of any.

    Hints that contradict each other are kept: the trainer finds out which one the reply agrees with.

    Args:
        votes: None for an answer that cannot be read.
        needed: how many answers must have a usable hint.
        from_tools: the answers may rest on tool output, and not on the user's words alone.
    """
    request = "" if evidence.task is None else evidence.task.text
    reply = "\n".join(statement.text for statement in evidence.reply)
    readable = [vote for vote in votes if vote is not None]
    if not readable:
        return HintChoice((), answered=False, why="no valid hint answer")
    answered = len(readable) >= needed
    offered = [(text, fault_of(text, request=request, reply=reply)) for vote in readable for text in vote.hints]
    if not offered:
        return HintChoice((), answered, why="the judge found no hint")
    faults = dict(offered)
    usable = [[text for text in vote.hints if faults[text] is None] for vote in readable]
    giving = sum(bool(texts) for texts in usable)
    if not giving:
        return HintChoice((), answered, why=f"hint dropped: {offered[0][1]}")
    source = ", which may rest on tool output" if from_tools else ""
    why = f"the judge gave a usable hint in {giving} of {len(readable)} answers{source}"
    if giving < needed:
        return HintChoice((), answered, why=f"{why}, {needed} are needed")
    distinct: dict[tuple[str, ...], str] = {}  # by their words, so that punctuation makes no second hint
    for texts in zip_longest(*usable):
        for text in filter(None, texts):
            distinct.setdefault(tuple(comparable_words(text)), text)
    kept = sorted(list(distinct.values())[:MOST_HINTS], key=len, reverse=True)
    return HintChoice(tuple(kept), answered=True, why=f"{why}, {len(kept)} different hints" if len(kept) > 1 else why)


def next_message(words: str) -> HintChoice:
    """A user's own words in place of a hint: on one line, at most LONGEST_MESSAGE characters, without control tokens.

    Args:
        words: as the user wrote them, of any length.
    """
    line = " ".join(words.split())
    if not line:
        return HintChoice((), answered=True, why="the user's message has no words")
    text = harmless(" ".join(cut_middle(line, LONGEST_MESSAGE).split()))
    cut = f" of {len(line)}" if len(line) > LONGEST_MESSAGE else ""
    return HintChoice((text,), answered=True, why=f"{len(text)}{cut} characters")


def reject_hints(choice: HintChoice, why: str) -> HintChoice:
    """No hint, because none can be used, e.g. `template mismatch`."""
    return HintChoice((), answered=choice.answered, why=why)


def fault_of(hint: str, *, request: str, reply: str) -> str | None:
    """The reason that a hint cannot be used; None if it can."""
    if len(hint.strip()) <= SHORTEST:
        return "too short"
    if has_control_tokens(hint):
        return "holds control tokens"
    words = comparable_words(hint)
    if set(words) <= _VERDICT_WORDS:
        return "repeats the verdict"
    if _within(words, comparable_words(request)):
        return "repeats the request"
    if _within(words, comparable_words(reply)):
        return "repeats the reply"
    return None


def with_hint(messages: Sequence[Message], hint: str, *, spoken: bool = False) -> list[Message] | None:
    """A copy of the messages with the hint in the last user message that is not volatile.

    None if there is no such message, or its content is neither text nor a list of parts.

    Args:
        spoken: the hint is what the user said next: it stands before the request, as if the user had begun with it.
            Otherwise it stands after the request, behind a lead-in.
    """
    before, after = (f"{hint}\n\n", "") if spoken else ("", f"{LEAD_IN}{hint}")
    for at in reversed(range(len(messages))):
        message = messages[at]
        if message.get("role") != "user" or is_volatile(message):
            continue
        content = message.get("content")
        if isinstance(content, str):
            hinted = message | {"content": f"{before}{content}{after}"}
        elif isinstance(content, list):
            part: Message = {"type": "text", "text": before or after}
            hinted = message | {"content": [part, *content] if spoken else [*content, part]}
        else:
            return None
        return [*messages[:at], hinted, *messages[at + 1 :]]
    return None


@dataclass(frozen=True, slots=True)
class PromptChange:
    """A hinted prompt as what it adds to the plain one: of the plain prompt it keeps a beginning and an end.

    Args:
        start: number of tokens it begins with that are those of the plain prompt.
        end: likewise at its end.
        added: the tokens between them.
    """

    start: int
    end: int
    added: tuple[int, ...]

    @classmethod
    def between(cls, plain: Sequence[int], hinted: Sequence[int]) -> PromptChange:
        shorter = min(len(plain), len(hinted))
        start = next((at for at in range(shorter) if plain[at] != hinted[at]), shorter)
        rest = shorter - start
        end = next((at for at in range(rest) if plain[-1 - at] != hinted[-1 - at]), rest)
        return cls(start, end, tuple(hinted[start : len(hinted) - end]))

    def of(self, plain: Sequence[int]) -> list[int]:
        """The hinted prompt.

        Raises:
            RecordUnusable: it keeps more of the plain prompt than there is.
        """
        if self.start < 0 or self.end < 0 or self.start + self.end > len(plain):
            raise RecordUnusable(f"a hint keeps {self.start} and {self.end} tokens of a prompt of {len(plain)}")
        return [*plain[: self.start], *self.added, *plain[len(plain) - self.end :]]


def comparable_words(text: str) -> list[str]:
    """The words of a text, in which case, width and punctuation make no difference."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return re.findall(r"[^\W_]+", _UNSPACED.sub(r" \1 ", folded))


def _within(words: Sequence[str], text: Sequence[str]) -> bool:
    return f" {' '.join(words)} " in f" {' '.join(text)} "
