"""Known-good figures, kept per node count with their provenance, and the rule that a new figure must meet.

The rule: 90 % of the baseline of the *same* node count, ranks, message size, column and tool, and no wrong element. One
threshold for all node counts would pass a bad pair and fail a good eight nodes (docs/cluster-checks.md).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.data.files import write_json
from megatron_ext.errors import UserError
from megatron_ext.preflight.findings import Finding
from megatron_ext.preflight.measurement import Measurement, measurement_from_plain

SCHEMA = 1
PASS_SHARE = 0.9
CHECK = "all-to-all"
RECORD = "measure a known-good allocation and record it: megatron-moe preflight baseline --out DIR --baselines FILE"


@dataclass(frozen=True)
class Baseline:
    """Every known-good measurement of one configuration; their median is what counts."""

    runs: tuple[Measurement, ...]

    @property
    def busbw_gbps(self) -> float:
        """Median bus bandwidth of the runs, GB/s."""
        return statistics.median(run.busbw_gbps for run in self.runs)


def load_baselines(path: Path) -> tuple[Measurement, ...]:
    """Read the file; a missing one holds none.

    Raises:
        UserError: It cannot be read or is of another form.
    """
    if not path.exists():
        return ()
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        if plain["schema"] != SCHEMA:
            raise ValueError(f"schema {plain['schema']}, this version reads {SCHEMA}")
        return tuple(measurement_from_plain(run) for run in plain["runs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            "the baselines cannot be read", where=str(path), why=str(error),
            remedy="mend the file, or name another with --baselines",
        ) from error  # fmt: skip


def record_baseline(path: Path, new: Measurement) -> Baseline:
    """Add a measurement to the file and return its configuration's baseline.

    Raises:
        UserError: Elements were wrong or not checked: that can be no baseline.
    """
    if new.wrong != 0:
        raise UserError(
            "a measurement with wrong or unchecked elements cannot be a baseline",
            where=f"#wrong {new.wrong if new.wrong is not None else 'not checked'}",
            remedy="run it again with checking on (-c 1); if elements are wrong, find the bad node first",
        )
    runs = (*load_baselines(path), new)
    write_json(path, {"schema": SCHEMA, "runs": [run.to_plain() for run in runs]})
    found = find_baseline(runs, new)
    assert found is not None
    return found


def find_baseline(runs: Sequence[Measurement], like: Measurement) -> Baseline | None:
    """Return the baseline of the same configuration, None where there is none."""
    same = tuple(run for run in runs if _key(run) == _key(like))
    return Baseline(same) if same else None


def judge_alltoall(found: Measurement, runs: Sequence[Measurement], *, expected_ranks: int | None = None) -> Finding:
    """Judge a measurement by the rule above; the rank count first, since a figure of other ranks means nothing."""
    where = f"{found.num_nodes} node{'s' if found.num_nodes > 1 else ''}"
    value = f"{found.busbw_gbps:.2f} GB/s, #wrong {found.wrong if found.wrong is not None else 'unchecked'}"
    if expected_ranks is not None and found.ranks != expected_ranks:
        return Finding(
            CHECK, where, "bad", f"{found.ranks} ranks", f"expected {expected_ranks}",
            "the launcher started too few or unconnected ranks: match the image's MPI to Slurm's (srun --mpi=pmix), "
            "and check --ntasks",
        )  # fmt: skip
    if found.wrong is None:
        return Finding(CHECK, where, "unknown", value, "correctness was not checked", "run it with checking on: -c 1")
    if found.wrong:
        return Finding(
            CHECK, where, "bad", value, "no wrong element",
            "data arrive wrong: do not train here; search the node with `megatron-moe preflight alltoall --pairs`",
        )  # fmt: skip
    baseline = find_baseline(runs, found)
    if baseline is None:
        return _no_baseline(found, runs, where, value)
    floor = PASS_SHARE * baseline.busbw_gbps
    against = f"at least {floor:.2f}: 90 % of {baseline.busbw_gbps:.2f} ({len(baseline.runs)} runs)"
    if found.busbw_gbps < floor:
        nodes = ", ".join(found.node_list)
        return Finding(
            CHECK, where, "bad", value, against,
            f"one of {nodes} or a link between them is slow: `megatron-moe preflight alltoall --pairs` finds it; "
            "compare the settings kept with the baseline too",
        )  # fmt: skip
    return Finding(CHECK, where, "good", value, against)


def _no_baseline(found: Measurement, runs: Sequence[Measurement], where: str, value: str) -> Finding:
    known = sorted({run.num_nodes for run in runs if run.tool == found.tool and run.size_bytes == found.size_bytes})
    why = f"no baseline of this node count, size and tool (there is one for {known} nodes)" if known else "no baseline"
    # One node's links need no cluster to be known good; several do.
    return Finding(CHECK, where, "warning" if found.num_nodes == 1 else "unknown", value, why, RECORD)


def _key(run: Measurement) -> tuple[object, ...]:
    return run.tool, run.num_nodes, run.ranks, run.size_bytes, run.column
