"""A program for test_rollouts_whole.py: clawloop, whose orchestrator hears sooner that a worker is dead."""

from __future__ import annotations

from datetime import timedelta

from clawloop.app.cli.main import main
from workflows import activity_options

if __name__ == "__main__":
    activity_options.EPISODE_SILENCE = timedelta(seconds=20)
    main()
