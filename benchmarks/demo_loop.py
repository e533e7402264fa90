"""The demo's learning loop in one process: user, judge, samples, training steps and gate are the real ones.

Gateway, engine, database and Temporal are replaced by a loop: a round of two sessions of five requests
(`benchmarks.demo_chats`), whose last answers nobody reacts to, then a step for each full batch. A version answers once
it passed the gate's checks.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.demo_chats import DemoChats
from clawloop.contracts.gate_checks import CheckResult, GateCheck
from clawloop.contracts.probes import ProbeAnswer
from clawloop.contracts.training import BatchSample, HeldOutScore
from clawloop.demo.experiment import FULLY_MEASURED_INTERACTIONS, rounds
from clawloop.demo.plan import PlannedRun
from clawloop.demo.probes import demo_probes
from clawloop.demo.report import Evaluation
from clawloop.demo.world import EVALUATION, PROBES, Axis, grade
from clawloop.errors import StepDiverged
from clawloop.gate.numbers import check_numbers
from clawloop.gate.probe_content import is_right
from clawloop.gate.probes import ProbePair, ProbeScores, check_probes
from clawloop.gate.replay import check_replay
from clawloop.recipes.recipe import Recipe
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


class DemoLoop:
    """The learning loop of one user and one policy.

    Args:
        folder: of the demo's model.
        gated: False lets each version answer that a step made.
    """

    def __init__(self, folder: Path, recipe: Recipe, run: PlannedRun, *, gated: bool = True):
        torch.manual_seed(run.seed)
        self.recipe, self.run, self.gated = recipe, run, gated
        self.chats = DemoChats(folder, recipe, run)
        lora = LoraShape(recipe.train.lora.rank, recipe.train.lora.alpha)
        device = torch.device("cpu")
        self.policy = load_torchtune_model(folder, lora, dtype=torch.float32, device=device, seed=run.seed)
        self.optimizer = make_optimizer(self.policy, recipe.train.optimiser)
        begin(self.policy, self.optimizer, seed=run.seed)
        self.base = {name: tensor.clone() for name, tensor in self.chats.served.model.state_dict().items()}
        self.step, self.rejections = 0, 0
        self.versions = {0: adapter_tensors(self.policy)}
        self.steps: list[GatedStep] = []
        self.probes = demo_probes()
        self._answers = {0: self._probe_answers()} if gated else {}
        self.stopped: str | None = None
        self._began = time.perf_counter()

    def evaluate(self, *, is_flipped: bool = False) -> Evaluation:
        """Ask the evaluation's requests."""
        chats = self.chats
        replies = chats.answers_to(EVALUATION, EVALUATION_TEMPERATURE)
        grades = [grade(request, reply, chats.preference) for request, reply in zip(EVALUATION, replies, strict=True)]
        return Evaluation(
            step=self.step,
            version=chats.version,
            interactions=chats.interactions,
            reward=chats.mean_verdict(),
            match=sum(each.match for each in grades) / len(grades),
            exact=sum(each.exact for each in grades) / len(grades),
            failed=0,
            seconds=time.perf_counter() - self._began,
            flipped=is_flipped,
        )

    def learn(self, samples: Sequence[BatchSample]) -> bool:
        """Take a step; return whether its version answers from now on."""
        self.step += 1
        recipe, parent = self.recipe, self.chats.version
        state = copy.deepcopy(self.optimizer.state_dict())
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.train.optimiser.lr * recipe.gate.lr_scale(self.rejections)
        held_out = self.chats.held_out[-recipe.gate.replay_turns :] if self.gated else []
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
            self.chats.version, self.rejections = self.step, 0
            self.versions[self.step] = adapter_tensors(self.policy)
        else:
            self._restore(parent, state)
            self.rejections += 1
            if self.rejections >= recipe.gate.pause_after:
                self.stopped = f"{self.rejections} steps in a row without an accepted version: {rejected}"
        self.steps.append(GatedStep(self.step, self.chats.interactions, rejected, right))
        return rejected is None

    def _score(self, held_out: Sequence[BatchSample]) -> Mapping[int, float]:
        return score_replies(self.policy, held_out, LIMITS, Ranks(), ignore_progress)

    def _replay(self, held_out: Sequence[BatchSample], before: Mapping[int, float]) -> GateCheck:
        after = self._score(held_out)
        scores = [
            HeldOutScore(int(sample.reward or 0), before[at], after[at], sample.unit)
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
        return check_probes(scores, self.recipe.gate.content_loss)

    def _probe_answers(self) -> list[ProbeAnswer]:
        return [ProbeAnswer(text) for text in self.chats.answers_to(PROBES, 0.0)]

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
        self.chats.served.model.load_state_dict(merged)


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
            flipped_at = loop.chats.interactions
            loop.chats.flip(flip)
            yield loop.evaluate(is_flipped=True)
        for sizes in rounds(count):
            waiting += loop.chats.chat(sizes)
            while len(waiting) >= size and loop.stopped is None:
                batch, waiting = waiting[:size], waiting[size:]
                is_dense = loop.chats.interactions - flipped_at <= FULLY_MEASURED_INTERACTIONS
                if loop.learn(batch) and (is_dense or loop.chats.version - measured >= measure_every):
                    measured = loop.chats.version
                    yield loop.evaluate(is_flipped=half > 0)
            if loop.stopped is not None:
                return
    if measured < loop.chats.version:
        yield loop.evaluate(is_flipped=bool(flip))
