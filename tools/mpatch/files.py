"""Files that are never half written: temporary then replace, a journal for several at once, a lock, a swap."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.mpatch.errors import Busy, StateUnreadable

AT_FDCWD = -100
RENAME_EXCHANGE = 2


@contextlib.contextmanager
def temporary(target: Path) -> Iterator[Path]:
    """Give a path beside `target` that replaces it on success and disappears on failure."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        os.chmod(partial, 0o644)  # mkstemp's 0600 is for secrets
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def write_bytes(target: Path, data: bytes) -> None:
    """Replace a file in one step; it reaches the disk before it gets its name."""
    with temporary(target) as partial, partial.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def write_json(target: Path, value: object) -> None:
    """Write JSON in one step, keys in the order given."""
    write_bytes(target, (json.dumps(value, indent=2) + "\n").encode())


def commit_files(journal: Path, root: Path, contents: Mapping[str, bytes | None]) -> None:
    """Change several files as one: after a kill at any moment all are old, or `recover` makes all new.

    Args:
        journal: Where the plan is kept meanwhile.
        root: The folder that the names are relative to.
        contents: New content per name; None deletes.
    """
    plan = {name: None if data is None else data.decode("latin-1") for name, data in contents.items()}
    write_json(journal, {"files": plan})
    recover(journal, root)


def recover(journal: Path, root: Path) -> list[str]:
    """Finish a change that `commit_files` had planned; return the names, none when there was no plan.

    The plan does not hold `root`: a checkout that was moved or copied after a kill must mend itself, not the first one.
    """
    if not journal.exists():
        return []
    try:
        files = dict(json.loads(journal.read_text())["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise StateUnreadable(
            "the journal of an earlier command cannot be read",
            where=str(journal),
            why=str(error),
            remedy=f"git status patches/, then: rm {journal}",
        ) from None
    for name, data in files.items():
        target = root / name
        for torn in target.parent.glob(f".{target.name}.{'?' * 8}"):  # what a kill left of `temporary`
            torn.unlink()
        if data is None:
            target.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                target.parent.rmdir()  # an empty topic folder
        else:
            write_bytes(target, data.encode("latin-1"))
    journal.unlink()
    return sorted(files)


def remove_git_locks(git_dir: Path) -> None:
    """Remove the lock files of a git that was killed; to be called where no other git can be at work there."""
    for lock in [*git_dir.glob("*.lock"), *(git_dir / "refs").rglob("*.lock")]:
        lock.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Keep other mpatch commands of this checkout out; the kernel frees the lock of a killed process.

    Raises:
        Busy: another one works now.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise Busy(
                "another mpatch works in this checkout",
                where=str(path),
                why=f"{what} needs the tree for itself",
                remedy="wait for it to end, then run this again",
            ) from None
        yield


def swap(new: Path, place: Path) -> None:
    """Put the folder `new` at `place`; what was there is removed afterwards.

    On Linux the two are exchanged in one step, so that no reader ever finds the place empty. Elsewhere there is a
    moment without it; `finish_swap` mends a kill in that moment.
    """
    old = place.with_name(f".{place.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        if _exchange(new, place):
            os.rename(new, old)
        else:
            os.rename(place, old)
            os.rename(new, place)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        os.rename(new, place)
    shutil.rmtree(old, ignore_errors=True)


def finish_swap(place: Path) -> None:
    """Undo or finish what a killed `swap` left, and remove abandoned scratch folders."""
    old = place.with_name(f".{place.name}.old")
    if old.exists() and not place.exists():
        os.rename(old, place)
    shutil.rmtree(old, ignore_errors=True)
    for scratch in place.parent.glob(f".{place.name}.scratch-*"):
        shutil.rmtree(scratch, ignore_errors=True)


def scratch_folder(place: Path) -> Path:
    """Make an empty folder beside `place`, on the same file system, so that it can be renamed there."""
    place.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{place.name}.scratch-", dir=place.parent))
    os.chmod(made, 0o755)
    return made


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two paths atomically; False where the system cannot. os has no call for it (Python 3.14)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(call(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0)
