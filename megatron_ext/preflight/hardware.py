"""Read and judge what a node says of its GPUs (`nvidia-smi`) and its EFA devices (`fi_info`)."""

from __future__ import annotations

import re

from megatron_ext.preflight.findings import Finding

GPU_FIELDS = ("index", "name", "temperature.gpu", "clocks.sm", "clocks.max.sm", "clocks_throttle_reasons.active",
              "ecc.errors.uncorrected.volatile.total")  # fmt: skip
GPU_COMMAND = ("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits")
EFA_COMMAND = ("fi_info", "-p", "efa", "-t", "FI_EP_RDM")
# Bits of NVML's nvmlClocksThrottleReasons (nvml.h). A power cap under load is normal and not among them.
THROTTLE_BITS = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
# P5 has 32 EFA devices, four a GPU; OFI_NCCL_FORCE_NUM_RAILS says how many of them one GPU uses.
RAILS_VARIABLE = "OFI_NCCL_FORCE_NUM_RAILS"
_DOMAIN = re.compile(r"^\s*domain:\s*(\S+)", re.MULTILINE)


def judge_gpus(node: str, text: str | None, expected: int | None = None) -> list[Finding]:
    """Judge `GPU_COMMAND`'s output: GPU count, throttling, uncorrected memory errors."""
    if text is None:
        return [Finding("GPUs", node, "skipped", "nvidia-smi is not installed here")]
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == len(GPU_FIELDS) and row[0].isdigit()]
    if not rows:
        said = text.strip().splitlines()[-1][:120] if text.strip() else "no output"
        return [Finding("GPUs", node, "unknown", said, "one line a GPU", "run nvidia-smi on the node")]
    findings = []
    if expected is not None and len(rows) != expected:
        remedy = "the missing GPU fell off the bus or was not allocated: check dmesg for Xid lines, and --gres"
        findings.append(Finding("GPUs", node, "bad", f"{len(rows)} GPUs", f"{expected}", remedy))
    for row in rows:
        findings += _judge_gpu(node, row)
    if not findings:
        hottest = max((int(row[2]) for row in rows if row[2].isdigit()), default=0)
        findings = [Finding("GPUs", node, "good", f"{len(rows)} x {rows[0][1]}, at most {hottest} °C, not throttled")]
    return findings


def judge_efa(node: str, text: str | None, *, wanted: bool, num_gpus: int | None, rails: str) -> Finding:
    """Judge `EFA_COMMAND`'s output: are there devices, and enough of them for the rails asked for.

    Args:
        node: Its name.
        text: The output; None where fi_info is not installed.
        wanted: The environment asks for EFA.
        num_gpus: GPUs of the node, if known.
        rails: Value of `OFI_NCCL_FORCE_NUM_RAILS`, or "".
    """
    devices = sorted(set(_DOMAIN.findall(text or "")))
    if not devices:
        if not wanted:
            return Finding("EFA", node, "skipped", "no EFA here and none asked for")
        said = "fi_info is not installed" if text is None else (text.strip().splitlines() or ["no device"])[-1][:120]
        return Finding(
            "EFA", node, "bad", said, "EFA devices",
            "pass /dev/infiniband into the container, and use the image with the EFA layer (docker/)",
        )  # fmt: skip
    value = f"{len(devices)} devices"
    if num_gpus and rails.isdigit() and len(devices) < int(rails) * num_gpus:
        why = f"{int(rails) * num_gpus}: {RAILS_VARIABLE}={rails} for {num_gpus} GPUs"
        return Finding("EFA", node, "bad", value, why, "ask for the node with all its interfaces, or use fewer rails")
    if num_gpus and len(devices) % num_gpus:
        why, remedy = f"a multiple of {num_gpus} GPUs", "one interface is missing: take the node out of the allocation"
        return Finding("EFA", node, "warning", value, why, remedy)
    return Finding("EFA", node, "good", value)


def _judge_gpu(node: str, row: list[str]) -> list[Finding]:
    where, findings = f"{node} GPU {row[0]}", []
    try:
        bits = int(row[5], 16)
    except ValueError:
        bits = 0
    reasons = [name for bit, name in THROTTLE_BITS.items() if bits & bit]
    if reasons:
        value = f"{', '.join(reasons)} at {row[2]} °C, {row[3]} of {row[4]} MHz"
        remedy = "cooling or power: take the node out; DCGM level 2 in a maintenance window"
        findings.append(Finding("throttling", where, "bad", value, "none", remedy))
    if row[6].isdigit() and int(row[6]):
        remedy = "reset or replace the GPU; do not train on it"
        findings.append(Finding("memory errors", where, "bad", f"{row[6]} uncorrected", "0", remedy))
    return findings
