"""The task.toml of Harbor's schema 1.4 (Harbor 0.26): each key is used, changes nothing here, or is refused by name.

A key that Harbor does not know is refused, too: it may be a mistyped one, or of a schema that came later.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from clawloop.core.contracts.episodes import UNIT_RANGE, RewardRange
from clawloop.core.episodes.kinds import LONGEST_SECONDS
from clawloop.core.errors import SetupError
from clawloop.sandboxes.containers import image_name

SCHEMA = "1.4"
# Harbor has no limit of an agent's time; commands of a small model take seconds.
AGENT_SECONDS = 900.0
VERIFIER_SECONDS = 600.0
_STEP = re.compile(r"[^<>:\"/\\|?*\x00-\x1f\x7f]{0,254}[^<>:\"/\\|?*\x00-\x1f\x7f. ]")
_VARIABLE = re.compile(r"[^=\0]+")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([GMK])B?", re.IGNORECASE)
_ROOT = (None, "", "root", 0, "0")


def _one_user(value: Any) -> None:
    if value not in _ROOT or value is False:
        raise ValueError("a sandbox has one user, whose the working folder is: leave it out")


def _within(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LONGEST_SECONDS:
        raise ValueError(f"must be a number of seconds up to {LONGEST_SECONDS:g}")
    return value


def _megabytes(value: Any) -> Any:
    """Megabytes of a size in an older task's form, e.g. `2G`; other values unchanged."""
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise ValueError("must be a size such as 512M or 2G")
    return int(float(found[1]) * {"G": 1024.0, "M": 1.0, "K": 1 / 1024}[found[2].upper()])


Seconds = Annotated[float, BeforeValidator(_within)]
User = Annotated[None, BeforeValidator(_one_user)]
Megabytes = Annotated[int, BeforeValidator(_megabytes), Field(gt=0)]
Variables = dict[Annotated[str, Field(pattern=_VARIABLE)], str]


class Mode(StrEnum):
    SHARED = "shared"  # the verifier finds what the agent left in its working folder
    SEPARATE = "separate"  # it finds the task's own files, and of the agent's what `artifacts` names


class RewardOfSteps(StrEnum):
    MEAN = "mean"
    FINAL = "final"


class _Table(BaseModel):
    """
    Args:
        refused: why a key that says anything cannot be honoured, by its name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    refused: ClassVar[Mapping[str, str]] = {}

    @field_validator("*", mode="before")
    @classmethod
    def _refuse(cls, value: Any, info: ValidationInfo) -> Any:
        why = cls.refused.get(info.field_name or "")
        if why is None:
            return value
        if value not in (None, "", 0, [], {}):
            raise ValueError(why)
        return None


class _Networked(_Table):
    """`public` is taken and not given: the check of the task shows whether it needs more than the gateway."""

    refused: ClassVar[Mapping[str, str]] = {"allowed_hosts": "sandboxes reach the gateway alone, no other hosts"}
    network_mode: Literal["public", "no-network"] | None = None
    allowed_hosts: None = None

    @field_validator("network_mode", mode="before")
    @classmethod
    def _no_allowlist(cls, value: Any) -> Any:
        if value == "allowlist":
            raise ValueError("sandboxes reach the gateway alone: only public and no-network are taken")
        return value


class Healthcheck(_Table):
    """A command that must succeed before the agent starts."""

    command: str = Field(min_length=1)
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: float = Field(default=0.0, ge=0, le=LONGEST_SECONDS)
    start_interval_sec: Seconds = 5.0
    retries: int = Field(default=3, ge=1, le=1000)


class Artifact(_Table):
    source: str = Field(min_length=1)
    destination: str | None = None  # on Harbor's own disk
    exclude: list[str] = []
    service: Literal["main"] | None = None

    @field_validator("source")
    @classmethod
    def _inside(cls, value: str) -> str:
        if ".." in value.split("/"):
            raise ValueError("must not contain `..`")
        return value


Artifacts = list[
    Annotated[Artifact, BeforeValidator(lambda value: {"source": value} if isinstance(value, str) else value)]
]


class AgentTable(_Networked):
    timeout_sec: Seconds | None = None
    user: User = None


class VerifierTable(_Networked):
    refused: ClassVar[Mapping[str, str]] = {
        **_Networked.refused,
        "environment": "the verifier's sandbox is of the task's own image: no other can be given",
        "collect": "no command runs between agent and verifier: test.sh can do it",
    }
    timeout_sec: Seconds | None = None
    env: Variables = {}
    user: User = None
    environment_mode: Mode | None = None
    environment: None = None
    collect: None = None


class SolutionTable(_Table):
    env: Variables = {}


class EnvironmentTable(_Networked):
    """
    Args:
        sandbox: of ours: `host`, a shell and Python are enough, whatever the Dockerfile says.
    """

    refused: ClassVar[Mapping[str, str]] = {
        **_Networked.refused,
        "gpus": "sandboxes have no GPU",
        "tpu": "sandboxes have no TPU",
        "mcp_servers": "a sandbox reaches the gateway alone, no MCP server",
        "skills_dir": "our agent loop has no skills: give what it needs in the instruction",
    }
    sandbox: Literal["host"] | None = None
    build_timeout_sec: Any = None  # nothing is built
    docker_image: str | None = None
    os: Annotated[
        Literal["linux"], BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
    ] = "linux"
    cpus: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    memory_mb: Megabytes | None = None
    memory: Megabytes | None = None
    storage_mb: Megabytes | None = None
    storage: Megabytes | None = None
    gpus: None = None
    gpu_types: Any = None  # of the GPUs that are refused
    tpu: None = None
    mcp_servers: None = None
    env: Variables = {}
    skills_dir: None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    allow_internet: bool | None = None  # like network_mode

    @field_validator("docker_image")
    @classmethod
    def _named(cls, value: str | None) -> str | None:
        try:
            return image_name(value) if value else None
        except SetupError as error:
            raise ValueError(str(error)) from None

    @field_validator("workdir")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and (not value.startswith("/") or ".." in value.split("/")):
            raise ValueError("must be an absolute path")
        return None if value is None else value.rstrip("/") or "/"


class StepTable(_Table):
    name: str
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    min_reward: float | None = Field(default=None, allow_inf_nan=False)
    healthcheck: Healthcheck | None = None
    artifacts: Artifacts = []

    @field_validator("name")
    @classmethod
    def _folder(cls, value: str) -> str:
        if not _STEP.fullmatch(value) or value in (".", ".."):
            raise ValueError("must be the name of one folder")
        return value

    @field_validator("min_reward", mode="before")
    @classmethod
    def _of_the_reward(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value.keys() != {"reward"}:
            raise ValueError("only the reward named `reward` counts: give it a number, or no other name")
        return value["reward"]


class TaskTable(_Table):
    """The whole file."""

    schema_version: str = Field(default=SCHEMA, pattern=r"^1(\.|$)")
    task: Any = None  # name, version, description, authors, keywords
    metadata: Any = None
    source: Any = None
    verifier: VerifierTable = VerifierTable()
    agent: AgentTable = AgentTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()
    multi_step_reward_strategy: RewardOfSteps | None = None
    steps: list[StepTable] = []
    artifacts: Artifacts = []

    @model_validator(mode="before")
    @classmethod
    def _older(cls, data: Any) -> Any:
        if isinstance(data, dict) and "version" in data:
            data = dict(data)
            data.setdefault("schema_version", data.pop("version"))
        return data

    @field_validator("metadata")
    @classmethod
    def _ranged(cls, metadata: Any) -> Any:
        _reward_range(metadata)
        return metadata

    @field_validator("steps")
    @classmethod
    def _different(cls, steps: list[StepTable]) -> list[StepTable]:
        names = [unicodedata.normalize("NFC", step.name).casefold() for step in steps]
        if len(set(names)) < len(names):
            raise ValueError("two steps have the same name")
        return steps

    @property
    def reward_range(self) -> RewardRange:
        """Range of the numbers that `test.sh` may write; no key of Harbor's own has it."""
        return _reward_range(self.metadata)

    def mode(self, step: StepTable | None = None) -> Mode:
        """Place in which the verifier of a step, or of the whole task, runs."""
        own = None if step is None else step.verifier.environment_mode
        return own or self.verifier.environment_mode or Mode.SHARED


def _reward_range(metadata: Any) -> RewardRange:
    """
    Raises:
        ValueError: `reward_range` is not two numbers, the first below the second.
    """
    found = metadata.get("reward_range") if isinstance(metadata, dict) else None
    if found is None:
        return UNIT_RANGE
    try:
        low, high = found
        return RewardRange(float(low), float(high))
    except (TypeError, ValueError) as error:
        raise ValueError(f"reward_range must be two numbers, the lowest and the highest reward: {error}") from None


def read_toml(path: Path) -> TaskTable:
    """
    Raises:
        SetupError: it cannot be read, or holds what cannot be honoured; the message names the key.
    """
    try:
        content: Mapping[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read: {error}") from error
    try:
        return TaskTable.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise SetupError(f"{path}: {_place(first['loc'])}{_problem(first['type'], first['msg'])}") from None


def _place(location: tuple[int | str, ...]) -> str:
    """E.g. `steps.0.verifier.env: `."""
    return f"{'.'.join(str(part) for part in location)}: " if location else ""


def _problem(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return f"Harbor's schema {SCHEMA} has no such key: correct or remove it"
    if kind in ("model_type", "dict_type"):
        return "must be a table"
    return message.removeprefix("Value error, ")
