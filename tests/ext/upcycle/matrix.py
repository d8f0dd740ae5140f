"""The matrix: shapes times parallel layouts of source and target. Run as a script it forks 4 real ranks over gloo.

    matrix.py FOLDER CASE...        writes FOLDER/results.json as it goes

Megatron is imported once, before the ranks are forked, and every case makes its process groups anew in them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from itertools import product
from pathlib import Path

import torch

from megatron_ext.runtime import cpu

if __name__ == "__main__":
    torch.set_num_threads(1)
    cpu.install()

from gpt import Layout, Moe, Shape, build, load, losses, moe_flags, replace, save_dense, unwrapped, use_groups

WORLD = 4
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
    "predicting": (Shape(mtp=1), Moe(16, 4, 16)),
}  # fmt: skip
# The same models in bf16, and some that only it has.
SHAPES |= {f"{name} bf16": (replace(SHAPES[name][0], dtype=torch.bfloat16), SHAPES[name][1])
           for name in ("full", "sliced", "mixed", "biases")}
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
         if not (shape.startswith("biases") and layout == "one to tp2pp2")]
# One of each: slices, mixed layers, biases, bf16; tensor, pipeline, virtual pipeline and expert parallel.
FEW = [
    "sliced / tp2pp2 to ep4",
    "mixed / pp4 to pp2ep2",
    "sliced bf16 / tp4 to vpp2pp2ep2",
    "biases / vpp2pp2 to tp2ep2etp1",
]


def run_case(name: str, folder: Path) -> dict[str, object]:
    """Return the micro-batches' losses of the dense model and of the MoE before and after loading.

    `apart` is how far the weights that the path inside training makes are from the loaded ones, at most.
    """
    from megatron_ext.cli import main

    shape_name, layout_name = name.split(" / ")
    shape, moe = SHAPES[shape_name]
    source, target = LAYOUTS[layout_name]
    root = folder / name.replace(" / ", "-").replace(" ", "_")
    started = time.perf_counter()
    use_groups(source)
    dense = build(shape, source)
    before = last_stage(losses(dense))
    save_dense(dense, root / "dense", shape)
    if torch.distributed.get_rank() == 0:
        words = ["upcycle", str(root / "dense"), str(root / "moe"), *moe_flags(moe), "--json"]
        assert main(words) == 0
    torch.distributed.barrier()
    use_groups(target)
    made = build(shape, target, moe)
    fresh = last_stage(losses(made))
    load(made, root / "moe" / "release")
    after = last_stage(losses(made))
    apart = in_training(made, shape, target, root)
    shutil.rmtree(root, ignore_errors=True)
    return {"dense": before, "fresh": fresh, "moe": after, "apart": apart, "seconds": time.perf_counter() - started}


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


def last_stage(value: list[float] | None) -> list[float]:
    """Return the last pipeline stage's losses on every rank."""
    values: list[list[float] | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return next(one for one in reversed(values) if one is not None)


def run_cases(names: list[str], folder: Path) -> None:
    """Run the cases on this rank. Rank 0 writes what they gave; one that fails is written and ends the run."""
    results: dict[str, object] = {}
    for name in names:
        try:
            results[name] = run_case(name, folder)
        except BaseException:
            # The other ranks wait in a collective; `fork.run` ends them.
            results[name] = traceback.format_exc()
            (folder / "results.json").write_text(json.dumps(results))
            raise
        if torch.distributed.get_rank() == 0:
            (folder / "results.json").write_text(json.dumps(results))


def run_in_child(names: list[str], folder: Path, root: Path) -> dict[str, object]:
    """Run cases on 4 ranks that a fresh process forks; return what each gave."""
    here = Path(__file__).parent
    places = [root, root / "build/megatron", here, root / "tests", root / "tests/ranks"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
           "PYTHONPATH": ":".join(str(place) for place in places)}
    with (folder / "log").open("w") as log:
        subprocess.run([sys.executable, __file__, str(folder), *names], env=env, stdout=log, stderr=log, timeout=560,
                       check=False)
    path = folder / "results.json"
    assert path.exists(), (folder / "log").read_text()[-3000:]
    return json.loads(path.read_text())


if __name__ == "__main__":
    import fork
    from megatron.core.models.gpt import gpt_model  # noqa: F401  (before the fork, once)

    fork.run(WORLD, run_cases, sys.argv[2:], Path(sys.argv[1]), timeout_s=540)
