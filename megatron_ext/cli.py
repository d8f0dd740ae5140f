"""`megatron-moe`: one command, one verb a room.

A room that offers a verb has a module with `add_arguments(parser)` and `run(args) -> int`. Only the chosen verb's
module is imported, so that `megatron-moe plan` works where torch does not.
"""

from __future__ import annotations

import errno
import importlib
import json
import logging
import os
import sys
import warnings
from dataclasses import dataclass
from types import ModuleType

from megatron_ext.errors import UserError
from megatron_ext.usage import Parser, nearest


@dataclass(frozen=True)
class Verb:
    """A verb of the command: the module that answers, its line in the help, whether Megatron's training runs in it."""

    module: str
    summary: str
    runs_megatron: bool = False


VERBS: dict[str, Verb] = {
    "health": Verb("megatron_ext.observe.health", "say how a run is doing, from its run directory"),
    "train": Verb("megatron_ext.runtime.cli", "start one rank's training under patched Megatron", runs_megatron=True),
    "trace": Verb("megatron_ext.trace.cli", "say where a profiled step went, from torch's profiler traces"),
    "report": Verb("megatron_ext.report.cli", "a table and one offline page from run directories"),
    "tokenize": Verb("megatron_ext.data.cli", "turn text into Megatron's indexed files, or check them"),
    "plan": Verb("megatron_ext.plan.cli", "estimate before training: memory, traffic of the dispatchers, upcycling"),
    "bench": Verb("megatron_ext.dispatch.bench_cli", "time the dispatchers on this machine"),
    "preflight": Verb("megatron_ext.preflight.cli", "check nodes and network before a run"),
    "doctor": Verb("megatron_ext.preflight.doctor", "say what is installed here and whether it fits together"),
    "place": Verb("megatron_ext.place.cli", "number a checkpoint's experts anew, so that ranks get as many tokens"),
    "upcycle": Verb("megatron_ext.upcycle.cli", "make an MoE checkpoint from a dense one, or a larger MoE"),
    "upcycle verify": Verb("megatron_ext.upcycle.verify_cli", "run source and target on one batch and compare"),
    "examples": Verb("megatron_ext.install.examples", "copy the launch scripts and the quickstart to a folder"),
}
# What a path that a person named can answer. Other errors of the system are ours, and in training they can be anyone's.
_FILES = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT,
          errno.ENAMETOOLONG}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run `megatron-moe`; return the exit status (0 good, 1 the thing asked about is wrong, 64 usage)."""
    words = sys.argv[1:] if argv is None else argv
    try:
        status = _answer(words)
        sys.stdout.flush()
        return status
    except UserError as error:
        print(error.text(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has enough: `| head`
        _forget_output()
        return 0
    except OSError as error:
        name = verb_and_rest(words)[0]
        if error.errno not in _FILES or (name in VERBS and VERBS[name].runs_megatron):
            raise
        if error.filename is None:
            _forget_output()
        print(_unusable(error, f"megatron-moe {name}").text(), file=sys.stderr)
        return 1


def _forget_output() -> None:
    """Let nothing be flushed at exit: Python would complain about it once more, and change the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _answer(words: list[str]) -> int:
    name, rest = verb_and_rest(words)
    if name == "help":  # `megatron-moe help report`, as many commands have it
        name, rest = verb_and_rest([*rest, "--help"])
    if name in ("-h", "--help"):
        print(_help())
        return 0 if words else 64
    if name == "--version":
        return _version(as_json="--json" in words)
    verb = VERBS.get(name)
    if verb is None:
        near = nearest(name, VERBS)
        remedy = f"did you mean {near[0]}? All verbs: `megatron-moe --help`" if near else "see `megatron-moe --help`"
        raise UserError("there is no such verb", where=f"megatron-moe {name}", remedy=remedy, exit_code=64)
    # Upstream says at each import, in a dozen lines, which optional kernels are absent.
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|transformer-engine)")
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    # torch's word for a machine that has CUDA's compiler and no GPU; ours is `[moe] device: cpu (...)`.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    parser = Parser(prog=f"megatron-moe {name}", description=verb.summary)
    try:
        room = _room(name, verb)
        room.add_arguments(parser)
        return int(room.run(parser.parse_args(rest)))
    except SystemExit as stop:  # argparse's after --help, Megatron's at --exit-interval
        if isinstance(stop.code, str):
            raise
        return int(stop.code or 0)


def _unusable(error: OSError, command: str) -> UserError:
    return UserError(
        "a file or folder cannot be used",
        where=command if error.filename is None else os.fsdecode(error.filename),
        why=error.strerror or type(error).__name__,
        remedy="check the path, its permissions and the free space",
    )


def verb_and_rest(words: list[str]) -> tuple[str, list[str]]:
    """Return the verb's name, of two words where such a verb exists, and what follows it."""
    for count in (2, 1):
        name = " ".join(words[:count])
        if len(words) >= count and (name in VERBS or count == 1):
            return name, words[count:]
    return "--help", []


def _room(name: str, verb: Verb) -> ModuleType:
    """Import the verb's module; a package that it needs and that is not there is no fault of ours."""
    try:
        return importlib.import_module(verb.module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "megatron_ext"):
            raise
        raise UserError(
            f"the package {missing} is not installed",
            where=f"megatron-moe {name} with {sys.executable}",
            remedy=f"install {missing} there; in a checkout: make setup",
        ) from None


def _version(*, as_json: bool) -> int:
    from megatron_ext.install.about import about_lines, about_record

    print(json.dumps(about_record(), indent=2) if as_json else "\n".join(about_lines()))
    return 0


def _help() -> str:
    rows = "\n".join(f"  {name:<14} {verb.summary}" for name, verb in VERBS.items())
    last = "Every verb has --help. megatron-moe --version says which Megatron with which patches this is."
    return f"usage: megatron-moe VERB ...\n\n{rows}\n\n{last}"


if __name__ == "__main__":
    sys.exit(main())
