"""What an episode is given in time is what it gets: the calls around it and its key end later."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest

from clawloop.app.cli.remote_environment import _parser, worker_of
from clawloop.core.episodes.keys import KEY_LIFETIME
from clawloop.core.episodes.kinds import KEY_LEAST_LEFT, LONGEST_SECONDS
from clawloop.core.errors import SetupError
from clawloop.environments.gateway import PATIENCE_SECONDS
from clawloop.environments.verifiers.loading import seconds_in_all
from clawloop.sandboxes.containers import PULL_SECONDS
from workflows.activity_options import run_in, verify_in


def test_calls_and_keys_outlast_the_longest_agent_and_verifier_that_are_accepted() -> None:
    longest = timedelta(seconds=LONGEST_SECONDS + PULL_SECONDS + 2 * PATIENCE_SECONDS)
    for options in (run_in("terminal"), verify_in("terminal")):
        assert options["start_to_close_timeout"] > longest
    assert KEY_LIFETIME > KEY_LEAST_LEFT > longest


def stages(rollout: float | None) -> SimpleNamespace:
    return SimpleNamespace(setup=None, rollout=rollout, finalize=600.0, scoring=60)


def test_stages_of_verifiers_that_an_episode_cannot_hold_are_refused_with_their_sum() -> None:
    assert seconds_in_all(stages(900), "agent", "sums") == 60 + 600 + 900 + 600 + 60
    why = (
        "--verifiers sums: the stages setup, rollout, finalize and scoring may take 15660 s together, and an episode"
        " 14400: lower `agent.timeout` in --verifiers-config, or --seconds"
    )
    with pytest.raises(SetupError) as refused:
        seconds_in_all(stages(14_400), "agent", "sums")
    assert str(refused.value) == why
    with pytest.raises(SetupError, match="nan s together"):
        seconds_in_all(stages(float("nan")), "agent", "sums")


@pytest.mark.parametrize("seconds", ["14401", "0", "-1", "nan", "inf"])
def test_seconds_of_an_agent_are_bounded(seconds: str) -> None:
    options = ["--verifiers", "sums", f"--seconds={seconds}", "--temporal", "t:7233"]
    with pytest.raises(SetupError, match=f"^--seconds must be above 0 and at most 14400, not {float(seconds):g}$"):
        worker_of(_parser().parse_args(options), {"CLAWLOOP_WORKER_KEY": "key"})
