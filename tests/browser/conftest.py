"""Headless Chromium in front of the page."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, async_playwright

from clawloop.environments.browser.chromium import chromium_folder
from tests.ui.conftest import page

__all__ = ["page"]

# Without a GPU, and as root, which has no sandbox of Chromium's own.
_ARGUMENTS = ("--no-sandbox", "--no-zygote", "--disable-gpu", "--use-gl=angle", "--use-angle=swiftshader")


@pytest.fixture(scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with running_browser() as running:
        yield running


@asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    folder = chromium_folder()
    environment = dict(os.environ) | {
        "LD_LIBRARY_PATH": f"{folder}/al2023/lib:{folder}/lib:{folder}",
        "FONTCONFIG_PATH": f"{folder}/fonts",
    }
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(
            executable_path=folder / "chromium", args=_ARGUMENTS, env=dict(environment)
        )
        yield running
        await running.close()
