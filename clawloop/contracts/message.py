"""The base of what crosses Temporal between workflows and activities: ids, scores and reasons, never text.

Open workflows and saved histories hold messages. After a release their fields keep their names, and a new field is
optional.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Message(BaseModel):
    model_config = ConfigDict(frozen=True)
