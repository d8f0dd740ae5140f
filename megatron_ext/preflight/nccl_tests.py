"""Read what `alltoall_perf` of nccl-tests prints.

Layout (nccl-tests 2.13 to 2.17): `#` lines with the parameters and one `Rank` line a rank, then a row a size: size,
count, type, redop, root, and twice time, algbw, busbw and #wrong, first out of place, then in place. Lines may carry
srun's label (`3: `), and numbers a decimal comma where MPI forwarded another locale.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_ext.errors import UserError
from megatron_ext.preflight.measurement import Column, Measurement

_LABEL = re.compile(r"^\s*\d+:\s?")
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device\s+(\d+)")
_ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+(\w+)\s+(\w+)\s+(-?\d+)\s+(\S.*)$")
_ITERATIONS = re.compile(r"\biters:\s*(\d+)")
_VERSION = re.compile(r"NCCL version[ :]+([\d.]+)")
_VALUES = 4


@dataclass(frozen=True)
class Row:
    """One size: bandwidths in GB/s and wrong elements (None for "N/A"), out of place and in place.

    The in-place half is None where the line stops before it.
    """

    size_bytes: int
    out_of_place: tuple[float, int | None]
    in_place: tuple[float, int | None] | None


@dataclass(frozen=True)
class NcclTestsOutput:
    """A whole output: host of each rank listed, rows in order, and whether it was printed to its end."""

    hosts: tuple[str, ...]
    rows: tuple[Row, ...]
    iterations: int
    nccl_version: str
    complete: bool


def parse_nccl_tests(text: str) -> NcclTestsOutput:
    """Read an output, whole or cut short. Rows that are cut before their first four values are left out."""
    lines = [_LABEL.sub("", line) for line in text.splitlines()]
    hosts = {int(found[1]): found[2] for line in lines if (found := _RANK.match(line))}
    rows = [row for line in lines if (row := _parse_row(line))]
    iterations = [int(found[1]) for line in lines for found in _ITERATIONS.finditer(line) if "warmup" not in found[0]]
    version = _VERSION.search(text)
    return NcclTestsOutput(
        hosts=tuple(hosts[rank] for rank in sorted(hosts)),
        rows=tuple(rows),
        # "warmup iters: 5 iters: 20 agg iters: 1": the second one counts.
        iterations=iterations[1] if len(iterations) > 1 else 0,
        nccl_version=version[1] if version else "",
        complete="Avg bus bandwidth" in text,
    )


def to_measurement(
    output: NcclTestsOutput, *, size_bytes: int | None = None, column: Column = "out of place"
) -> Measurement:
    """Return the figure of one size (the largest by default) and column.

    Raises:
        UserError: The output was cut short, holds no such size, or no rank list.
    """
    if not output.complete or not output.rows or not output.hosts:
        missing = "rank list" if not output.hosts else "result row" if not output.rows else "closing summary"
        raise UserError(
            "the all-to-all output is cut short",
            where=f"{len(output.hosts)} ranks, {len(output.rows)} rows",
            why=f"it has no {missing}: the run died or its log was cut",
            remedy="look at the end of the log and run the test again",
            exit_code=2,
        )
    sizes = [row.size_bytes for row in output.rows]
    wanted = max(sizes) if size_bytes is None else size_bytes
    row = next((row for row in output.rows if row.size_bytes == wanted), None)
    half = None if row is None else row.out_of_place if column == "out of place" else row.in_place
    if half is None:
        raise UserError(
            "the all-to-all output has no such figure",
            where=f"{wanted:,} bytes, {column}",
            why=f"it has {', '.join(f'{size:,}' for size in sizes)} bytes",
            remedy="run alltoall_perf with the size of the baseline: -b 8G -e 8G",
            exit_code=2,
        )
    return Measurement(
        tool="nccl-tests",
        node_list=tuple(dict.fromkeys(output.hosts)),
        ranks=len(output.hosts),
        size_bytes=wanted,
        column=column,
        busbw_gbps=half[0],
        wrong=half[1],
        iterations=output.iterations,
        versions={"nccl": output.nccl_version} if output.nccl_version else {},
    )


def _parse_row(line: str) -> Row | None:
    found = _ROW.match(line)
    if not found:
        return None
    values = found[6].split()
    out = _half(values[:_VALUES])
    if out is None:
        return None
    return Row(int(found[1]), out, _half(values[_VALUES : 2 * _VALUES]))


def _half(values: list[str]) -> tuple[float, int | None] | None:
    if len(values) < _VALUES:
        return None
    try:
        busbw = float(values[2].replace(",", "."))
        return busbw, None if values[3] == "N/A" else int(float(values[3].replace(",", ".")))
    except ValueError:
        return None
