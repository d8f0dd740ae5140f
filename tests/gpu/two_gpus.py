"""Expert parallelism on two real ranks, everything in one start: NCCL on two GPUs, gloo on the CPU.

    torchrun --standalone --nproc-per-node 2 tests/gpu/two_gpus.py        (`test_two_gpus.py` starts it with its paths)

Rank 0 prints one line a check. A check that fails shows its traceback and ends the job with another exit code than 0.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.runtime import cpu

if not torch.cuda.is_available():
    torch.set_num_threads(1)
    cpu.install()

import fork
import gpt
import megatron_ranks
import nccl_check
import numpy as np
import saved
import small
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from observe_child import FileSink
from observe_training import Output
from process_groups import destroy_all

from megatron_ext import cli
from megatron_ext.dispatch import publish
from megatron_ext.dispatch.options import DispatchOptions
from megatron_ext.observe.monitor import Monitor
from megatron_ext.observe.options import AlarmOptions, ObserveOptions
from megatron_ext.upcycle import in_training

WORLD = 2
FC = ("linear_fc1", "linear_fc2")
FP32: dict[str, Any] = {"bf16": False, "params_dtype": torch.float32}
# What is counted within an expert-parallel group or a rank, which are others at EP 1, or says how much memory and time.
OF_THE_GROUP = ("_micro", "rank_max_vio", "rows_off", "choices_off", "dispatch_gib", "memory", "step/")


def transfers(folder: Path) -> str:
    """The dispatchers' own random cases, forward and every gradient, against a dense mixture of experts."""
    if cpu.is_installed():
        return f"{nccl_check.check(40, torch.device('cpu'))} random shapes"
    # Fewer on a GPU, where each one compiles kernels of its own: 40 took 100 s on two H200.
    return f"{nccl_check.check(12, torch.device('cuda', torch.cuda.current_device()))} random shapes"


def dense_layer(layer: Any, tokens: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The layer's output and gradients on this rank, from plain formulas over all ranks' tokens in fp64.

    Softmax over the chosen logits; every expert sees every token, times a weight that is 0 where it was not chosen.
    """
    rank = dist.get_rank()
    weights = {name: value.detach().double().cpu() for name, value in layer.named_parameters()}
    held = [None] * dist.get_world_size()
    dist.all_gather_object(held, {name: value for name, value in weights.items() if "local_experts" in name})
    experts = [
        {kind: part[f"experts.local_experts.{local}.{kind}.weight"].requires_grad_() for kind in FC}
        for part in held
        for local in range(megatron_ranks.EXPERTS // len(held))
    ]
    data = [megatron_ranks.input_and_grad(r, count) for r, count in enumerate(tokens)]
    x = [one.double()[:, 0].requires_grad_() for one, _ in data]
    # A copy of the router a rank: its gradient is that of the rank's own tokens.
    routers = [weights["router.weight"].clone().requires_grad_() for _ in tokens]
    logits = torch.cat([one @ router.T for one, router in zip(x, routers, strict=True)])
    best = logits.topk(layer.config.moe_router_topk, dim=1)
    share = best.values.softmax(dim=1)
    out = torch.zeros(sum(tokens), megatron_ranks.HIDDEN, dtype=torch.float64)
    for number, expert in enumerate(experts):
        gate, up = (torch.cat(x) @ expert["linear_fc1"].T).chunk(2, dim=1)
        weight = (share * (best.indices == number)).sum(1, keepdim=True)
        out = out + weight * ((torch.nn.functional.silu(gate) * up) @ expert["linear_fc2"].T)
    out.backward(torch.cat([grad.double()[:, 0] for _, grad in data]))
    mine = experts[rank * len(experts) // len(held) : (rank + 1) * len(experts) // len(held)]
    return {
        "output": out.detach().split(list(tokens))[rank],
        "grad of the input": x[rank].grad,
        "router.weight": routers[rank].grad,
        **{
            f"experts.local_experts.{local}.{kind}.weight": expert[kind].grad
            for local, expert in enumerate(mine)
            for kind in FC
        },
    }


def layers(folder: Path) -> str:
    """Megatron's MoE layer under each dispatcher, forward and every gradient, against the dense formulas."""
    destroy_all()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=WORLD)
    worst, ran = 0.0, []
    for backend, form, tokens in (
        ("alltoall", "auto", (10, 3)),
        ("allgather", "auto", (10, 10)),  # it wants as many tokens on each rank
        ("dedup", "alltoallv", (10, 3)),
        ("dedup", "static", (10, 10)),
        ("twohop", "alltoallv", (10, 3)),
        ("twohop", "static", (10, 3)),
    ):
        publish._session = publish.Session(DispatchOptions(form=form, ranks_per_node=1), max_tokens=12)
        layer = megatron_ranks.make_layer(backend, WORLD, 1)
        out, grad, *others = megatron_ranks.run_layer(layer, dist.get_rank(), tokens[dist.get_rank()])
        names = [name for name, _ in layer.named_parameters()]
        got = dict(zip(("output", "grad of the input", *names), (out[:, 0], grad[:, 0], *others), strict=True))
        want = dense_layer(layer, tokens)
        assert got.keys() == want.keys()
        for name, right in want.items():
            scale = max(1.0, right.abs().max().item())
            gap = (got[name].double().cpu() - right).abs().max().item() / scale
            worst = max(worst, gap)
            assert gap <= 4e-6, f"{backend} {form}: {name} is off by {gap} of {scale}"
        assert want["output"].abs().max() > 0.1
        ran.append(f"{backend} {form}")
    return f"{', '.join(ran)}: off by at most {worst:.1e} of the largest value"


def watched(trained: small.Training, folder: Path, seed: int) -> dict[str, float]:
    """Train one step under the monitor; return its values (empty but on the last rank) and the exact counts."""
    writes = dist.get_rank() == dist.get_world_size() - 1
    folder.mkdir(exist_ok=True)
    place = argparse.Namespace(seq_length=small.TOKENS, mock_data=True)
    monitor = Monitor(ObserveOptions(interval=1), AlarmOptions(), FileSink(folder) if writes else None, place)
    monitor.attach([trained.model])
    trained.step(seed)
    monitor.step_end(1)
    monitor.flush()
    if not writes:
        return {}
    counts = Output(folder, "").counts(1)
    # Every token's top-2, over both ranks.
    assert (counts.sum(-1) == 2 * small.TOKENS * WORLD).all(), counts
    values = {f"counts/{layer}/{e}": float(n) for layer, row in enumerate(counts) for e, n in enumerate(row)}
    return values | Output(folder, "").metrics(1)


def monitor(folder: Path) -> str:
    """The monitor's values of a step at EP 2 and, from the same weights and tokens, at EP 1."""
    small.groups(WORLD)
    trained = small.training(small.config(WORLD, **FP32))
    for seed in range(2):
        trained.step(seed)
    saved.save(trained, folder / "weights", saved.FULLY)
    wide = watched(trained, folder / "ep2", seed=2)
    small.groups(1)
    alone = small.training(small.config(1, **FP32))
    saved.load(alone, folder / "weights", saved.FULLY)
    narrow = watched(alone, folder / "ep1", seed=2)
    compared = [key for key in narrow if not any(part in key for part in OF_THE_GROUP)]
    for key in compared:
        assert np.isclose(wide[key], narrow[key], rtol=2e-5, atol=1e-7), f"{key}: {wide[key]} {narrow[key]}"
    spread = [value for key, value in narrow.items() if key.startswith("counts/")]
    if narrow:
        assert len([key for key in compared if key.startswith("moe/")]) > 20, compared
        assert max(spread) > min(spread)
    # The last rank has the values; the others' answers are not printed.
    numbers = [len(compared)]
    dist.broadcast_object_list(numbers, src=WORLD - 1)
    return f"{numbers[0]} values equal at EP 2 and EP 1, counts exactly"


def upcycling(folder: Path) -> str:
    """A dense checkpoint of EP 1, upcycled by the command and by training's own step, at EP 2: the dense loss."""
    shape, moe = gpt.Shape(), gpt.Moe(64, 8, 8)
    gpt.use_groups(gpt.Layout())
    dense = gpt.build(shape, gpt.Layout())
    before = gpt.loss(dense, shape)
    gpt.save_dense(dense, folder / "dense", shape)
    if dist.get_rank() == 0:
        assert cli.main(["upcycle", str(folder / "dense"), str(folder / "moe"), *gpt.moe_flags(moe)]) == 0
    dist.barrier()
    wide = gpt.Layout(ep=WORLD)
    gpt.use_groups(wide)
    made = gpt.build(shape, wide, moe)
    assert abs(gpt.loss(made, shape) - before) > 5e-3, "before loading: the comparison can fail"
    gpt.load(made, folder / "moe" / "release")
    offline = abs(gpt.loss(made, shape) - before)
    again = gpt.build(shape, wide, moe)
    again[0].load_state_dict(in_training.convert(again[0], dense[0], seed=7))
    online = abs(gpt.loss(again, shape) - before)
    assert max(offline, online) < 1e-5, f"{offline} {online}"
    return f"first loss off by {offline:.1e} (command), {online:.1e} (in training), of {before:.4f}"


def checkpoints(folder: Path) -> str:
    """EP 2 to EP 1 and back, bf16, gradients reduced in buckets: all equal, and so are the next two steps' losses."""
    made = {}
    for place, (expert_parallel, source) in {"ep2": (2, ""), "ep1": (1, "ep2"), "again": (2, "ep1")}.items():
        small.groups(expert_parallel)
        trained = small.training(small.config(expert_parallel), bucket_size=1500)
        if source:
            saved.load(trained, folder / source, saved.FULLY)
        else:
            for seed in range(3):
                trained.step(seed)
        saved.save(trained, folder / place, saved.FULLY)
        made[place] = [trained.step(seed) for seed in (3, 4)]
    contents = {place: saved.whole_tensors(folder / place) for place in made}
    for place in ("ep1", "again"):
        assert contents["ep2"].keys() == contents[place].keys()
        different = [key for key, value in contents["ep2"].items() if not np.array_equal(value, contents[place][key])]
        assert not different, f"{place}: {different}"
    assert len([key for key in contents["ep2"] if ".exp_avg_sq." in key]) > 10
    gap = np.abs(np.subtract(made["again"], made["ep2"])).max()
    # At EP 1 the experts' products have other shapes, so bf16 may round otherwise.
    other = np.abs(np.subtract(made["ep1"], made["ep2"])).max()
    assert gap <= 1e-5, made
    assert other <= 2e-2, made
    assert abs(made["ep2"][0] - made["ep2"][1]) > 1e-3, made
    return f"{len(contents['ep2'])} tensors to the bit; losses off by {gap:.1e} back at EP 2, {other:.1e} at EP 1"


CHECKS: tuple[Callable[[Path], str], ...] = (transfers, layers, monitor, upcycling, checkpoints)


def main() -> int:
    """Run every check in turn, or those named on the command line."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if cpu.is_installed():
        dist.init_process_group("gloo")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
        # Without a device_id: every check makes Megatron's groups anew, and only those that are used shall connect.
        dist.init_process_group("nccl")
    assert dist.get_world_size() == WORLD
    init_num_microbatches_calculator(dist.get_rank(), None, WORLD, 1, WORLD)
    asked = sys.argv[1:] or [check.__name__ for check in CHECKS]
    with tempfile.TemporaryDirectory() as made:
        shared = [made]
        dist.broadcast_object_list(shared, src=0)
        for check in CHECKS:
            if check.__name__ not in asked:
                continue
            folder, begin = Path(shared[0]) / check.__name__, time.monotonic()
            folder.mkdir(exist_ok=True)
            # As in a fresh process: the check before may have left one of another shape.
            MoEAuxLossAutoScaler.main_loss_backward_scale = None
            try:
                result = check(folder)
                dist.barrier()
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                fork.end_children()
                # At once, without the destructors of groups that wait for the other rank.
                os._exit(1)
            if dist.get_rank() == 0:
                print(f"{check.__name__}: {result} ({time.monotonic() - begin:.1f} s)", flush=True)
        dist.barrier()
    sys.stdout.flush()
    # Megatron's checkpoint writer has started a process that would outlive this one.
    fork.end_children()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
