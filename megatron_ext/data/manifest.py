"""The manifest: what a tokenized corpus consists of, and the files that hand it to Megatron.

`manifest.json` is written last, so a directory that has one is complete. Paths inside the directory are
stored relative to it; the `*.args` files beside it hold absolute ones, because Megatron resolves them against
its own working directory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_ext.data.files import write_json, write_text
from megatron_ext.data.split import SPLITS, Split
from megatron_ext.errors import UserError

SCHEMA = 1
FILE_NAME = "manifest.json"


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer that wrote the shards: its directory and the SHA-256 of its `tokenizer.json`."""

    path: Path
    sha256: str
    vocab_size: int
    eod_token: str
    eod_id: int


@dataclass(frozen=True)
class Shard:
    """One pair of indexed files, `prefix.bin` and `prefix.idx`: its label, split, counts, sizes and digests.
    """

    prefix: Path
    label: str
    split: Split
    documents: int
    tokens: int
    bin_bytes: int
    idx_bytes: int
    bin_sha256: str
    idx_sha256: str

    @property
    def bin_path(self) -> Path:
        """The token file."""
        return Path(f"{self.prefix}.bin")

    @property
    def idx_path(self) -> Path:
        """The index file."""
        return Path(f"{self.prefix}.idx")


@dataclass(frozen=True)
class Manifest:
    """A tokenized corpus. `dtype` is numpy's name of a token's type; `held_out` the share asked for, 0 to 1.
    """

    path: Path
    tokenizer: TokenizerRecord
    dtype: str
    held_out: float
    seed: int
    fingerprint: str
    shards: tuple[Shard, ...]

    def of_split(self, split: Split) -> tuple[Shard, ...]:
        """Return the shards of one split, in the manifest's order."""
        return tuple(shard for shard in self.shards if shard.split == split)

    @property
    def blend_path(self) -> Path:
        """The file for Megatron's `--per-split-data-args-path`."""
        return self.path.with_name("blend.json")


def args_path(manifest: Manifest, split: Split) -> Path | None:
    """Return the file of `weight prefix` lines of one split, for `--data-args-path` or `--train-data-path`.

    None where the folder's name has white space: Megatron splits these lists there. It reads `blend.json` as it is.
    """
    path = manifest.path.with_name(f"{split}.args")
    return None if any(letter.isspace() for letter in str(path)) else path


def blend_words(shards: tuple[Shard, ...]) -> list[str]:
    """Return Megatron's `weight prefix ...` words: each shard weighs its tokens, so that all data count
    alike.

    With weights Megatron goes round the data as often as the run needs; without, it stops at the end of the
    data.
    """
    return [word for shard in shards for word in (str(shard.tokens), str(shard.prefix))]


def labels_by_prefix(manifest: Manifest) -> Mapping[str, str]:
    """Return each shard's absolute prefix -> its label, for metrics by source."""
    return {str(shard.prefix): shard.label for shard in manifest.shards}


def write_manifest(manifest: Manifest) -> None:
    """Write the files for Megatron, then the manifest itself, each completely or not at all."""
    blend: dict[str, list[str] | None] = {"test": None}
    for split in SPLITS:
        words = blend_words(manifest.of_split(split))
        blend[split] = words or None
        lines = [" ".join(pair) for pair in zip(words[::2], words[1::2], strict=True)]
        if listed := args_path(manifest, split):
            write_text(listed, "".join(f"{line}\n" for line in lines))
    write_json(manifest.blend_path, blend)
    write_json(manifest.path, _to_plain(manifest))


def load_manifest(path: str | Path) -> Manifest:
    """Read a manifest; `path` is the file or its directory.

    Raises:
        UserError: It is missing, unreadable, not a manifest, or of another schema.
    """
    file = Path(path)
    file = file / FILE_NAME if file.is_dir() else file
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            "the data manifest cannot be read",
            where=str(file),
            why=error.strerror or str(error),
            remedy="check the path; `megatron-moe tokenize` writes the manifest when all shards are complete",
        ) from error
    except ValueError as error:
        raise UserError(
            "the data manifest is not JSON",
            where=str(file),
            why=str(error),
            remedy="write it again with `megatron-moe tokenize`: finished shards are kept",
        ) from error
    try:
        return _from_plain(plain, file.resolve())
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            "the data manifest lacks something",
            where=str(file),
            why=f"{type(error).__name__}: {error}",
            remedy="write it again with `megatron-moe tokenize`: finished shards are kept",
        ) from error


def shard_to_plain(shard: Shard, root: Path) -> dict[str, Any]:
    """Return a shard as JSON values, its prefix relative to `root`."""
    return {**asdict(shard), "prefix": _relative(shard.prefix, root)}


def shard_from_plain(plain: Mapping[str, Any], root: Path) -> Shard:
    """Undo `shard_to_plain`."""
    return Shard(**{**plain, "prefix": root / plain["prefix"]})


def _to_plain(manifest: Manifest) -> dict[str, Any]:
    root = manifest.path.parent
    return {
        "schema": SCHEMA,
        "tokenizer": {**asdict(manifest.tokenizer), "path": _relative(manifest.tokenizer.path, root)},
        "dtype": manifest.dtype,
        "held_out": manifest.held_out,
        "seed": manifest.seed,
        "fingerprint": manifest.fingerprint,
        "shards": [shard_to_plain(shard, root) for shard in manifest.shards],
    }


def _from_plain(plain: Mapping[str, Any], file: Path) -> Manifest:
    if plain["schema"] != SCHEMA:
        raise UserError(
            "the data manifest has another schema",
            where=f"{file}: schema {plain['schema']}",
            why=f"this version reads schema {SCHEMA}",
            remedy="tokenize again, or use the version that wrote it",
        )
    root = file.parent
    tokenizer = plain["tokenizer"]
    return Manifest(
        path=file,
        tokenizer=TokenizerRecord(**{**tokenizer, "path": root / tokenizer["path"]}),
        dtype=plain["dtype"],
        held_out=plain["held_out"],
        seed=plain["seed"],
        fingerprint=plain["fingerprint"],
        shards=tuple(shard_from_plain(shard, root) for shard in plain["shards"]),
    )


def _relative(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
