"""Compares the agent's answer with the task's: its last whole number must be exactly that."""

import re

try:
    with open("/artifact/answer.txt", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        numbers = re.findall(r"-?\d+", file.read(100_000))
except OSError:
    numbers = []
with open("/task/answer.txt", encoding="utf-8") as file:  # noqa: PTH123
    right = file.read()
with open("/work/reward.txt", "w", encoding="utf-8") as file:  # noqa: PTH123
    file.write("1" if numbers and numbers[-1] == right else "0")
