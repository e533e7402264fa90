"""The servers that the gateway is measured beside: aiohttp relays, LiteLLM proxy, and an engine without anything."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import LOOPBACK, free_port, module, running, wait_for
from clawloop.app.local.checks import bound_socket
from clawloop.core.errors import SetupError

# From PyPI, into an environment of its own: it is no dependency of Clawloop. 1.107.0 is reported to have been
# compromised: take no other version without looking.
LITELLM = "litellm[proxy]==1.106.0"
LITELLM_ENVIRONMENT = Path(".bench") / "litellm"


@dataclass(frozen=True)
class Contender:
    """
    Args:
        model: the name that its clients ask for.
        process: None: not measured, as for the engine itself.
    """

    name: str
    url: str
    model: str
    key: str
    process: subprocess.Popen[bytes] | None


@contextmanager
def relay(engine: str, model: str, how: str, folder: Path) -> Iterator[Contender]:
    port = free_port()
    with running(module("benchmarks.aiohttp_relay", port, engine, how), folder / f"relay-{how}.log") as process:
        url = f"http://{LOOPBACK}:{port}"
        wait_for(f"{url}/healthz", process, folder / f"relay-{how}.log")
        yield Contender(f"aiohttp relay, {how}", url, model, "x", process)


@contextmanager
def litellm(engine: str, model: str, folder: Path) -> Iterator[Contender]:
    """LiteLLM's proxy with one worker; installs it first, which takes minutes once."""
    program = _installed_litellm()
    parameters = {"model": f"openai/{model}", "api_base": f"{engine}/v1", "api_key": "x"}
    config = folder / "litellm.json"  # JSON is YAML
    config.write_text(json.dumps({"model_list": [{"model_name": "policy", "litellm_params": parameters}]}))
    port = free_port()
    command = [str(program), "--config", str(config), "--host", LOOPBACK, "--port", str(port), "--telemetry", "False"]
    key = f"sk-{secrets.token_hex(32)}"  # without one it does not start
    # Without the first variable it downloads a list of prices at its start.
    settings = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": key}
    with running(command, folder / "litellm.log", settings) as process:
        url = f"http://{LOOPBACK}:{port}"
        wait_for(f"{url}/health/liveliness", process, folder / "litellm.log")
        yield Contender("LiteLLM proxy", url, "policy", key, process)


def _installed_litellm() -> Path:
    environment = LITELLM_ENVIRONMENT.absolute()
    program, stamp = environment / "bin" / "litellm", environment / "installed"
    if stamp.exists() and stamp.read_text() == LITELLM:
        return program
    create, install = (
        [sys.executable, "-m", "venv", str(environment)],
        [str(environment / "bin/pip"), "install", LITELLM],
    )
    for command in (create, install):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise SetupError(f"{LITELLM} cannot be installed: {reason}; measure without it: --without-litellm")
    stamp.write_text(LITELLM)
    return program


@contextmanager
def gateway(
    name: str, folder: Path, database_url: str, key: str, temporal: str | None, processes: int
) -> Iterator[Contender]:
    """Our gateway, recording; with several processes as under `clawloop up`."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"DATABASE_URL": database_url, "CLAWLOOP_DATA": str(folder)}
    if temporal is not None:
        settings["TEMPORAL_ADDRESS"] = temporal
    with ExitStack() as stack, bound_socket("the gateway", LOOPBACK, 0, "") as listener:
        descriptor = listener.fileno()
        command = module("benchmarks.gateways_on_a_socket", descriptor, processes)
        process = stack.enter_context(running(command, folder / "gateway.log", settings, (descriptor,)))
        url = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
        wait_for(f"{url}/readyz", process, folder / "gateway.log")
        yield Contender(name, url, "policy", key, process)
