"""`megatron-moe preflight`: check nodes and network before a run; one table, one verdict, JSON kept."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.preflight.baselines import record_baseline
from megatron_ext.preflight.findings import EXIT_CODES, Finding, print_table, to_plain, verdict_of
from megatron_ext.preflight.judge import JudgeOptions, judge_directory, logs_of, read_measurement
from megatron_ext.preflight.node import NodeOptions, check_node
from megatron_ext.preflight.transport import FABRICS, expected_fabric, judge_transport, read_transport
from megatron_ext.usage import real, whole

PARTS = ("all", "node", "alltoall", "judge", "baseline", "transport")
_HELP = """\
parts:
  all        this machine: node, alltoall over its GPUs (or two CPU processes), judge (default)
  node       this node's DCGM, GPUs, EFA, settings and disk; one task a node, all into the same --out
  alltoall   bandwidth and correctness over torch.distributed; one task a GPU, under torchrun
  judge      put a directory's parts together: table, verdict, preflight.json; exit 0 good, 1 bad, 2 could not tell
  baseline   record a directory's all-to-all as known good
  transport  read NCCL logs (files or directories) and say which network each rank chose
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _HELP
    parser.add_argument("part", nargs="?", choices=PARTS, default="all")
    parser.add_argument("logs", nargs="*", type=Path, help="for `transport`: NCCL logs or their directory")
    parser.add_argument("--out", type=Path, default=Path("preflight"), help="the parts' directory (default preflight)")
    parser.add_argument("--run-dir", type=Path, help="where the run will write, to check its disk (default --out)")
    parser.add_argument("--need-gb", type=real(low=0), default=50.0, help="free space that the run needs (default 50)")
    parser.add_argument("--baselines", type=Path, default=Path(os.environ.get("MOE_BASELINES", "baselines.json")),
                        help="known-good figures (default $MOE_BASELINES, or baselines.json)")  # fmt: skip
    parser.add_argument("--nodes", type=whole(), help="nodes of the allocation")
    parser.add_argument("--ranks", type=whole(), help="ranks expected in the all-to-all")
    parser.add_argument("--gpus", type=whole(0), help="GPUs that each node must have")
    parser.add_argument(
        "--size", default="0", help="send buffer of a rank, e.g. 8G (default: 8G on GPUs, 16M on the CPU)"
    )
    parser.add_argument("--iterations", type=whole(), default=20, help="timed repetitions (default 20)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--pairs", action="store_true", help="measure the nodes pair by pair too, to find a slow one")
    parser.add_argument("--transport", choices=FABRICS, default="auto", help="network that NCCL must use")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Run one part; return the exit status.

    Raises:
        UserError: The size is none, or there is nothing to judge or to record.
    """
    parse_size(args.size)  # before a minute of measuring
    if args.part == "alltoall":
        from megatron_ext.preflight.alltoall import AllToAllOptions, measure

        measure(AllToAllOptions(args.out, parse_size(args.size), args.iterations, args.device, args.pairs))
        return 0
    if args.part == "baseline":
        return _baseline(args)
    if args.part == "node":
        return _show(check_node(_node_options(args)), args.json)
    if args.part == "transport":
        return _show(_transport(args), args.json)
    if args.part == "all":
        _run_here(args)
    elif not args.out.is_dir():
        raise UserError("there is no such folder of parts", where=str(args.out), exit_code=2,
                        remedy="name the --out that the parts wrote into; `megatron-moe preflight` alone does it all")
    return _show(judge_directory(_judge_options(args)), args.json)


def parse_size(text: str) -> int:
    """Return bytes for "8G", "64M", "4096" (powers of 1,024, as nccl-tests reads them).

    Raises:
        UserError: It is no size.
    """
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in units else (text, "")
    if not number.isdigit():
        raise UserError("not a message size", where=f"--size {text}", remedy="e.g. 8G, 64M, 4096", exit_code=64)
    return int(number) * units.get(unit, 1)


def _run_here(args: argparse.Namespace) -> None:
    for stale in ("alltoall.json", "alltoall.log"):
        (args.out / stale).unlink(missing_ok=True)
    shutil.rmtree(args.out / "nccl", ignore_errors=True)
    check_node(_node_options(args))
    ranks = args.ranks = args.ranks or _local_ranks(args.device)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--no-python",
        sys.executable, "-m", "megatron_ext.cli", "preflight", "alltoall", "--out", str(args.out), "--size", args.size,
        "--iterations", str(args.iterations), "--device", args.device,
    ]  # fmt: skip
    log = args.out / "alltoall-run.log"
    with log.open("w") as stream:
        done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        print(f"[preflight] the all-to-all ended with {done.returncode}; its log: {log}", file=sys.stderr)


def _local_ranks(device: str) -> int:
    if device == "cpu":
        return 2
    import torch

    return torch.cuda.device_count() or 2


def _node_options(args: argparse.Namespace) -> NodeOptions:
    nodes = args.nodes or int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    return NodeOptions(args.out, args.run_dir, int(args.need_gb * 1e9), args.gpus, args.transport, nodes)


def _judge_options(args: argparse.Namespace) -> JudgeOptions:
    nodes = args.nodes if args.part == "judge" else args.nodes or 1
    return JudgeOptions(args.out, args.baselines, nodes, args.ranks, parse_size(args.size), args.transport)


def _baseline(args: argparse.Namespace) -> int:
    measurement, _ = read_measurement(args.out, parse_size(args.size))
    if measurement is None:
        raise UserError(
            "there is no measurement to record", where=str(args.out), exit_code=2,
            remedy="run the all-to-all into this directory first",
        )  # fmt: skip
    baseline = record_baseline(args.baselines, measurement)
    print(f"recorded in {args.baselines}: {measurement.num_nodes} nodes, {measurement.ranks} ranks, "
          f"{measurement.size_bytes:,} bytes, {measurement.busbw_gbps:.2f} GB/s; the median of "
          f"{len(baseline.runs)} runs is {baseline.busbw_gbps:.2f}")  # fmt: skip
    return 0


def _transport(args: argparse.Namespace) -> list[Finding]:
    logs = logs_of(args.logs or [args.out / "nccl"])
    read = {rank: read_transport(path.read_text(encoding="utf-8", errors="replace")) for rank, path in logs.items()}
    return judge_transport(read, expected_fabric(args.transport, os.environ, args.nodes or 2))


def _show(findings: Sequence[Finding], as_json: bool) -> int:
    verdict = verdict_of(findings)
    if as_json:
        print(json.dumps({"verdict": verdict, "findings": to_plain(findings)}, indent=2, ensure_ascii=False))
    else:
        print_table(findings)
    return EXIT_CODES[verdict]
