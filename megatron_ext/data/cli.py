"""`megatron-moe tokenize`: text in, Megatron's indexed files and a manifest out."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_ext.data.check import CheckReport, check
from megatron_ext.data.corpus import Corpus, write_corpus
from megatron_ext.data.files import sha256_json, write_json
from megatron_ext.data.job import Job, Recipe, existing_manifest, finish, parts_done, run_part, training_texts
from megatron_ext.data.manifest import Manifest, args_path
from megatron_ext.data.progress import Meter
from megatron_ext.data.sources import Source, find_sources
from megatron_ext.data.split import SPLITS
from megatron_ext.data.tokenizer import OpenTokenizer, open_tokenizer, train_tokenizer
from megatron_ext.errors import UserError

Row = tuple[str, str, int, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    default = Recipe()
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="[LABEL=]PATH",
        help="text file, directory or JSON-lines file; repeat it; the label names the source in metrics",
    )
    parser.add_argument(
        "--builtin-corpus",
        type=Path,
        metavar="DIR",
        help="write the small corpus that every Python carries (labels prose, code) and use it",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="where shards and manifest.json go")
    parser.add_argument(
        "--train-tokenizer", action="store_true", help="train a byte-level BPE on the training documents"
    )
    parser.add_argument(
        "--vocab-size", type=int, default=4096, help="entries of a trained tokenizer (default 4096)"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="an existing Hugging Face tokenizer directory"
    )
    parser.add_argument("--eod-token", help="end-of-text token, if the tokenizer's configuration names none")
    parser.add_argument("--tokenizer-only", action="store_true", help="stop once the tokenizer is trained")
    parser.add_argument(
        "--held-out",
        type=float,
        default=default.held_out,
        metavar="SHARE",
        help="share of documents kept out of training, 0 to 1 (default 0.05)",
    )
    parser.add_argument(
        "--seed", type=int, default=default.seed, help="chooses the held-out documents (default 1234)"
    )
    parser.add_argument(
        "--sample-rate", type=float, default=1.0, metavar="SHARE", help="use this share of the documents"
    )
    parser.add_argument(
        "--limit", type=int, default=0, metavar="N", help="at most N documents of a label and task"
    )
    parser.add_argument(
        "--json-key", default=default.json_key, help="where a JSON line keeps its text (default text)"
    )
    parser.add_argument(
        "--tasks", type=int, default=1, metavar="N", help="cut each label into N parts, e.g. a job array's"
    )
    parser.add_argument("--task", type=int, metavar="I", help="do part I of them, from 0 (default: all)")
    parser.add_argument("--overwrite", action="store_true", help="replace another corpus in --output")
    parser.add_argument(
        "--check", metavar="PATH", help="only read back a manifest, or the prefix of one shard"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Tokenize or check; return the exit status.

    Raises:
        UserError: there is no output directory, or the data cannot be what was asked for.
    """
    if args.check:
        _show_check(check(args.check, args.tokenizer), args.json)
        return 0
    corpus = write_corpus(args.builtin_corpus) if args.builtin_corpus else None
    if args.output is None:
        if corpus is None:
            raise UserError("no output directory", where="--output", remedy="name one", exit_code=64)
        _show_corpus(corpus, args.json)
        return 0
    sources = tuple(find_sources([*args.input, *(corpus.inputs if corpus else [])]))
    recipe = Recipe(args.held_out, args.seed, args.sample_rate, args.limit, args.json_key, args.tasks)
    tokenizer = _tokenizer(args, sources, recipe)
    if args.tokenizer_only:
        _emit(
            args.json,
            {"tokenizer": str(tokenizer.path), "vocab_size": tokenizer.vocab_size},
            f"tokenizer of {tokenizer.vocab_size:,} entries in {tokenizer.path}",
        )
        return 0
    _tokenize(args, Job(sources, tokenizer, recipe, args.output.resolve()))
    return 0


def _tokenize(args: argparse.Namespace, job: Job) -> None:
    manifest = existing_manifest(job, overwrite=args.overwrite)
    if manifest is not None:
        print(f"[tokenize] up to date: {manifest.path}", file=sys.stderr)
    else:
        for task in _chosen_tasks(args):
            for source in job.sources:
                run_part(job, source, task, quiet=args.json)
        manifest = finish(job)
    if manifest is None:
        done, parts = parts_done(job)
        _emit(
            args.json,
            {"complete": False, "done": done, "parts": parts},
            f"{done} of {parts} parts done; the last one writes {job.output}/manifest.json",
        )
        return
    _show_manifest(manifest, args.json)


def _chosen_tasks(args: argparse.Namespace) -> range:
    if args.task is None:
        return range(args.tasks)
    if not 0 <= args.task < args.tasks:
        raise UserError(
            "no such part",
            where=f"--task {args.task}",
            why=f"--tasks {args.tasks} counts from 0",
            exit_code=64,
            remedy="in a Slurm array: --array=0-99, --tasks 100 --task $SLURM_ARRAY_TASK_ID",
        )
    return range(args.task, args.task + 1)


def _tokenizer(args: argparse.Namespace, sources: tuple[Source, ...], recipe: Recipe) -> OpenTokenizer:
    if args.train_tokenizer == (args.tokenizer is not None):
        raise UserError(
            "one tokenizer is needed",
            where="--tokenizer, --train-tokenizer",
            exit_code=64,
            remedy="either --tokenizer DIR, or --train-tokenizer --vocab-size N",
        )
    if args.tokenizer is not None:
        return open_tokenizer(args.tokenizer, args.eod_token)
    if args.task is not None and not args.tokenizer_only:
        raise UserError(
            "parallel tasks cannot each train a tokenizer",
            where=f"--train-tokenizer --task {args.task}",
            exit_code=64,
            remedy="train it first with --tokenizer-only, then give the tasks --tokenizer OUTPUT/tokenizer",
        )
    return _trained(args.output.resolve() / "tokenizer", sources, recipe, args.vocab_size, quiet=args.json)


def _trained(
    directory: Path, sources: tuple[Source, ...], recipe: Recipe, vocab_size: int, *, quiet: bool
) -> OpenTokenizer:
    files = [
        [str(f.path.resolve()), f.size_bytes, f.path.stat().st_mtime_ns] for s in sources for f in s.files
    ]
    wanted = sha256_json({"files": files, "recipe": asdict(recipe), "vocab_size": vocab_size})
    marker = directory.parent / ".done" / "tokenizer.json"
    try:
        if json.loads(marker.read_text())["fingerprint"] == wanted:
            return open_tokenizer(directory)
    except (OSError, ValueError, KeyError, UserError):
        pass  # Not there, or not whole: train it.
    with Meter("tokenizer", sum(source.size_bytes for source in sources), quiet=quiet) as meter:
        tokenizer = train_tokenizer(training_texts(sources, recipe, meter), vocab_size, directory)
    write_json(marker, {"fingerprint": wanted})
    return tokenizer


def _show_manifest(manifest: Manifest, as_json: bool) -> None:
    rows: list[Row] = [(s.label, s.split, s.documents, s.tokens) for s in manifest.shards]
    lists = {f"{split}_args": args_path(manifest, split) for split in SPLITS}
    _print_rows(
        rows,
        f"{manifest.tokenizer.vocab_size:,} entries, {manifest.dtype}",
        as_json,
        {
            "complete": True,
            "manifest": str(manifest.path),
            "tokenizer": str(manifest.tokenizer.path),
            "vocab_size": manifest.tokenizer.vocab_size,
            "per_split_data_args": str(manifest.blend_path),
            **{name: str(path) if path else None for name, path in lists.items()},
        },
    )
    if not as_json:
        print(
            f"manifest  {manifest.path}\ntrain with --tokenizer-type HuggingFaceTokenizer --tokenizer-model "
            f"{quote(str(manifest.tokenizer.path))} --per-split-data-args-path {quote(str(manifest.blend_path))}"
        )


def _show_check(report: CheckReport, as_json: bool) -> None:
    rows: list[Row] = [(s.label or s.prefix.name, s.split, s.documents, s.tokens) for s in report.shards]
    _print_rows(
        rows,
        f"good: ids below {report.vocab_size:,}, documents end with {report.eod_id}",
        as_json,
        {"good": True, "vocab_size": report.vocab_size, "eod_id": report.eod_id},
    )


def _show_corpus(corpus: Corpus, as_json: bool) -> None:
    plain = {label: {"documents": count, "bytes": size} for label, (count, size) in corpus.sizes.items()}
    text = ", ".join(
        f"{label}: {count} documents, {size:,} bytes" for label, (count, size) in corpus.sizes.items()
    )
    _emit(
        as_json,
        {"directory": str(corpus.directory), "sizes": plain, "inputs": corpus.inputs},
        f"{text}\nuse it with {' '.join(f'--input {word}' for word in corpus.inputs)}",
    )


def _print_rows(rows: list[Row], caption: str, as_json: bool, plain: dict[str, Any]) -> None:
    if as_json:
        keys = ("label", "split", "documents", "tokens")
        print(json.dumps({**plain, "shards": [dict(zip(keys, row, strict=True)) for row in rows]}, indent=2))
        return
    table = Table()
    for name in ("label", "split", "documents", "tokens"):
        table.add_column(name, justify="left" if name in ("label", "split") else "right")
    for label, split, documents, tokens in rows:
        table.add_row(label, split, f"{documents:,}", f"{tokens:,}")
    Console().print(table)
    print(caption)


def _emit(as_json: bool, plain: dict[str, Any], text: str) -> None:
    print(json.dumps(plain, indent=2) if as_json else text)
