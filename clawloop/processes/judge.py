"""The judge of the settings: CLAWLOOP_JUDGE_URL, or the base model on the engines."""

from __future__ import annotations

from collections.abc import Callable

from clawloop.contracts.serving import Directory
from clawloop.errors import SetupError
from clawloop.judging.prompts import AnswerForm
from clawloop.processes.endpoints import engine_secret
from clawloop.serving.endpoints import Endpoint, Endpoints
from clawloop.serving.judge import JudgeClient, RequestClock
from clawloop.serving.judge_pictures import PictureReader
from clawloop.settings import Settings


def engine_endpoints(settings: Settings, directory: Callable[[], Directory]) -> Endpoints:
    """The engines that are not draining, with the name of the policy's base model, and their secret."""
    secret = engine_secret(settings)

    def endpoints(policy_id: str) -> list[Endpoint]:
        now = directory()
        names = [policy.base_model for policy in now.policies if policy.id == policy_id]
        return [Endpoint(engine.url, name, secret()) for name in names for engine in now.engines if not engine.draining]

    return endpoints


def judge_client(
    settings: Settings,
    directory: Callable[[], Directory],
    clock: RequestClock | None = None,
    pictures: PictureReader | None = None,
) -> JudgeClient:
    """
    Args:
        pictures: of the evidence; read only if CLAWLOOP_JUDGE_IMAGES says that the judge sees.

    Raises:
        SetupError: CLAWLOOP_JUDGE_URL is set, CLAWLOOP_JUDGE_MODEL is not.
    """
    seen = pictures if settings.judge_images else None
    if settings.judge_url is None:
        endpoints = engine_endpoints(settings, directory)
        return JudgeClient(endpoints, _form(settings.judge_form), with_chats=True, clock=clock, pictures=seen)
    if settings.judge_model is None:
        raise SetupError("CLAWLOOP_JUDGE_URL is set, CLAWLOOP_JUDGE_MODEL is not: set it to the model's name there")
    key = None if settings.judge_api_key is None else settings.judge_api_key.get_secret_value()
    endpoint = Endpoint(settings.judge_url.rstrip("/").removesuffix("/v1"), settings.judge_model, key)
    form = _form(settings.judge_form or "free")
    return JudgeClient(lambda policy: [endpoint], form, clock=clock, pictures=seen)


def _form(setting: str | None) -> AnswerForm | None:
    return None if setting in (None, "auto") else AnswerForm(setting)
