"""The same tar.gz from the same files, whoever packs them and when."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path


def normalise(path: Path, epoch: int) -> None:
    """Rewrite a tar.gz in place: members sorted, one time, one owner, modes 0644 and 0755."""
    with tarfile.open(path) as archive:
        members = [(member, archive.extractfile(member)) for member in archive if member.isreg()]
        contents = {member.name: (member.mode, stream.read()) for member, stream in members if stream is not None}
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, (mode, data) in sorted(contents.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), epoch
            member.mode = 0o755 if mode & 0o100 else 0o644
            archive.addfile(member, io.BytesIO(data))
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as out, gzip.GzipFile("", "wb", fileobj=out, mtime=epoch) as packed:
        packed.write(plain.getvalue())
    os.replace(partial, path)
