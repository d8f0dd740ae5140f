"""`megatron-moe bench dispatch`: start the ranks, time the dispatchers, print the table."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.usage import whole

NAMES = ("alltoall", "megatron", "dedup", "dedup-static", "twohop", "twohop-static")
DTYPES = ("bfloat16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the verb."""
    parser.add_argument("subject", choices=["dispatch"], help="what to time")
    parser.add_argument("--ranks", type=whole(), help="ranks to start (default: the GPUs here, or 4 on the CPU)")
    parser.add_argument("--ranks-per-node", type=whole(), help="emulate nodes of this many ranks (default: one node)")
    parser.add_argument("--tokens", type=whole(), nargs="+", help="tokens a rank (default 2k to 32k; 256 on the CPU)")
    parser.add_argument("--hidden", type=whole(), help="hidden size (default 2048; 256 on the CPU)")
    parser.add_argument("--experts", type=whole(), default=64, help="experts over all ranks (default 64)")
    parser.add_argument("--top-k", type=whole(), default=8, help="choices a token (default 8)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the tokens (default bfloat16)")
    parser.add_argument("--dispatchers", nargs="+", choices=NAMES, help="default: all that run here")
    parser.add_argument("--repeats", type=whole(), default=20, help="timed turns (default 20)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--out", type=Path, help="also write the JSON here")


def run(args: argparse.Namespace) -> int:
    """Start the ranks, or be one of them when `torchrun` started us."""
    if "RANK" not in os.environ:
        return _launch(args)
    return _rank(args)


def _launch(args: argparse.Namespace) -> int:
    import torch

    ranks = args.ranks or torch.cuda.device_count() or 4
    _check(args, ranks)
    words = sys.argv[sys.argv.index("bench") :] if "bench" in sys.argv else ["bench", args.subject]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environ = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run([*command, "-m", "megatron_ext.cli", *words], env=environ).returncode


def _rank(args: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    from megatron_ext.dispatch import bench
    from megatron_ext.dispatch.layout import Layout

    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(backend="nccl" if cuda else "gloo", device_id=device if cuda else None)
    world = dist.get_world_size()
    try:
        layout = Layout(world, dist.get_rank(), _share(args.experts, world), args.ranks_per_node or world)
        names = args.dispatchers or usable(layout, cuda=cuda)
        sends = bench.dispatchers(layout, dist.group.WORLD, names)
        hidden, sizes = args.hidden or (2048 if cuda else 256), args.tokens or _sizes(cuda)
        rows: list[bench.Timing] = []
        for skewed in (False, True):
            for tokens in sizes:
                shape = bench.Shape(tokens, hidden, args.experts, args.top_k, getattr(torch, args.dtype), skewed)
                rows += bench.time_all(sends, shape, dist.group.WORLD, device=device, repeats=args.repeats)
        if layout.rank == 0:
            _report(args, layout, rows, device)
    finally:
        dist.destroy_process_group()
    return 0


def _check(args: argparse.Namespace, ranks: int) -> None:
    """Refuse before the ranks start what they would refuse: torchrun prints a page about each of them."""
    import torch

    from megatron_ext.dispatch.layout import Layout

    Layout(ranks, 0, _share(args.experts, ranks), args.ranks_per_node or ranks)
    if args.top_k > args.experts:
        raise UserError(
            "a token cannot choose that many experts",
            where=f"--top-k {args.top_k}, --experts {args.experts}",
            remedy="change one of the two numbers",
            exit_code=64,
        )
    if "megatron" in (args.dispatchers or ()) and not torch.cuda.is_available():
        raise UserError(
            "upstream's dispatcher is timed on GPUs only",
            where="--dispatchers megatron",
            why="it works on CUDA streams",
            remedy="leave it out; alltoall is the same exchange",
            exit_code=64,
        )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)


def _share(experts: int, world: int) -> int:
    if experts % world:
        raise UserError(
            "the experts do not divide over the ranks",
            where=f"--experts {experts}, {world} ranks",
            remedy="choose --ranks, or --experts as a multiple of them",
            exit_code=64,
        )
    return experts // world


def _sizes(cuda: bool) -> list[int]:
    return [2048, 4096, 8192, 16384, 32768] if cuda else [256]


def usable(layout: Any, *, cuda: bool) -> Sequence[str]:
    """The dispatchers that run here: upstream's needs Megatron and CUDA streams, `twohop` nodes of several ranks."""
    names = [n for n in NAMES if n != "megatron" or (cuda and importlib.util.find_spec("megatron"))]
    if 1 in (layout.num_nodes, layout.ranks_per_node):  # both hops are the same
        names = [n for n in names if not n.startswith("twohop")]
    return names


def _report(args: argparse.Namespace, layout: Any, rows: Sequence[Any], device: Any) -> None:
    from dataclasses import asdict

    import torch

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    record = {
        "ranks": layout.world,
        "ranks_per_node": layout.ranks_per_node,
        "device": gpu,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else "",
        "rows": [asdict(row) for row in rows],
    }
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    if args.json:
        print(json.dumps(record))
        return
    _table(layout, rows, gpu)


def _table(layout: Any, rows: Sequence[Any], gpu: str) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:  # a bare GPU machine: the figures matter more than the frame
        for row in rows:
            print(row.name, row.shape["tokens"], "skewed" if row.shape["skewed"] else "even", row.ms, row.total_ms)
        return
    title = f"ms of the slowest rank, {layout.world} ranks, {layout.num_nodes} node(s), {gpu}"
    table = Table("dispatcher", "tokens", "choice", *rows[0].ms, "sum", "speed-up", "spread", "gap", title=title)
    base = {(r.shape["tokens"], r.shape["skewed"]): r.total_ms for r in rows if r.name == rows[0].name}
    for row in rows:
        key = (row.shape["tokens"], row.shape["skewed"])
        table.add_row(
            row.name,
            str(row.shape["tokens"]),
            "skewed" if row.shape["skewed"] else "even",
            *(f"{value:.3f}" for value in row.ms.values()),
            f"{row.total_ms:.3f}",
            f"{base[key] / row.total_ms:.2f}",
            f"{row.spread:.0%}",
            f"{row.largest_gap:.1e}",
        )
    Console(width=140).print(table)
