"""Calls functions of the repository that the agent left, and compares what they return.

Their code runs, so it runs in a process that can only calculate: it gets sources and arguments through its standard
input, never what is expected; it opens no file, so it cannot read these tests or write a reward; it starts no process.
The reward is 0 until this program, which imports nothing of the repository, has compared all results.
"""

import json
import os
import subprocess
import sys

SECONDS = 10  # small functions take milliseconds, a busy machine's Python a second or two to start
BYTES = 1_000_000
# Standard modules are loaded before files are forbidden; others cannot be imported.
CALCULATE = r"""
import bisect, collections, dataclasses, datetime, decimal, enum, fractions, functools, heapq, importlib, itertools
import importlib.abc, importlib.util, json, math, operator, random, re, resource, statistics, string, sys, typing

given = json.load(sys.stdin)

class Sources(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        is_package = name + ".__init__" in given["sources"]
        if is_package or name in given["sources"]:
            return importlib.util.spec_from_loader(name, self, is_package=is_package)

    def exec_module(self, module):
        name = module.__name__
        exec(given["sources"].get(name + ".__init__", given["sources"].get(name)), module.__dict__)

sys.meta_path.append(Sources())
for limit, value in ((resource.RLIMIT_NPROC, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 3)):
    resource.setrlimit(limit, (value, value))
write = sys.stdout.write
module = importlib.import_module(given["module"])
results = [getattr(module, name)(*arguments) for name, arguments in given["calls"]]
write(json.dumps(results))
"""


def main() -> None:
    reward("0")
    with open("/tests/cases.json", encoding="utf-8") as file:  # noqa: PTH123
        tests = json.load(file)
    wanted = [case[2] for case in tests["cases"]]
    calls = [[name, arguments] for name, arguments, _ in tests["cases"]]
    given = {"sources": sources("/work"), "module": tests["module"], "calls": calls}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", CALCULATE],
            input=json.dumps(given).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
        )
        results = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError, RecursionError):
        return
    # As text, so that True is not 1.
    if json.dumps(results) == json.dumps(wanted):
        reward("1")


def sources(folder: str) -> "dict[str, str]":
    """Each Python file below the folder by the name of its module."""
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)  # noqa: PTH118
            if name.endswith(".py") and os.path.getsize(path) <= BYTES:  # noqa: PTH202
                with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
                    found[os.path.relpath(path, folder)[:-3].replace(os.sep, ".")] = file.read()
    return found


def reward(value: str) -> None:
    with open("/logs/verifier/reward.txt", "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write(value)


if __name__ == "__main__":
    main()
