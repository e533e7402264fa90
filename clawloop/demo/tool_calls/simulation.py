"""The environment `tool-call` in this process: sums that a reply calls for are calculated here."""

from __future__ import annotations

import re
from collections.abc import Sequence

from clawloop.environments.task import parse_task_id
from clawloop.environments.tool_call.environment import AGENT, Question, question

_SUM = re.compile(r"print\((-?\d+) ([-+*]) (-?\d+)\)")


class ToolCallSimulation:
    """Satisfies `clawloop.demo.practice.simulation.Simulation[Question]`."""

    agent = AGENT

    def begin(self, task_id: str) -> tuple[Question, str]:
        asked = question(*parse_task_id(task_id))
        return asked, asked.text

    def run(self, states: Sequence[Question], arguments: Sequence[str]) -> list[str]:
        found = [_SUM.fullmatch(code) for code in arguments]
        return [
            "error" if each is None else str(Question(int(each[1]), each[2], int(each[3])).answer) for each in found
        ]

    def rewards(self, states: Sequence[Question], replies: Sequence[str]) -> list[float]:
        numbers = [re.findall(r"-?\d+", reply) for reply in replies]
        return [
            float(bool(of_reply) and of_reply[-1] == str(asked.answer))
            for asked, of_reply in zip(states, numbers, strict=True)
        ]
