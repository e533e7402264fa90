"""One sandbox in which a shell runs the commands of many attempts, each in a folder of its own.

For simulations only: attempts could disturb each other, as those of real episodes cannot. Empty folders do not last
from one command to the next.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clawloop.environments.inside.harness import OUTPUT
from clawloop.errors import SandboxFailed
from clawloop.sandboxes.boxes import BoxTask
from clawloop.sandboxes.bubblewrap import Bubblewrap

# A command of a toy takes milliseconds; one that waits for input that never comes is stopped.
_COMMAND_SECONDS = 5
_RUN = f"""
for attempt in /work/*; do
  mkdir -p $attempt/files && cd $attempt/files
  timeout {_COMMAND_SECONDS} bash -c "$(cat $attempt/command)" < /dev/null > $attempt/stdout 2> $attempt/stderr
done
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """
    Args:
        files: what is there afterwards.
        output: as the agent's tool returns it.
    """

    files: dict[str, bytes]
    output: str


def run_all(sandboxes: Bubblewrap, attempts: Sequence[tuple[Mapping[str, bytes], str]]) -> list[Ran]:
    """Run each command where its files are.

    Raises:
        SandboxFailed: the sandbox did not work, or what is left cannot be kept.
    """
    if not attempts:
        return []
    packed: dict[str, bytes] = {}
    for number, (files, command) in enumerate(attempts):
        packed[f"{number}/command"] = command.encode(errors="replace")
        packed |= {f"{number}/files/{path}": content for path, content in files.items()}
    box = BoxTask("commands", ("bash", "-c", _RUN), 60.0 + _COMMAND_SECONDS * len(attempts), archive=_archive(packed))
    result = asyncio.run(sandboxes.run(box))
    if result.problem is not None or result.exit_code is None:
        raise SandboxFailed(f"commands of {len(attempts)} attempts: {result.problem or 'stopped at the time limit'}")
    left = _files(result.artifact)
    ran = []
    for number in range(len(attempts)):
        folder = f"{number}/files/"
        files = {path.removeprefix(folder): content for path, content in left.items() if path.startswith(folder)}
        said = b"".join(left.get(f"{number}/{stream}", b"") for stream in ("stdout", "stderr"))
        ran.append(Ran(files, said.decode(errors="replace").strip()[-OUTPUT:]))
    return ran


def _archive(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, content in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def _files(packed: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        members = [(member.name, archive.extractfile(member)) for member in archive]
        return {name: file.read() for name, file in members if file is not None}
