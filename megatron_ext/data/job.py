"""Tokenize sources into shards, restartable, and write the manifest when the last part is there.

A part is one label and one task of `--tasks N`. It writes at most one training and one held-out shard, then a
completion marker that names the shards and a fingerprint of everything that decides their content. A part
whose marker has the same fingerprint is not done again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_ext.data.files import sha256_json, write_json
from megatron_ext.data.manifest import (
    FILE_NAME,
    Manifest,
    Shard,
    TokenizerRecord,
    load_manifest,
    shard_from_plain,
    shard_to_plain,
    write_manifest,
)
from megatron_ext.data.progress import Meter
from megatron_ext.data.shards import ShardWriter, token_dtype
from megatron_ext.data.sources import Source, SourceFile, read_documents
from megatron_ext.data.split import Split, is_sampled, split_of
from megatron_ext.data.tokenizer import OpenTokenizer
from megatron_ext.errors import UserError

BATCH_DOCUMENTS = 256


@dataclass(frozen=True)
class Recipe:
    """What decides the content of shards, beside the texts and the tokenizer.

    Args:
        held_out: Share of documents held out of training, 0 to 1 (default 0.05).
        seed: Chooses which documents those are.
        sample_rate: Share of documents used at all, 0 to 1.
        limit: At most so many documents of a label and task; 0 for all.
        json_key: Where a JSON line keeps its text.
        tasks: How many parts each label is cut into.
    """

    held_out: float = 0.05
    seed: int = 1234
    sample_rate: float = 1.0
    limit: int = 0
    json_key: str = "text"
    tasks: int = 1

    def __post_init__(self) -> None:
        checks = {
            f"--held-out {self.held_out}": 0 <= self.held_out < 1,
            f"--sample-rate {self.sample_rate}": 0 < self.sample_rate <= 1,
            f"--limit {self.limit}": self.limit >= 0,
            f"--tasks {self.tasks}": self.tasks >= 1,
        }
        for where, good in checks.items():
            if not good:
                raise UserError(
                    "an option is out of range",
                    where=where,
                    exit_code=64,
                    remedy="--held-out in [0, 1), --sample-rate in (0, 1], --limit >= 0, --tasks >= 1",
                )


@dataclass(frozen=True)
class Job:
    """Sources, tokenizer, recipe and output directory of one corpus."""

    sources: tuple[Source, ...]
    tokenizer: OpenTokenizer
    recipe: Recipe
    output: Path

    @cached_property
    def source_fingerprints(self) -> dict[str, str]:
        """Label -> a digest of all that decides its shards: files, their times and sizes, recipe, tokenizer.
        """
        how = {
            "recipe": asdict(self.recipe),
            "tokenizer": self.tokenizer.sha256,
            "eod": self.tokenizer.eod_token,
        }
        files = {
            source.label: [
                [str(f.path.resolve()), f.size_bytes, f.path.stat().st_mtime_ns] for f in source.files
            ]
            for source in self.sources
        }
        return {label: sha256_json({"files": listed, **how}) for label, listed in files.items()}

    @property
    def fingerprint(self) -> str:
        """A digest of the whole corpus."""
        return sha256_json(self.source_fingerprints)


def training_texts(sources: tuple[Source, ...], recipe: Recipe, meter: Meter) -> Iterator[str]:
    """Yield the training documents only: a tokenizer must not have seen what is held out."""
    for source in sources:
        for text, split in _documents(source, recipe, 0, 1, meter):
            if split == "train":
                yield text


def existing_manifest(job: Job, *, overwrite: bool) -> Manifest | None:
    """Return the finished manifest of the same job, None where there is none.

    Raises:
        UserError: The directory holds another corpus and `overwrite` is not set.
    """
    file = job.output / FILE_NAME
    if not file.exists():
        return None
    manifest = load_manifest(file)
    if manifest.fingerprint == job.fingerprint:
        return manifest
    if not overwrite:
        raise UserError(
            "the output directory holds another corpus",
            where=str(file),
            why="its inputs, options or tokenizer differ from this command's",
            remedy="choose another --output, or replace it with --overwrite",
        )
    file.unlink()
    return None


def run_part(job: Job, source: Source, task: int, *, quiet: bool = False) -> tuple[Shard, ...]:
    """Tokenize one part, or return its shards at once where its marker stands.

    Raises:
        UserError: An input cannot be read, or the output cannot be written.
    """
    done = _read_marker(job, source, task)
    if done is not None:
        return done
    mine = sum(file.size_bytes for file in _dealt(source, task, job.recipe.tasks))
    with Meter(f"{source.label} ({task + 1} of {job.recipe.tasks})", mine, quiet=quiet) as meter:
        shards = _write_part(job, source, task, meter)
    _remove_old_shards(job, source, task, shards)
    plain = [shard_to_plain(shard, job.output) for shard in shards]
    write_json(
        _marker_path(job, source, task),
        {"fingerprint": job.source_fingerprints[source.label], "shards": plain},
    )
    return shards


def finish(job: Job) -> Manifest | None:
    """Write the manifest if every part is there, else return None.

    Raises:
        UserError: A label has no training document, or none held out although some were asked for.
    """
    shards: list[Shard] = []
    for source in job.sources:
        parts = [_read_marker(job, source, task) for task in range(job.recipe.tasks)]
        if any(part is None for part in parts):
            return None
        found = [shard for part in parts for shard in part or ()]
        _check_label(source.label, found, job.recipe)
        shards += found
    tokenizer = job.tokenizer
    record = TokenizerRecord(
        tokenizer.path, tokenizer.sha256, tokenizer.vocab_size, tokenizer.eod_token, tokenizer.eod_id
    )
    manifest = Manifest(
        path=job.output / FILE_NAME,
        tokenizer=record,
        dtype=token_dtype(tokenizer.vocab_size).__name__,
        held_out=job.recipe.held_out,
        seed=job.recipe.seed,
        fingerprint=job.fingerprint,
        shards=tuple(shards),
    )
    write_manifest(manifest)
    return manifest


def parts_done(job: Job) -> tuple[int, int]:
    """Return how many parts have their marker, and how many there are."""
    parts = [(source, task) for source in job.sources for task in range(job.recipe.tasks)]
    return sum(_read_marker(job, source, task) is not None for source, task in parts), len(parts)


def _dealt(source: Source, task: int, tasks: int) -> tuple[SourceFile, ...]:
    # Whole files are dealt out where there are enough; else every task reads all and keeps its documents.
    return source.files[task::tasks] if len(source.files) >= tasks else source.files


def _documents(
    source: Source, recipe: Recipe, task: int, tasks: int, meter: Meter
) -> Iterator[tuple[str, Split]]:
    by_document = len(source.files) < tasks
    texts = (
        text
        for file in _dealt(source, task, tasks)
        for text in read_documents(file, recipe.json_key, meter.advance)
    )
    mine = (text for index, text in enumerate(texts) if not by_document or index % tasks == task)
    kept = (text for text in mine if is_sampled(text, recipe.sample_rate, recipe.seed))
    for text in islice(kept, recipe.limit or None):
        yield text, split_of(text, recipe.held_out, recipe.seed)


def _write_part(job: Job, source: Source, task: int, meter: Meter) -> tuple[Shard, ...]:
    dtype = token_dtype(job.tokenizer.vocab_size)
    writers: dict[Split, ShardWriter] = {}
    documents = _documents(source, job.recipe, task, job.recipe.tasks, meter)
    with ExitStack() as stack:
        while batch := list(islice(documents, BATCH_DOCUMENTS)):
            encoded = job.tokenizer.encode([text for text, _ in batch])
            for (_, split), ids in zip(batch, encoded, strict=True):
                if split not in writers:
                    prefix = _prefix(job, source, task, split)
                    writers[split] = stack.enter_context(ShardWriter(prefix, source.label, split, dtype))
                writers[split].add(ids)
        return tuple(writers[split].finish() for split in sorted(writers))


def _prefix(job: Job, source: Source, task: int, split: Split) -> Path:
    return job.output / split / f"{source.label}_{task:05d}"


def _remove_old_shards(job: Job, source: Source, task: int, shards: tuple[Shard, ...]) -> None:
    # An earlier recipe may have written a split that this one leaves empty.
    splits: tuple[Split, ...] = ("train", "valid")
    for split in set(splits) - {shard.split for shard in shards}:
        for suffix in (".bin", ".idx"):
            Path(f"{_prefix(job, source, task, split)}{suffix}").unlink(missing_ok=True)


def _marker_path(job: Job, source: Source, task: int) -> Path:
    return job.output / ".done" / f"{source.label}_{task:05d}-of-{job.recipe.tasks:05d}.json"


def _read_marker(job: Job, source: Source, task: int) -> tuple[Shard, ...] | None:
    try:
        plain: dict[str, Any] = json.loads(_marker_path(job, source, task).read_text(encoding="utf-8"))
        shards = tuple(shard_from_plain(shard, job.output) for shard in plain["shards"])
        whole = all(
            shard.bin_path.stat().st_size == shard.bin_bytes
            and shard.idx_path.stat().st_size == shard.idx_bytes
            for shard in shards
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return shards if whole and plain["fingerprint"] == job.source_fingerprints[source.label] else None


def _check_label(label: str, shards: list[Shard], recipe: Recipe) -> None:
    count = {split: sum(s.documents for s in shards if s.split == split) for split in ("train", "valid")}
    if not count["train"]:
        raise UserError(
            "a source has no training document",
            where=f"label {label}",
            why=f"{count['valid']} documents, all held out" if count["valid"] else "its files hold no text",
            remedy="check the files, lower --held-out, or leave the source out",
        )
    if recipe.held_out and not count["valid"]:
        raise UserError(
            "a source has no held-out document",
            where=f"label {label}",
            why=f"{count['train']} documents and --held-out {recipe.held_out}: whole documents are held out",
            remedy="raise --held-out, cut the text into more documents, or hold nothing out: --held-out 0",
        )
