"""Plans `clawloop up`: which parts run here, on which ports, and which ones the operator gives.

A wrong option, setting or model folder raises SetupError here, before anything is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from clawloop.app.local import checks, parts
from clawloop.app.local.model_layout import ModelOptions, PlannedModels, model_in, plan_models
from clawloop.app.local.parts import LOOPBACK
from clawloop.app.local.services.postgres import EmbeddedPostgres
from clawloop.app.local.services.temporal_server import Ports
from clawloop.app.local.services.vllm import GUARD_SECRET, GUARD_SECRETS
from clawloop.app.local.supervision.supervisor import Part
from clawloop.core.errors import SetupError
from clawloop.core.recipes.recipe import DEFAULT_RECIPE, Recipe
from clawloop.serving.engine_secret import SecretFile


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Options of `clawloop up`. Port 0 is any free one.

    Args:
        environment: of this process; parts inherit it.
        gateways: number of gateway processes, which share the port.
        allowed_hosts: host names that clients may use for the gateway, besides loopback and addresses.
        model: a model folder; None where `engines` are given.
        models: how it is served and trained.
        aliases: further model names of the policy; empty: the base model's short name.
        database_url, temporal_address: of a server to use; None starts one.
        engines: URLs of engines to use; empty starts one.
        recipe: the policy's recipe from now on; None: the stored one, or `first_recipe`.
        first_recipe: of a policy that has none yet.
        sandboxes: start an environment worker if this machine can make sandboxes.
    """

    data: Path
    environment: Mapping[str, str]
    host: str = LOOPBACK
    port: int = 30000
    gateways: int = 2
    allowed_hosts: tuple[str, ...] = ()
    temporal_port: int = 7233
    temporal_ui_port: int = 8233
    engine_port: int = 8100
    postgres_port: int = 0
    model: Path | None = None
    models: ModelOptions = field(default_factory=ModelOptions)
    aliases: tuple[str, ...] = ()
    database_url: str | None = None
    temporal_address: str | None = None
    engines: tuple[str, ...] = ()
    recipe: Recipe | None = None
    first_recipe: Recipe = DEFAULT_RECIPE
    sandboxes: bool = True


@dataclass(frozen=True, slots=True)
class ExternalPart:
    """A part that the operator gives; `clawloop up` uses it, and neither starts nor stops it."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The services to start before the gateway, with every port chosen, and the external ones.

    Args:
        postgres: the server to start; its URL is complete after `prepare()`. None: `database_url` is given.
        temporal_ui: None if Temporal is external.
        models: the engines and the trainer to start; None: the engines are external.
    """

    parts: list[Part]
    external: list[ExternalPart]
    postgres: EmbeddedPostgres | None
    database_url: str | None
    temporal_address: str
    temporal_ui: str | None
    engines: tuple[str, ...]
    base_model: str
    models: PlannedModels | None


async def plan_parts(options: UpOptions) -> Plan:
    """Check options and machine, and choose what to start.

    Raises:
        SetupError: the disk is full, a port is taken, the model is unusable, or an external part does not answer.
    """
    checks.require_disk(options.data)
    started: list[Part] = []
    external: list[ExternalPart] = []
    postgres = None
    if options.database_url is not None:
        await checks.require_database(options.database_url)
        external.append(ExternalPart("postgres", "DATABASE_URL"))
    else:
        port = checks.choose_port("PostgreSQL", LOOPBACK, options.postgres_port, "--postgres-port")
        postgres = EmbeddedPostgres(options.data / "postgres", port)
        started.append(parts.postgres(postgres))
    if options.temporal_address is not None:
        await checks.require_temporal(options.temporal_address)
        temporal_address, temporal_ui = options.temporal_address, None
        external.append(ExternalPart("temporal", temporal_address))
    else:
        ports = _temporal_ports(options)
        temporal_address, temporal_ui = f"{LOOPBACK}:{ports.main}", f"http://{LOOPBACK}:{ports.ui}"
        started.append(parts.temporal(options.data / "temporal", ports, options.environment))
    models = None
    if options.engines:
        _require_no_layout(options.models)
        # No agent and no trainer here: agents run beside the engines, and the trainer where the model folder is.
        base_model = await checks.require_engines(options.engines, _engine_secret(options.environment))
        engines = options.engines
        names = ["vllm"] if len(engines) == 1 else [f"vllm {n}" for n in range(1, len(engines) + 1)]
        external.extend(ExternalPart(name, url) for name, url in zip(names, engines, strict=True))
    else:
        assert options.model is not None
        models = plan_models(
            model_in(options.model, options.models.chat),
            options.models,
            options.recipe,
            options.environment,
            options.engine_port,
            options.data,
        )
        started += models.engines
        base_model, engines = models.base_model, models.urls
    return Plan(
        parts=started,
        external=external,
        postgres=postgres,
        database_url=options.database_url,
        temporal_address=temporal_address,
        temporal_ui=temporal_ui,
        engines=engines,
        base_model=base_model,
        models=models,
    )


def _engine_secret(environment: Mapping[str, str]) -> str | None:
    """
    Raises:
        SetupError: the file of secrets cannot be read, or everybody may read it.
    """
    file = environment.get(GUARD_SECRETS)
    if environment.get(GUARD_SECRET) or not file:
        return environment.get(GUARD_SECRET)
    try:
        return SecretFile(Path(file))()
    except SetupError as error:
        raise SetupError(f"{GUARD_SECRETS}: {error}") from None


def _require_no_layout(models: ModelOptions) -> None:
    """
    Raises:
        SetupError: an option says how to start engines, although none is started here.
    """
    given = {
        "--serve-gpus": models.serve_gpus,
        "--judge-gpus": models.judge_gpus,
        "--train-gpus": models.train_gpus,
        "--serve-model": models.serve_model,
        "--judge-model": models.judge_model,
        "--quantise": models.quantise,
        "--engine-arg": models.engine_arguments,
    }
    for option, value in given.items():
        if value:
            raise SetupError(f"{option}: CLAWLOOP_ENGINES names engines of your own, none is started: leave one out")


def _temporal_ports(options: UpOptions) -> Ports:
    return Ports(
        main=checks.choose_port("Temporal", LOOPBACK, options.temporal_port, "--temporal-port"),
        ui=checks.choose_port("Temporal's UI", LOOPBACK, options.temporal_ui_port, "--temporal-ui-port"),
        http=checks.choose_port("Temporal's HTTP interface", LOOPBACK, 0, ""),
    )
