"""Scores what the agent replied between <answer> and </answer> as reasoning-gym does; only a full score is a reward."""

import json
import os
import sys

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each thread reserves memory, which is limited
sys.path.insert(0, "/packages")

import reasoning_gym
from reasoning_gym.utils import extract_answer

with open("/task/right.json", encoding="utf-8") as file:  # noqa: PTH123
    right = json.load(file)
try:
    with open("/artifact/answer.txt", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        answer = extract_answer(file.read(100_000))
except OSError:
    answer = None
dataset = reasoning_gym.create_dataset(right["generator"], seed=0, size=1)
score = dataset.score_answer(answer, right["entry"])
with open("/work/reward.txt", "w", encoding="utf-8") as file:  # noqa: PTH123
    file.write("1" if score >= 1 else "0")
