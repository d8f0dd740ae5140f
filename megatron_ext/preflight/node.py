"""Check the node this runs on and write `node-NAME.json`: raw outputs are kept, so that they can be judged again."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.data.files import write_json
from megatron_ext.preflight import dcgm, hardware
from megatron_ext.preflight.findings import Finding, to_plain
from megatron_ext.preflight.storage import judge_disk
from megatron_ext.preflight.transport import expected_fabric, judge_environment

COMMAND_SECONDS = 300.0


@dataclass(frozen=True)
class NodeOptions:
    """What is expected of a node.

    Args:
        out: Directory of the reports, shared by all nodes.
        run_dir: Where the run will write (default: `out`).
        need_bytes: Free space that the run needs.
        gpus: GPUs that the node must have; None to take what there is.
        transport: One of `transport.FABRICS`.
        num_nodes: Nodes of the allocation.
    """

    out: Path
    run_dir: Path | None = None
    need_bytes: int = 50_000_000_000
    gpus: int | None = None
    transport: str = "auto"
    num_nodes: int = 1


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return this node's name as the scheduler knows it, else its host name."""
    return environ.get("MOE_NODE_NAME") or environ.get("SLURMD_NODENAME") or platform.node()


def check_node(options: NodeOptions, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Run every check of one node, write its report and return the findings."""
    node = node_name(environ)
    fabric = expected_fabric(options.transport, environ, options.num_nodes)
    raw = {command[0]: run_tool(command) for command in (dcgm.COMMAND, hardware.GPU_COMMAND, hardware.EFA_COMMAND)}
    gpu_lines = [line for line in (raw["nvidia-smi"] or "").splitlines() if line[:1].isdigit()]
    findings = [
        dcgm.judge_dcgm(node, raw["dcgmi"]),
        *hardware.judge_gpus(node, raw["nvidia-smi"], options.gpus),
        hardware.judge_efa(
            node,
            raw["fi_info"],
            wanted=fabric == "Libfabric",
            num_gpus=len(gpu_lines) or None,
            rails=environ.get(hardware.RAILS_VARIABLE, ""),
        ),
        *judge_environment(node, environ, fabric),
        *judge_disk(node, options.run_dir or options.out, options.need_bytes),
    ]
    report = {"node": node, "time": time.time(), "findings": to_plain(findings), "raw": raw}
    write_json(options.out / f"node-{node}.json", report)
    return findings


def run_tool(command: Sequence[str]) -> str | None:
    """Return what a tool prints, both streams, in the C locale; None where it is not installed."""
    environ = {**os.environ, "LC_ALL": "C", "LANG": "C"}
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environ,
            timeout=COMMAND_SECONDS, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not end within {COMMAND_SECONDS:.0f} s"
    except OSError as error:
        return str(error)
    return done.stdout
