"""Biases of a judge's answers, how good its votes are, and the form that follows."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from clawloop.core.errors import JudgeRefused
from clawloop.core.judging.phrases import Phrase, PhraseList, phrases_of
from clawloop.core.judging.prompts import AnswerForm, JudgeAnswer, JudgePrompt, vote_prompt
from clawloop.core.judging.quality import CALIBRATED, biased, direct_votes, fit_biases, quality
from clawloop.core.judging.voting import Vote
from clawloop.core.recipes.recipe import JudgeForm
from clawloop.operations.judge_trial import _turn, try_judge

VOTES: tuple[Vote, ...] = (1, 0, -1)
ALL = phrases_of(PhraseList.TRIAL)


def answer(right: Vote, sure: float, towards: dict[Vote, float]) -> dict[Vote, float]:
    raised = {vote: (sure if vote == right else 0.0) + towards[vote] for vote in VOTES}
    total = math.log(sum(math.exp(value) for value in raised.values()))
    return {vote: value - total for vote, value in raised.items()}


def test_fitted_biases_undo_a_judges_leaning() -> None:
    rng = random.Random(1)
    votes: list[Vote] = [rng.choice((1, 0, -1)) for _ in range(300)]
    leaning: dict[Vote, float] = {1: 3.0, 0: 0.0, -1: -1.0}
    answers = [answer(vote, 2.0 + rng.gauss(0, 0.3), leaning) for vote in votes]
    biases = fit_biases(answers, votes)
    assert biases[0] == 0
    assert biases[1] == pytest.approx(-3.0, abs=0.2)
    assert biases[-1] == pytest.approx(1.0, abs=0.2)
    assert set(direct_votes(answers)) == {1}
    assert direct_votes(answers, biases) == votes
    assert sum(math.exp(value) for value in biased(answers[0], biases).values()) == pytest.approx(1)


def test_a_judge_that_always_votes_the_same_has_a_kappa_of_0() -> None:
    phrases = phrases_of(PhraseList.TRIAL)
    found = quality(phrases, [1] * len(phrases))
    assert found.kappa == 0
    assert found.accuracy == sum(phrase.vote == 1 for phrase in phrases) / len(phrases)
    right = quality(phrases, [phrase.vote for phrase in phrases])
    assert right.accuracy == 1
    assert right.kappa == pytest.approx(1)
    assert all(count == of_kind for count, of_kind in right.by_kind.values())
    missing = quality(phrases, [None, *(phrase.vote for phrase in phrases[1:])])
    assert missing.accuracy == 1 - 1 / len(phrases)


class ScriptedJudge:
    """Leans to 1 in every form, and knows the right vote as surely as `sure` says of the form."""

    def __init__(self, sure: dict[AnswerForm, float], leaning: float) -> None:
        self._sure = sure
        self._leaning: dict[Vote, float] = {1: leaning, 0: 0.0, -1: 0.0}
        self._right = {
            vote_prompt(_turn(at), phrase.evidence, AnswerForm.GRAMMAR).messages[-1]["content"]: phrase.vote
            for name in (PhraseList.CALIBRATION, PhraseList.TRIAL, PhraseList.REPORTED)
            for at, phrase in enumerate(phrases_of(name))
        }

    async def form(self, policy: str, wanted: JudgeForm) -> AnswerForm:
        return AnswerForm.GRAMMAR

    async def identity(self, policy: str) -> tuple[str, str]:
        return "small", "ab" * 32

    async def answers(self, policy: str, prompt: JudgePrompt, n: int, temperature: float) -> list[JudgeAnswer]:
        raise AssertionError("direct votes alone")

    async def distribution(self, policy: str, prompt: JudgePrompt) -> dict[Vote, float]:
        if prompt.form not in self._sure:
            raise JudgeRefused("no such form")
        right = self._right[prompt.messages[-1]["content"]]
        return answer(right, self._sure[prompt.form], self._leaning)


@pytest.mark.parametrize(
    ("sure", "leaning", "best", "off"),
    [
        ({AnswerForm.GRAMMAR: 3.0, AnswerForm.EXAMPLES: 3.0}, 0.0, "grammar", False),
        ({AnswerForm.GRAMMAR: 0.0, AnswerForm.EXAMPLES: 3.0}, 1.0, "examples", False),
        ({AnswerForm.GRAMMAR: 0.0, AnswerForm.EXAMPLES: 3.0}, 5.0, CALIBRATED, False),
        ({AnswerForm.GRAMMAR: 0.0}, 1.0, "grammar", True),
    ],
)
async def test_the_form_follows_the_trial(sure: dict[AnswerForm, float], leaning: float, best: str, off: bool) -> None:
    trial = await try_judge(ScriptedJudge(sure, leaning), "default")
    assert trial.form is (AnswerForm.GRAMMAR if best == "grammar" else AnswerForm.EXAMPLES)
    assert (trial.biases is not None) is (best == CALIBRATED)
    assert (trial.votes_off is not None) is off
    assert trial.reported.phrases == 100
    if trial.votes_off is not None:
        assert trial.votes_off.startswith("votes and hints are off: small agrees with labelled phrases by")
        assert "a kappa of 0.00," in trial.votes_off
        assert "the recipe `hindsight`" in trial.votes_off
        assert "choose another judge" in trial.votes_off
    else:
        assert trial.reported.kappa == pytest.approx(1.0)


async def test_a_trial_on_ones_own_phrases_reports_those() -> None:
    own: Sequence[Phrase] = phrases_of(PhraseList.TRIAL)[:7]
    judge = ScriptedJudge({AnswerForm.GRAMMAR: 3.0, AnswerForm.EXAMPLES: 3.0}, 0.0)
    assert (await try_judge(judge, "default", own)).reported.phrases == 7


def test_examples_stand_before_each_question_the_same() -> None:
    first, second = (vote_prompt(_turn(at), ALL[at].evidence, AnswerForm.EXAMPLES) for at in (0, 1))
    assert first.messages[:-1] == second.messages[:-1]
    assert [message["role"] for message in first.messages] == ["system", *["user", "assistant"] * 12, "user"]
    plain = vote_prompt(_turn(0), ALL[0].evidence, AnswerForm.GRAMMAR)
    assert [plain.messages[0], plain.messages[-1]] == [first.messages[0], first.messages[-1]]
    assert first.structured_outputs == plain.structured_outputs
