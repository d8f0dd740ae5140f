"""Whether DeepEP's wheel runs on this machine's torch and NCCL, and how it compares with `dedup` over NVLink.

    python benchmarks/deepep_nvlink.py --wheel DIR --out FILE [--nccl DIR]

--wheel holds the unpacked wheel (sgl-deep-ep). First a plain import, whose error is the reason why not. Its compiled
part asks for functions that torch 2.11 and its NCCL lack, but only the newer interface (`ElasticBuffer`) calls those of
NCCL, so then an import that binds a function when it is first called: under it the older interface (`Buffer`, CUDA's
own memory handles between the GPUs of a host) can work. With --nccl, a folder with `lib` and `include` of NCCL 2.30.4
or later, the newer interface is tried instead: that library stands in torch's place while the ranks run, and is put
back. Two ranks dispatch and combine; what arrives must equal, bit for bit, what the choices say; then both dispatchers
take turns. Nothing here is how training loads DeepEP.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gated_run

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
HIDDEN, EXPERTS, TOP_K = 2048, 64, 8
SIZES = (2048, 8192, 32768)
# The newer interface compiles its kernels first.
LIMIT_S = 75


def launch(args: argparse.Namespace) -> int:
    """Import plainly in a process of its own, then start two ranks that bind lazily."""
    paths = os.pathsep.join([str(args.wheel.resolve()), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "NVSHMEM_DISABLE_NVLS": "1"}
    plain = subprocess.run(
        [sys.executable, "-c", "import deep_ep"], env=environment, capture_output=True, text=True, timeout=120
    )
    reason = plain.stderr.strip().splitlines()[-1] if plain.returncode else "works"
    print(f"plain import: {reason}", flush=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    log = args.out.with_suffix(".log")
    command += ["--out", str(args.out)]
    if args.nccl:
        environment["EP_NCCL_ROOT_DIR"] = str(args.nccl.resolve())
        command.append("--newer")
    with contextlib.ExitStack() as after:
        if args.nccl:
            after.enter_context(another_nccl(args.nccl / "lib" / "libnccl.so.2"))
        done = run_limited(command, environment, log)
    if done:
        print(f"lazy import, two ranks: ended with {done}\n{gated_run.failure(log.read_text(), 1000)}")
        args.out.write_text(json.dumps({"plain_import": reason, "ended_with": done}, indent=1) + "\n")
        return 1
    record = {"plain_import": reason, **json.loads(args.out.read_text())}
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"lazy import, {record['api']}: {record['checked']} rows equal bit for bit")
    for row in record["rows"]:
        print({key: round(value, 3) for key, value in row.items()})
    return 0


def run_limited(command: list[str], environment: dict[str, str], log: Path) -> int:
    """Run into a log and return the exit status, 124 where it took longer than `LIMIT_S`."""
    with log.open("w") as out:
        job = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        try:
            return job.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            # Not killed: torchrun ends its ranks, which are in sessions of their own.
            job.terminate()
            job.wait()
            return 124


@contextlib.contextmanager
def another_nccl(library: Path) -> Iterator[None]:
    """Put a library in the place of the one that torch's own run path finds first, for a while."""
    import importlib.util

    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    place = Path(spec.origin).parents[1] / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    kept = place.with_suffix(".kept")
    place.rename(kept)
    try:
        shutil.copy(library, place)
        yield
    finally:
        kept.replace(place)


def rank(args: argparse.Namespace) -> int:
    """Be one of the ranks."""
    import torch
    import torch.distributed as dist

    from megatron_ext.dispatch.autograd import combine, dispatch
    from megatron_ext.dispatch.deepep import Transfer, TransferV1, TransferV2
    from megatron_ext.dispatch.engine import Engine
    from megatron_ext.dispatch.layout import Layout
    from megatron_ext.dispatch.transport import make_groups

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    dist.barrier()
    sys.setdlopenflags(os.RTLD_LAZY)
    import deep_ep

    here, world = dist.get_rank(), dist.get_world_size()
    transfer: Transfer
    if args.newer:
        transfer = TransferV2(deep_ep, dist.group.WORLD, EXPERTS, max(SIZES))
    else:
        transfer = TransferV1(deep_ep, dist.group.WORLD, EXPERTS)
    layout = Layout(world, here, EXPERTS // world, world)
    engine = Engine(layout, make_groups(layout, dist.group.WORLD, two_hops=False), static=False)
    checked = check(transfer, here, world)
    rows = []
    for tokens in SIZES:
        x, ids, weights = tokens_of(here, tokens)
        received = transfer.dispatch(x, ids, weights)
        arrived, _, handle = dispatch(engine, x, ids, weights)
        ms = in_turns(
            {
                "deepep_dispatch_ms": lambda x=x, i=ids, w=weights: transfer.dispatch(x, i, w),
                "dedup_dispatch_ms": lambda x=x, i=ids, w=weights: dispatch(engine, x, i, w),
                "deepep_combine_ms": lambda r=received: transfer.combine(r.rows, r.handle, None),
                "dedup_combine_ms": lambda a=arrived, h=handle: combine(engine, a, h),
            }
        )
        rows.append({"tokens": tokens, **ms})
    if here == 0:
        api = "ElasticBuffer" if args.newer else "Buffer"
        versions = {"torch": torch.__version__, "deep_ep": deep_ep.__version__, "nccl": list(torch.cuda.nccl.version())}
        args.out.write_text(json.dumps({"api": api, "checked": checked, **versions, "rows": rows}) + "\n")
    dist.barrier()
    os._exit(0)


def tokens_of(rank: int, tokens: int) -> tuple[Any, Any, Any]:
    """A rank's tokens [T, H] bf16, choices [T, k] int64 ascending, weights [T, k] fp32.

    The first columns say where a token comes from, in numbers that bf16 holds exactly.
    """
    import torch

    made = torch.Generator(device="cuda").manual_seed(rank + 7 * tokens)
    x = torch.randn(tokens, HIDDEN, device="cuda", generator=made).bfloat16()
    number = torch.arange(tokens, device="cuda")
    x[:, 0], x[:, 1], x[:, 2] = rank, number // 256, number % 256
    ids = torch.rand(tokens, EXPERTS, device="cuda", generator=made).topk(TOP_K).indices.sort(dim=1).values
    return x, ids, torch.rand(tokens, TOP_K, device="cuda", generator=made)


def check(transfer: Any, here: int, world: int) -> int:
    """Hold what arrives, and what comes home, against the choices; return how many rows were compared."""
    import torch

    counts = [3000, 1111]
    everyone = [tokens_of(rank, counts[rank]) for rank in range(world)]
    local = EXPERTS // world
    received = transfer.dispatch(*everyone[here])
    rows = received.rows.float()
    source, number = rows[:, 0].long(), (rows[:, 1] * 256 + rows[:, 2]).long()
    arrived = 0
    for rank, (x, ids, weights) in enumerate(everyone):
        mine = ids.div(local, rounding_mode="floor") == here
        wanted = mine.any(dim=1).nonzero().flatten()
        got = (source == rank).nonzero().flatten()
        got = got[number[got].argsort()]
        assert torch.equal(number[got], wanted), "which tokens arrived"
        assert torch.equal(received.rows[got], x[wanted]), "their values"
        right = torch.where(mine, ids - here * local, -1)[wanted]
        assert torch.equal(received.ids[got], right), "their experts"
        kept = torch.where(mine, weights, 0.0)[wanted]
        assert torch.equal(torch.where(right >= 0, received.weights[got], 0.0), kept), "their weights"
        arrived += len(wanted)
    assert len(rows) == arrived, "nothing else arrived"
    home, _ = transfer.combine(received.rows, received.handle, None)
    x, ids, _ = everyone[here]
    copies = torch.stack([(ids.div(local, rounding_mode="floor") == rank).any(1) for rank in range(world)]).sum(0)
    assert torch.equal(home, x * copies[:, None].bfloat16()), "the sum of a token's copies"
    return arrived + len(home)


def in_turns(cases: dict[str, Callable[[], object]], repeats: int = 20) -> dict[str, float]:
    """Median ms of the slowest rank for each case, the cases taking turns."""
    import torch
    import torch.distributed as dist

    samples: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeats + 3):
        for name, run in cases.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            begin.record()
            run()
            end.record()
            end.synchronize()
            if turn >= 3:
                samples[name].append(begin.elapsed_time(end))
    table = torch.tensor(list(samples.values()), device="cuda")
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return {name: statistics.median(row) for name, row in zip(samples, table.tolist(), strict=True)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="folder of the unpacked wheel")
    parser.add_argument("--nccl", type=Path, help="folder of another NCCL: tries the newer interface")
    parser.add_argument("--newer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    return rank(args) if "RANK" in os.environ else launch(args)


if __name__ == "__main__":
    sys.exit(main())
