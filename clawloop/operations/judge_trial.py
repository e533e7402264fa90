"""A trial of a judge: calibrated on phrases with a known vote, measured on others, and the form that it should take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from clawloop.core.errors import EngineAnswerUnusable, JudgeRefused, SetupError
from clawloop.core.ids import TurnId
from clawloop.core.judging.phrases import Phrase, PhraseList, phrases_of
from clawloop.core.judging.prompts import AnswerForm, JudgeAnswer, JudgePrompt, vote_prompt
from clawloop.core.judging.quality import CALIBRATED, Biases, JudgeTrial, Quality, direct_votes, fit_biases, quality
from clawloop.core.judging.voting import Vote, parse_vote
from clawloop.core.recipes.recipe import JudgeForm

# A form replaces a simpler one if better by this margin; 100 phrases cannot show less.
_MARGIN = 0.03
_TEMPERATURE = 0.6


class TriedJudge(Protocol):
    """A judge without its earlier trial."""

    async def form(self, policy: str, wanted: JudgeForm) -> AnswerForm: ...

    async def identity(self, policy: str) -> tuple[str, str]: ...

    async def answers(self, policy: str, prompt: JudgePrompt, n: int, temperature: float) -> list[JudgeAnswer]: ...

    async def distribution(self, policy: str, prompt: JudgePrompt) -> dict[Vote, float]: ...


async def try_judge(
    judge: TriedJudge,
    policy: str,
    own: Sequence[Phrase] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> JudgeTrial:
    """Ask the policy's judge about labelled phrases in each form, and choose the form by what it got right.

    Args:
        own: an operator's phrases, by which the form is chosen and which the reported figure is of; None: our lists.
        report: gets one line for each list that was asked.

    Raises:
        JudgeUnavailable, JudgeRefused: the judge answers nothing.
    """
    name, digest = await judge.identity(policy)
    trial = own or phrases_of(PhraseList.TRIAL)
    reported = own or phrases_of(PhraseList.REPORTED)
    present = await judge.form(policy, "auto")
    plain = _Asked(judge, policy, present)
    by_form: dict[str, Quality] = {str(present): quality(trial, await plain.votes(trial))}
    report(f"{present}: {_words(by_form[str(present)])}")
    biases: Biases | None = None
    try:
        shown = _Asked(judge, policy, AnswerForm.EXAMPLES)
        calibration = phrases_of(PhraseList.CALIBRATION)
        biases = fit_biases(await shown.answers(calibration), [phrase.vote for phrase in calibration])
        answers = await shown.answers(trial)
        by_form[AnswerForm.EXAMPLES] = quality(trial, direct_votes(answers))
        by_form[CALIBRATED] = quality(trial, direct_votes(answers, biases))
        with_examples, calibrated = _words(by_form[AnswerForm.EXAMPLES]), _words(by_form[CALIBRATED])
        report(f"{AnswerForm.EXAMPLES}: {with_examples}; calibrated: {calibrated}")
    except (JudgeRefused, EngineAnswerUnusable) as error:
        report(f"{AnswerForm.EXAMPLES}: not possible: {error}")
    best = _best(by_form)
    form = present if best == str(present) else AnswerForm.EXAMPLES
    chosen = biases if best == CALIBRATED else None
    of_chosen = by_form[best] if own else quality(reported, await _Asked(judge, policy, form, chosen).votes(reported))
    return JudgeTrial(name, digest, form, chosen, by_form, of_chosen)


def _best(by_form: dict[str, Quality]) -> str:
    """The form with the highest kappa; a simpler one that is hardly behind."""
    best, *others = by_form
    for name in others:
        if by_form[name].kappa > by_form[best].kappa + _MARGIN:
            best = name
    return best


def _words(found: Quality) -> str:
    return f"{found.accuracy:.0%} right, kappa {found.kappa:.2f}"


@dataclass(frozen=True, slots=True)
class _Asked:
    """A judge that is asked in one form."""

    judge: TriedJudge
    policy: str
    form: AnswerForm
    biases: Biases | None = None

    async def votes(self, phrases: Sequence[Phrase]) -> list[Vote | None]:
        """One vote on each phrase; None where it cannot be read."""
        if self.form is AnswerForm.FREE:
            return list(await asyncio.gather(*(self._vote(at, phrase) for at, phrase in enumerate(phrases))))
        return direct_votes(await self.answers(phrases), self.biases)

    async def answers(self, phrases: Sequence[Phrase]) -> list[dict[Vote, float]]:
        """Log-probs of the votes on each phrase. The first is asked alone, so that the others find its prefix."""
        if not phrases:
            raise SetupError("no phrase to try the judge on")
        prompts = [vote_prompt(_turn(at), phrase.evidence, self.form) for at, phrase in enumerate(phrases)]
        first = await self.judge.distribution(self.policy, prompts[0])
        others = await asyncio.gather(*(self.judge.distribution(self.policy, prompt) for prompt in prompts[1:]))
        return [first, *others]

    async def _vote(self, at: int, phrase: Phrase) -> Vote | None:
        prompt = vote_prompt(_turn(at), phrase.evidence, self.form)
        answers = await self.judge.answers(self.policy, prompt, 1, _TEMPERATURE)
        return parse_vote(answers[0].text, prompt) if answers and not answers[0].cut else None


def _turn(at: int) -> TurnId:
    """A turn id that gives a question its mark, different from the marks of the examples."""
    return TurnId(UUID(int=1_000_000 + at))
