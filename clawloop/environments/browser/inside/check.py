"""Compares what the tab posted and where it is, as its session recorded it, with what the task wants: data only."""

import json

with open("/task/expected.json", encoding="utf-8") as file:  # noqa: PTH123
    expected = json.load(file)
try:
    with open("/artifact/state.json", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        found = json.loads(file.read(1_000_000))
except (OSError, ValueError):
    found = None
with open("/work/reward.txt", "w", encoding="utf-8") as file:  # noqa: PTH123
    file.write("1" if found == expected else "0")
