"""The unprivileged user that PostgreSQL runs as when Clawloop runs as root, as PostgreSQL refuses to run as root.

No permissions of existing folders are changed for that user: programs below a folder like /root are copied to one
that the user can read, and the data is opened through the working directory (`/proc/self/cwd`), which needs no
permission on the folders above.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clawloop.errors import SetupError

OWN_WORKING_DIRECTORY = Path("/proc/self/cwd")

_CANDIDATES = ("postgres", "nobody")
_COPIES = Path("/var/lib/clawloop")
_PROBE_SECONDS = 20.0  # one program start; a few seconds from a cold disk


@dataclass(frozen=True, slots=True)
class ServiceUser:
    """`user` and `group` for `subprocess`; `extra_groups` is empty."""

    uid: int
    gid: int

    def can_run(self, program: Path) -> bool:
        try:
            finished = subprocess.run(
                [program, "--version"],
                user=self.uid,
                group=self.gid,
                extra_groups=[],
                cwd="/",
                capture_output=True,
                timeout=_PROBE_SECONDS,
                check=False,
            )
        except PermissionError:
            return False
        return finished.returncode == 0

    def chown_tree(self, tree: Path) -> None:
        """Make the user the owner of a folder and everything below; does not follow links."""
        if tree.stat().st_uid == self.uid:
            return
        for folder, folders, files in os.walk(tree):
            for name in (*folders, *files):
                os.chown(Path(folder) / name, self.uid, self.gid, follow_symlinks=False)
        os.chown(tree, self.uid, self.gid)  # last: marks everything below as done


def service_user(owned: Path) -> ServiceUser | None:
    """The user to run as: the owner of existing data, else `postgres` or `nobody`; None if this process is not root.

    Raises:
        SetupError: there is no such user, or this process is not root and the data belongs to another user.
    """
    owner = owned.stat().st_uid if owned.exists() else None
    if os.geteuid() != 0:
        if owner not in (None, os.geteuid()):
            raise SetupError(f"{owned} belongs to user id {owner}: start as that user, or as root")
        return None
    if owner:
        try:
            found = pwd.getpwuid(owner)
            return ServiceUser(found.pw_uid, found.pw_gid)
        except KeyError:
            pass  # created on another machine: `chown_tree` gives it to the user chosen below
    for name in _CANDIDATES:
        try:
            found = pwd.getpwnam(name)
            return ServiceUser(found.pw_uid, found.pw_gid)
        except KeyError:
            continue
    raise SetupError(
        "PostgreSQL does not run as root, and there is no user 'postgres' or 'nobody': start as another user"
    )


def executable_by(install: Path, program: str, parts: Sequence[str], name: str, user: ServiceUser) -> Path:
    """`install` if the user can run `program` in it, else a copy of its `parts` in which it can.

    Args:
        program: relative to `install`.
        name: folder name of the copy.

    Raises:
        SetupError: the user can run neither.
    """
    if user.can_run(install / program):
        return install
    for parent in (_COPIES, Path(tempfile.gettempdir()) / "clawloop", Path("/tmp/clawloop")):
        target = parent / name
        try:
            _copy(install, parts, target)
        except OSError:
            continue  # read-only or full: try the next folder
        if _written_by_root_alone(target) and user.can_run(target / program):
            return target
    raise SetupError(
        f"user id {user.uid} can run neither {install / program} nor a copy of it in {_COPIES}:"
        " install outside /root, or start as another user than root"
    )


def _copy(install: Path, parts: Sequence[str], target: Path) -> None:
    if target.exists():
        return
    if not target.parent.exists():
        target.parent.mkdir(parents=True)
        target.parent.chmod(0o755)  # `mkdir` alone would apply the umask
    unfinished = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        for part in parts:
            shutil.copytree(install / part, unfinished / part, symlinks=True)
        _make_executable_by_all(unfinished)  # an installation under a strict umask is readable by its owner alone
        unfinished.rename(target)
    except OSError:
        shutil.rmtree(unfinished)
        if not target.exists():  # else another process has made the same copy
            raise


def _make_executable_by_all(tree: Path) -> None:
    for folder, _, files in os.walk(tree):
        Path(folder).chmod(0o755)
        for path in (Path(folder) / name for name in files):
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)


def _written_by_root_alone(folder: Path) -> bool:
    """True if only root can write to the folder and its parent."""
    for path in (folder, folder.parent):
        status = path.lstat()
        if status.st_uid != 0 or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
            return False
    return True
