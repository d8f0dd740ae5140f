"""Put the parts of one preflight directory together: node reports, all-to-all, NCCL logs; one list of findings."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.data.files import write_json
from megatron_ext.errors import UserError
from megatron_ext.preflight.baselines import judge_alltoall, load_baselines
from megatron_ext.preflight.findings import Finding, to_plain, verdict_of
from megatron_ext.preflight.measurement import Measurement, measurement_from_plain
from megatron_ext.preflight.nccl_tests import parse_nccl_tests, to_measurement
from megatron_ext.preflight.pairs import judge_pairs
from megatron_ext.preflight.storage import judge_shared
from megatron_ext.preflight.transport import expected_fabric, judge_transport, read_transport

# A second is more than NTP ever leaves and less than confuses a log; beyond it file times and tokens expire wrongly.
MAX_CLOCK_SKEW_S = 1.0
NCCL_TESTS_LOG = "alltoall.log"


@dataclass(frozen=True)
class JudgeOptions:
    """What to hold a directory against.

    Args:
        out: The directory that the parts wrote.
        baselines: The baselines file.
        num_nodes: Nodes of the allocation; None to take what reported.
        ranks: Ranks expected in the all-to-all.
        size_bytes: Message size to read from nccl-tests' output; 0 for the largest.
        transport: One of `transport.FABRICS`.
    """

    out: Path
    baselines: Path
    num_nodes: int | None = None
    ranks: int | None = None
    size_bytes: int = 0
    transport: str = "auto"


def judge_directory(options: JudgeOptions) -> list[Finding]:
    """Judge everything in the directory, write `preflight.json` there and return the findings."""
    reports = [_read_json(path) for path in sorted(options.out.glob("node-*.json"))]
    findings = [Finding(**row) for report in reports for row in report["findings"]]
    findings.append(judge_shared([report["node"] for report in reports], options.num_nodes, options.out))
    measurement, more = read_measurement(options.out, options.size_bytes)
    if measurement is None:
        findings.append(_not_measured(options.out))
    else:
        runs = load_baselines(options.baselines)
        findings.append(judge_alltoall(measurement, runs, expected_ranks=options.ranks))
        findings += judge_more(more, measurement)
    findings += judge_logs(options.out, options.transport, options.num_nodes or len(reports))
    write_json(options.out / "preflight.json", {
        "verdict": verdict_of(findings),
        "findings": to_plain(findings),
        "measurement": measurement.to_plain() if measurement else None,
        "nodes": sorted(report["node"] for report in reports),
    })  # fmt: skip
    return findings


def read_measurement(out: Path, size_bytes: int = 0) -> tuple[Measurement | None, dict[str, Any]]:
    """Return the all-to-all figure of a directory and, from our own tool, what came with it.

    Raises:
        UserError: nccl-tests' output was cut short.
    """
    own, log = out / "alltoall.json", out / NCCL_TESTS_LOG
    if own.exists():
        plain = _read_json(own)
        return measurement_from_plain(plain["measurement"]), plain
    if log.exists():
        text = log.read_text(encoding="utf-8", errors="replace")
        return to_measurement(parse_nccl_tests(text), size_bytes=size_bytes or None), {}
    return None, {}


def judge_more(plain: dict[str, Any], measurement: Measurement) -> list[Finding]:
    """Judge what our own all-to-all also took: pairs of nodes and clocks."""
    findings = []
    if plain.get("pairs"):
        pairs = {(pair["nodes"][0], pair["nodes"][1]): pair for pair in plain["pairs"]}
        gbps = {pair: found["busbw_gbps"] for pair, found in pairs.items()}
        wrong = {pair: found["wrong"] for pair, found in pairs.items()}
        findings += judge_pairs(measurement.node_list, gbps, wrong)
    offsets = plain.get("clock_offsets_s", {})
    if len(offsets) > 1:
        node, worst = max(offsets.items(), key=lambda item: abs(item[1]))
        good = abs(worst) <= MAX_CLOCK_SKEW_S
        remedy = (
            "" if good else "set the node's clock (chronyc tracking): file times and logs of the run would not agree"
        )
        where = "all nodes" if good else node
        against = f"within {MAX_CLOCK_SKEW_S} s"
        findings.append(Finding("clock", where, "good" if good else "bad", f"{worst:+.3f} s", against, remedy))
    return findings


def judge_logs(out: Path, transport: str, num_nodes: int) -> list[Finding]:
    """Judge the transport of every rank that left a log under `nccl/`, or of nccl-tests' joint log."""
    logs = {path.stem: path for path in sorted((out / "nccl").glob("*.log"))}
    if not logs and (out / NCCL_TESTS_LOG).exists():
        logs = {"nccl-tests": out / NCCL_TESTS_LOG}
    fabric = expected_fabric(transport, os.environ, num_nodes)
    if not logs:
        if fabric in ("off", "any"):
            return []
        remedy = "run the all-to-all with NCCL_DEBUG=INFO"
        return [Finding("transport", str(out / "nccl"), "unknown", "no NCCL log", fabric, remedy)]
    read = {rank: read_transport(path.read_text(encoding="utf-8", errors="replace")) for rank, path in logs.items()}
    return judge_transport(read, fabric)


def logs_of(paths: Sequence[Path]) -> dict[str, Path]:
    """Return rank name -> log file for files or directories of logs.

    Raises:
        UserError: There is none.
    """
    found = [file for path in paths for file in (sorted(path.rglob("*.log")) if path.is_dir() else [path])]
    missing = [str(file) for file in found if not file.is_file()]
    if missing or not found:
        raise UserError(
            "there is no log to read", where=", ".join(missing or map(str, paths)), exit_code=2,
            remedy="name the files that NCCL_DEBUG_FILE wrote, one a rank, or their directory",
        )  # fmt: skip
    return {file.stem: file for file in found}


def _not_measured(out: Path) -> Finding:
    remedy = f"run alltoall_perf with its output in {out / NCCL_TESTS_LOG}, or `megatron-moe preflight alltoall` there"
    return Finding("all-to-all", str(out), "unknown", "not measured", "", remedy)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            "a preflight report cannot be read", where=str(path), why=str(error), exit_code=2,
            remedy="remove it and run that part again",
        ) from error  # fmt: skip
    return plain
