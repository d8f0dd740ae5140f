"""Run as 4 ranks: every configuration of the matrix in one process start; rank 0 writes the losses as JSON.

    python -m torch.distributed.run --nproc-per-node 4 matrix_child.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from itertools import product
from pathlib import Path

import torch

from megatron_ext.runtime import cpu

if __name__ == "__main__":
    cpu.install()

from gpt import Layout, Moe, Shape, build, load, loss, moe_flags, save_dense, unwrapped, use_groups

SHAPES = {
    "full": (Shape(), Moe()),
    "sliced": (Shape(), Moe(64, 8, 8)),
    "sigmoid": (Shape("squared_relu"), Moe(16, 4, 32, 1, {"moe_router_score_function": "sigmoid",
                                                         "moe_router_topk_scaling_factor": 2.5,
                                                         "moe_router_enable_expert_bias": True})),
    "mixed": (Shape(tied=True), Moe(8, 4, 16, [0, 1, 1, 0], {"moe_shared_expert_intermediate_size": 16})),
    "second": (Shape("gelu"), Moe(8, 2, 32, 2, {"moe_shared_expert_intermediate_size": 16,
                                                "moe_shared_expert_gate": True})),
    "biases": (Shape("gelu", biases=True), Moe(8, 4, 16)),
    "bf16": (Shape(dtype=torch.bfloat16), Moe(16, 4, 16)),
}  # fmt: skip
LAYOUTS = {
    "tp2pp2 to ep4": (Layout(tp=2, pp=2), Layout(ep=4)),
    "pp4 to pp2ep2": (Layout(pp=4), Layout(pp=2, ep=2)),
    "tp4 to vpp2pp2ep2": (Layout(tp=4), Layout(pp=2, vpp=2, ep=2)),
    "vpp2pp2 to tp2ep2etp1": (Layout(pp=2, vpp=2), Layout(tp=2, ep=2, etp=1)),
    "one to tp2pp2": (Layout(), Layout(tp=2, pp=2)),
    "tp2 to pp4": (Layout(tp=2), Layout(pp=4)),
}
# Megatron adds no expert biases under expert tensor parallelism.
CASES = [f"{shape} / {layout}" for shape, layout in product(SHAPES, LAYOUTS)
         if (shape, layout) != ("biases", "one to tp2pp2")]


def run_case(name: str, folder: Path) -> dict[str, float]:
    """Return the dense loss, the MoE's before and after loading, and how far the in-training path is from it."""
    from megatron_ext.cli import main

    shape_name, layout_name = name.split(" / ")
    shape, moe = SHAPES[shape_name]
    source, target = LAYOUTS[layout_name]
    root = folder / name.replace(" / ", "-").replace(" ", "_")
    use_groups(source)
    dense = build(shape, source)
    before = shared(loss(dense, shape))
    save_dense(dense, root / "dense", shape)
    if torch.distributed.get_rank() == 0:
        words = ["upcycle", str(root / "dense"), str(root / "moe"), *moe_flags(moe), "--json"]
        assert main(words) == 0
    torch.distributed.barrier()
    use_groups(target)
    made = build(shape, target, moe)
    fresh = shared(loss(made, shape))
    load(made, root / "moe" / "release")
    after = shared(loss(made, shape))
    return {"dense": before, "fresh": fresh, "moe": after, "apart": shared(in_training(made, shape, target, root))}


def in_training(made: list, shape: Shape, target: Layout, root: Path) -> float:
    """Upcycle under the target layout as --moe-use-upcycling does; return the largest difference on this rank."""
    from megatron.core.transformer.moe import upcycling_utils

    from megatron_ext.upcycle import in_training as room

    dense = build(shape, target)
    load(dense, root / "dense" / "iter_0000012")
    room._run_choices = lambda scaling, seed: (scaling, 1234)  # there are no Megatron arguments in this process
    state = upcycling_utils.upcycle_state_dict(unwrapped(made), dense)
    apart = 0.0
    for i, chunk in enumerate(unwrapped(made)):
        mine = state["model" if len(made) == 1 else f"model{i}"]
        loaded = chunk.state_dict()
        assert mine.keys() == loaded.keys()
        for name, value in loaded.items():
            if isinstance(value, torch.Tensor):
                apart = max(apart, float((value.double() - mine[name].double()).abs().max()))
    worst = torch.tensor([apart])
    torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
    return float(worst)


def shared(value: float | None) -> float:
    """Return the last stage's loss on every rank."""
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return float(next(one for one in reversed(values) if one is not None))


def run_all(folder: Path) -> None:
    """Run every case; a failing one is recorded with its traceback, and ends the run on all ranks."""
    torch.distributed.init_process_group("gloo")
    results: dict[str, object] = {}
    for name in CASES:
        try:
            results[name] = run_case(name, folder)
        except Exception:
            results[name] = traceback.format_exc()
            (folder / "results.json").write_text(json.dumps(results))
            os._exit(1)  # the other ranks wait in a collective; torchrun ends them
        if torch.distributed.get_rank() == 0:
            (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_all(Path(sys.argv[1]))
