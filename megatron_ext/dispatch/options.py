"""The options of the dispatchers: one field, one flag, one sentence. The dispatcher itself is Megatron's to choose:
`--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend twohop` (or `dedup`, `deepep_any`).
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_ext.dispatch.errors import DispatchError

FORMS = ("auto", "static", "alltoallv")
PREFIX = "moe_ext_dispatch_"


def _option(default: Any, sentence: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": sentence, "choices": choices})


@dataclass(frozen=True)
class DispatchOptions:
    """How the dispatchers of this distribution run."""

    form: str = _option(
        "auto",
        "The first hop: static sizes (every token to every node, no split sizes), alltoallv, or auto (static while it "
        "costs at most 5 percent more rows: two nodes).",
        FORMS,
    )
    ranks_per_node: int = _option(0, "Ranks of the expert-parallel group on a node; 0: as placed. Emulates nodes.")
    max_tokens: int = _option(
        0, "Most tokens that a rank has in a micro-batch, for the static form; 0: sequence length times micro-batch."
    )
    fallback: bool = _option(False, "Run dedup where twohop cannot, instead of stopping; the start-up report says so.")

    def __post_init__(self) -> None:
        """Check the values."""
        if self.form not in FORMS:
            raise DispatchError(
                "no such form of the first hop",
                where=f"--moe-ext-dispatch-form {self.form}",
                remedy=f"choose one of {', '.join(FORMS)}",
                exit_code=64,
            )
        for name in ("ranks_per_node", "max_tokens"):
            if getattr(self, name) < 0:
                raise DispatchError(
                    "a count below zero",
                    where=f"--moe-ext-dispatch-{name.replace('_', '-')} {getattr(self, name)}",
                    remedy="leave the flag out",
                    exit_code=64,
                )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--moe-ext-dispatch-*`."""
    group = parser.add_argument_group("dispatchers of this distribution")
    for item in fields(DispatchOptions):
        flag = "--" + (PREFIX + item.name).replace("_", "-")
        # None means "not given": the environment may then answer, for entry scripts without these flags.
        if isinstance(item.default, bool):
            group.add_argument(flag, action="store_true", default=None, help=item.metadata["help"])
        else:
            choices = item.metadata["choices"] or None
            group.add_argument(flag, type=type(item.default), choices=choices, help=item.metadata["help"])


def from_args(args: argparse.Namespace) -> DispatchOptions:
    """Read the flags; one that was not given comes from `MOE_EXT_DISPATCH_<NAME>` or is its default."""
    values = {}
    for item in fields(DispatchOptions):
        given = getattr(args, PREFIX + item.name, None)
        if given is None:
            given = _from_environment(item.name, item.default)
        values[item.name] = given
    return DispatchOptions(**values)


def _from_environment(name: str, default: Any) -> Any:
    word = os.environ.get((PREFIX + name).upper())
    if word is None:
        return default
    if isinstance(default, bool):
        return word.lower() in ("1", "true", "yes")
    try:
        return type(default)(word)
    except ValueError as error:
        raise DispatchError(
            "an environment variable is not a number",
            where=f"{(PREFIX + name).upper()}={word}",
            remedy="set a whole number or unset it",
            exit_code=64,
        ) from error
