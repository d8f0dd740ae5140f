"""Megatron's own sniff test prints; its outliers come out on the writing rank."""

from __future__ import annotations

import json
import logging

import pytest
import torch.distributed as dist

from megatron_ext.preflight import Outlier, SniffRelay
from megatron_ext.preflight.sniff import LOGGER


def test_outliers_go_from_rank_zero_to_the_writing_rank_once() -> None:
    store = dist.HashStore()
    first, last = SniffRelay(store), SniffRelay(store)
    logger = logging.getLogger(LOGGER)
    first.attach()
    try:
        logger.info("  All-to-all busbw (EP PG, size=8, 268 MB) [GB/s]: median=77.10, mean=75.00, min=39.80, max=78.00")
        logger.warning("    OUTLIER rank 11 (node-1): 39.80 (-48.4%)")
        logger.warning("    OUTLIER rank 12: 40.00 (-48.1%)")
        name = "All-to-all busbw (EP PG, size=8, 268 MB) [GB/s]"
        assert last.drain() == [Outlier(name, 11, "node-1", 39.8, -48.4), Outlier(name, 12, "", 40.0, -48.1)]
        assert last.drain() == []
        logger.info("  GEMM throughput (8192x8192x8192, bf16) [TFLOP/s/GPU]: median=700.00, mean=1.0, min=1.0, max=1.0")
        logger.warning("    OUTLIER rank 3 (node-0): 500.00 (-28.6%)")
        assert [outlier.rank for outlier in last.drain()] == [3]
    finally:
        logger.removeHandler(first)


def test_line_format_is_the_one_that_this_megatron_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs Megatron's own reporting function with the gathering and the device stood in for."""
    import torch
    from megatron.training import gpu_sniff_test

    values = [10.0, 10.0, 10.0, 4.0]

    def gather(into: list[torch.Tensor], _: torch.Tensor) -> None:
        for slot, value in zip(into, values, strict=True):
            slot.fill_(value)

    monkeypatch.setattr(gpu_sniff_test.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(gpu_sniff_test.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(gpu_sniff_test.dist, "all_gather", gather)
    for name in ("tensor", "zeros"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, _make=make, **k: _make(*a, **{**k, "device": "cpu"}))
    store = dist.HashStore()
    relay = SniffRelay(store)
    relay.attach()
    try:
        assert gpu_sniff_test._gather_and_check("Send/recv busbw [GB/s]", 10.0, ["a", "a", "b", "b"])
    finally:
        logging.getLogger(LOGGER).removeHandler(relay)
    assert relay.drain() == [Outlier("Send/recv busbw [GB/s]", 3, "b", 4.0, -60.0)]
    assert json.loads(store.get("moe-ext/sniff/1"))["node"] == "b"
