"""An image of this machine's own Python and shell, made without a registry."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from clawloop.sandboxes.containers import ContainerEngine

_FILES = ["cat", "chmod", "chown", "cp", "find", "gzip", "head", "ls", "mkdir", "rm", "tar", "tee", "touch"]
_PROGRAMS = ["bash", "sh", "env", "grep", "setsid", "sleep", "true", *_FILES]
_LEFT_OUT = {"test", "__pycache__", "idlelib", "lib2to3", "ensurepip", "dist-packages", "site-packages"}


def import_image(engine: ContainerEngine, name: str, work: str, files: Mapping[str, tuple[bytes, int]]) -> None:
    """
    Args:
        files: content and mode, by path.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for folder in ("proc", "sys", "dev", "tmp", "etc", work.strip("/")):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(info)
        for link in ("bin", "lib", "lib64"):
            info = tarfile.TarInfo(link)
            info.type, info.linkname = tarfile.SYMTYPE, f"usr/{link}"
            archive.addfile(info)
        added: set[str] = set()
        for program in (*_PROGRAMS, "python3"):
            found = shutil.which(program, path="/usr/bin:/bin")
            assert found is not None, f"no {program} on this machine"
            _add(archive, Path(found), f"usr/bin/{program}", added)
            for library in _libraries(found):
                place = library.lstrip("/")
                _add(archive, Path(library), place if place.startswith("usr/") else f"usr/{place}", added)
        for path in sorted(Path(_standard_library()).rglob("*")):
            if path.is_file() and not _LEFT_OUT & set(path.parts):
                _add(archive, path, path.as_posix().lstrip("/"), added)
        for path_name, (content, mode) in files.items():
            info = tarfile.TarInfo(path_name.lstrip("/"))
            info.size, info.mode = len(content), mode
            archive.addfile(info, io.BytesIO(content))
    subprocess.run(
        [str(engine.program), "import", "--change", f"WORKDIR {work}", "-", name],
        input=packed.getvalue(),
        check=True,
        capture_output=True,
    )


def _add(archive: tarfile.TarFile, path: Path, name: str, added: set[str]) -> None:
    if name not in added:
        added.add(name)
        archive.add(path.resolve(), name)


def _libraries(program: str) -> list[str]:
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return re.findall(r"(/\S+) \(0x", said)


def _standard_library() -> str:
    python = shutil.which("python3", path="/usr/bin:/bin")
    assert python is not None
    code = "import sysconfig; print(sysconfig.get_path('stdlib'))"
    return subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.strip()
