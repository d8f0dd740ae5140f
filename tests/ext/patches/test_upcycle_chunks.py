"""Proof of upcycle-chunks: under a virtual pipeline every MoE chunk is made from the dense chunk of the same layers."""

from __future__ import annotations

import pytest
from megatron.core.transformer.moe import upcycling_utils


class Chunk:
    """Stands for a model chunk; upstream asked the wrong ones for a state dict."""

    def __init__(self, name: str) -> None:
        self.name = name

    def state_dict(self) -> str:
        return f"state of {self.name}"


def test_every_chunk_meets_its_own_dense_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upcycling_utils, "_convert_to_moe_state_dict", lambda moe, dense: (moe, dense))
    moe, dense = [Chunk("moe 0"), Chunk("moe 1")], [Chunk("dense 0"), Chunk("dense 1")]
    state = upcycling_utils.upcycle_state_dict(moe, dense)
    assert state == {"model0": (moe[0], dense[0]), "model1": (moe[1], dense[1])}
