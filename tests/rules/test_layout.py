"""Rules of layout, naming and packaging that a program can check."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clawloop.app.processes.install_check import TOP_LEVEL_NAMES, check_install
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.errors import ClawloopError, PermanentError, SetupError, TransientError
from clawloop.core.recipes.recipe import DEFAULT_RECIPE, WITHOUT_JUDGE, load_recipe
from workflows import names

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("clawloop", *TOP_LEVEL_NAMES)
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_package_files_are_empty() -> None:
    assert [path for path in SOURCES if path.name == "__init__.py" and path.stat().st_size] == []


def test_every_module_has_a_docstring() -> None:
    modules = [path for path in SOURCES if path.name != "__init__.py"]
    assert [str(path) for path in modules if not path.read_text().startswith('"""')] == []


def test_modules_that_comments_name_exist() -> None:
    """In backticks: a file, or a module with one of its names."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    files = {path.name for path in (*SOURCES, *tests)}
    dotted = re.compile(rf"`((?:{'|'.join(PACKAGES)})\.[\w.]+)")
    missing = []
    for path in (*SOURCES, *tests):
        text = path.read_text()
        missing += [(path, name) for name in re.findall(r"`(?:\w+/)*(\w+\.py)`", text) if name not in files]
        missing += [(path, name) for name in dotted.findall(text) if not _exists(name.rstrip(".").split("."))]
    assert missing == []


def _exists(parts: list[str]) -> bool:
    for end in range(len(parts), 0, -1):
        module = ROOT.joinpath(*parts[:end])
        if module.with_suffix(".py").is_file():
            source = module.with_suffix(".py").read_text()
            return all(re.search(rf"\b{name}\b", source) for name in parts[end:])
    return ROOT.joinpath(*parts).is_dir()


def test_no_module_has_a_generic_name() -> None:
    generic = {"utils", "util", "helpers", "helper", "manager", "common", "misc", "base"}
    assert [path for path in SOURCES if path.stem in generic] == []


def test_openclaws_side_model_sends_the_side_header_and_its_main_model_none() -> None:
    """OpenClaw sends some side turns with the main model; a header would override their classification."""
    config = json.loads((ROOT / "deploy" / "openclaw" / "openclaw.json").read_text())
    models = {model["id"]: model for model in config["models"]["providers"]["clawloop"]["models"]}
    assert "X-Turn-Type" not in models["policy"].get("headers", {})
    assert models["policy-side"]["headers"] == {"X-Turn-Type": "side"}


def test_each_error_is_permanent_or_transient_and_in_the_drawn_tree() -> None:
    drawn = sys.modules[ClawloopError.__module__].__doc__ or ""
    leaves = [leaf for kind in (PermanentError, TransientError) for leaf in kind.__subclasses__()]
    assert leaves
    assert {kind.__name__ for kind in ClawloopError.__subclasses__()} == {"PermanentError", "TransientError"}
    assert [leaf.__name__ for leaf in leaves if not re.search(rf"\b{leaf.__name__}\b", drawn)] == []


def test_every_outcome_is_assigned_somewhere() -> None:
    """An outcome that no turn can have should not be documented."""
    naming = {"wording.py", "explain.py", "descriptions.py"}  # they name outcomes, and give none
    written = "\n".join(path.read_text() for path in SOURCES if path.name not in naming)
    assert [outcome.value for outcome in TurnOutcome if f"Outcome.{outcome.name}" not in written] == []


def test_help_imports_nothing_heavy() -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", "import clawloop.app.cli.main, sys; print(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    heavy = {"torch", "vllm", "sqlalchemy", "fastapi", "uvicorn", "temporalio", "transformers", "pydantic"}
    assert heavy.isdisjoint(loaded)


def test_an_idle_trainer_has_not_loaded_what_computes_a_model() -> None:
    """The libraries of both backends, and of torch what they alone need, come with the first step's model."""
    program = "import clawloop.app.processes.trainer, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"torchtune", "transformers", "triton", "torch._dynamo", "torch.distributed.fsdp", "sympy"}.isdisjoint(
        loaded.stdout.split()
    )


def test_importing_a_workflow_imports_no_io_library() -> None:
    program = "import workflows.session, workflows.sweep, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    io_libraries = {"sqlalchemy", "psycopg", "aiohttp", "httpx", "fastapi", "starlette", "torch", "db", "api"}
    assert io_libraries.isdisjoint(loaded.stdout.split())


def test_signals_and_updates_are_named_as_the_methods_that_handle_them() -> None:
    handler = re.compile(r"@workflow\.(?:signal|update)\(name=names\.(\w+)\)\n    def (\w+)")
    sources = [path.read_text() for path in (ROOT / "workflows").glob("*.py")]
    handled = [found for source in sources for found in handler.findall(source)]
    assert len(handled) == sum(len(re.findall(r"@workflow\.(?:signal|update)\b", source)) for source in sources)
    assert [(name, method) for name, method in handled if getattr(names, name) != method] == []


def test_the_recipes_of_new_policies_equal_their_files() -> None:
    assert load_recipe(ROOT / "deploy" / "recipes" / "hybrid.toml").hash == DEFAULT_RECIPE.hash
    assert load_recipe(ROOT / "deploy" / "recipes" / "hindsight.toml").hash == WITHOUT_JUDGE.hash


def test_a_shadowed_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_install()
    (tmp_path / "db").mkdir()
    (tmp_path / "db" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "db", raising=False)
    with pytest.raises(SetupError, match=f"{tmp_path}/db shadows"):
        check_install()
