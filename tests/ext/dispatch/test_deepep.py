"""DeepEP: what is wrong is named with its remedy, its import cannot break a run, and both generations give `dedup`'s
answer."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import deepep_standin
import pytest
import torch
import torch.distributed as dist
from cases import make_data, random_case, run_dense
from gloo_world import run_ranks

from megatron_ext.dispatch import deepep, probe
from megatron_ext.dispatch.deepep_manager import _Combine, _Dispatch
from megatron_ext.dispatch.errors import DispatchError

GOOD = deepep.Facts(
    "sgl-deep-ep", "0.1.2.post1", "v2", "==2.14.1", "2.14.1", (2, 30, 7), True, 1, "p5en.48xlarge", True
)


def _what(**changes: object) -> str:
    return "; ".join(f"{p.what} | {p.remedy}" for p in deepep.problems(replace(GOOD, **changes)))


def test_a_fitting_machine_has_no_problems() -> None:
    assert deepep.problems(GOOD) == []
    deepep.require(GOOD)


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"distribution": "", "api": ""}, ["no deep_ep package", "twohop"]),
        ({"torch_version": "2.11.0"}, ["wants torch==2.14.1, found 2.11.0", "install that torch"]),
        ({"nccl": (2, 28, 9)}, ["NCCL 2.28.9", "2.30.4 or later", "nvidia-nccl-cu13"]),
        ({"version": "2.5.0", "nccl": (2, 30, 7)}, ["2.32.3 or later"]),
        ({"nccl": ()}, ["no NCCL", "run on a GPU"]),
        ({"has_nvcc": False}, ["no nvcc", "CUDA_HOME"]),
        ({"api": "v1", "num_nodes": 2}, ["V1 between nodes over EFA", "twohop"]),
        ({"num_nodes": 2, "instance": "p5.48xlarge"}, ["V2 between nodes over EFA on p5.48xlarge", "twohop"]),
    ],
)
def test_each_reason_is_named_with_its_remedy(changes: dict[str, object], texts: list[str]) -> None:
    said = _what(**changes)
    for text in texts:
        assert text in said
    with pytest.raises(DispatchError, match="DeepEP cannot run here"):
        deepep.require(replace(GOOD, **changes))


def test_v1_inside_a_node_does_not_ask_for_nccl_or_nvcc() -> None:
    assert _what(api="v1", nccl=(2, 20, 0), has_nvcc=False) == ""


@pytest.mark.parametrize("raised", ["AssertionError('no nvcc')", "OSError('undefined symbol')", "ImportError('x')"])
def test_a_broken_deepep_breaks_no_run_that_does_not_ask_for_it(tmp_path: Path, root: Path, raised: str) -> None:
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep" / "__init__.py").write_text(f"raise {raised}\n")
    code = (
        "from megatron_ext.dispatch import deepep, registry, megatron, publish\n"
        "facts = deepep.gather_facts(num_nodes=1, instance='', has_efa=False)\n"
        "assert facts.api == 'v1', facts\n"
        "try:\n    deepep.import_deepep()\n"
        "except ValueError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": f"{tmp_path}:{root}"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "installed but cannot be imported" in done.stdout
    assert raised.split("(")[0] in done.stdout


def test_which_generation_is_read_from_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "deep_ep" / "buffers"
    folder.mkdir(parents=True)
    (tmp_path / "deep_ep" / "__init__.py").write_text("raise AssertionError\n")
    (folder / "elastic.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert deepep.gather_facts(num_nodes=1, instance="", has_efa=False).api == "v2"


def _run(rank: int, world: int, generation: str) -> None:
    """A random case through the adapter over the stand-in, against the dense reference."""
    from megatron_ext.dispatch.autograd import from_experts, order_rows

    for seed in range(6):
        case = replace(random_case(seed, world), dtype=torch.bfloat16, align=0)
        data = make_data(case)
        first = rank * case.num_local_experts
        mine = data.experts[first : first + case.num_local_experts]
        group = dist.group.WORLD
        transfer: deepep.Transfer = deepep.TransferV1(deepep_standin, group, case.num_experts)
        if generation == "v2":
            transfer = deepep.TransferV2(deepep_standin, group, case.num_experts, max(case.tokens))
        x, weights = data.x[rank].clone().requires_grad_(), data.weights[rank].clone().requires_grad_()
        box: list[deepep.Received] = []
        rows, row_weights = _Dispatch.apply(x, weights, data.ids[rank], transfer, box)
        counts = torch.tensor(box[0].tokens_per_expert)
        out, flat, order, counts = order_rows(rows, row_weights, box[0].ids, counts)
        parts = [
            torch.tanh(part @ mine[e]) * w.unsqueeze(1).to(part.dtype)
            for e, (part, w) in enumerate(zip(out.split(counts.tolist()), flat.split(counts.tolist()), strict=True))
        ]
        result = _Combine.apply(from_experts(torch.cat(parts), order), transfer, box[0].handle)
        result.backward(data.grads[rank])
        want = run_dense(case, data)[rank]
        for name, one, right in zip(("output", "grad x", "grad w"), (result, x.grad, weights.grad), want, strict=False):
            scale = max(1.0, right.abs().max().item() if right.numel() else 1.0)
            gap = (one.float() - right).abs().max().item() if one.numel() else 0.0
            assert gap <= 4e-2 * scale, f"{generation} {case}: {name} off by {gap}"


@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_the_adapter_over_the_stand_in_equals_dense(generation: str) -> None:
    run_ranks(_run, 4, generation)


def test_probe_reads_instance_cards_and_environment(tmp_path: Path) -> None:
    (tmp_path / "class" / "dmi" / "id").mkdir(parents=True)
    (tmp_path / "class" / "dmi" / "id" / "product_name").write_text("p5.48xlarge\n")
    for name in ("efa_0", "efa_1", "mlx5_0"):
        (tmp_path / "class" / "infiniband" / name).mkdir(parents=True)
    node = probe.look(tmp_path, {"NCCL_NET_PLUGIN": "ofi", "FI_PROVIDER": "efa"})
    assert node == probe.Node("p5.48xlarge", 2, 1, "ofi", "efa")
    assert "p5.48xlarge, 2 EFA and 1 other RDMA devices" in node.line()


@pytest.mark.parametrize(
    ("nodes", "efa", "used", "copies", "naive", "text"),
    [
        (1, 0, "dedup", 1.75, 1.75, "prefer it"),
        (1, 0, "dedup", 0.998, 4.0, "over NVLink"),
        (2, 32, "twohop", 0.998, 4.0, "up to 8 nodes"),
        (2, 32, "dedup", 3.375, 4.0, "twohop sends fewer still"),
        (16, 32, "twohop", 5.8, 7.5, "forced balance"),
    ],
)
def test_recommendation_follows_nodes_and_savings(
    nodes: int, efa: int, used: str, copies: float, naive: float, text: str
) -> None:
    node = probe.Node("p5.48xlarge", efa, 0, "ofi", "efa")
    said = probe.recommend(node, used=used, num_nodes=nodes, copies=copies, copies_alltoall=naive)
    assert text in said
