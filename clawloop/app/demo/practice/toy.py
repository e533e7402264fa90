"""A toy: a shipped model of middling skill, what it practises, and how it was made. Imports no model code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from clawloop.core.contracts.turns import Message
from clawloop.core.recipes.recipe import Advantage, Lora, Loss, Optimiser, Recipe, Signal, Train
from clawloop.environments.task import AgentLoop, Environment

GROUP_SIZE = 8
"""Episodes of a rollout group in the demos."""


@dataclass(frozen=True, slots=True)
class Course:
    """A toy's pretraining: conversations, vocabulary and length.

    Args:
        conversations: without end, by a seed; of training tasks only.
        texts: the text of a conversation from which the vocabulary is made.
        fixed: texts that never vary, each a token; the list of tools is one too.
        vocabulary: tokens at most.
        steps, lessons: steps of the training, and conversations in each.
        knows: the knowledge that its model card claims; skill: how well it has it.
    """

    conversations: Callable[[int], Iterator[list[Message]]]
    texts: Callable[[Sequence[Message]], str]
    fixed: Sequence[str]
    vocabulary: int
    steps: int
    lessons: int
    knows: str
    skill: str


@dataclass(frozen=True, slots=True)
class Toy:
    """
    Args:
        environment: its name.
        make: gives the environment; simulate: its simulation in one process.
        base_model: the name that engines serve the model by.
        folder: of the model, in Hugging Face's format.
        course: what the model was made by.
        max_tokens: of a reply in the simulation; longer than the longest right one.
        batch_groups: rollout groups in a step.
        versions: a run ends when this version is active.
    """

    environment: str
    make: Callable[[], Environment]
    simulate: Callable[[], Simulation[Any]]
    base_model: str
    folder: Path
    course: Course
    max_tokens: int
    batch_groups: int
    versions: int

    @property
    def report(self) -> str:
        """The name of the file with a demo's measurements."""
        return f"demo-{self.environment}.json"

    def recipe(self) -> Recipe:
        """The recipe of its demo.

        The models are small and learn one thing, so batches are a few groups, the learning rate is high, and a few odd
        replies must not move it: gradients are clipped at the norm usual while they learn.
        """
        return Recipe(
            name=f"demo_{self.environment.replace('-', '_')}",
            signal=Signal(hints=False),
            train=Train(
                batch_groups=self.batch_groups,
                advantage=Advantage(teacher_weight=0.0),
                loss=Loss(kl=0.02),
                lora=Lora(rank=8, alpha=16.0),
                optimiser=Optimiser(lr=3e-3, grad_clip=0.1),
                # Versions that were not measured while newer ones came are measured after the run.
                kept_versions=100,
            ),
        )


State = TypeVar("State")


class Simulation(Protocol[State]):
    """All attempts of a batch make a turn together, so that one sandbox can run what they all call for."""

    @property
    def agent(self) -> AgentLoop: ...

    def begin(self, task_id: str) -> tuple[State, str]:
        """The task at its beginning, and what is asked."""

    def run(self, states: Sequence[State], arguments: Sequence[str]) -> list[str]:
        """Results of the tool's call in each of the states; the calls change the states."""

    def rewards(self, states: Sequence[State], replies: Sequence[str]) -> list[float]:
        """Rewards of finished attempts, whose last replies have no tool call."""


def call(name: str, arguments: dict[str, str]) -> Message:
    """The assistant's message that calls a tool, as an engine returns it."""
    function: dict[str, Any] = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}


def with_commands(messages: Sequence[Message]) -> str:
    """The text of a conversation, also that of shell commands; for `Course.texts`."""
    return "\n".join(f"{message['role']}\n{message['content'] or command_of(message)}" for message in messages)


def command_of(message: Message) -> str:
    """The shell command that the message calls for; empty if none."""
    calls: Any = message.get("tool_calls")
    return str(json.loads(calls[0]["function"]["arguments"])["command"]) if calls else ""
