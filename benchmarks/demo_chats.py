"""The demo's chats in one process: a synthetic user, the model that answers, and the judge that makes samples of it.

Gateway, engine and database are replaced by calls; user, prompts, judge and the rule that decides on a sample are the
real ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import UUID

from clawloop.algorithms.rewards import RunningMean
from clawloop.contracts.training import BatchSample
from clawloop.contracts.turns import Message
from clawloop.demo.evaluate import DemoModel
from clawloop.demo.examples import hint_answer
from clawloop.demo.plan import PlannedRun
from clawloop.demo.sessions import CHAT_TEMPERATURE
from clawloop.demo.user import FollowUp, SyntheticUser
from clawloop.demo.world import AXIS_OF, STYLES, Axis, Request, answer, draw_preference, flipped
from clawloop.ids import SampleId, TurnId
from clawloop.judging.evidence import Evidence, gather
from clawloop.judging.hints import HintChoice, choose_hint, with_hint
from clawloop.judging.parsing import parse_hint
from clawloop.judging.prompts import AnswerForm, JudgePrompt, hint_prompt, vote_prompt
from clawloop.judging.records import TurnDecision
from clawloop.judging.voting import Verdict, majority
from clawloop.recipes.recipe import Recipe
from clawloop.samples.decision import decide
from clawloop.samples.holdout import is_held_out

MAX_REPLY_TOKENS = 96
MAX_HINT_TOKENS = 40


@dataclass
class _Chat:
    """A session of the user."""

    user: SyntheticUser
    id: UUID
    left: int
    messages: list[Message]
    request: Request


@dataclass(frozen=True, slots=True)
class _Turn:
    """A reply and what the user says next."""

    chat: _Chat
    prompt_ids: Sequence[int]
    reply_ids: Sequence[int]
    logprobs: Sequence[float]
    reply: str
    following: FollowUp

    @property
    def evidence(self) -> Evidence:
        said: Message = {"role": "user", "content": self.following.text}
        return gather(self.chat.messages, {"role": "assistant", "content": self.reply}, [said])

    @property
    def following_messages(self) -> list[Message]:
        return [
            *self.chat.messages,
            {"role": "assistant", "content": self.reply},
            {"role": "user", "content": self.following.text},
        ]


class DemoChats:
    """The sessions of one user with one policy.

    Args:
        folder: of the demo's model.

    Attributes:
        served: the model that answers; whoever trains sets its weights, and `version` with them.
        held_out: samples that are never trained, oldest first.
    """

    def __init__(self, folder: Path, recipe: Recipe, run: PlannedRun):
        self.recipe, self.run = recipe, run
        self.judge, self.served = DemoModel(folder), DemoModel(folder)
        self.preference = draw_preference(run.seed)
        self.version, self.interactions = 0, 0
        self.held_out: list[BatchSample] = []
        self._mean = RunningMean()
        self._sessions = 0
        self._rng = random.Random(run.seed)
        self._known: dict[Request, list[list[int]]] = {}
        self._verdicts: list[int] = []

    def mean_verdict(self) -> float | None:
        """The mean of the verdicts since the last call; None without any."""
        verdicts, self._verdicts = self._verdicts, []
        return sum(verdicts) / len(verdicts) if verdicts else None

    def answers_to(self, requests: Sequence[Request], temperature: float) -> list[str]:
        """Answers to requests outside of any session, in their order; temperature 0 is greedy."""
        texts: dict[Request, str] = {}
        for axis in Axis:  # answers of one axis are of similar length, so that little is read for nothing
            of_axis = [request for request in requests if request.axis is axis]
            prompts = [self.served.prompt_ids([{"role": "user", "content": request.text}]) for request in of_axis]
            drafts = [self._drafts(request) for request in of_axis]
            replies = self.served.sampled(prompts, temperature, MAX_REPLY_TOKENS, drafts)
            texts |= {request: self.served.text(reply) for request, reply in zip(of_axis, replies, strict=True)}
        return [texts[request] for request in requests]

    def _drafts(self, request: Request) -> list[list[int]]:
        """What it mostly answers: the right content in either style."""
        known = self._known.get(request)
        if known is None:
            texts = (answer(request, style) for style in STYLES[request.axis])
            known = self._known[request] = [self.served.reply_ids(text) for text in texts]
        return known

    def flip(self, axes: Sequence[Axis]) -> None:
        """Flip the user's preference on these axes."""
        self.preference = flipped(self.preference, axes)

    def chat(self, sizes: Sequence[int]) -> list[BatchSample]:
        """Chat in sessions of these sizes at once and return their samples; those held out are kept aside."""
        chats = [self._begin_chat(size) for size in sizes]
        samples: list[BatchSample] = []
        while going := [chat for chat in chats if chat.left]:
            prompts = [self.served.prompt_ids(chat.messages) for chat in going]
            drafts = [self._drafts(chat.request) for chat in going]
            replies = self.served.sampled(prompts, CHAT_TEMPERATURE, MAX_REPLY_TOKENS, drafts)
            logprobs = self.served.logprobs(prompts, replies, CHAT_TEMPERATURE)
            turns = []
            for chat, prompt_ids, reply_ids, of_tokens in zip(going, prompts, replies, logprobs, strict=True):
                self.interactions += 1
                chat.left -= 1
                if chat.left:  # nobody reacts to the last answer
                    reply = self.served.text(reply_ids)
                    following = chat.user.follow_up(chat.request, reply)
                    turns.append(_Turn(chat, prompt_ids, reply_ids, of_tokens, reply, following))
            for turn, sample in zip(turns, self._judge(turns), strict=True):
                if sample is not None and is_held_out(self.run.policy, turn.chat.id, self.recipe.gate.held_out):
                    if sample.reward:
                        verdict = math.copysign(1.0, sample.reward)
                        self.held_out.append(replace(sample, reward=verdict, unit=turn.chat.id))
                elif sample is not None:
                    samples.append(sample)
                turn.chat.messages = turn.following_messages
                turn.chat.request = turn.following.request
        return samples

    def _begin_chat(self, size: int) -> _Chat:
        self._sessions += 1
        # As `Experiment` does: a user of its own for each session.
        user = SyntheticUser(self.run.seed * 10_000 + self._sessions, self.preference)
        request = user.first_request()
        return _Chat(user, self._uuid(), size, [{"role": "user", "content": request.text}], request)

    def _judge(self, turns: Sequence[_Turn]) -> list[BatchSample | None]:
        """Judge turns and return their samples; None for one that gives none."""
        if not turns:
            return []
        signal, ids = self.recipe.signal, [TurnId(self._uuid()) for _ in turns]
        evidence = [turn.evidence for turn in turns]
        verdicts = [majority([])] * len(turns)
        if signal.verdicts:
            votes = [vote_prompt(id_, each, AnswerForm.GRAMMAR) for id_, each in zip(ids, evidence, strict=True)]
            drawn = self.judge.sampled_votes(votes, signal.m, signal.judge_temperature)
            verdicts = [self._beside_baseline(majority(of_turn)) for of_turn in drawn]
        hints = [HintChoice(None, False, "not asked")] * len(turns)
        if signal.hints:
            questions = [hint_prompt(id_, each, AnswerForm.GRAMMAR) for id_, each in zip(ids, evidence, strict=True)]
            hints = [
                choose_hint([parse_hint(text, question) for text in texts], each, signal.hints_needed)
                for texts, question, each in zip(self._hint_texts(questions), questions, evidence, strict=True)
            ]
        self._verdicts += [verdict.verdict for verdict in verdicts if verdict.verdict is not None]
        return [
            self._sample(turn, SampleId(id_), decide(signal, verdict, hint, None))
            for turn, id_, verdict, hint in zip(turns, ids, verdicts, hints, strict=True)
        ]

    def _beside_baseline(self, verdict: Verdict) -> Verdict:
        """With `signal.baseline = "mean"` as `db.judging.finalize` rewards it, in the order of judging."""
        if self.recipe.signal.baseline == "none" or not verdict.verdict or verdict.reward is None:
            return verdict
        before, self._mean = self._mean, self._mean.including(verdict.verdict)
        return replace(verdict, reward=before.relative(verdict.reward) or None)

    def _hint_texts(self, questions: Sequence[JudgePrompt]) -> list[list[str]]:
        """The judge's m answers to each question."""
        signal = self.recipe.signal
        prompts = [self.judge.prompt_ids(question.messages) for question in questions for _ in range(signal.m)]
        drafts: list[list[list[int]]] = []
        for question in questions:
            likely = [self.judge.reply_ids(hint_answer(question, style)) for style in (None, *AXIS_OF)]
            drafts += [likely] * signal.m
        replies = self.judge.sampled(prompts, signal.judge_temperature, MAX_HINT_TOKENS, drafts)
        texts = [self.judge.text(reply) for reply in replies]
        return [texts[at : at + signal.m] for at in range(0, len(texts), signal.m)]

    def _sample(self, turn: _Turn, id_: SampleId, decision: TurnDecision) -> BatchSample | None:
        if decision.reward is None and decision.hint is None:
            return None
        hinted = None if decision.hint is None else with_hint(turn.chat.messages, decision.hint)
        return BatchSample(
            sample_id=id_,
            prompt_ids=turn.prompt_ids,
            response_ids=turn.reply_ids,
            logprobs=turn.logprobs,
            temperature=CHAT_TEMPERATURE,
            version=self.version,
            reward=decision.reward,
            hinted_prompt_ids=None if hinted is None else self.served.prompt_ids(hinted),
        )

    def _uuid(self) -> UUID:
        return UUID(int=self._rng.getrandbits(128), version=4)
