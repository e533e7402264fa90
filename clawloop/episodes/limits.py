"""Time limits of episodes. A task that asks for more is refused when it is loaded, since no error would show later."""

from __future__ import annotations

from datetime import timedelta

LONGEST_SECONDS = 4 * 3600.0
"""Longest run of an agent and of a verifier; if an environment of verifiers does both, of all its stages together."""
CALL_LIMIT = timedelta(seconds=LONGEST_SECONDS) + timedelta(hours=2)
"""Time limit of the activity around an agent or a verifier, which also pulls an image and waits for a gateway."""
KEY_LEAST_LEFT = timedelta(seconds=LONGEST_SECONDS) + timedelta(hours=1)
"""Least time left of an episode's key when its agent starts, since the gateway's clock may differ."""
