"""The demo's learning loop in one process: user, judge, samples, training steps and gate are the real ones.

Gateway, engine, database and Temporal are replaced by a loop: a round of two sessions of five requests, whose last
answers nobody reacts to, then a step for each full batch. A version answers once it passed the gate's checks.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import torch

from clawloop.contracts.probes import ProbeAnswer
from clawloop.contracts.training import BatchSample, CheckResult, GateCheck, HeldOutScore
from clawloop.contracts.turns import Message
from clawloop.demo.evaluate import DemoModel
from clawloop.demo.examples import hint_answer
from clawloop.demo.experiment import FULLY_MEASURED_INTERACTIONS, rounds
from clawloop.demo.plan import PlannedRun
from clawloop.demo.probes import demo_probes
from clawloop.demo.report import Evaluation
from clawloop.demo.sessions import CHAT_TEMPERATURE
from clawloop.demo.user import FollowUp, SyntheticUser
from clawloop.demo.world import (
    AXIS_OF,
    EVALUATION,
    PROBES,
    STYLES,
    Axis,
    Request,
    answer,
    draw_preference,
    flipped,
    grade,
)
from clawloop.errors import StepDiverged
from clawloop.gate.numbers import check_numbers
from clawloop.gate.probe_content import is_right
from clawloop.gate.probes import ProbePair, ProbeScores, check_probes
from clawloop.gate.replay import check_replay
from clawloop.ids import SampleId, TurnId
from clawloop.judging.evidence import Evidence, gather
from clawloop.judging.hints import HintChoice, choose_hint, with_hint
from clawloop.judging.parsing import parse_hint
from clawloop.judging.prompts import AnswerForm, JudgePrompt, hint_prompt, vote_prompt
from clawloop.judging.records import TurnDecision
from clawloop.judging.voting import majority
from clawloop.recipes.recipe import Recipe
from clawloop.samples.decision import decide
from clawloop.samples.holdout import is_held_out
from clawloop.training.adapters.checkpoint import begin
from clawloop.training.model.adapter import adapter_tensors, set_adapter
from clawloop.training.model.lora import LoraShape
from clawloop.training.model.torchtune_loading import load_torchtune_model
from clawloop.training.packing.sequences import Limits
from clawloop.training.progress import ignore_progress
from clawloop.training.ranks.collectives import Ranks
from clawloop.training.replies import score_replies
from clawloop.training.step import make_optimizer, train_step

# The default of the demo's policies.
EVALUATION_TEMPERATURE = 0.6
MAX_REPLY_TOKENS = 96
MAX_HINT_TOKENS = 40
LIMITS = Limits(budget_tokens=8192, max_tokens=4096, vocab_size=100_000)


@dataclass(frozen=True, slots=True)
class GatedStep:
    """A step and what the gate said of its version.

    Args:
        interactions: when it was taken.
        rejected: why it does not answer; None if it does.
        right: share of the probes whose content is right; None if they were not asked.
    """

    n: int
    interactions: int
    rejected: str | None
    right: float | None


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


class DemoLoop:
    """The learning loop of one user and one policy.

    Args:
        folder: of the demo's model.
        gated: False lets each version answer that a step made.
    """

    def __init__(self, folder: Path, recipe: Recipe, run: PlannedRun, *, gated: bool = True):
        torch.manual_seed(run.seed)
        self.recipe, self.run, self.gated = recipe, run, gated
        self.judge, self.served = DemoModel(folder), DemoModel(folder)
        lora = LoraShape(recipe.train.lora.rank, recipe.train.lora.alpha)
        device = torch.device("cpu")
        self.policy = load_torchtune_model(folder, lora, dtype=torch.float32, device=device, seed=run.seed)
        self.optimizer = make_optimizer(self.policy, recipe.train.optimiser)
        begin(self.policy, self.optimizer, seed=run.seed)
        self.preference = draw_preference(run.seed)
        self.base = {name: tensor.clone() for name, tensor in self.served.model.state_dict().items()}
        self.version, self.step, self.rejections = 0, 0, 0
        self.interactions, self.sessions = 0, 0
        self.versions = {0: adapter_tensors(self.policy)}
        self.rng = random.Random(run.seed)
        self.held_out: list[BatchSample] = []
        self.steps: list[GatedStep] = []
        self.probes = demo_probes()
        self._known: dict[Request, list[list[int]]] = {}
        self._answers = {0: self._probe_answers()} if gated else {}
        self.stopped: str | None = None
        self._verdicts: list[int] = []
        self._began = time.perf_counter()

    def evaluate(self, *, is_flipped: bool = False) -> Evaluation:
        """Ask the evaluation's requests."""
        replies = self._answers_to(EVALUATION, EVALUATION_TEMPERATURE)
        grades = [grade(request, reply, self.preference) for request, reply in zip(EVALUATION, replies, strict=True)]
        verdicts, self._verdicts = self._verdicts, []
        return Evaluation(
            step=self.step,
            version=self.version,
            interactions=self.interactions,
            reward=sum(verdicts) / len(verdicts) if verdicts else None,
            match=sum(each.match for each in grades) / len(grades),
            exact=sum(each.exact for each in grades) / len(grades),
            failed=0,
            seconds=time.perf_counter() - self._began,
            flipped=is_flipped,
        )

    def _answers_to(self, requests: Sequence[Request], temperature: float) -> list[str]:
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
                    self.held_out += [sample] if sample.reward else []
                elif sample is not None:
                    samples.append(sample)
                turn.chat.messages = turn.following_messages
                turn.chat.request = turn.following.request
        return samples

    def _begin_chat(self, size: int) -> _Chat:
        self.sessions += 1
        # As `Experiment` does: a user of its own for each session.
        user = SyntheticUser(self.run.seed * 10_000 + self.sessions, self.preference)
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
            verdicts = [majority(of_turn) for of_turn in drawn]
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
        return UUID(int=self.rng.getrandbits(128), version=4)

    def learn(self, samples: Sequence[BatchSample]) -> bool:
        """Take a step; return whether its version answers from now on."""
        self.step += 1
        recipe, parent = self.recipe, self.version
        state = copy.deepcopy(self.optimizer.state_dict())
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.train.optimiser.lr * recipe.gate.lr_backoff**self.rejections
        held_out = self.held_out[-recipe.gate.replay_turns :] if self.gated else []
        before = self._score(held_out)
        right: float | None = None
        try:
            figures = train_step(
                self.policy,
                self.optimizer,
                samples,
                recipe.train,
                LIMITS,
                parent=parent,
                read_version=lambda version: self.versions[version],
                token_distance=recipe.gate.token_distance,
            )
        except StepDiverged as error:
            rejected: str | None = str(error)
        else:
            checks: list[GateCheck] = []
            self._serve(adapter_tensors(self.policy))
            if self.gated:
                checks = [check_numbers(figures, recipe.gate), self._replay(held_out, before), self._probe(parent)]
                right = checks[-1].figures["right"]
            failed = [check for check in checks if check.result is CheckResult.FAILED]
            rejected = "; ".join(f"{check.name}: {check.reason}" for check in failed) or None
        if rejected is None:
            self.version, self.rejections = self.step, 0
            self.versions[self.version] = adapter_tensors(self.policy)
        else:
            self._restore(parent, state)
            self.rejections += 1
            if self.rejections >= recipe.gate.pause_after:
                self.stopped = f"{self.rejections} steps in a row without an accepted version: {rejected}"
        self.steps.append(GatedStep(self.step, self.interactions, rejected, right))
        return rejected is None

    def _score(self, held_out: Sequence[BatchSample]) -> Mapping[int, float]:
        return score_replies(self.policy, held_out, LIMITS, Ranks(), ignore_progress)

    def _replay(self, held_out: Sequence[BatchSample], before: Mapping[int, float]) -> GateCheck:
        after = self._score(held_out)
        scores = [
            HeldOutScore(int(sample.reward or 0), before[at], after[at])
            for at, sample in enumerate(held_out)
            if at in before and at in after
        ]
        return check_replay(scores, f"{self.run.policy}/{self.step}")

    def _probe(self, parent: int) -> GateCheck:
        answers = self._answers[self.step] = self._probe_answers()
        pairs = [
            ProbePair(
                probe,
                theirs,
                ours,
                is_right(probe, theirs.text),
                is_right(probe, ours.text),
                right_base=is_right(probe, of_base.text) if parent else None,
            )
            for probe, of_base, theirs, ours in zip(
                self.probes, self._answers[0], self._answers[parent], answers, strict=True
            )
        ]
        scores = [ProbeScores.of(pair) for pair in pairs]
        return check_probes(scores)

    def _probe_answers(self) -> list[ProbeAnswer]:
        return [ProbeAnswer(text) for text in self._answers_to(PROBES, 0.0)]

    def _restore(self, version: int, state: dict[str, Any]) -> None:
        set_adapter(self.policy, self.versions[version])
        self.optimizer.load_state_dict(state)
        self._serve(self.versions[version])

    def _serve(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Merge an adapter into the served model."""
        merged = dict(self.base)
        scale = self.policy.lora.alpha / self.policy.lora.rank
        for name in self.base:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{module}.lora_A.weight" in tensors:
                a, b = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
                merged[name] = self.base[name] + scale * (b @ a)
        self.served.model.load_state_dict(merged)


def learn(loop: DemoLoop, interactions: int, flip: Sequence[Axis], measure_every: int) -> Iterator[Evaluation]:
    """Yield an evaluation before learning and after accepted steps; the preference flips half-way.

    Args:
        measure_every: as in `clawloop.demo.plan.Plan`.
    """
    yield loop.evaluate()
    measured, flipped_at = 0, 0
    waiting: list[BatchSample] = []
    size = loop.recipe.train.batch_samples
    halves = [interactions // 2, interactions - interactions // 2] if flip else [interactions]
    for half, count in enumerate(halves):
        if half:
            flipped_at = loop.interactions
            loop.flip(flip)
            yield loop.evaluate(is_flipped=True)
        for sizes in rounds(count):
            waiting += loop.chat(sizes)
            while len(waiting) >= size and loop.stopped is None:
                batch, waiting = waiting[:size], waiting[size:]
                is_dense = loop.interactions - flipped_at <= FULLY_MEASURED_INTERACTIONS
                if loop.learn(batch) and (is_dense or loop.version - measured >= measure_every):
                    measured = loop.version
                    yield loop.evaluate(is_flipped=half > 0)
            if loop.stopped is not None:
                return
    if measured < loop.version:
        yield loop.evaluate(is_flipped=bool(flip))
