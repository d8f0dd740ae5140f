"""`megatron-moe doctor`: what is installed here and whether it fits together; one table, no training."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import sys
import sysconfig
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.guard import TREE_VARIABLE, load_record
from megatron_ext.install import Proof, other_megatron, prove_distribution, prove_megatron
from megatron_ext.pins import load_pins
from megatron_ext.preflight.findings import EXIT_CODES, Finding, print_table, to_plain, verdict_of

HERE = "this machine"
# Optional on a CPU, needed for speed on a GPU.
GPU_PACKAGES = {"transformer-engine": "transformer_engine", "nv-grouped-gemm": "grouped_gemm", "sgl-deep-ep": "deep_ep"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Look and print; exit 0 good, 1 something is wrong."""
    findings = [_python(), *_megatron(), _torch(), *map(_package, GPU_PACKAGES)]
    verdict = verdict_of(findings)
    if args.json:
        print(json.dumps({"verdict": verdict, "findings": to_plain(findings)}, indent=2))
    else:
        print_table(findings)
    return EXIT_CODES[verdict]


def _python() -> Finding:
    good = sys.version_info >= (3, 12)
    return Finding("Python", HERE, "good" if good else "bad", sys.version.split()[0], "3.12 or newer",
                   "" if good else "make setup finds or names one")  # fmt: skip


def _megatron() -> list[Finding]:
    remedy = "make setup"
    try:
        pins = load_pins()
    except UserError as error:
        return [Finding("patched Megatron", HERE, "bad", error.what, "", remedy)]
    patches = f"{pins['base']}, {len(pins['patches'])} patches, series {str(pins['series_digest'])[:12]}"
    findings = [Finding("patched Megatron", HERE, "good", patches), *_proofs()]
    spec = importlib.util.find_spec("megatron")
    places = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    core = next((place for place in places if (place / "core").is_dir()), None)
    # One that was compiled for another Python cannot be imported.
    name = f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    value = str(core) if core else "not importable"
    if core is None or not (core / "core" / "datasets" / name).is_file():
        return [*findings, Finding("dataset helper", HERE, "bad", value, name, remedy)]
    return [*findings, Finding("dataset helper", HERE, "good", value)]


def _proofs() -> list[Finding]:
    """Hash what is installed; an upstream package beside ours is named first, as it explains the rest."""
    record = load_record()
    if not record.files:
        return [Finding("Megatron's files", HERE, "skipped", str(record.root), f"{TREE_VARIABLE} names another tree")]
    again = "pip install --force-reinstall --no-deps the wheel; in a checkout: mpatch status"
    findings = []
    other = other_megatron(record)
    if other:
        why = "no megatron-core: it has the same import names, each install overwrites the other's files"
        findings.append(
            Finding("installed Megatron", HERE, "bad", other, why, f"pip uninstall megatron-core, then: {again}")
        )
    megatron = prove_megatron(record)
    findings.append(_proof("Megatron's files", megatron, f"tree {record.tree[:12]}", again))
    wheel = prove_distribution()
    if wheel is not None:
        findings.append(_proof("the wheel's files", wheel, "sha256 in RECORD", again))
    return findings


def _proof(name: str, proof: Proof, against: str, remedy: str) -> Finding:
    return Finding(
        name, HERE, "good" if proof.good else "bad", proof.describe(), against, "" if proof.good else remedy
    )


def _torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("torch", HERE, "bad", str(error), "importable", "install it, the version is in upstream.toml")
    count = torch.cuda.device_count()
    device = f"{count} x {torch.cuda.get_device_name(0)}" if count else "no GPU: the CPU runtime"
    return Finding("torch", HERE, "good", f"{torch.__version__}, {device}")


def _package(name: str) -> Finding:
    try:
        return Finding(name, HERE, "good", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        there = importlib.util.find_spec(GPU_PACKAGES[name]) is not None
        return Finding(name, HERE, "good" if there else "skipped", "installed" if there else "not installed")
