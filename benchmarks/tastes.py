"""Ablation on a real small model, in one process: what each recipe does to a taste and to what the model knows.

A person with a taste that a rule checks asks everyday requests, one at a time, and reacts as the demo's person does.
Each arm is a recipe; samples are made as judging makes them, by a judge that is the rule itself, and trained by the
product's own step. After every second step replies to held-out requests are checked by the rule, and known questions
are asked. Raw lines are added to a file as they come; a run that is there to its end is not run again. Run as
`make bench ARGS="tastes FOLDER"`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any
from uuid import UUID

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.options import at_least
from clawloop.app.demo.comparison import corrected, p_value
from clawloop.app.demo.sessions import as_notes
from clawloop.app.demo.tastes import (
    HELD_OUT,
    Answer,
    Person,
    Taste,
    is_loop,
    share_met,
    tastes_to_learn,
    told,
    wordings,
)
from clawloop.app.evaluation.figures import INTERVAL, Estimate
from clawloop.core.contracts.training import BatchSample, ProbeContent
from clawloop.core.contracts.turns import Message
from clawloop.core.errors import NothingToTrain
from clawloop.core.gate.checks import is_right
from clawloop.core.gate.general import ANSWER_TOKENS, KNOWN_ANSWERS, KNOWN_TEMPERATURE, general_questions
from clawloop.core.ids import SampleId
from clawloop.core.judging.hints import CONTROL_HINT, next_message, with_hint
from clawloop.core.recipes.recipe import (
    CONTROL,
    DEFAULT_RECIPE,
    WITHOUT_JUDGE,
    Advantage,
    Recipe,
    Signal,
    Train,
)
from clawloop.core.samples.decision import is_correction, nothing_to_correct
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape, adapter_tensors
from clawloop.training.packing import Limits
from clawloop.training.step import make_optimizer, train_step

OUT = Path(__file__).parent / "results" / "tastes.jsonl"
BATCH, LEARNING_RATE = 8, 5e-4
REPLY_TOKENS, TEMPERATURE = 80, 0.6
AT_ONCE = 8  # requests answered together
# Hints as a judge would give them; the person never says any of these.
HINTS: Mapping[Taste, tuple[str, str, str]] = {
    Taste.BRIEF: (
        "Answer in one or two short sentences.",
        "The user wants brief, concise answers.",
        "Leave out every detail that the user did not ask for and keep the whole reply under forty words.",
    ),
    Taste.PROSE: (
        "Write one plain paragraph without lists or numbering.",
        "The user dislikes bullet points.",
        "Use flowing sentences as in a letter, and no lists, headings or bold text anywhere.",
    ),
    Taste.ASKS: (
        "End the reply with a question to the user.",
        "The user wants to be asked something back.",
        "After the answer, finish with one short question about what the user needs next.",
    ),
    Taste.FRIENDLY: (
        "Begin with a friendly greeting such as: Hi there!",
        "The user wants to be greeted first.",
        "Open each reply with a hello and a kind word, and only then answer what was asked.",
    ),
    Taste.DIRECT: (
        "State facts without may, might, can or could.",
        "The user dislikes hedging.",
        "Commit to one definite answer, and leave out words such as usually, often, maybe and generally.",
    ),
    Taste.STEPS: (
        "Write the answer as a numbered list.",
        "The user wants lists with numbers.",
        "Divide the reply into numbered points, one on each line, so that they can be ticked off.",
    ),
    Taste.EXAMPLE: (
        "Give one example that begins with: For example.",
        "The user wants an example in each answer.",
        "Explain by something concrete from everyday life, and introduce it with the words: for example.",
    ),
}


# Arms -----------------------------------------------------------------------------------------------------------------


NEAR = {"hint_distance": 0.16}
_HALF = {"lr": LEARNING_RATE / 2}


# What is the same in all arms that do not say otherwise.
_PLAIN: Mapping[str, Mapping[str, Any]] = {
    "loss": {"kl": 0.1},
    "optimiser": {"lr": LEARNING_RATE, "epsilon": 1e-8},
    "distillation": {"hint_distance": None},
}


def _arm(base: Recipe, *, batch: int = BATCH, corrected_share: float = 0.0, **tables: Mapping[str, Any]) -> Recipe:
    """The recipe at the pace of a model of 135M parameters, with these keys changed, by table of `train`."""
    changed: dict[str, Any] = {"batch_samples": batch, "corrected_share": corrected_share}
    for name in {**_PLAIN, **tables}:
        keys = {**_PLAIN.get(name, {}), **tables.get(name, {})}
        changed[name] = getattr(base.train, name).model_copy(update=keys)
    return base.model_copy(update={"train": base.train.model_copy(update=changed)})


_PACE = {"lr": 1e-3, "epsilon": 1e-4}
# By this epsilon a step is as long as its clipped gradient: what is compared needs the same clip.
_SAME_STEP = {"optimiser": _PACE | {"beta1": 0.5, "grad_clip": 0.05}}


def _demos_pace(base: Recipe, **tables: Mapping[str, Any]) -> Recipe:
    """The recipe as the demo runs a pretrained model: a large epsilon, a weak pull, no step once users are content."""
    pace: dict[str, Any] = {"loss": {"kl": 0.02}, "optimiser": _PACE} | tables
    return _arm(base, corrected_share=0.25, **pace)


_COMBINED = Recipe(
    name="combined", train=Train(loss=DEFAULT_RECIPE.train.loss.model_copy(update={"distillation": 0.0}))
)
_BINARY = Recipe(
    name="binary",
    signal=Signal(hints=False),
    train=_COMBINED.train.model_copy(update={"advantage": Advantage(teacher_weight=0.0, spare_unlikely=1.0)}),
)
ARMS: Mapping[str, Recipe] = {
    "hybrid": _arm(DEFAULT_RECIPE),
    "hybrid, no control": _arm(DEFAULT_RECIPE, advantage={"control": False}),
    "hybrid, no rewards": _arm(DEFAULT_RECIPE, advantage={"verdict_weight": 0.0}),
    "binary": _arm(_BINARY),
    "hindsight": _arm(WITHOUT_JUDGE),
    "hindsight, no control": _arm(WITHOUT_JUDGE, advantage={"control": False}),
    "hindsight, clip 1": _arm(WITHOUT_JUDGE, optimiser={"grad_clip": 1.0}),
    "hindsight, half lr": _arm(WITHOUT_JUDGE, optimiser=_HALF),
    "hindsight, batch 16": _arm(WITHOUT_JUDGE, batch=16),
    "hindsight, pull 1": _arm(WITHOUT_JUDGE, loss={"kl": 1.0}),
    "hindsight, near": _arm(WITHOUT_JUDGE, distillation=NEAR),
    "hindsight, near, no pull": _arm(WITHOUT_JUDGE, distillation=NEAR, loss={"kl": 0.0}),
    "hindsight, near, pull 0.02, clip 1": _arm(
        WITHOUT_JUDGE, distillation=NEAR, loss={"kl": 0.02}, optimiser={"grad_clip": 1.0}
    ),
    "hindsight, near, pull 0.02, until content": _arm(
        WITHOUT_JUDGE, corrected_share=0.25, distillation=NEAR, loss={"kl": 0.02}
    ),
    "hindsight, near, pull 0.02, until content, half lr": _arm(
        WITHOUT_JUDGE, optimiser=_HALF, corrected_share=0.25, distillation=NEAR, loss={"kl": 0.02}
    ),
    "hybrid, demo's pace": _demos_pace(DEFAULT_RECIPE),
    "hybrid, no rewards, demo's pace": _demos_pace(DEFAULT_RECIPE, advantage={"verdict_weight": 0.0}),
    "combined, demo's pace": _demos_pace(_COMBINED, advantage={"spare_unlikely": 1.0}, **_SAME_STEP),
    "binary, demo's pace": _demos_pace(_BINARY, **_SAME_STEP),
    "combined, clip 1, demo's pace": _demos_pace(_COMBINED, advantage={"spare_unlikely": 1.0}),
    "binary, clip 1, demo's pace": _demos_pace(_BINARY),
    "hindsight, demo's pace": _demos_pace(WITHOUT_JUDGE, distillation=NEAR),
    "hindsight, centred, demo's pace": _demos_pace(
        WITHOUT_JUDGE, distillation=NEAR, advantage={"control": False, "centre_gap": True}
    ),
    "hybrid, rewards 1, demo's pace": _demos_pace(DEFAULT_RECIPE, advantage={"verdict_weight": 1.0}),
    "hybrid, k 20, demo's pace": _demos_pace(DEFAULT_RECIPE, distillation={"top_k": 20}),
    "hybrid, C 2, demo's pace": _demos_pace(DEFAULT_RECIPE, advantage={"opd_clip": 2.0}),
    "hybrid, overlap, demo's pace": _demos_pace(DEFAULT_RECIPE, distillation={"top_k_of": "overlap"}),
    "hybrid, shortest, demo's pace": _demos_pace(DEFAULT_RECIPE, distillation={"hint_choice": "shortest"}),
    "hybrid, longest, demo's pace": _demos_pace(DEFAULT_RECIPE, distillation={"hint_choice": "longest"}),
    "hybrid, token, demo's pace": _demos_pace(DEFAULT_RECIPE, distillation={"hint_choice": "token_optimal"}),
    "hybrid, spare end, demo's pace": _demos_pace(DEFAULT_RECIPE, distillation={"spare_end": True}),
    "combined, rewards 0.1, demo's pace": _demos_pace(
        _COMBINED, advantage={"spare_unlikely": 1.0, "verdict_weight": 0.1}, **_SAME_STEP
    ),
}
_COMPARED = ("taste", "facts")
_FIGURES = (*_COMPARED, "words", "ended", "loops")
FIRST = tuple(
    f"{recipe}, demo's pace" for recipe in ("hybrid", "hybrid, no rewards", "combined", "binary", "hindsight")
)


# Model ----------------------------------------------------------------------------------------------------------------


class Served:
    """The model as an engine would serve it: samples, and takes a new adapter after each step."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._end = self._tokenizer.eos_token_id
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._base = {name: each.detach().clone() for name, each in self._model.named_parameters() if "_proj" in name}

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a chat that the model is to answer."""
        rendered = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
        return list(rendered["input_ids"])

    @torch.no_grad()
    def replies(
        self, prompts: Sequence[Sequence[int]], tokens: int, *, temperature: float, seed: int
    ) -> list[tuple[list[int], list[float]]]:
        """Ids and log-probs of a reply to each prompt; greedy at temperature 0."""
        torch.manual_seed(seed)
        longest = max(map(len, prompts))
        padding = [longest - len(ids) for ids in prompts]
        chosen: dict[str, Any] = {"do_sample": False}
        if temperature:
            chosen = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
        found = self._model.generate(
            input_ids=torch.tensor([[self._end] * pad + list(ids) for pad, ids in zip(padding, prompts, strict=True)]),
            attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding]),
            max_new_tokens=tokens,
            pad_token_id=self._end,
            eos_token_id=self._end,
            return_dict_in_generate=True,
            output_logits=True,
            **chosen,
        )
        logprobs = torch.log_softmax(torch.stack(found.logits, 1) / (temperature or 1.0), -1)
        replies = []
        for row, of_row in zip(found.sequences[:, longest:].tolist(), logprobs, strict=True):
            ids = row[: row.index(self._end) + 1] if self._end in row else row
            replies.append((ids, [float(of_row[at, token]) for at, token in enumerate(ids)]))
        return replies

    def answer(self, ids: Sequence[int]) -> Answer:
        return Answer(self._tokenizer.decode(list(ids), skip_special_tokens=True), ids[-1] == self._end)

    def take(self, adapter: Mapping[str, torch.Tensor], scale: float) -> None:
        """Serve the base weights plus this adapter; none of it is rounded."""
        for name, weight in self._model.named_parameters():
            if name in self._base:
                ends = [f"{name.removesuffix('.weight')}.lora_{of}.weight" for of in "BA"]
                found = [each for end in ends for key, each in adapter.items() if key.endswith(end)]
                weight.data.copy_(self._base[name] + scale * found[0] @ found[1] if found else self._base[name])


@dataclass(frozen=True)
class Exam:
    """Held-out requests, and questions that the base model knows."""

    served: Served

    @cached_property
    def known(self) -> list[ProbeContent]:
        known = [each.content for each in general_questions()]
        for seed in range(KNOWN_ANSWERS):
            right = self._are_right(known, KNOWN_TEMPERATURE, seed)
            known = [each for each, is_right in zip(known, right, strict=True) if is_right]
        return known

    @cached_property
    def base_facts(self) -> float:
        """Share of these that the base model answers rightly without sampling."""
        return fmean(self._are_right(self.known))

    @cached_property
    def base(self) -> list[Answer]:
        """The base model's replies to the held-out requests."""
        return self.replies(32)

    def replies(self, count: int) -> list[Answer]:
        asked = [self.served.prompt([{"role": "user", "content": each}]) for each in HELD_OUT[:count]]
        found = self.served.replies(asked, REPLY_TOKENS, temperature=TEMPERATURE, seed=7)
        return [self.served.answer(ids) for ids, _ in found]

    def measured(self, taste: Taste, count: int) -> dict[str, Any]:
        said = self.replies(count)
        return {
            "taste": share_met(taste, said),
            "facts": fmean(self._are_right(self.known)),
            "words": fmean(each.words for each in said),
            "ended": fmean(each.ended for each in said),
            "loops": sum(is_loop(each.text) for each in said),
            "example": said[0].text,
        }

    def _are_right(self, questions: Sequence[ProbeContent], temperature: float = 0.0, seed: int = 0) -> Iterator[bool]:
        for start in range(0, len(questions), 32):
            some = questions[start : start + 32]
            prompts = [self.served.prompt(each.messages) for each in some]
            found = self.served.replies(prompts, ANSWER_TOKENS, temperature=temperature, seed=seed)
            for content, (ids, _) in zip(some, found, strict=True):
                yield bool(is_right(content, self.served.answer(ids).text))


# Runs -----------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One arm with one person."""

    served: Served
    exam: Exam
    folder: Path
    recipe: Recipe
    seed: int
    steps: int
    wish: Taste | None  # None: the seed draws it
    verdict_every: int = 1  # of so many replies one gets a verdict; hints come with each complaint

    def lines(self) -> Iterator[dict[str, Any]]:
        """What is measured before the first step, after every second and after the last."""
        train = self.recipe.train
        shape = LoraShape(train.lora.rank, train.lora.alpha)
        model = load_model(
            self.folder, shape, dtype=torch.float32, device=torch.device("cpu"), max_tokens=2048,
            recompute_beyond=None, seed=self.seed,
        )  # fmt: skip
        optimizer = make_optimizer(model, train.optimiser)
        limits = Limits(budget_tokens=2048, max_tokens=2048, vocab_size=model.vocab_size)
        taste = self.wish or tastes_to_learn(self.seed, self.exam.base)[0]
        yield {"step": 0, "wish": taste.value, "taste": share_met(taste, self.exam.base), "facts": self.exam.base_facts}
        person = Person(f"ablation {self.seed}", taste)
        fresh: list[BatchSample] = []
        asked, met = 0, []
        for step in range(1, self.steps + 1):
            while len(fresh) < train.batch_samples:
                some = [person.request() for _ in range(AT_ONCE)]
                prompts = [self.served.prompt([{"role": "user", "content": each}]) for each in some]
                seed = self.seed * 10_000 + asked
                replies = self.served.replies(prompts, REPLY_TOKENS, temperature=TEMPERATURE, seed=seed)
                for request, prompt, (ids, logprobs) in zip(some, prompts, replies, strict=True):
                    asked += 1
                    met.append(taste.is_met(self.served.answer(ids)))
                    learned = self._learned(person, taste, request, ids, judged=asked % self.verdict_every == 0)
                    if learned is not None:
                        reward, hinted = learned
                        sample = BatchSample(
                            sample_id=SampleId(UUID(int=asked)), prompt_ids=prompt, response_ids=ids, logprobs=logprobs,
                            temperature=TEMPERATURE, version=0, reward=reward, hinted_prompts=hinted,
                        )  # fmt: skip
                        fresh.append(sample)
            # Samples that are left over answer as the parent would: the step reads them behind its own weights.
            batch = [replace(each, version=step - 1) for each in fresh[: train.batch_samples]]
            fresh = fresh[train.batch_samples :]
            began = time.monotonic()
            line: dict[str, Any] = {"step": step, "asked": asked, "met": fmean(met)}
            why = nothing_to_correct(self.recipe, [(each.reward, bool(each.hinted_prompts)) for each in batch])
            try:
                if why is not None:
                    fresh = [each for each in batch if self._corrects(each)] + fresh  # the others expire
                    raise NothingToTrain(why)
                figures = train_step(model, optimizer, batch, train, limits, parent=step - 1)
            except NothingToTrain as error:  # what the exam finds is then that of the version before
                line["not_trained"] = str(error)
            else:
                self.served.take(adapter_tensors(model), shape.alpha / shape.rank)
                line |= {"dropped": len(figures.dropped), "taught": len(figures.taught), "grad_norm": figures.grad_norm}
                line["to_parent"] = figures.to_parent.mean if figures.to_parent else None
            line["seconds"] = round(time.monotonic() - began)
            met.clear()
            if step % 2 == 0 or step == self.steps:
                yield line | self.exam.measured(taste, 32 if step == self.steps else 16)

    def _corrects(self, sample: BatchSample) -> bool:
        return is_correction(self.recipe, sample.reward, hinted=bool(sample.hinted_prompts))

    def _learned(
        self, person: Person, taste: Taste, request: str, ids: Sequence[int], *, judged: bool
    ) -> tuple[float | None, dict[int, list[int]]] | None:
        """Reward and hinted prompts of a reply; None if the recipe learns nothing from it."""
        signal = self.recipe.signal
        said = self.served.answer(ids)
        reaction = person.react(request, said)
        is_met = taste.is_met(said)
        if signal.teaches_by_message:
            reward, hints = reaction.thumb, () if reaction.thumb == 1 else next_message(reaction.text).texts
        else:
            reward = (1 if is_met else -1) if signal.verdicts and judged else None
            hints = () if is_met else HINTS[taste]
        if not signal.hints:
            hints = ()
        messages: list[Message] = [{"role": "user", "content": request}]
        texts = {**dict(enumerate(sorted(hints, key=len, reverse=True))), **({CONTROL: CONTROL_HINT} if hints else {})}
        hinted = {
            place: self.served.prompt(with_hint(messages, text, spoken=signal.teaches_by_message) or messages)
            for place, text in texts.items()
        }
        return (None if reward is None else float(reward), hinted) if hinted or reward else None


def _all_told(served: Served, exam: Exam) -> Iterator[dict[str, Any]]:
    """For each taste, the share of held-out replies that meet it when the model is told the taste in the prompt.

    What a model does not do when it is told, no teacher that has read the same words can teach it.
    """
    requests = HELD_OUT[:16]
    yield {"told": "nothing", **{taste.value: share_met(taste, exam.base[: len(requests)]) for taste in Taste}}
    for how in ("the next message", "a hint", "notes"):
        line: dict[str, Any] = {"told": how}
        for taste in Taste:
            prompts, said = [], wordings(taste)
            for at, request in enumerate(requests):
                messages: list[Message] = [{"role": "user", "content": request}]
                if how == "notes":
                    messages.insert(0, {"role": "system", "content": as_notes(said[:5])})
                elif how == "a hint":
                    messages = with_hint(messages, HINTS[taste][at % 3]) or messages
                else:
                    messages = [{"role": "user", "content": told(taste, at)}]
                prompts.append(served.prompt(messages))
            found = served.replies(prompts, REPLY_TOKENS, temperature=TEMPERATURE, seed=7)
            line[taste.value] = share_met(taste, [served.answer(ids) for ids, _ in found])
        yield line


def _done(path: Path) -> dict[tuple[str, int, int], list[dict[str, Any]]]:
    """Lines of whole runs by arm, seed and number of steps."""
    runs: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        line = json.loads(text)
        runs.setdefault((line["arm"], line["seed"], line["steps"]), []).append(line)
    return {key: lines for key, lines in runs.items() if lines[-1]["step"] == key[2]}


def _report(runs: Mapping[tuple[str, int, int], Sequence[Mapping[str, Any]]], console: Console) -> None:
    """Means over seeds with 95 % intervals, at each step that was measured, and differences to the first arm."""
    arms = list(dict.fromkeys(arm for arm, _, _ in runs))
    steps = max(of_run for _, _, of_run in runs)
    for step in sorted({line["step"] for lines in runs.values() for line in lines} - {0}):
        at: dict[str, dict[int, Mapping[str, Any]]] = {arm: {} for arm in arms}
        for (arm, seed, of_run), lines in runs.items():
            found = [line for line in lines if (line["step"], of_run) == (step, steps)]
            at[arm] |= {seed: found[0]} if found else {}
        further = (f"{name} beyond {arms[0]}, p" for name in _COMPARED)
        table = Table("arm", "runs", *_FIGURES, *further, title=f"step {step}")
        compared = {name: _differences(at, arms, name) for name in _COMPARED}
        for arm in arms:
            shown = [Estimate.of([float(line[name]) for line in at[arm].values()]) for name in _FIGURES]
            cells = ["" if each is None else each.shown(2) for each in shown]
            table.add_row(arm, str(len(at[arm])), *cells, *(compared[name].get(arm, "") for name in _COMPARED))
        console.print(table)
    how = "differences paired by seed, each interval that of one comparison; p by Mann-Whitney, Holm's correction"
    console.print(f"{INTERVAL}; {how}", highlight=False)


def _differences(
    at: Mapping[str, Mapping[int, Mapping[str, Any]]], arms: Sequence[str], name: str
) -> Mapping[str, str]:
    """Of each arm but the first: its difference to the first, paired by seed, and the corrected p."""
    first, *others = arms
    values = {arm: {seed: float(line[name]) for seed, line in at[arm].items()} for arm in arms}
    pairs = {arm: sorted(values[arm].keys() & values[first].keys()) for arm in others}
    p = corrected(
        {arm: p_value(list(values[first].values()), list(values[arm].values())) for arm in others if pairs[arm]}
    )
    shown = {}
    for arm in p:
        found = Estimate.of([values[arm][seed] - values[first][seed] for seed in pairs[arm]])
        assert found is not None
        shown[arm] = f"{found.shown(2)}, {p[arm]:.3f}"
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks tastes", description="recipes on a real model, in process")
    parser.add_argument("model", type=Path, help="folder of the model: clawloop model fetch smollm2 prints it")
    parser.add_argument("--arms", default=";".join(FIRST), help="names between semicolons, or `all`")
    parser.add_argument("--seeds", default="1", help="between commas; 1 to 99 are for tuning")
    parser.add_argument("--wish", type=Taste, choices=list(Taste), help="of each person; otherwise the seed draws it")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--verdict-every", type=at_least(1), default=1, help="one of so many replies gets a verdict")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--told", action="store_true", help="what the model does when told a taste, and nothing else")
    options = parser.parse_args()
    arms = list(ARMS) if options.arms == "all" else options.arms.split(";")
    served = Served(options.model)
    exam = Exam(served)
    if options.told:
        for line in _all_told(served, exam):
            print(json.dumps(line), flush=True)
        return
    sparse = "" if options.verdict_every == 1 else f", a verdict in {options.verdict_every}"
    for seed in map(int, options.seeds.split(",")):
        for arm in arms:
            if (f"{arm}{sparse}", seed, options.steps) in _done(options.out):
                continue
            served.take({}, 0.0)
            known = len(exam.known)
            began = time.monotonic()
            run = Run(served, exam, options.model, ARMS[arm], seed, options.steps, options.wish, options.verdict_every)
            for line in run.lines():
                whole = {"arm": f"{arm}{sparse}", "seed": seed, "steps": options.steps, "known": known, **line}
                text = json.dumps(whole | {"s": round(time.monotonic() - began)})
                print(text, flush=True)
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(f"{text}\n")
    _report(_done(options.out), Console(width=200))


if __name__ == "__main__":
    main()
