"""The page's routes."""

from __future__ import annotations

from fastapi import APIRouter

from api.ui import assets, compare, engines, events, login, now, sessions, start, turns, versions

ROUTERS: tuple[APIRouter, ...] = tuple(
    module.router for module in (assets, login, now, events, sessions, turns, versions, compare, engines, start)
)
