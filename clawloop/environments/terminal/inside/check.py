"""Compares the files that the agent left in /work with those that should be there: data only, nothing of it is run."""

import json

right = True
with open("/tests/expected.json", encoding="utf-8") as file:  # noqa: PTH123
    expected = json.load(file)
for path, content in expected.items():
    try:
        with open(f"/work/{path}", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            as_wanted = content is not None and file.read(1_000_000).strip() == content.strip()
    except OSError:
        as_wanted = content is None
    right = right and as_wanted
with open("/logs/verifier/reward.txt", "w", encoding="utf-8") as file:  # noqa: PTH123
    file.write("1" if right else "0")
