"""What became of an episode of verifiers: how it ended, its reward, and what is kept of it.

verifiers scores a rollout in its own place, at its end, and so once. What is kept are numbers and names, no text of the
conversation, which the gateway has.
"""

from __future__ import annotations

import io
import json
import tarfile
from importlib.metadata import version
from typing import Any

from clawloop.contracts.episodes import AgentRun, Ending
from clawloop.environments.reward import REWARD_FILE, packed, read_reward

_RESULT_FILE = "result.json"
_TOKEN_LIMITS = ("max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")
# Of the model's API: wrong requests, e.g. a conversation that is too long, are the agent's own.
_AGENTS_STATUS = (400, 404, 413, 422)


def outcome_of(episode: Any, role: str) -> AgentRun:
    """
    Args:
        episode: a `verifiers.v1.Episode` that has ended.
        role: the agent that the policy played.
    """
    runs = [trace for trace in episode.traces if trace.agent.name == role]
    if not runs:
        return AgentRun(Ending.INFRASTRUCTURE, f"the agent was not run: {_errors(episode)}", b"")
    ending = _ending(runs[-1])
    if ending is Ending.INFRASTRUCTURE:
        return AgentRun(ending, f"{runs[-1].stop_condition}: {_errors(runs[-1])}", b"")
    reward, why = _reward(episode, runs)
    reason = why if ending is not Ending.AGENT_ERROR else f"{runs[-1].stop_condition}: {_errors(runs[-1])}"
    return _verified(ending, reason, _kept(runs[-1], reward, why))


def unanswered(seconds: float) -> AgentRun:
    """Of an episode that hung."""
    why = f"it did not end in {seconds:g} s"
    return _verified(Ending.TRUNCATED_TIME, why, packed({_RESULT_FILE: json.dumps({"why": why}).encode()}))


def kept_reward(artifact: bytes) -> tuple[float | None, str]:
    """The reward in what was kept of an episode, or why there is none."""
    try:
        return read_reward(artifact)
    except (KeyError, tarfile.TarError):
        return None, _kept_reason(artifact)


def _verified(ending: Ending, reason: str, kept: bytes) -> AgentRun:
    """With the verdict that `kept_reward` will give of it at any time: nothing has to be asked."""
    return AgentRun(ending, reason, kept, kept_reward(kept))


def _ending(trace: Any) -> Ending:
    stop = str(trace.stop_condition)
    if stop == "provider_error":
        status = trace.last_error.status_code if trace.last_error is not None else None
        return Ending.AGENT_ERROR if status in _AGENTS_STATUS else Ending.INFRASTRUCTURE
    if stop == "harness_error":
        return Ending.AGENT_ERROR
    if stop == "error" or stop.endswith("_error") or stop == "setup_timeout":
        return Ending.INFRASTRUCTURE
    if stop == "agent_timeout":
        return Ending.TRUNCATED_TIME
    if stop == "max_turns":
        return Ending.TRUNCATED_TURNS
    if stop in _TOKEN_LIMITS or trace.is_truncated:
        return Ending.TRUNCATED_TOKENS
    return Ending.COMPLETED


def _reward(episode: Any, runs: list[Any]) -> tuple[float | None, str]:
    if len(runs) != 1:
        return None, f"the policy played {len(runs)} times in one episode, which has one reward"
    if not episode.ok or not runs[0].ok:
        return None, f"not scored: {_errors(runs[0]) or _errors(episode)}"
    rewards = runs[0].rewards
    missing = sorted(name for name, reward in rewards.items() if reward is None)
    if missing or not rewards:
        return None, f"the environment gave no reward {', '.join(missing)}".rstrip()
    return float(runs[0].reward), ""


def _errors(of: Any) -> str:
    """Types of errors, which quote nothing."""
    return ", ".join(dict.fromkeys(error.type for error in of.errors))


def _kept(trace: Any, reward: float | None, why: str) -> bytes:
    result = {
        "why": why,
        "stop": trace.stop_condition,
        "rewards": {name: None if part is None else part.value for name, part in trace.rewards.items()},
        "metrics": dict(trace.metrics),
        "verifiers": version("verifiers"),
    }
    files = {_RESULT_FILE: json.dumps(result).encode()}
    if reward is not None:
        files[REWARD_FILE] = repr(reward).encode()
    return packed(files)


def _kept_reason(artifact: bytes) -> str:
    try:
        with tarfile.open(fileobj=io.BytesIO(artifact)) as files:
            file = files.extractfile(_RESULT_FILE)
            return str(json.loads(b"{}" if file is None else file.read()).get("why")) or "no reward"
    except (KeyError, ValueError, tarfile.TarError):
        return "what was kept of the episode cannot be read"
