"""Read shards back with Megatron's own reader, and hold a training command against its data before step 1."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from megatron_ext.data.files import sha256_file
from megatron_ext.data.indexed import megatron_indexed
from megatron_ext.data.manifest import FILE_NAME, Manifest, Shard, load_manifest
from megatron_ext.data.tokenizer import OpenTokenizer, open_tokenizer
from megatron_ext.errors import UserError

READ_DOCUMENTS = 4096
INDEX_MAGIC = b"MMIDIDX\x00\x00"
TOKENIZE_AGAIN = "delete the shard and run the same `megatron-moe tokenize` command again"


@dataclass(frozen=True)
class ShardReport:
    """What one shard holds, as Megatron reads it. `label` and `split` are empty without a manifest."""

    prefix: Path
    label: str
    split: str
    documents: int
    tokens: int
    largest_id: int


@dataclass(frozen=True)
class CheckReport:
    """What `check` read: every shard in order. It exists only where all of them are good."""

    shards: tuple[ShardReport, ...]
    vocab_size: int
    eod_id: int


def check(
    manifest_or_prefixes: str | Path | Manifest | Sequence[str | Path], tokenizer: str | Path | None = None
) -> CheckReport:
    """Read every token of every shard with Megatron's reader.

    Args:
        manifest_or_prefixes: A manifest (or its path or directory), or prefixes of `.bin`/`.idx` pairs.
        tokenizer: Hugging Face tokenizer directory; by default the manifest's.

    Raises:
        UserError: A file is missing, cut short or changed since the manifest was written; a token id lies
            outside the vocabulary; a document doesn't end with the end-of-text id or holds it inside; the
            tokenizer is another than the one that wrote the shards; there is no document.
    """
    manifest = _as_manifest(manifest_or_prefixes)
    if manifest is None:
        prefixes = [Path(word) for word in _as_sequence(manifest_or_prefixes)]
        for prefix in prefixes:
            _shard_files(prefix)
        if tokenizer is None:
            raise UserError(
                "prefixes can only be checked against a tokenizer",
                where=str(prefixes[0]),
                remedy="name its directory with --tokenizer",
                exit_code=64,
            )
        opened = open_tokenizer(Path(tokenizer))
        reports = [_read_shard(prefix, "", "", opened) for prefix in prefixes]
    else:
        directory = Path(tokenizer) if tokenizer else manifest.tokenizer.path
        opened = open_tokenizer(directory, manifest.tokenizer.eod_token)
        _same_tokenizer(manifest, opened.path, opened.sha256)
        reports = [_check_recorded(shard, opened) for shard in manifest.shards]
    return CheckReport(tuple(reports), opened.vocab_size, opened.eod_id)


def verify_for_training(manifest: Manifest | str | Path, args: argparse.Namespace) -> None:
    """Hold Megatron's parsed arguments against the manifest, in well under a second and on any rank.

    Args:
        manifest: The manifest or its path.
        args: Megatron's arguments after validation: tokenizer and data flags, `seq_length`,
            `padded_vocab_size`.

    Raises:
        UserError: Another tokenizer than the one that wrote the shards; a vocabulary too small for them; data
            paths outside the manifest, or a held-out shard among the training ones; a shard missing, cut
            short or smaller than one sequence; mock data.
    """
    manifest = manifest if isinstance(manifest, Manifest) else load_manifest(manifest)
    if getattr(args, "mock_data", False):
        raise UserError(
            "a data manifest and mock data at once",
            where="--mock-data",
            remedy="drop one of the two flags",
            exit_code=64,
        )
    _training_tokenizer(manifest, args)
    used = _training_shards(manifest, args)
    for shard in used:
        _same_size(shard)
        if shard.tokens <= args.seq_length:
            raise UserError(
                "a shard is smaller than one sequence",
                where=f"{shard.prefix}: {shard.tokens:,} tokens",
                why=f"--seq-length {args.seq_length} needs {args.seq_length + 1:,}",
                remedy="use more text, a larger --held-out, or a shorter --seq-length",
            )


def _as_manifest(value: Any) -> Manifest | None:
    if isinstance(value, Manifest):
        return value
    if isinstance(value, str | Path) and (Path(value).is_dir() or Path(value).name.endswith(".json")):
        return load_manifest(value)
    return None


def _as_sequence(value: Any) -> list[Any]:
    words = [value] if isinstance(value, str | Path) else list(value)
    if not words:
        raise UserError(
            "there is nothing to check", where=FILE_NAME, remedy="name a manifest or prefixes", exit_code=64
        )
    return words


def _same_tokenizer(manifest: Manifest, directory: Path, sha256: str) -> None:
    if sha256 != manifest.tokenizer.sha256:
        raise UserError(
            "the tokenizer doesn't match the data",
            where=f"{directory / 'tokenizer.json'}: sha256 {sha256[:12]}…",
            why=f"{manifest.path} was written with sha256 {manifest.tokenizer.sha256[:12]}…",
            remedy=f"use {manifest.tokenizer.path}, or tokenize the text again with this tokenizer",
        )


def _check_recorded(shard: Shard, tokenizer: OpenTokenizer) -> ShardReport:
    _same_size(shard)
    for path, recorded in ((shard.bin_path, shard.bin_sha256), (shard.idx_path, shard.idx_sha256)):
        found = sha256_file(path)
        if found != recorded:
            raise UserError(
                "a shard changed since its manifest was written",
                where=str(path),
                why=f"sha256 {found[:12]}…, recorded {recorded[:12]}…",
                remedy=TOKENIZE_AGAIN,
            )
    report = _read_shard(shard.prefix, shard.label, shard.split, tokenizer)
    if (report.documents, report.tokens) != (shard.documents, shard.tokens):
        raise UserError(
            "a shard doesn't hold what its manifest says",
            where=str(shard.prefix),
            why=f"{report.documents:,} documents and {report.tokens:,} tokens, "
            f"recorded {shard.documents:,} and {shard.tokens:,}",
            remedy=TOKENIZE_AGAIN,
        )
    return report


def _same_size(shard: Shard) -> None:
    for path, recorded in ((shard.bin_path, shard.bin_bytes), (shard.idx_path, shard.idx_bytes)):
        try:
            found = path.stat().st_size
        except OSError as error:
            raise UserError(
                "a shard's file is missing",
                where=str(path),
                why=error.strerror or str(error),
                remedy=TOKENIZE_AGAIN,
            ) from error
        if found != recorded:
            raise UserError(
                "a shard's file is cut short or changed",
                where=str(path),
                why=f"{found:,} bytes, recorded {recorded:,}",
                remedy=TOKENIZE_AGAIN,
            )


def _read_shard(prefix: Path, label: str, split: str, tokenizer: OpenTokenizer) -> ShardReport:
    dataset = _open_shard(prefix)
    largest = 0
    for start in range(0, len(dataset), READ_DOCUMENTS):
        for offset, ids in enumerate(dataset[start : min(start + READ_DOCUMENTS, len(dataset))]):
            largest = max(largest, _check_document(prefix, start + offset, ids, tokenizer))
    documents = len(dataset.document_indices) - 1
    return ShardReport(
        prefix, label, split, documents, int(dataset.sequence_lengths.sum(dtype=numpy.int64)), largest
    )


def _shard_files(prefix: Path) -> tuple[Path, Path]:
    bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    # Megatron answers a bad pair with bare assertions, or only when a wrong token is read, so ask first.
    for path in (bin_path, idx_path):
        if not path.is_file():
            raise UserError(
                "a shard's file is missing",
                where=str(path),
                remedy="give the prefix without .bin or .idx; if it is right, tokenize again",
            )
    return bin_path, idx_path


def _open_shard(prefix: Path) -> Any:
    bin_path, idx_path = _shard_files(prefix)
    if not bin_path.stat().st_size:
        raise UserError(
            "there is no document", where=str(bin_path), why="0 bytes", remedy="tokenize some text first"
        )
    with idx_path.open("rb") as stream:
        magic = stream.read(len(INDEX_MAGIC))
    if magic != INDEX_MAGIC:
        raise UserError(
            "not a Megatron index",
            where=str(idx_path),
            why=f"it begins with {magic!r}",
            remedy=TOKENIZE_AGAIN,
        )
    try:
        dataset = megatron_indexed().IndexedDataset(str(prefix))
    except (AssertionError, ValueError, OSError) as error:
        raise UserError(
            "Megatron cannot read a shard", where=str(idx_path), why=str(error), remedy=TOKENIZE_AGAIN
        ) from error
    expected = (
        int(dataset.sequence_lengths.sum(dtype=numpy.int64)) * numpy.dtype(dataset.index.dtype).itemsize
    )
    if bin_path.stat().st_size != expected:
        raise UserError(
            "a shard's two files don't belong together",
            where=str(bin_path),
            why=f"{bin_path.stat().st_size:,} bytes, the index wants {expected:,}",
            remedy=TOKENIZE_AGAIN,
        )
    return dataset


def _check_document(prefix: Path, number: int, ids: numpy.ndarray, tokenizer: OpenTokenizer) -> int:
    where = f"{prefix}, document {number}"
    if not len(ids) or int(ids[-1]) != tokenizer.eod_id:
        last = int(ids[-1]) if len(ids) else "nothing"
        raise UserError(
            "a document doesn't end with the end-of-text token",
            where=where,
            why=f"last id {last}, {tokenizer.eod_token!r} is {tokenizer.eod_id}",
            remedy="check that the tokenizer is the one that wrote the shard, or tokenize again",
        )
    largest, smallest = int(ids.max()), int(ids.min())
    if largest >= tokenizer.vocab_size or smallest < 0:
        raise UserError(
            "a token id lies outside the vocabulary",
            where=f"{where}: id {largest if smallest >= 0 else smallest}",
            why=f"the tokenizer has {tokenizer.vocab_size:,} entries",
            remedy="use the tokenizer that wrote the shard, or tokenize again",
        )
    if int((ids == tokenizer.eod_id).sum()) != 1:
        raise UserError(
            "a document holds the end-of-text token inside",
            where=where,
            why="training would see two documents",
            remedy="tokenize again: `megatron-moe tokenize` writes such text as ordinary characters",
        )
    return largest


def _training_tokenizer(manifest: Manifest, args: argparse.Namespace) -> None:
    record = manifest.tokenizer
    if args.tokenizer_type == "HuggingFaceTokenizer":
        file = Path(args.tokenizer_model or "") / "tokenizer.json"
        if not file.is_file():
            raise UserError(
                "the training tokenizer is not a directory with tokenizer.json",
                where=f"--tokenizer-model {args.tokenizer_model}",
                remedy=f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {record.path}",
            )
        _same_tokenizer(manifest, file.parent, sha256_file(file))
    size = getattr(args, "padded_vocab_size", None) or getattr(args, "vocab_size", None)
    if size is not None and size < record.vocab_size:
        raise UserError(
            "the model's vocabulary is smaller than the data's",
            where=f"vocabulary {size:,}",
            why=f"the shards were written with {record.vocab_size:,} entries",
            remedy=f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {record.path}",
        )


def _training_shards(manifest: Manifest, args: argparse.Namespace) -> list[Shard]:
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    if blend is None and per_split is None:
        raise UserError(
            "a data manifest but no data flag",
            where=str(manifest.path),
            remedy=f"--per-split-data-args-path {manifest.blend_path}",
            exit_code=64,
        )
    by_prefix = {str(shard.prefix): shard for shard in manifest.shards}
    used: list[Shard] = []
    for place, split in enumerate(("train", "valid", "test")):
        part = blend if per_split is None else per_split[place]
        if part is None or (per_split is None and place):
            continue
        for prefix in part[0]:
            used.append(_known_shard(manifest, by_prefix, prefix, split))
    return used


def _known_shard(manifest: Manifest, by_prefix: dict[str, Shard], prefix: str, split: str) -> Shard:
    shard = by_prefix.get(str(Path(prefix).resolve()))
    remedy = f"--per-split-data-args-path {manifest.blend_path}"
    if shard is None:
        raise UserError(
            "a data path is not in the manifest", where=prefix, why=f"manifest {manifest.path}", remedy=remedy
        )
    if split == "train" and shard.split != "train":
        raise UserError(
            "a held-out shard among the training data",
            where=prefix,
            why="the held-out loss would say nothing",
            remedy=remedy,
        )
    return shard
