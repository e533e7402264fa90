"""Named points at which a process kills itself, once, where a test asked for it. Off, a point costs one comparison.

A test arms a point by creating the file of its name in the folder of CLAWLOOP_CRASH_POINTS, also while processes run.
The first process that reaches the point removes the file and is gone, as by `kill -9`.
"""

from __future__ import annotations

import os
import signal
from enum import StrEnum
from pathlib import Path

_folder: Path | None = None


class CrashPoint(StrEnum):
    """Each member is one place in the code, between two effects that no transaction joins."""

    MID_STREAM = "mid-stream"  # gateway: a chunk was sent, more follow
    REPLY_NOT_STORED = "reply-not-stored"  # gateway: the engine's answer is complete, its turn is not stored
    GATEWAY_SHUTDOWN = "gateway-shutdown"  # gateway: it was asked to stop, and has not closed what it uses
    VOTES_STORED = "votes-stored"  # judge: all answers are stored, the judgement is not decided
    PRACTICE_ANSWERED = "practice-answered"  # judge: an engine answered a practised request, nothing is stored of it
    PRACTICE_STORED = "practice-stored"  # judge: a practised reply and its sample are stored, no workflow knows
    CLAIMED = "claimed"  # orchestrator: a batch is claimed, the workflow does not know
    STEP_NOT_SAVED = "step-not-saved"  # trainer: computed, nothing is on disk
    SAVED_NOT_COMMITTED = "saved-not-committed"  # trainer: the version's directory has its name, its step no commit
    COMMITTED = "committed"  # trainer: committed, the workflow does not know, no engine has it
    LOADED_NOT_ROUTED = "loaded-not-routed"  # engine agent: the engine has the version, no row sends requests to it
    NOT_ACTIVATED = "not-activated"  # orchestrator: engines have the version, another version is active
    UNROUTED_NOT_UNLOADED = "unrouted-not-unloaded"  # engine agent: rows are gone, the engine still has the version


def arm_crash_points(folder: Path | None) -> None:
    """Look for armed points in this folder from now on; None: never."""
    global _folder
    _folder = folder


def crash_point(point: CrashPoint) -> None:
    """Kill this process, if the point is armed."""
    if _folder is not None:
        _crash_once(_folder / point)


def _crash_once(armed: Path) -> None:
    try:
        armed.unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
