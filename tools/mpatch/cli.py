"""The command line: one small class a verb, one answer, printed for people or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tools.mpatch import apply, check, doctor, drift, edit, listing, notes, prove, rebase, record, sources, upstream
from tools.mpatch.checkout import Checkout, find_checkout
from tools.mpatch.errors import EXIT_USAGE, DiskRefused, MpatchError, UsageError
from tools.mpatch.output import Answer

Options = argparse.Namespace


@dataclass(frozen=True)
class Verb:
    """A verb: its line in the help, its own options, and what it does."""

    summary: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Checkout, Options], Answer]


class _Parser(argparse.ArgumentParser):
    """argparse exits with 2 on wrong usage; the house uses 64 and keeps 2 for "could not check"."""

    def error(self, message: str) -> NoReturn:
        """Print usage and what was wrong."""
        self.print_usage(sys.stderr)
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


def _source_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", default="", help="a base of upstream.toml (default: default_base)")
    parser.add_argument("--offline", type=Path, metavar="DIR", help="take the sdist from this folder, ask no index")
    parser.add_argument(
        "--from",
        dest="origin",
        default="",
        metavar="CLONE",
        help="take a git base from this clone or address",
    )


def _fetch_options(parser: argparse.ArgumentParser) -> None:
    _source_options(parser)
    parser.add_argument(
        "--record",
        nargs=2,
        metavar=("NAME", "SOURCE"),
        help="pin a new base: PACKAGE==VERSION on the index, FILE.tar.gz, or CLONE[@REVISION]",
    )


def _apply_options(parser: argparse.ArgumentParser) -> None:
    _source_options(parser)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the tree's foreign edits there, then go on")
    parser.add_argument("--discard", action="store_true", help="throw the tree's foreign edits away")


def _fetch(checkout: Checkout, options: Options) -> Answer:
    if options.record:
        return record.record(checkout, *options.record)
    base = checkout.pins().base(options.base)
    with apply.working(checkout, "fetch"):
        got = sources.fetch(checkout, base, offline=options.offline, origin=options.origin, progress=_progress())
    word = "verified" if got.checked else "unchecked: no tree id is pinned"
    return Answer(
        [f"{base.name}: {base.describe()}, tree {got.tree} ({word}), from {got.source}"],
        {"base": base.name, "tree": got.tree, "source": got.source, "checked": got.checked},
    )


def _apply(checkout: Checkout, options: Options) -> Answer:
    return apply.apply(
        checkout,
        base_name=options.base,
        offline=options.offline,
        origin=options.origin,
        save=options.save,
        discard=options.discard,
        progress=_progress(),
    )


def _new_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("slug", metavar="TOPIC/SLUG")
    parser.add_argument("--after", default="", metavar="SLUG", help="put it after this patch instead of on top")
    parser.add_argument("--message", type=Path, metavar="FILE", help="subject, body and trailers (- reads stdin)")


def _refresh_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("slug", nargs="?", default="", help="the patch that gets the changes (default: the open one)")
    parser.add_argument("--message", type=Path, metavar="FILE", help="a new message (- reads stdin)")
    parser.add_argument(
        "--from-file", action="store_true", help="take the patch file, edited by hand, for what it says"
    )


def _refresh(checkout: Checkout, options: Options) -> Answer:
    if options.from_file:
        if not options.slug or options.message:
            raise UsageError("--from-file wants a SLUG and no --message", remedy="mpatch refresh SLUG --from-file")
        return edit.refresh_from_file(checkout, options.slug)
    return edit.refresh(checkout, options.slug, text=_text(options.message))


def _text(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            "the message cannot be read",
            where=str(path),
            why=str(error.strerror),
            remedy="mpatch show SLUG --message prints one to start from",
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(
            "the message is not UTF-8", where=str(path), why=str(error), remedy="save it as UTF-8, then run this again"
        ) from None


def _show_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("slug")
    parser.add_argument("--message", action="store_true", help="only the message, as --message of refresh takes it")


def _drop_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("slug")
    parser.add_argument("--because", required=True, help="why it goes; belongs into the commit message")


def _rebase_options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--onto", metavar="BASE", help="a base of upstream.toml; becomes the default one")
    what.add_argument("--continue", dest="go_on", action="store_true", help="the place that it waited at is settled")
    what.add_argument("--abort", action="store_true", help="leave it; series and tree are as before")
    parser.add_argument("--drop-absorbed", action="store_true", help="let patches go that the new base has")
    parser.add_argument("--offline", type=Path, metavar="DIR", help="take the sdist from this folder, ask no index")
    parser.add_argument("--from", dest="origin", default="", metavar="CLONE", help="take a git base from there")


def _rebase(checkout: Checkout, options: Options) -> Answer:
    if options.abort:
        return rebase.abort(checkout)
    if options.go_on:
        return rebase.resume(checkout, drop_absorbed=options.drop_absorbed)
    return rebase.rebase(
        checkout,
        options.onto,
        offline=options.offline,
        origin=options.origin,
        drop_absorbed=options.drop_absorbed,
    )


def _check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("gates", nargs="*", metavar="GATE", help=f"one of {', '.join(check.GATES)} (default: all)")


def _prove_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("slugs", nargs="*", metavar="SLUG", help="default: all")
    parser.add_argument("--python", default="", help="runs the tests (default: .venv/bin/python)")
    parser.add_argument("--whole", action="store_true", help="with = the whole series: faster, proves no Depends-On")
    parser.add_argument("--hunks", action="store_true", help="also: which hunks does the proof not miss? (slow)")
    parser.add_argument("--timeout", type=int, default=600, metavar="SECONDS", help="for each test (default 600)")


def _drift_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bases", nargs="+", metavar="BASE", help="a base of upstream.toml, or a clone: PATH[@REVISION]")
    parser.add_argument("--offline", type=Path, metavar="DIR", help="take sdists from this folder, ask no index")
    parser.add_argument(
        "--prove", action="store_true", help="run the proofs of patches that don't fit: green is absorbed"
    )
    parser.add_argument("--python", default="", help="runs the proofs (default: .venv/bin/python)")


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", default="", help="the environment to look at (default: .venv/bin/python)")


def _upstream_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("slug")
    parser.add_argument("--clone", type=Path, required=True, metavar="DIR", help="a clone of upstream; gets a branch")
    parser.add_argument("--onto", default="HEAD", metavar="REVISION", help="where the branch starts (default HEAD)")


def _notes_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--since", default="", metavar="STATE", help="a revision, or a folder (default: the last tag)")
    parser.add_argument("--to", default="", metavar="STATE", help="a revision, or a folder (default: the checkout)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the page there")


def _bundle_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="becomes the bundle; must not exist")
    add("--python", default="", metavar="SERIES", help="of the node (default: [python] preferred in upstream.toml)")
    add("--cuda", default="13", metavar="MAJOR", help="of the node (default 13)")
    add("--glibc", type=int, default=28, metavar="MINOR", help="the node's glibc is 2.MINOR or newer (default 28)")
    add("--machine", default="x86_64", help="processor of the node (default x86_64)")
    add("--torch", default="", metavar="VERSION", help="default: the pinned one")
    add("--te", default="", metavar="VERSION", help="Transformer Engine (default: the pinned one); none leaves it out")
    add("--wheel", type=Path, metavar="FILE", help="our wheel, built for that Python (default: build it)")
    add("--wheels", type=Path, metavar="DIR", help="wheels that no index has, e.g. transformer_engine_torch")
    add("--more", action="append", default=[], metavar="REQUIREMENT", help="a further package; may be repeated")
    add("--without", action="append", default=[], metavar="NAME", help="the node has it already; may be repeated")
    add("--split", default="", metavar="SIZE", help="folders of at most this size each, e.g. 56M (default: one folder)")


def _bundle(checkout: Checkout, options: Options) -> Answer:
    from tools.package.bundle import Wanted, bundle
    from tools.package.target import Target

    pins = checkout.pins()
    series = options.python or str(pins.raw.get("python", {}).get("preferred", "3.12"))
    target = Target(series, options.machine, options.glibc, options.cuda)
    te = "" if options.te == "none" else options.te or pins.packages.get("transformer-engine", "")
    torch = options.torch or pins.packages.get("torch", "")
    more, without = tuple(options.more), tuple(options.without)
    return bundle(checkout, options.folder, Wanted(target, torch, te, more, without, options.wheel, options.wheels),
                  options.split)  # fmt: skip


def _slug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("slug")


def _list_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write-readme", action="store_true", help="write patches/README.md")


def _none(parser: argparse.ArgumentParser) -> None:
    pass


VERBS: dict[str, Verb] = {
    "fetch": Verb("bring a base here and verify it", _fetch_options, _fetch),
    "apply": Verb("make build/megatron: the base with the whole series", _apply_options, _apply),
    "status": Verb("what is pinned, what is in the tree", _none, lambda c, o: apply.status(c)),
    "verify": Verb("prove every file before and after each patch", _none, lambda c, o: apply.verify(c)),
    "list": Verb("the series, with its budget", _list_options, lambda c, o: listing.list_(c, o.write_readme)),
    "show": Verb("one patch", _show_options, lambda c, o: listing.show(c, o.slug, o.message)),
    "new": Verb(
        "open an empty patch",
        _new_options,
        lambda c, o: edit.new(c, o.slug, after=o.after, text=_text(o.message)),
    ),
    "edit": Verb("open the tree at a patch's place", _slug, lambda c, o: edit.edit(c, o.slug)),
    "refresh": Verb(
        "write the tree's changes into the open patch, and rewrite all after it",
        _refresh_options,
        _refresh,
    ),
    "rebase": Verb("move the series to another base, resumable", _rebase_options, _rebase),
    "check": Verb("the gates: lint, alone, prefixes, round trip", _check_options, lambda c, o: check.check(c, o.gates)),
    "prove": Verb(
        "each patch's Proof: red without it, green with it",
        _prove_options,
        lambda c, o: prove.prove(c, o.slugs, whole=o.whole, hunks=o.hunks, python=o.python, timeout_s=o.timeout),
    ),
    "drift": Verb(
        "how each patch would fare on other bases",
        _drift_options,
        lambda c, o: drift.drift(c, o.bases, offline=o.offline, prove=o.prove, python=o.python),
    ),
    "doctor": Verb(
        "which file each megatron module comes from, and what is missing",
        _doctor_options,
        lambda c, o: doctor.doctor(c, o.python),
    ),
    "upstream-prep": Verb(
        "one patch on upstream's main, checked as upstream checks it",
        _upstream_options,
        lambda c, o: upstream.upstream_prep(c, o.slug, o.clone, onto=o.onto),
    ),
    "bundle": Verb("everything that a GPU node without a network needs, to carry there", _bundle_options, _bundle),
    "release-notes": Verb(
        "a page on what changed in the series since the last release",
        _notes_options,
        lambda c, o: notes.release_notes(c, o.since, o.to, o.output),
    ),
    "drop": Verb("take a patch out of the series", _drop_options, lambda c, o: edit.drop(c, o.slug, o.because)),
}


def _progress() -> Callable[[int, int], None] | None:
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        end = "\n" if done >= total else ""
        print(f"\rdownload {done / 1e6:.1f} of {total / 1e6:.1f} MB", end=end, file=sys.stderr, flush=True)

    return show


def parser() -> argparse.ArgumentParser:
    """Return the whole command line."""
    top = _Parser(
        prog="mpatch",
        description="The patch queue: a pinned Megatron plus patches/ gives build/megatron.",
        epilog="Exit codes: 0 good, 1 a patch is wrong, 2 could not check, 64 usage.",
    )
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, verb in VERBS.items():
        one = verbs.add_parser(name, help=verb.summary, description=verb.summary)
        one.add_argument("--json", action="store_true", help="print the answer as JSON")
        one.add_argument("--root", metavar="DIR", help="the checkout (default: the one around the current folder)")
        verb.options(one)
    return top


def _run(options: Options) -> Answer:
    try:
        return VERBS[options.verb].run(find_checkout(options.root), options)
    except OSError as error:
        raise DiskRefused(
            "a file cannot be read or written",
            where=", ".join(str(name) for name in (error.filename, error.filename2) if name is not None),
            why=error.strerror or str(error),
            remedy="is the disk full or read-only, the path a folder, a right missing? mend it, then run this again",
        ) from error


def main(argv: list[str] | None = None) -> int:
    """Run `mpatch`; return the exit status."""
    try:
        options = parser().parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        answer = _run(options)
    except MpatchError as error:
        if options.json:
            print(json.dumps(error.record(), indent=2))
        print(error.text(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; nothing is half applied", file=sys.stderr)
        return 130
    try:
        print(json.dumps(answer.data, indent=2) if options.json else "\n".join(answer.lines), flush=True)
    except BrokenPipeError:
        sys.stderr.close()  # the reader (head, grep -q) has seen enough
    return answer.exit_code
