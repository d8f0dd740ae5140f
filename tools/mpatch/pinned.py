"""Is this file the pinned one? Apart from the download, so that most verbs never load a network library."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from tools.mpatch.errors import DownloadMismatch
from tools.mpatch.pins import SdistBase

# Called with the bytes that have come and the bytes that are expected.
Progress = Callable[[int, int], None]


def check(base: SdistBase, path: Path, source: str, keep_as: Path | None = None) -> None:
    """Compare size and sha256 of a file with the pin.

    Raises:
        DownloadMismatch: they differ. With `keep_as` the bad file is moved there.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if (size, digest) == (base.size_bytes, base.sha256):
        return
    kept = ""
    if keep_as is not None:
        os.replace(path, keep_as)
        kept = f"\nkept as  {keep_as}"
    raise DownloadMismatch(
        f"{base.filename} is not the pinned file",
        where=source,
        why=f"expected {base.size_bytes} bytes, sha256 {base.sha256}\nactual   {size} bytes, sha256 {digest}{kept}",
        remedy="nothing was unpacked. If the pin is right, another index or: mpatch fetch --offline DIR",
    )
