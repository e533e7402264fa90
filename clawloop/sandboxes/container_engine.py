"""podman or docker, by its program: found, asked, and told to remove containers."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from clawloop.errors import SetupError

_PROGRAMS = ("podman", "docker")
_PROBE_SECONDS = 20.0
_COMMAND_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ContainerEngine:
    """
    Args:
        is_podman: whatever the program is called; Debian's `podman-docker` calls it docker.
    """

    program: Path
    is_podman: bool

    @classmethod
    def find(cls) -> ContainerEngine:
        """The first of podman and docker that answers; asked once, when a worker starts.

        Raises:
            SetupError: none does.
        """
        problems = []
        for name in _PROGRAMS:
            found = shutil.which(name)
            if found is None:
                problems.append(f"there is no {name}")
                continue
            try:
                asked = subprocess.run([found, "info"], capture_output=True, timeout=_PROBE_SECONDS, check=False)
                version = subprocess.run([found, "--version"], capture_output=True, timeout=_PROBE_SECONDS, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                problems.append(f"`{name} info` fails: {error}")
                continue
            if asked.returncode == 0:
                return cls(Path(found), version.stdout.lower().startswith(b"podman"))
            why = " ".join(asked.stderr.decode(errors="replace").split())[-200:]
            problems.append(f"`{name} info` fails ({why})")
        raise SetupError(f"no containers on this machine: {', and '.join(problems)}")

    def tmpfs_options(self, user: str) -> str:
        """Mount options that give a tmpfs to the container's user, and keep it empty.

        Over a folder that the image has, runc gives it that folder's mode, so that only its owner can write. podman
        would copy into it what the image has there.

        Args:
            user: of `user`.
        """
        uid, _, gid = user.partition(":")
        return "notmpcopyup,U" if self.is_podman else f"uid={uid},gid={gid}"

    @property
    def run_options(self) -> tuple[str, ...]:
        """podman makes further places writable, and passes proxies on."""
        return ("--read-only-tmpfs=false", "--http-proxy=false") if self.is_podman else ()

    def user(self, uid: int | None) -> str:
        """User and group of a container's processes: those of this process if it is not root.

        Args:
            uid: of the container's own; None if this process is not root.
        """
        if uid is not None:
            return f"{uid}:{uid}"
        # Without root podman gives containers a namespace of users, where 0 is this process's own.
        return "0:0" if self.is_podman else f"{os.geteuid()}:{os.getegid()}"

    def ask(self, *words: str, seconds: float = _COMMAND_SECONDS) -> subprocess.CompletedProcess[bytes]:
        """
        Raises:
            OSError, subprocess.TimeoutExpired
        """
        return subprocess.run([str(self.program), *words], capture_output=True, timeout=seconds, check=False)

    def remove(self, name: str) -> None:
        """Kill and remove a container with its volumes, if it is there."""
        try:
            self.ask("rm", "--force", "--volumes", name)
        except (OSError, subprocess.TimeoutExpired):
            return  # the sweep tries again

    def named_with(self, label: str) -> list[str]:
        """Names of the containers with this label, in whatever state.

        Raises:
            OSError, subprocess.SubprocessError: the program does not answer.
        """
        listed = self.ask("ps", "--all", "--filter", f"label={label}", "--format", "{{.Names}}")
        listed.check_returncode()
        return listed.stdout.decode(errors="replace").split()

    def has_image(self, identity: str) -> bool:
        """True if the image of this id is on the machine.

        Raises:
            OSError, subprocess.SubprocessError: the program does not answer, which asking for the image alone would not
                tell from an image that is gone.
        """
        listed = self.ask("image", "ls", "--all", "--quiet", "--no-trunc")
        listed.check_returncode()
        # podman inspects ids without the prefix, and lists them with it.
        ids = {one.removeprefix("sha256:") for one in listed.stdout.decode(errors="replace").split()}
        return identity.removeprefix("sha256:") in ids
