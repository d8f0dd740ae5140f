"""Upcycle a dense checkpoint of 1.2B weights into 64 experts of 1,024 on one CPU: peak memory, size, rate.

    python benchmarks/upcycle_offline.py --folder /big/disk --json benchmarks/results/upcycle_offline.json

The dense checkpoint has the shape of the training handbook's first run (bf16) and random weights, written layer by
layer. Each step is a process of its own; peak memory is what the kernel says of it (ru_maxrss). The rate is given
beside that of writing plain bytes to the same disk. About 20 GB of disk, deleted at the end; minutes. A size that
misses the plan's by more than 1 %, or a peak of 6 GB, ends with status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ext.plan import parameters
from megatron_ext.plan.parameters import ModelShape

DENSE = ModelShape(num_layers=16, hidden=2048, ffn=8192, heads=32, vocab=128256, query_groups=4)
MOE = replace(DENSE, num_experts=64, moe_ffn=1024, topk=8, moe_layers=16)
LIMIT_GB, SIZE_ERROR = 6.0, 0.01
DISK_SAMPLE = 2 << 30


def make_dense(root: Path, shape: ModelShape, std: float = 0.02, dtype_name: str = "bfloat16") -> None:
    """Write a dense checkpoint as Megatron's local layers have it, one tensor of one layer in memory at a time."""
    import torch

    from megatron_ext.upcycle import router
    from megatron_ext.upcycle.target import Block, Content, saved_bytes, write_checkpoint

    dtype, count = getattr(torch, dtype_name), shape.num_layers
    channels = shape.hidden // shape.heads
    queries, hidden = shape.heads * channels, shape.hidden
    wide = queries + 2 * (shape.query_groups or shape.heads) * channels

    def block(name: str, whole: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Block:
        def make() -> torch.Tensor:
            if "norm" in name:
                return torch.ones(sizes, dtype=dtype)
            return router.normal(sizes, std=std, seed=1, name=f"{name}{offsets}").to(dtype)

        return Block(name, whole, dtype, offsets, sizes, make)

    def whole_tensor(name: str, *size: int) -> Block:
        return block(name, size, tuple(0 for _ in size), size)

    blocks = [whole_tensor("embedding.word_embeddings.weight", shape.vocab, hidden)]
    parts = {
        "self_attention.linear_qkv.layer_norm_weight": (hidden,),
        "self_attention.linear_qkv.weight": (wide, hidden),
        "self_attention.linear_proj.weight": (hidden, queries),
        "mlp.linear_fc1.layer_norm_weight": (hidden,),
        "mlp.linear_fc2.weight": (hidden, shape.ffn),
    }
    for layer in range(count):
        for short, size in parts.items():
            blocks.append(block(f"decoder.layers.{short}", (count, *size), (layer, *(0 for _ in size)), (1, *size)))
        # Megatron stores the gate and up halves as two pieces.
        for half in range(2):
            blocks.append(block("decoder.layers.mlp.linear_fc1.weight", (count, 2 * shape.ffn, hidden),
                                (layer, half * shape.ffn, 0), (1, shape.ffn, hidden)))
    blocks.append(whole_tensor("decoder.final_layernorm.weight", hidden))
    objects = {
        f"decoder.layers.{short}._extra_state/shard_{layer}_{count}": saved_bytes(None)
        for short in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
        for layer in range(count)
    }
    args = Namespace(
        num_layers=count, hidden_size=hidden, ffn_hidden_size=shape.ffn, num_attention_heads=shape.heads,
        group_query_attention=bool(shape.query_groups), num_query_groups=shape.query_groups or None, swiglu=True,
        squared_relu=False, add_bias_linear=False, normalization="RMSNorm", transformer_impl="local",
        init_method_std=std, num_experts=None, iteration=1, consumed_train_samples=512, consumed_valid_samples=0,
        seq_length=4096, padded_vocab_size=shape.vocab, untie_embeddings_and_output_weights=False,
    )  # fmt: skip
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 1, "content_metadata": {}}
    objects["common_state/shard_0_1"] = saved_bytes(common)
    write_checkpoint(root, "iter_0000001", "1", Content(blocks, objects, {}))


def measured(command: list[str]) -> tuple[float, int]:
    """Run a command; return its seconds and its peak resident memory in bytes.

    This process imports no torch: the kernel counts a parent's memory for a child until it has become another program.
    """
    started = time.perf_counter()
    child = subprocess.Popen(command)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"status {child.returncode}: {' '.join(command)}")
    return time.perf_counter() - started, usage.ru_maxrss * 1024


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def disk_rate(folder: Path) -> float:
    """Return the GB/s at which plain bytes reach the disk."""
    piece = os.urandom(1 << 24)
    started = time.perf_counter()
    with (folder / "plain").open("wb") as handle:
        for _ in range(DISK_SAMPLE // len(piece)):
            handle.write(piece)
        handle.flush()
        os.fsync(handle.fileno())
    seconds = time.perf_counter() - started
    (folder / "plain").unlink()
    return DISK_SAMPLE / seconds / 1e9


def measure(folder: Path) -> dict[str, Any]:
    """Make the dense checkpoint, upcycle it, measure."""
    dense, moe = folder / "dense", folder / "moe"
    seconds, peak = measured([sys.executable, __file__, "--make-dense", str(dense)])
    print(f"dense checkpoint: {folder_bytes(dense) / 1e9:.2f} GB in {seconds:.0f} s, peak {peak / 1e9:.2f} GB")
    plain = disk_rate(folder)
    words = ["--num-experts", str(MOE.num_experts), "--router-topk", str(MOE.topk), "--moe-ffn-hidden-size",
             str(MOE.moe_ffn)]  # fmt: skip
    seconds, peak = measured([sys.executable, "-m", "megatron_ext.cli", "upcycle", str(dense), str(moe), *words])
    size, planned = folder_bytes(moe), parameters.checkpoint_bytes(MOE)
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {_memory() / 2**30:.0f} GiB",
        "date": time.strftime("%Y-%m-%d"),
        "dense_weights": parameters.total(DENSE),
        "moe_weights": parameters.total(MOE),
        "dense_bytes": folder_bytes(dense),
        "moe_bytes": size,
        "planned_bytes": planned,
        "size_over_plan": round(size / planned, 5),
        "peak_bytes": peak,
        "limit_bytes": int(LIMIT_GB * 1e9),
        "seconds": round(seconds, 1),
        "plain_write_gb_per_s": round(plain, 3),
        "rate_over_plain_write": round(size / seconds / 1e9 / plain, 3),
    }


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to use (default: the system's temporary folder)")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--make-dense", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make_dense:
        make_dense(args.make_dense, DENSE)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="upcycle-offline-", dir=args.folder))
    needed = parameters.checkpoint_bytes(DENSE) + parameters.checkpoint_bytes(MOE) + DISK_SAMPLE
    try:
        if shutil.disk_usage(folder).free < 1.1 * needed:
            raise SystemExit(f"{folder} has too little room: {1.1 * needed / 1e9:.0f} GB are needed")
        result = measure(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    off = abs(result["size_over_plan"] - 1)
    return int(off > SIZE_ERROR or result["peak_bytes"] >= result["limit_bytes"])


if __name__ == "__main__":
    sys.exit(main())
