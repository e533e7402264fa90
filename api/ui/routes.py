"""The page's routes."""

from __future__ import annotations

from fastapi import APIRouter

from api.ui import engines, events, lessons, login, now, page, rollouts, sessions, settings, versions

_PAGES = (login, now, lessons, events, sessions, versions, rollouts, engines, settings)
ROUTERS: tuple[APIRouter, ...] = (page.assets_router, *(module.router for module in _PAGES))
