"""Measures how the demo's model learns, in one process: the figures behind `clawloop/demo/recipes.py`.

The user, the judge, the samples and the training step are real; gateway, database and Temporal are replaced by a loop.
Run: python -m benchmarks.demo_learning --methods opd --seeds 1 2 --flip code
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import UUID

import torch

from clawloop.contracts.training import BatchSample
from clawloop.contracts.turns import Message
from clawloop.demo.evaluate import DemoModel
from clawloop.demo.location import model_path
from clawloop.demo.recipes import Method, demo_recipe
from clawloop.demo.sessions import CHAT_TEMPERATURE
from clawloop.demo.user import SyntheticUser
from clawloop.demo.world import EVALUATION, Axis, Grade, flipped, grade
from clawloop.ids import SampleId, TurnId
from clawloop.judging.evidence import gather
from clawloop.judging.hints import HintChoice, choose_hint, with_hint
from clawloop.judging.parsing import parse_hint
from clawloop.judging.prompts import AnswerForm, hint_prompt, vote_prompt
from clawloop.judging.voting import Verdict, majority
from clawloop.recipes.recipe import Recipe
from clawloop.samples.decision import decide
from clawloop.training.adapters.checkpoint import begin
from clawloop.training.model.adapter import adapter_tensors
from clawloop.training.model.lora import LoraShape
from clawloop.training.model.torchtune_loading import load_torchtune_model
from clawloop.training.packing.collate import collate
from clawloop.training.packing.sequences import Limits, TokenSequence
from clawloop.training.step import make_optimizer, train_step

# The default of the demo's policies.
EVALUATION_TEMPERATURE = 0.6
MAX_REPLY_TOKENS = 96
SESSION_REQUESTS = 4
LIMITS = Limits(budget_tokens=8192, max_tokens=4096, vocab_size=100_000)


class Loop:
    """The learning loop of one user and one policy.

    Args:
        seed: of the user and of sampling.
    """

    def __init__(self, folder: Path, recipe: Recipe, seed: int):
        torch.manual_seed(seed)
        self.recipe, self.seed = recipe, seed
        self.judge, self.served = DemoModel(folder), DemoModel(folder)
        lora = LoraShape(recipe.train.lora.rank, recipe.train.lora.alpha)
        device = torch.device("cpu")
        self.policy = load_torchtune_model(folder, lora, dtype=torch.float32, device=device, seed=seed)
        self.optimizer = make_optimizer(self.policy, recipe.train.optimiser)
        begin(self.policy, self.optimizer, seed=seed)
        self.user = SyntheticUser(seed)
        self.base = {name: tensor.clone() for name, tensor in self.served.model.state_dict().items()}
        self.version, self.interactions = 0, 0
        self.versions = {0: adapter_tensors(self.policy)}
        self.rng = random.Random(seed)

    def evaluate(self) -> tuple[float, float]:
        """Return (match, exact) on the evaluation requests."""
        chats: list[list[Message]] = [[{"role": "user", "content": request.text}] for request in EVALUATION]
        replies = self.served.replies(chats, EVALUATION_TEMPERATURE, MAX_REPLY_TOKENS)
        grades: list[Grade] = [
            grade(request, reply, self.user.preference) for request, reply in zip(EVALUATION, replies, strict=True)
        ]
        return sum(g.match for g in grades) / len(grades), sum(g.exact for g in grades) / len(grades)

    def flip(self, axes: Sequence[Axis]) -> None:
        """Flip the user's preference on these axes."""
        self.user = SyntheticUser(self.seed, flipped(self.user.preference, axes))

    def session(self) -> list[BatchSample]:
        """Chat for one session and return its samples."""
        samples: list[BatchSample] = []
        messages: list[Message] = []
        request = self.user.first_request()
        text = request.text
        for _ in range(SESSION_REQUESTS):
            messages = [*messages, {"role": "user", "content": text}]
            reply = self.served.replies([messages], CHAT_TEMPERATURE, MAX_REPLY_TOKENS)[0]
            follow_up = self.user.follow_up(request, reply)
            self.interactions += 1
            samples += self.judge_turn(messages, reply, follow_up.text)
            messages = [*messages, {"role": "assistant", "content": reply}]
            request, text = follow_up.request, follow_up.text
        return samples

    def judge_turn(self, messages: Sequence[Message], reply: str, following: str) -> list[BatchSample]:
        """Judge a turn and return its sample, or nothing if it gives none."""
        turn = TurnId(UUID(int=self.rng.getrandbits(128), version=4))
        answered: Message = {"role": "assistant", "content": reply}
        evidence = gather(messages, answered, [{"role": "user", "content": following}])
        signal = self.recipe.signal
        vote = vote_prompt(turn, evidence, AnswerForm.GRAMMAR)
        verdict: Verdict = majority(self.judge.sampled_votes(vote, signal.m, signal.judge_temperature))
        hint_question = hint_prompt(turn, evidence, AnswerForm.GRAMMAR)
        texts = self.judge.replies([hint_question.messages] * signal.m, signal.judge_temperature, 40)
        hint: HintChoice = choose_hint(
            [parse_hint(text, hint_question) for text in texts], evidence, signal.hints_needed
        )
        decision = decide(signal, verdict, hint, None)
        if decision.reward is None and decision.hint is None:
            return []
        hinted = None if decision.hint is None else with_hint(messages, decision.hint)
        prompt_ids, response_ids = self.served.prompt_ids(messages), self.served.reply_ids(reply)
        return [
            BatchSample(
                sample_id=SampleId(turn),
                prompt_ids=prompt_ids,
                response_ids=response_ids,
                logprobs=self.logprobs(prompt_ids, response_ids),
                temperature=CHAT_TEMPERATURE,
                version=self.version,
                reward=decision.reward,
                hinted_prompt_ids=None if hinted is None else self.served.prompt_ids(hinted),
            )
        ]

    @torch.no_grad()
    def logprobs(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> list[float]:
        sequence = TokenSequence("one", prompt_ids, response_ids, CHAT_TEMPERATURE)
        logprobs: list[float] = self.policy(collate([sequence], (0,))).logprobs_N.tolist()
        return logprobs

    def learn(self, samples: Sequence[BatchSample]) -> None:
        train_step(
            self.policy,
            self.optimizer,
            samples,
            self.recipe.train,
            LIMITS,
            parent=self.version,
            read_version=lambda version: self.versions[version],
        )
        self.version += 1
        self.versions[self.version] = adapter_tensors(self.policy)
        self.serve()

    def serve(self) -> None:
        """Merge the adapter into the served model."""
        merged = dict(self.base)
        tensors = self.versions[self.version]
        scale = self.policy.lora.alpha / self.policy.lora.rank
        for name in self.base:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{module}.lora_A.weight" in tensors:
                a, b = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
                merged[name] = self.base[name] + scale * (b @ a)
        self.served.model.load_state_dict(merged)


def learn(
    folder: Path, recipe: Recipe, seed: int, interactions: int, flip: Sequence[Axis]
) -> Iterator[tuple[int, float, float]]:
    """Yield (interactions, match, exact) before learning and after each step; the preference flips half-way."""
    loop = Loop(folder, recipe, seed)
    yield 0, *loop.evaluate()
    waiting: list[BatchSample] = []
    size = recipe.train.batch_samples
    has_flipped = False
    while loop.interactions < interactions:
        if flip and not has_flipped and loop.interactions >= interactions // 2:
            loop.flip(flip)
            has_flipped = True
        waiting += loop.session()
        while len(waiting) >= size:
            batch, waiting = waiting[:size], waiting[size:]
            loop.learn(batch)
            yield loop.interactions, *loop.evaluate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=model_path())
    parser.add_argument("--methods", type=Method, nargs="+", default=[Method.COMBINED], help="binary, opd, combined")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--interactions", type=int, default=96)
    parser.add_argument("--out", type=Path, help="write all evaluations, as JSON")
    parser.add_argument("--flip", type=Axis, nargs="+", default=[], help="code, length, tone")
    options = parser.parse_args()
    report = []
    for seed in options.seeds:
        for method in options.methods:
            began = time.perf_counter()
            recipe = demo_recipe(method)
            evaluations = []
            for at, match, exact in learn(options.model, recipe, seed, options.interactions, options.flip):
                evaluations.append((at, match, exact))
                print(f"seed {seed} {method}: {at} interactions, match {match:.2f}, exact {exact:.2f}", flush=True)
            reached = next((at for at, match, _ in evaluations if match >= 0.9), None)
            least = min(exact for _, _, exact in evaluations)
            seconds = time.perf_counter() - began
            run = {"seed": seed, "method": method.value, "recipe": recipe.hash, "seconds": round(seconds)}
            report.append(run | {"evaluations": evaluations})
            if options.out is not None:  # after each run, so that what has ended is kept
                options.out.write_text(json.dumps(report) + "\n", encoding="utf-8")
            print(f"seed {seed} {method}: 90 % at {reached}, exact at least {least:.2f}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
