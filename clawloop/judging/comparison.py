"""The question to a judge which of two answers to a request is better, and what its answers in both orders say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, TypeAlias

from clawloop.contracts.turns import Message
from clawloop.ids import TurnId
from clawloop.judging.blocks import choose_mark, harmless, render
from clawloop.judging.evidence import blocks_of, gather
from clawloop.judging.prompts import EVIDENCE_RULE, AnswerForm, JudgePrompt
from clawloop.judging.truncation import DEFAULT_BUDGETS, cut_middle
from clawloop.turns.thinking import without_leading_thinking

Choice: TypeAlias = Literal["first", "second", "equal"]
CHOICES: tuple[Choice, ...] = ("first", "second", "equal")
# Characters of each answer that a judge sees.
ANSWER_CHARACTERS = 4000

COMPARE_INSTRUCTION = f"""\
You compare two answers of an assistant to the same request.
{EVIDENCE_RULE}
first: the first answer is better: more correct, more complete, closer to what was asked for.
second: the second answer is better.
equal: neither is better. Length and tone alone make no answer better."""
_ASK = 'You may think first. End with the line "better {mark}: WORD", where WORD is first, second or equal.'
_ASK_BARE = "Answer with first, second or equal only."
_LONGEST_LINE = 100


def comparison_prompt(
    key: TurnId, messages: Sequence[Message], first: str, second: str, form: AnswerForm = AnswerForm.FREE
) -> JudgePrompt:
    """The prompt for a comparison of two answers to the last of `messages`.

    Args:
        key: makes the mark of the prompt.
    """
    asked = gather(messages, {"role": "assistant", "content": ""}, [])
    blocks = [block for block in blocks_of(asked, DEFAULT_BUDGETS) if block.section in ("history", "task")]
    answers = [cut_middle(harmless(text), ANSWER_CHARACTERS) for text in (first, second)]
    mark = choose_mark(key, [*(block.text for block in blocks), *answers])
    shown = "\n".join(
        f"<{name} {mark} assistant>\n{text}\n</{name} {mark}>"
        for name, text in zip(("first", "second"), answers, strict=True)
    )
    ask = _ASK_BARE if form is AnswerForm.GRAMMAR else _ASK
    question = f"{render(blocks, mark)}\n{shown}\n{ask.format(mark=mark)}"
    return JudgePrompt(
        messages=[{"role": "system", "content": COMPARE_INSTRUCTION}, {"role": "user", "content": question}],
        mark=mark,
        form=form,
        structured_outputs={"choice": [*CHOICES]} if form is AnswerForm.GRAMMAR else None,
    )


def parse_choice(answer: str, prompt: JudgePrompt) -> Choice | None:
    """The judge's choice; None if it cannot be read."""
    text = without_leading_thinking(answer).strip(" \t\r\n*_`\"'")
    line = text.rpartition("\n")[2][-_LONGEST_LINE:].casefold()
    if prompt.form is AnswerForm.GRAMMAR:
        return next((choice for choice in CHOICES if line == choice), None)
    found = re.search(rf"better\W{{0,4}}{prompt.mark}\W{{0,4}}(first|second|equal)\W{{0,4}}$", line)
    return None if found is None else next(choice for choice in CHOICES if choice == found[1])


def preference(as_first: Choice | None, as_second: Choice | None) -> int:
    """1 if an answer is better than the other, −1 if it is worse, 0 if the judge does not say the same in both orders.

    Args:
        as_first: the choice when the answer stood first.
        as_second: the choice when it stood second.
    """
    if (as_first, as_second) == ("first", "second"):
        return 1
    return -1 if (as_first, as_second) == ("second", "first") else 0
