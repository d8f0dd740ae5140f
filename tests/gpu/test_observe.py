"""On a GPU: expert norms under TE's grouped GEMM, no copy to the host in a hook, and no large temporary."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import seed_ranges
import torch

from megatron_ext.observe import tally

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not torch.version.cuda, reason="needs a CUDA device"),
]
SEEDS = 96  # each a router call and an expert call


def grouped(rows: int = 4096, hidden: int = 512, experts: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows in expert order, already times their weights; expert 3 has none, expert 5 is 20 times as large."""
    generator = torch.Generator("cuda").manual_seed(1)
    counts = torch.full((experts,), rows // (experts - 1), device="cuda")
    counts[3] = 0
    counts[-1] += rows - counts.sum()
    scale = torch.ones(experts, device="cuda")
    scale[5] = 20.0
    output = torch.randn(rows, hidden, device="cuda", generator=generator) * scale.repeat_interleave(counts)[:, None]
    probs = torch.rand(rows, device="cuda", generator=generator) * 0.9 + 0.05
    return (output * probs[:, None]).bfloat16(), probs, counts


def test_norms_of_grouped_rows_before_the_weights():
    output, probs, counts = grouped()
    sums = tally.expert_row_sums(output, probs, counts)
    for expert, (part, weights) in enumerate(
        zip(output.split(counts.tolist()), probs.split(counts.tolist()), strict=True)
    ):
        plain = (part.double() / weights.double()[:, None]).square().mean(-1).sum()
        assert sums[0, expert].item() == len(part)
        assert sums[1, expert].item() == pytest.approx(plain.item(), rel=1e-5)


def test_rows_beyond_the_counts_and_rows_of_weight_0_are_padding():
    output, probs, counts = grouped()
    padded = torch.cat([output, torch.full_like(output[:16], 1e4)])
    weights = torch.cat([probs, torch.ones(16, device="cuda")])
    assert torch.allclose(tally.expert_row_sums(padded, weights, counts), tally.expert_row_sums(output, probs, counts))
    weights[7] = 0.0
    assert tally.expert_row_sums(padded, weights, counts)[0].sum().item() == counts.sum().item() - 1


def test_one_pass_and_nothing_of_the_outputs_size():
    output, probs, counts = grouped(rows=65536, hidden=2048, experts=64)
    tally.expert_row_sums(output, probs, counts)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tally.expert_row_sums(output, probs, counts)
    assert torch.cuda.max_memory_allocated() - before < output.numel() * output.element_size() * 0.05


def test_the_kernels_agree_with_the_torch_path(root):
    """Random router and expert calls."""
    print("\n".join(seed_ranges.run(root / "tests" / "ext" / "observe" / "tally_kernel_check.py", "cuda", SEEDS)))


@pytest.mark.parametrize("path", ["triton", "torch"])
def test_no_hook_waits_for_the_device(path, monkeypatch):
    monkeypatch.setenv(tally.KERNELS_VARIABLE, path)
    output, probs, counts = grouped()
    logits = torch.randn(2048, 64, device="cuda")
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(8, -1).indices, True)
    labels = torch.tensor([0, 1], device="cuda")
    # Where TE's grouped GEMM wants them: without a wait in the hook.
    on_host = counts.cpu()
    weights = torch.softmax(logits.masked_fill(~chosen, -torch.inf), -1)
    scores = torch.softmax(logits, -1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tally.expert_row_sums(output, probs, counts)
        tally.expert_row_sums(output, probs, on_host)
        tally.logit_sums(logits, None)
        tally.aux_sums(chosen, chosen, scores, None)
        tally.weight_sums(weights, 8, None)
        tally.valid_counts(chosen, None)
        tally.source_counts(chosen, labels, 2, None)
        tally.flip_sums(chosen=chosen, native=chosen, exact=chosen, coarse=chosen, order=None, valid=None)
        tally.square_sums(output)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_monitor_under_te_grouped_gemm(tmp_path, root):
    """A real training of four steps with TE; the norms must be there and alike at the start."""
    pytest.importorskip("transformer_engine.pytorch")
    import json

    flags = """--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256
    --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-4 --lr-decay-style constant --mock-data
    --tokenizer-type NullTokenizer --vocab-size 127 --split 100,0,0 --eval-iters 0 --eval-interval 100
    --num-experts 8 --moe-router-topk 2
    --moe-ffn-hidden-size 256 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --bf16
    --moe-grouped-gemm --moe-shared-expert-intermediate-size 256 --moe-shared-expert-overlap
    --no-gradient-accumulation-fusion --recompute-granularity selective --recompute-modules moe_act
    --moe-ext-observe-interval 1 --moe-ext-no-trackio --num-workers 0 --log-interval 1"""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += ["-m", "megatron_ext.cli", "train", "--device", "cuda", "--", *flags.split()]
    command += ["--moe-ext-run-dir", str(tmp_path / "run")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root), os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=190)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "turned itself off" not in done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, float] = {}
    for row in rows:
        found |= row["metrics"] if row["step"] == 3 else {}
    assert 1.0 <= found["moe/expert_norm_max_over_median/max"] < 2.0
    assert 0.3 < found["moe/shared_share/mean"] < 0.9
    # A bf16 router flips some tokens, never most.
    assert 0.0 <= found["moe/flip_rate/max"] < 0.1
