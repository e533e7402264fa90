"""Time limits of episodes. A task that asks for more is refused when it is loaded, since no error would show later."""

from __future__ import annotations

from datetime import timedelta

LONGEST_SECONDS = 4 * 3600.0
"""Of an agent and of a verifier; where an environment of verifiers does both, of all its stages together."""
CALL_LIMIT = timedelta(seconds=LONGEST_SECONDS) + timedelta(hours=2)
"""Of the activity around an agent or a verifier, which also pulls an image and waits for a gateway."""
KEY_LEAST_LEFT = timedelta(seconds=LONGEST_SECONDS) + timedelta(hours=1)
"""Of an episode's key when its agent starts: the gateway's clock may be another one."""
