"""Write one pair of indexed files with Megatron's own builder, completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy

from megatron_ext.data.files import sha256_file
from megatron_ext.data.indexed import megatron_indexed
from megatron_ext.data.manifest import Shard
from megatron_ext.data.split import Split
from megatron_ext.errors import UserError


def token_dtype(vocab_size: int) -> type[numpy.number]:
    """Return the type that Megatron stores a token of such a vocabulary in: uint16 while it fits, else int32.
    """
    return megatron_indexed().DType.optimal_dtype(vocab_size)


class ShardWriter:
    """Takes tokenized documents, writes temporary files, renames them into place on `finish`.

    As a context manager it removes what is unfinished when it is left.
    """

    def __init__(self, prefix: Path, label: str, split: Split, dtype: type[numpy.number]) -> None:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._prefix, self._label, self._split, self._dtype = prefix, label, split, dtype
        self.documents = 0
        self.tokens = 0
        self._remove_leftovers()
        self._bin = prefix.with_name(f".{prefix.name}.{os.getpid()}.bin.tmp")
        self._idx = prefix.with_name(f".{prefix.name}.{os.getpid()}.idx.tmp")
        self._builder = megatron_indexed().IndexedDatasetBuilder(str(self._bin), dtype=dtype)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._builder.data_file.close()
        self._bin.unlink(missing_ok=True)
        self._idx.unlink(missing_ok=True)

    def add(self, ids: list[int]) -> None:
        """Append one document, its end-of-text id included.

        Raises:
            UserError: The disk is full or the file cannot be written.
        """
        try:
            self._builder.add_document(numpy.asarray(ids, dtype=self._dtype), [len(ids)])
        except OSError as error:
            raise _cannot_write(self._prefix, error) from error
        self.documents += 1
        self.tokens += len(ids)

    def finish(self) -> Shard:
        """Write the index, move both files into place, and return the shard's record.

        Raises:
            UserError: the disk does not take them.
        """
        bin_path, idx_path = Path(f"{self._prefix}.bin"), Path(f"{self._prefix}.idx")
        try:
            self._builder.finalize(str(self._idx))
            for temporary in (self._bin, self._idx):
                _sync(temporary)
            os.replace(self._bin, bin_path)
            os.replace(self._idx, idx_path)
        except OSError as error:
            raise _cannot_write(self._prefix, error) from error
        return Shard(
            prefix=self._prefix,
            label=self._label,
            split=self._split,
            documents=self.documents,
            tokens=self.tokens,
            bin_bytes=bin_path.stat().st_size,
            idx_bytes=idx_path.stat().st_size,
            bin_sha256=sha256_file(bin_path),
            idx_sha256=sha256_file(idx_path),
        )

    def _remove_leftovers(self) -> None:
        # A killed run leaves its temporary files; a living one on this machine still owns them.
        for stale in self._prefix.parent.glob(f".{self._prefix.name}.*.tmp"):
            owner = stale.name.split(".")[-3]
            if not (owner.isdigit() and Path(f"/proc/{owner}").exists()):
                stale.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _cannot_write(prefix: Path, error: OSError) -> UserError:
    return UserError(
        "a shard cannot be written",
        where=f"{prefix}.bin",
        why=error.strerror or str(error),
        remedy="free space or name another --output; the same command keeps finished shards",
    )
