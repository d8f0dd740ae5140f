"""Can the run write where it means to: free space, a real write and read, and is the directory shared by all nodes."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.preflight.findings import Finding

PROBE_BYTES = 8 << 20
LOCAL_KINDS = frozenset({"tmpfs", "overlay", "ramfs", "squashfs"})


def judge_disk(node: str, directory: Path, need_bytes: int) -> list[Finding]:
    """Write, sync, read back and remove a small file; hold the free space against `need_bytes`."""
    where = f"{node}:{directory}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        seconds = write_probe(directory)
        free = shutil.disk_usage(directory).free
    except OSError as error:
        why = "a file can be written and read"
        remedy = (
            "free space, or put the run elsewhere" if error.errno in (28, 122) else "check the mount and its rights"
        )
        return [Finding("disk", where, "bad", error.strerror or str(error), why, remedy)]
    if free < need_bytes:
        remedy = "free space or put the run elsewhere: a full disk ends the run at its next checkpoint"
        return [Finding("disk", where, "bad", f"{free / 1e9:.1f} GB free", f"{need_bytes / 1e9:.1f} GB", remedy)]
    speed = PROBE_BYTES / seconds / 1e6
    return [Finding("disk", where, "good", f"{free / 1e9:.1f} GB free, {speed:.0f} MB/s", f"{need_bytes / 1e9:.1f} GB")]


def judge_shared(reported: Sequence[str], expected_nodes: int | None, directory: Path) -> Finding:
    """Every node wrote its report into `directory`; those seen from here share it."""
    where, count = str(directory), len(set(reported))
    if expected_nodes is not None and count < expected_nodes:
        return Finding(
            "shared directory", where, "bad", f"{count} node reports: {', '.join(sorted(set(reported)))}",
            f"{expected_nodes}", "a node did not start, or the directory is not shared: use a shared file system",
        )  # fmt: skip
    kind = file_system_of(directory)
    if count > 1 and kind in LOCAL_KINDS:
        remedy = "checkpoints must outlive the node: use a shared file system"
        return Finding("shared directory", where, "warning", kind, "a shared file system", remedy)
    reports = "1 node report" if count == 1 else f"{count} node reports"
    return Finding("shared directory", where, "good", f"{reports}, {kind or 'unknown'} file system")


def file_system_of(path: Path) -> str:
    """Return the kind of file system that `path` lies on, by the longest mount point above it; "" if unknown."""
    best, kind = "", ""
    target = str(path.resolve())
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in mounts:
        _, point, found, *_ = line.split()
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, found
    return kind


def nearest_folder(path: Path) -> Path:
    """Return `path` where it is a folder, else the nearest folder above it."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


def write_probe(directory: Path) -> float:
    """Write, sync, read back and remove 8 MiB in `directory`; return the seconds that the write took.

    Raises:
        OSError: It cannot be written, or what was read is not what was written.
    """
    probe = directory / f".probe-{platform.node()}-{os.getpid()}"
    content = os.urandom(PROBE_BYTES)
    start = time.monotonic()
    try:
        with probe.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        seconds = time.monotonic() - start
        if probe.read_bytes() != content:
            raise OSError(5, "what was read is not what was written")
    finally:
        probe.unlink(missing_ok=True)
    return max(seconds, 1e-9)
