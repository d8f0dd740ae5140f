"""The monitor under real Megatron training, two ranks over gloo, against plain NumPy on dumped tensors."""

from __future__ import annotations

import numpy as np
import pytest
from observe_training import Output, train

STEP = 2
EXPERTS, TOPK, RANKS = 8, 2, 2


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Output:
    """Expert parallel 2, a shared expert, an fp32 router by virtue of an fp32 model, two micro-batches a rank."""
    flags = "--expert-model-parallel-size 2 --global-batch-size 8 --train-iters 3 --use-distributed-optimizer"
    flags += " --moe-shared-expert-intermediate-size 64 --moe-z-loss-coeff 1e-3"
    return train(tmp_path_factory.mktemp("ep2"), flags, ranks=RANKS, plugin="Dump")


def calls(run: Output, kind: str, layer: int) -> list[dict[str, np.ndarray]]:
    """The dumped calls of the checked step, all ranks, in order of rank and call."""
    return [dump for dump in run.dumps(kind) if dump["layer"] == layer and dump["step"] == STEP]


def routed(run: Output, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits [T, E] in double, maps and weights of all ranks."""
    found = calls(run, "router", layer)
    assert len(found) == 4
    hidden = [dump["hidden"].reshape(-1, 64).astype(np.float64) @ dump["weight"].T.astype(np.float64) for dump in found]
    return np.concatenate(hidden), *(np.concatenate([dump[key] for dump in found]) for key in ("map", "probs"))


def softmax(z: np.ndarray) -> np.ndarray:
    p = np.exp(z - z.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def entropy(p: np.ndarray) -> np.ndarray:
    return -(p * np.log(p)).sum(-1) / np.log(p.shape[-1])


@pytest.mark.parametrize("layer", [0, 1])
def test_counts_are_those_of_the_maps(run, layer):
    _, maps, _ = routed(run, layer)
    assert run.counts(STEP)[layer].tolist() == maps.sum(0).astype(int).tolist()
    assert run.counts(STEP)[layer].sum() == TOPK * 8 * 64


@pytest.mark.parametrize("layer", [0, 1])
def test_values_agree_with_numpy(run, layer):
    z, maps, probs = routed(run, layer)
    counts = maps.sum(0)
    w = -np.sort(-probs.astype(np.float64), -1)[:, :TOPK]
    share = w / w.sum(-1, keepdims=True)
    size = np.sqrt((w**2).sum(-1))
    lse = np.log(np.exp(z).sum(-1))
    expected = {
        "max_vio": counts.max() / counts.mean() - 1,
        "load_cv": counts.std() / counts.mean(),
        "load_entropy": entropy(counts / counts.sum()),
        "z_rms": np.sqrt((lse**2).mean()),
        "router_entropy": entropy(softmax(z)).mean(),
        "balance_loss": EXPERTS * (counts / counts.sum() * softmax(z).mean(0)).sum(),
        "aux_map_disagreement": 0.0,
        "weight_entropy": entropy(share).mean(),
        "top_weight": share[:, 0].mean(),
        "max1_over_max2": (w[:, 0] / w[:, 1]).mean(),
        "routed_size_mean": size.mean(),
        "routed_size_std": size.std(),
        "flip_rate": 0.0,
        "flip_rate_order": 0.0,
    }
    check(run, layer, expected)


@pytest.mark.parametrize("layer", [0, 1])
def test_the_bf16_counterfactual_agrees_with_numpy(run, layer):
    found = calls(run, "router", layer)
    hidden = np.concatenate([dump["hidden"].reshape(-1, 64) for dump in found])
    coarse = bf16(bf16(hidden).astype(np.float64) @ bf16(found[0]["weight"]).T.astype(np.float64))
    _, maps, _ = routed(run, layer)
    chosen = np.argsort(-coarse, -1, kind="stable")[:, :TOPK]
    flips = ~np.take_along_axis(maps, chosen, -1).astype(bool).all(-1)
    # A tie in bf16 may fall either way, and does not fall as NumPy's sort does.
    tied = np.sort(coarse, -1)[:, -TOPK] == np.sort(coarse, -1)[:, -TOPK - 1]
    value = run.metrics(STEP)[f"moe/flip_rate_bf16/layer_{layer}"]
    assert (flips & ~tied).mean() <= value <= (flips | tied).mean()


def bf16(x: np.ndarray) -> np.ndarray:
    """Round to bfloat16, half to even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize("layer", [0, 1])
def test_expert_norms_before_the_weights(run, layer):
    squares, rows = np.zeros(EXPERTS), np.zeros(EXPERTS)
    for number, dump in enumerate(calls(run, "experts", layer)):
        rank = number // 2
        bounds = np.cumsum(dump["counts"]).astype(int)
        for local, part in enumerate(np.split(np.arange(len(dump["rows"])), bounds[:-1])):
            output = dump["rows"][part].astype(np.float64) / dump["probs"][part, None].astype(np.float64)
            squares[rank * 4 + local] += (output**2).mean(-1).sum()
            rows[rank * 4 + local] += len(part)
    rms = np.sqrt(squares / rows)
    assert rows.sum() == TOPK * 8 * 64
    median = np.median(rms)
    names = ("expert_norm_max_over_median", "expert_norm_min_over_median", "expert_norm_median")
    check(run, layer, dict(zip(names, (rms.max() / median, rms.min() / median, median), strict=True)))


@pytest.mark.parametrize("layer", [0, 1])
def test_rank_loads_of_each_micro_batch(run, layer):
    dumps = calls(run, "experts", layer)
    # Rank 0's two calls, then rank 1's; a micro-batch is one call of each.
    loads = np.array([dump["counts"] for dump in dumps]).reshape(RANKS, 2, EXPERTS // RANKS).swapaxes(0, 1)
    of_ranks = loads.sum(-1)
    vio = loads.reshape(2, EXPERTS).max(-1) / loads.reshape(2, EXPERTS).mean(-1) - 1
    rank_vio = of_ranks.max(-1) / of_ranks.mean(-1) - 1
    expected = {
        "max_vio_micro": vio.mean(),
        "max_vio_micro_worst": vio.max(),
        "rank_max_vio": rank_vio.mean(),
        "rank_max_vio_worst": rank_vio.max(),
    }
    check(run, layer, expected)


@pytest.mark.parametrize("layer", [0, 1])
def test_the_shared_experts_share(run, layer):
    shared = np.concatenate([dump["output"].ravel() for dump in calls(run, "shared", layer)]).astype(np.float64)
    total = np.concatenate([dump["output"].ravel() for dump in calls(run, "layer", layer)]).astype(np.float64)
    rms = np.sqrt((shared**2).mean()), np.sqrt(((total - shared) ** 2).mean())
    check(run, layer, {"shared_share": rms[0] / sum(rms)})


def check(run: Output, layer: int, expected: dict[str, float]) -> None:
    found = run.metrics(STEP)
    for name, value in expected.items():
        assert found[f"moe/{name}/layer_{layer}"] == pytest.approx(value, rel=1e-6, abs=1e-12), name
