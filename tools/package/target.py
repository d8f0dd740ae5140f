"""The machine that a bundle is for: its Python, its platform, its CUDA; and which wheels it can install."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from tools.mpatch.errors import UsageError

# The oldest glibc that wheels are tagged for in this form.
OLDEST_GLIBC_MINOR = 17


@dataclass(frozen=True)
class Target:
    """Where a bundle shall be installed.

    Args:
        python: Series, e.g. "3.12".
        machine: As wheels say it, e.g. "x86_64".
        glibc_minor: 28 for glibc 2.28, the oldest that the machine may have.
        cuda: Major version, e.g. "13".
    """

    python: str
    machine: str = "x86_64"
    glibc_minor: int = 28
    cuda: str = "13"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"3\.\d+", self.python):
            raise UsageError("not a Python series", where=f"--python {self.python}", remedy="e.g. --python 3.12")
        if not self.cuda.isdigit():
            raise UsageError("not a major version of CUDA", where=f"--cuda {self.cuda}", remedy="e.g. --cuda 13")

    @property
    def uv_platform(self) -> str:
        """As uv names it."""
        return f"{self.machine}-manylinux_2_{self.glibc_minor}"

    @property
    def platforms(self) -> list[str]:
        """As pip names them, newest first."""
        minors = range(self.glibc_minor, OLDEST_GLIBC_MINOR - 1, -1)
        return [*(f"manylinux_2_{minor}_{self.machine}" for minor in minors), f"manylinux2014_{self.machine}"]

    @cached_property
    def tags(self) -> frozenset[Tag]:
        """Every tag that fits. A plain `linux` wheel was built by hand for such machines, ours for one."""
        version = tuple(int(part) for part in self.python.split("."))
        platforms = [*self.platforms, f"linux_{self.machine}"]
        interpreter = f"cp{version[0]}{version[1]}"
        return frozenset(
            [*cpython_tags(version, platforms=platforms), *compatible_tags(version, interpreter, platforms)]
        )

    def fits(self, wheel: Path) -> bool:
        """Return whether the machine can install this wheel, by its name."""
        try:
            return bool(parse_wheel_filename(wheel.name)[3] & self.tags)
        except InvalidWheelFilename:
            return False


def size_bytes(text: str) -> int:
    """Return a size in bytes; K, M and G are powers of 1024.

    Raises:
        UsageError: it is no size, or under 1M: the smallest that holds the bundle's own files.

    >>> size_bytes("56M"), size_bytes("2G")
    (58720256, 2147483648)
    """
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    size = int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]] if match else 0
    if size < 1 << 20:
        raise UsageError("not a size that a bundle can be split to", where=f"--split {text}",
                         remedy="at least 1M, e.g. --split 56M")  # fmt: skip
    return size
