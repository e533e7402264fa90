"""The unprivileged user a server runs as when we are root.

Knows nothing about PostgreSQL, except that it refuses to run as root. Two things stand in such a user's way,
and neither is solved by opening up somebody's folders: programs below a folder like /root are copied to a place
it can reach, and its data is reached through its working directory (`/proc/self/cwd`), which needs no right on
the folders above.
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
_PROBE_SECONDS = 20.0  # starting one program; a cold disk takes a few


@dataclass(frozen=True, slots=True)
class ServiceUser:
    """Fields are what `subprocess` calls `user`, `group`, `extra_groups`."""

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

    def own(self, tree: Path) -> None:
        """Give the user everything below, links themselves and not what they point to."""
        if tree.stat().st_uid == self.uid:
            return
        for folder, folders, files in os.walk(tree):
            for name in (*folders, *files):
                os.chown(Path(folder) / name, self.uid, self.gid, follow_symlinks=False)
        os.chown(tree, self.uid, self.gid)  # last: it says that all below is done


def service_user(owned: Path) -> ServiceUser | None:
    """Whom to run as: the owner of data that exists, else `postgres` or `nobody`; None if we are not root.

    Raises:
        SetupError: there is no such user, or the data is another user's and we cannot change to that one.
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
            pass  # made on another machine: it changes hands below
    for name in _CANDIDATES:
        try:
            found = pwd.getpwnam(name)
            return ServiceUser(found.pw_uid, found.pw_gid)
        except KeyError:
            continue
    raise SetupError("PostgreSQL does not run as root, and there is no user 'postgres' or 'nobody': start as another")


def reachable(install: Path, program: str, parts: Sequence[str], name: str, user: ServiceUser) -> Path:
    """`install` itself, or a copy of its `parts`, whichever lets the user run `program` (a path inside it).

    Raises:
        SetupError: neither does.
    """
    if user.can_run(install / program):
        return install
    for parent in (_COPIES, Path(tempfile.gettempdir()) / "clawloop", Path("/tmp/clawloop")):
        target = parent / name
        try:
            _copy(install, parts, target)
        except OSError:
            continue  # read-only or full: the next place may do
        if _only_ours(target) and user.can_run(target / program):
            return target
    raise SetupError(
        f"user id {user.uid} can run neither {install / program} nor a copy of it in {_COPIES}:"
        " install outside /root, or start as another user than root"
    )


def _copy(install: Path, parts: Sequence[str], target: Path) -> None:
    if target.exists():
        return
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    torn = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        for part in parts:
            shutil.copytree(install / part, torn / part, symlinks=True)
        _let_everyone_run(torn)  # an installation under a strict umask is readable by its owner alone
        torn.rename(target)
    except OSError:
        shutil.rmtree(torn)
        if not target.exists():  # else another process was first, with the same content
            raise


def _let_everyone_run(tree: Path) -> None:
    for folder, _, files in os.walk(tree):
        Path(folder).chmod(0o755)
        for path in (Path(folder) / name for name in files):
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)


def _only_ours(folder: Path) -> bool:
    """Whether nobody but root can have put something there."""
    for path in (folder, folder.parent):
        status = path.lstat()
        if status.st_uid != 0 or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
            return False
    return True
