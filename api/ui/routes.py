"""The page's routes."""

from __future__ import annotations

from fastapi import APIRouter

from api.ui import (
    access,
    assets,
    compare,
    engines,
    events,
    files,
    judging,
    login,
    now,
    rollouts,
    sessions,
    settings,
    start,
    tokens,
    turns,
    upkeep,
    versions,
)

ROUTERS: tuple[APIRouter, ...] = tuple(
    module.router
    for module in (
        assets,
        login,
        now,
        events,
        sessions,
        turns,
        files,
        tokens,
        versions,
        compare,
        rollouts,
        engines,
        settings,
        judging,
        access,
        upkeep,
        start,
    )
)
