"""Types of the options that several benchmarks have; what fails after the measurement is refused before it."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    def number(given: str) -> int:
        value = int(given)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value}, but at least {least} are needed")
        return value

    return number


def sizes(given: str) -> list[int]:
    """Positive numbers between commas, each once, the smallest first."""
    return sorted({at_least(1)(number) for number in given.split(",")})
