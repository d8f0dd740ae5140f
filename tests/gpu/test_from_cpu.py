"""A dense model trained on the CPU, upcycled offline for Transformer Engine's layers: the GPU loads it and goes on."""

# ruff: noqa: SIM905  (flags read better as a command line)
from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gpu_starts import DEVICE, FAST, LENIENT, losses, run_command, train, weights_left_out

pytestmark = pytest.mark.gpu

SAVED_AT, STEPS = 6, 8
DENSE = (
    "--num-layers 3 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 256 --max-position-embeddings 256 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --bf16 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --split 100,0,0 --eval-iters 0 --eval-interval 100 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 2e-3 --lr-decay-style constant --lr-decay-iters 100 --seed 7 "
    f"--num-workers 0 --log-interval 1 --train-iters {STEPS}"
).split()
ROUTING = (
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none --moe-router-dtype fp32".split()
)
MOE = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512".split()


def test_the_gpu_goes_on_from_a_dense_model_of_the_cpu_upcycled_offline(tmp_path: Path) -> None:
    dense, moe = tmp_path / "dense", tmp_path / "moe"
    of_dense = losses(train("cpu", *DENSE, "--save", str(dense), "--save-interval", str(SAVED_AT)))
    assert len(of_dense) == STEPS
    # The two steps after it are what the MoE is compared with.
    (dense / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
    impl = "transformer_engine" if DEVICE == "cuda" else "local"
    upcycle = [sys.executable, "-m", "megatron_ext.cli", "upcycle", str(dense), str(moe), *MOE]
    run_command([*upcycle, "--transformer-impl", impl])
    also = (*MOE, *ROUTING, "--load", str(moe), "--lr", "0", "--min-lr", "0")
    with ThreadPoolExecutor() as pool:
        here = pool.submit(train, "cpu", *DENSE, *also)
        log = train(DEVICE, *DENSE, *also, *LENIENT, *FAST)
    assert not weights_left_out(log)
    found, of_cpu = losses(log), losses(here.result())
    print(f"the dense model's loss {of_dense[SAVED_AT]:.5f}; upcycled, on the CPU {of_cpu[0]:.5f}, here {found[0]:.5f}")
    # The same function on the same batch as the dense model's next step, and the same weights for all that follow.
    assert found[0] == pytest.approx(of_dense[SAVED_AT], rel=2e-3)
    assert len(found) == len(of_cpu) == STEPS
    assert found == pytest.approx(of_cpu, rel=2e-3)
