"""Which samples leave a frame, and which layers' values go to the tracker."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ext.observe import emit
from megatron_ext.observe.options import ObserveOptions
from megatron_ext.observe.sample import Sample

BUDGET = ObserveOptions().routing_bytes


@pytest.mark.parametrize(("layers", "experts"), [(64, 512), (16, 64), (4, 8)])
def test_frames_of_a_long_run_stay_within_the_budget(layers: int, experts: int) -> None:
    # Counts, expert norms and two sources.
    numbers = layers * experts * 4
    thinning = emit.Thinning(interval=10, budget_bytes=BUDGET, numbers_a_frame=numbers)
    kept = [step for step in range(10, 100_001, 10) if thinning.keeps(step)]
    assert len(kept) * numbers * 6 < BUDGET * 1.15
    assert len(kept) >= 40
    # The start, where a run changes fastest, is there whole; no gap is longer than an eighth of the run.
    assert kept[:8] == list(range(10, 90, 10))
    assert max(np.diff(kept)) <= 100_000 / 8


def test_a_resumed_run_keeps_the_same_steps() -> None:
    def kept(first: int) -> set[int]:
        thinning = emit.Thinning(interval=10, budget_bytes=BUDGET, numbers_a_frame=64 * 512 * 4)
        return {step for step in range(first, 5001, 10) if thinning.keeps(step)}

    assert kept(2010) == {step for step in kept(10) if step >= 2010}


def test_many_layers_send_extremes_and_the_alarmed_one() -> None:
    layers = tuple(range(3, 23))
    values = np.linspace(1.0, 2.0, 20)
    counts = np.ones((20, 4), np.int64)
    sample = Sample(10, layers, counts, counts, {"max_vio": values})
    out = emit.scalars(sample, layers="auto", alarmed={"max_vio": [7]})
    assert out["moe/max_vio/max"] == 2.0
    assert out["moe/max_vio/max_layer"] == 22
    assert {key for key in out if "layer_" in key} == {"moe/max_vio/layer_7"}
    assert len([key for key in emit.scalars(sample, layers="all", alarmed={}) if "layer_" in key]) == 20


def test_layers_without_a_value_are_left_out_of_the_extremes() -> None:
    counts = np.ones((3, 4), np.int64)
    values = {"max_vio": np.array([np.nan, 3.0, 1.0]), "z_rms": np.full(3, np.nan)}
    out = emit.scalars(Sample(10, (4, 5, 6), counts, counts, values), layers="all", alarmed={})
    assert out["moe/max_vio/max"] == 3.0
    assert out["moe/max_vio/min"] == 1.0
    assert out["moe/max_vio/mean"] == 2.0
    assert out["moe/max_vio/max_layer"] == 5
    assert {key for key in out if "layer_" in key} == {"moe/max_vio/layer_5", "moe/max_vio/layer_6"}
    assert not [key for key in out if "z_rms" in key]
