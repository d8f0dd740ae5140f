"""The monitor under every way that Megatron splits or changes a model, in real training: each value against NumPy.

Every rank's router and expert calls are dumped by hooks of the test's own; the numbers that the monitor's one
all-reduce gave are then computed again in float64 from those dumps alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fork import run
from observe_child import train_rank
from observe_training import Output, specification

pytestmark = pytest.mark.ranks

STEP, EXPERTS, TOPK, HIDDEN, SEQUENCE = 2, 8, 2, 64, 64
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2 --num-layers 4"
BIAS = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 "
    "--moe-router-dtype fp32 --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5"
)
DEDUP = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend dedup"
SHARED = "--moe-shared-expert-intermediate-size 64"


@dataclass(frozen=True)
class Case:
    """One configuration: its flags, ranks and sequences a step, MoE layers, and which metrics it can't have."""

    ranks: int
    flags: str
    layers: tuple[int, ...] = (0, 1)
    batch: int = 4
    norms: bool = True
    shared: bool = False
    topk: int = TOPK
    drops: bool = False


CASES = {
    "tp2": Case(2, f"{TP2} --expert-tensor-parallel-size 1 --expert-model-parallel-size 2 {SHARED}", shared=True),
    "tp2-etp2": Case(2, f"{TP2} --expert-tensor-parallel-size 2", norms=False),
    "pp2": Case(2, f"{PP2} {SHARED}", layers=(0, 1, 2, 3), shared=True),
    "vpp2": Case(2, f"{PP2} --num-virtual-stages-per-pipeline-rank 2", layers=(0, 1, 2, 3), batch=8),
    "mtp": Case(2, "--mtp-num-layers 2 --expert-model-parallel-size 2", layers=(0, 1, 2, 3)),
    "mtp-pp2": Case(2, f"{PP2} --mtp-num-layers 1", layers=(0, 1, 2, 3, 4)),
    "latent": Case(2, f"--moe-latent-size 32 --expert-model-parallel-size 2 {SHARED}", shared=True),
    "recompute-full": Case(
        2, f"--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        f"--expert-model-parallel-size 2 {SHARED}", shared=True,
    ),
    "recompute-moe": Case(
        2, f"--recompute-granularity selective --recompute-modules moe --expert-model-parallel-size 2 {SHARED}",
        shared=True,
    ),
    "bias-groups": Case(2, f"{BIAS} --expert-model-parallel-size 2"),
    "dense-first": Case(2, "--num-layers 3 --moe-layer-freq ([0]+[1]*2) --expert-model-parallel-size 2", layers=(1, 2)),
    "dedup": Case(2, f"{DEDUP} --expert-model-parallel-size 2 {SHARED}", batch=8, shared=True),
    "capacity": Case(2, "--moe-expert-capacity-factor 0.6 --expert-model-parallel-size 2", drops=True),
    "top-1": Case(2, "--moe-router-topk 1 --moe-router-pre-softmax --expert-model-parallel-size 2", topk=1),
    "evaluated": Case(
        2, "--split 80,20,0 --eval-iters 2 --eval-interval 1 --expert-model-parallel-size 2", batch=8
    ),
    "torch-experts": Case(
        2, f"--moe-ext-experts torch --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        f"--expert-model-parallel-size 2 {SHARED}", batch=8, shared=True,
    ),
    "everything-else": Case(
        4, f"{TP2} --expert-tensor-parallel-size 1 --expert-model-parallel-size 4 {DEDUP} {BIAS} {SHARED} "
        "--num-layers 3 --moe-layer-freq ([0]+[1]*2) --mtp-num-layers 1 --moe-expert-capacity-factor 1.0 "
        "--recompute-granularity selective --recompute-modules moe --split 80,20,0 --eval-iters 1 --eval-interval 1",
        layers=(1, 2, 3), batch=8, shared=True, drops=True,
    ),
    "all": Case(
        4, f"{TP2} --expert-tensor-parallel-size 1 --expert-model-parallel-size 2 {PP2} "
        f"--num-virtual-stages-per-pipeline-rank 2 {BIAS} {SHARED} --moe-latent-size 32 --mtp-num-layers 1 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        layers=(0, 1, 2, 3, 4), batch=8, shared=True,
    ),
}  # fmt: skip
# What "everything-else" has too.
NIGHTLY = ("dedup", "capacity", "evaluated")


def train(folder: Path, ranks: int, flags: str, plugin: str = "Dump") -> Output:
    folder.mkdir()
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    run(ranks, _rank, specification(folder, f"{flags} --train-iters 3", plugin=plugin))
    return Output(folder, "")


def _rank(spec: dict[str, Any]) -> None:
    if "--sequence-parallel" in spec["flags"]:
        _take_torchs_norm()
    if "--moe-latent-size" in spec["flags"]:
        _take_torchs_linear()
    train_rank(spec)


def _take_torchs_linear() -> None:
    """Put torch's linear layer where Transformer Engine's would be: Megatron's latent projections ask for that one."""
    from megatron.core.transformer.moe import moe_layer

    class Linear(torch.nn.Linear):
        def __init__(self, inputs: int, outputs: int, *, init_method: Any, bias: bool, **_: Any) -> None:
            super().__init__(inputs, outputs, bias=bias)
            init_method(self.weight)

        def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
            return super().forward(rows), None

    moe_layer.HAVE_TE, moe_layer.TELinear = True, Linear


def _take_torchs_norm() -> None:
    """Put torch's RMSNorm where Apex's or Transformer Engine's would be: the CPU has neither, and tensor parallel
    training of an MoE needs sequence parallelism, which Megatron's wrapper of torch's norm refuses."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from megatron_ext.runtime import device

    def new(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
        norm = torch.nn.RMSNorm(hidden_size, eps=eps)
        # Megatron then sums its gradient over the tensor-parallel ranks.
        norm.weight.sequence_parallel = True  # type: ignore[attr-defined]
        return norm

    WrappedTorchNorm.__new__ = new  # type: ignore[assignment]
    device.refuse_on_cpu = lambda args: None


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ()) for name in CASES],
)
def trained(request, tmp_path_factory) -> tuple[Case, Output]:
    case = CASES[request.param]
    folder = tmp_path_factory.mktemp("observe") / request.param
    return case, train(folder, case.ranks, f"{case.flags} --global-batch-size {case.batch}")


def test_counts_are_exact_and_every_value_is_numpys(trained: tuple[Case, Output]) -> None:
    case, found = trained
    counts = found.counts(STEP)
    values = found.metrics(STEP)
    assert len(counts) == len(case.layers)
    for row, layer in enumerate(case.layers):
        assigned = case.topk * case.batch * SEQUENCE
        assert counts[row].sum() < assigned if case.drops else counts[row].sum() == assigned, "sum n_e = k * T"
        expected = {**of_router(found, layer, counts[row].tolist(), case), **of_loads(found, layer, case)}
        if case.norms:
            expected |= of_experts(found, layer)
        else:
            assert f"moe/expert_norm_median/layer_{layer}" not in values
        if case.shared:
            expected |= of_shared(found, layer)
        for name, value in expected.items():
            assert values[f"moe/{name}/layer_{layer}"] == pytest.approx(value, rel=1e-6, abs=1e-12), (name, layer)


def calls(found: Output, kind: str, layer: int) -> list[dict[str, np.ndarray]]:
    return [dump for dump in found.dumps(kind) if dump["layer"] == layer and dump["step"] == STEP]


def entropy(p: np.ndarray) -> np.ndarray:
    return -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1) / np.log(p.shape[-1])


def of_router(found: Output, layer: int, counted: list[int], case: Case) -> dict[str, float]:
    """The metrics of maps, logits and weights; the maps themselves must be what was counted."""
    dumps = calls(found, "router", layer)
    z = np.concatenate([d["hidden"].reshape(-1, HIDDEN).astype(float) @ d["weight"].T.astype(float) for d in dumps])
    maps, probs = (np.concatenate([dump[key] for dump in dumps]) for key in ("map", "probs"))
    counts = maps.sum(0)
    assert counts.astype(int).tolist() == counted
    softmax = np.exp(z - z.max(-1, keepdims=True))
    softmax /= softmax.sum(-1, keepdims=True)
    scores = softmax
    if "bias" in dumps[0]:
        scores = 1 / (1 + np.exp(-z))
        scores /= scores.sum(-1, keepdims=True)
    aux = np.argsort(-scores, -1, kind="stable")[:, : case.topk]
    agree = np.take_along_axis(maps, aux, -1).sum()
    w = -np.sort(-probs.astype(float), -1)[:, : case.topk]
    # A token whose every assignment was dropped has no weights; one with a single expert left has no gate.
    size = np.sqrt((w[w[:, 0] > 0] ** 2).sum(-1))
    w = w[maps.sum(-1) > 1]
    share = w / w.sum(-1, keepdims=True)
    values = {
        "max_vio": counts.max() / counts.mean() - 1,
        "load_cv": counts.std() / counts.mean(),
        "load_entropy": entropy(counts / counts.sum()),
        "z_rms": np.sqrt((np.log(np.exp(z).sum(-1)) ** 2).mean()),
        "router_entropy": entropy(softmax).mean(),
        "balance_loss": EXPERTS * (counts / counts.sum() * scores.mean(0)).sum(),
        "aux_map_disagreement": 1 - agree / maps.sum(),
        "routed_size_mean": size.mean(),
        "routed_size_std": size.std(),
        "flip_rate": 0.0,
        "flip_rate_order": 0.0,
    }
    if case.topk > 1:
        values |= {
            "weight_entropy": entropy(share).mean(),
            "top_weight": share[:, 0].mean(),
            "max1_over_max2": (w[:, 0] / w[:, 1]).mean(),
        }
    if case.drops:
        width = 64 * maps.sum(-1)
        values |= {
            "drop_share": 1 - maps.sum() / (case.topk * len(maps)),
            "compute_per_token_mean": width.mean(),
            "compute_per_token_std": width.std(),
        }
    if "bias" in dumps[0]:
        # The bias is updated at the end of a step, before the monitor reads it: what the next step routes with.
        later = [d for d in found.dumps("router") if d["layer"] == layer and d["step"] == STEP + 1]
        bias = later[0]["bias"].astype(float)
        values |= {"bias_spread": np.ptp(bias), "bias_mean": bias.mean()}
    return values


def of_loads(found: Output, layer: int, case: Case) -> dict[str, float]:
    """The loads of each expert-parallel group's ranks, micro-batch by micro-batch, from the dispatched counts."""
    groups: dict[tuple[int, int], dict[int, np.ndarray]] = {}
    seen: dict[tuple[int, int], int] = {}
    for dump in calls(found, "experts", layer):
        place = int(dump["edp_rank"]), int(dump["ep_rank"])
        micro = seen[place] = seen.get(place, -1) + 1
        groups.setdefault((place[0], micro), {})[place[1]] = dump["counts"]
    if not case.norms:
        # Both ranks that share the experts' weights count the same rows: keep one micro-batch's worth a call.
        groups = {key: value for key, value in groups.items() if key[1] < len(groups) // 2}
    vio, rank_vio = [], []
    for ranks in groups.values():
        load = np.stack([ranks[rank] for rank in sorted(ranks)])
        vio.append(load.max() / load.mean() - 1)
        rank_vio.append(load.sum(-1).max() / load.sum(-1).mean() - 1)
    return {
        "max_vio_micro": np.mean(vio),
        "max_vio_micro_worst": np.max(vio),
        "rank_max_vio": np.mean(rank_vio),
        "rank_max_vio_worst": np.max(rank_vio),
    }


def of_experts(found: Output, layer: int) -> dict[str, float]:
    """Norms of the experts' outputs before the weights."""
    squares, rows = np.zeros(EXPERTS), np.zeros(EXPERTS)
    for dump in calls(found, "experts", layer):
        parts = np.split(np.arange(len(dump["rows"])), np.cumsum(dump["counts"]).astype(int)[:-1])
        for local, part in enumerate(parts):
            output = dump["rows"][part].astype(float) / dump["probs"][part, None].astype(float)
            expert = int(dump["ep_rank"]) * len(parts) + local
            squares[expert] += (output**2).mean(-1).sum()
            rows[expert] += len(part)
    rms = np.sqrt(squares[rows > 0] / rows[rows > 0])
    median = np.median(rms)
    return {
        "expert_norm_max_over_median": rms.max() / median,
        "expert_norm_min_over_median": rms.min() / median,
        "expert_norm_median": median,
    }


def of_shared(found: Output, layer: int) -> dict[str, float]:
    """The shared expert's part of the layer's output; the rest of it is the routed experts' (after up-projection)."""
    shared, total, latent = (
        np.concatenate([dump["output"].ravel() for dump in dumps]).astype(float) if (dumps := calls(found, kind, layer))
        else np.zeros(0) for kind in ("shared", "layer", "latent")
    )  # fmt: skip
    rms = np.sqrt((shared**2).mean()), np.sqrt(((total - shared) ** 2).mean())
    values = {"shared_share": rms[0] / sum(rms)}
    return values | ({"latent_out_norm": np.sqrt((latent**2).mean())} if latent.size else {})


def test_an_overlapped_shared_expert_gives_the_same_numbers(tmp_path: Path) -> None:
    flags = f"--expert-model-parallel-size 2 {SHARED}"
    plain = train(tmp_path / "plain", 2, flags).metrics(STEP)
    overlapped = train(tmp_path / "overlapped", 2, f"{flags} --moe-shared-expert-overlap").metrics(STEP)
    assert "moe/shared_share/layer_1" in plain
    for key, value in plain.items():
        if key.startswith("moe/"):
            assert overlapped[key] == pytest.approx(value, rel=1e-5, abs=1e-9), key
