"""The table `[lessons]` of a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from clawloop.core.recipes.table import Table


class Lessons(Table):
    """Lessons: sentences that prompts of the policy hold, so that a correction is obeyed from the next session on."""

    enabled: bool = False
    """Add the policy's active lessons to the system message of its chats. A turn that is answered with lessons is
    judged and not trained."""
    max_tokens: Annotated[int, Field(ge=50, le=4000)] = 400
    """Most tokens of all lessons in a prompt, by an estimate of a token for three bytes; if not all fit, the newest of
    those that do are shown."""
    shared: bool = False
    """Let several chat keys use the policy: who has one of them may have the model tell the lessons that another one's
    user gave. While it is false a second key is refused."""
    from_corrections: bool = False
    """Make a lesson of each correction: of the hint that a judge made of the user's words, or, where
    `signal.hints_from` is `message`, of comments and of what the user said after a reply that was rated down. What a
    tool printed never becomes one. While it is false lessons are typed."""
    practice: bool = False
    """Have the newest requests answered again without lessons while an engine has nothing else to do, and learn from
    these replies what the policy would have said with the active lessons. At most `train.batch_samples` such samples
    wait for a step."""
    retire: bool = False
    """Take a lesson out of the prompt when versions say by themselves what it made the policy say: measure what it does
    while it is new, and again in each step. A lesson is then practised once eight replies to measure it by are there,
    the others meanwhile, and the requests of these are never practised. Learned lessons come back when the policy
    forgets them."""
