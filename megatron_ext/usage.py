"""Wrong words on a command line: one answer of the house in place of argparse's page of flags, and numbers in range.

Megatron alone has some 900 flags, and under `torchrun` every rank would print them for one mistyped letter.
"""

from __future__ import annotations

import difflib
import math
from argparse import REMAINDER, ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from megatron_ext.errors import UserError

USAGE = 64
_UNKNOWN = "unrecognized arguments: "  # argparse's words


class Parser(ArgumentParser):
    """A parser whose complaints are `UserError`s with the nearest flag that exists."""

    def error(self, message: str) -> NoReturn:
        """Raise the complaint, exit code 64.

        Raises:
            UserError: Always.
        """
        raise wrong_usage(self, message, f"{self.prog} --help")

    def add_subparsers(self, **options: Any) -> Any:
        """Add subjects that name their own unknown flags: argparse would let the outer parser do that."""
        return super().add_subparsers(**{"parser_class": _Subject, **options})


class _Subject(Parser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"{_UNKNOWN}{' '.join(unknown)}")
        return found, unknown


def answer_for(parser: ArgumentParser, help_command: str) -> None:
    """Let a parser that was made elsewhere complain as `Parser` does; `help_command` lists its flags.

    Raises:
        UserError: From the parser, where it would have printed its usage and ended the process.
    """

    def error(message: str) -> NoReturn:
        raise wrong_usage(parser, message, help_command)

    parser.error = error  # type: ignore[method-assign]


def wrong_usage(parser: ArgumentParser, message: str, help_command: str) -> UserError:
    """Return the error for one of argparse's messages."""
    _, _, words = message.partition(_UNKNOWN)
    unknown = [word.partition("=")[0] for word in words.split() if word.startswith("--")]
    known = [flag for action in parser._actions for flag in action.option_strings]
    near = [flag for word in unknown for flag in nearest(word, known)]
    remedy = f"see `{help_command}`"
    if near:
        remedy = f"did you mean {' and '.join(near)}? All flags: `{help_command}`"
    elif unknown and any(action.nargs == REMAINDER for action in parser._actions):
        remedy = f"put Megatron's flags behind a lone --; those before it: `{help_command}`"
    return UserError(message, where=parser.prog, remedy=remedy, exit_code=USAGE)


def nearest(word: str, known: Iterable[str], likeness: float = 0.75) -> list[str]:
    """Return the known word that was probably meant, none where nothing is near; `likeness` is from 0 to 1 (the same).

    Examples:
        >>> nearest("--num-layerz", ["--num-layers", "--seq-length"])
        ['--num-layers']
        >>> nearest("--colour", ["--num-layers"])
        []
    """
    return difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)


def whole(low: int = 1) -> Callable[[str], int]:
    """Return an argparse type: a whole number, `low` or more.

    Raises:
        ArgumentTypeError: From what is returned, for any other text.
    """

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if number < low:
            raise ArgumentTypeError(f"{text!r} is not a whole number of {low} or more")
        return number

    return read


def real(*, above: float | None = None, low: float | None = None) -> Callable[[str], float]:
    """Return an argparse type: a finite number, more than `above`, or `low` or more.

    Raises:
        ArgumentTypeError: From what is returned, for any other text.
    """

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or (above is not None and number <= above) or (low is not None and number < low):
            bound = f" above {above:g}" if above is not None else f" of {low:g} or more" if low is not None else ""
            raise ArgumentTypeError(f"{text!r} is not a number{bound}")
        return number

    return read
