"""The sentences say what the numbers say: worked examples with known answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_ext.report import facts, sections
from megatron_ext.report.thin import thin, thin_experts, thin_frames
from megatron_ext.report.view import View, common_axis, frame_max_vio
from megatron_ext.tracking.rundir import MetricRow, RoutingFrame, Run, RunInfo


def _view(label: str, losses: list[float], *, first: int = 1, samples: int | None = None, frames=()) -> View:
    rows = [
        MetricRow(first + at, 0.0, 1, None if samples is None else samples + 4 * (at + 1), {"lm loss": loss})
        for at, loss in enumerate(losses)
    ]
    info = RunInfo("", label, config={"seq_length": 10})
    return View(Run(Path(label), info, rows, frames, ()), label, "#000000")


def test_worked_example_of_the_handbook() -> None:
    counts = np.array([[3072, 1024, 1024, 1024, 512, 512, 512, 512]])
    assert frame_max_vio(counts).tolist() == [2.0]


def test_layer_without_tokens_has_no_violation() -> None:
    assert frame_max_vio(np.zeros((1, 4), dtype=np.int64)).tolist() == [0.0]


def test_largest_gap_is_found_where_it_is() -> None:
    low = [5.0] * 10 + [3.0] + [5.0] * 9
    gap = facts.largest_gap([_view("a", low), _view("b", [5.0] * 20)])
    assert gap is not None
    assert (gap.lower, gap.upper, gap.size, gap.at, gap.axis) == ("a", "b", 2.0, 11.0, "step")


def test_gap_is_taken_on_tokens_where_all_runs_have_them() -> None:
    # b repeats a's curve half as fast in tokens: at 400 tokens a has step 10, b (twice the samples a step) has step 5.
    one, two = _view("a", list(np.linspace(5, 4, 20)), samples=0), _view("b", [4.8] * 20, samples=40)
    assert common_axis([one, two]) == "tokens"
    gap = facts.largest_gap([one, two])
    assert gap is not None
    assert gap.axis == "tokens"
    assert gap.at == 800.0, "the end of a, where b has run half of its own"


def test_runs_that_do_not_overlap_have_no_gap() -> None:
    views = [_view("a", [5.0, 4.0]), _view("b", [4.0, 3.0], first=100)]
    assert facts.largest_gap(views) is None
    assert "no stretch of steps" in facts.loss_sentences(views)[-1]


@pytest.mark.parametrize(("losses", "word"), [([5.0, 4.0], "fell"), ([4.0, 5.0], "rose"), ([5.0, 5.0], "stayed")])
def test_direction_is_computed(losses: list[float], word: str) -> None:
    assert word in facts.loss_sentences([_view("a", losses)])[0]


def test_values_that_are_not_finite_are_told() -> None:
    (sentence,) = facts.loss_sentences([_view("a", [5.0, float("nan"), 4.0, float("inf")])])
    assert "2 of its values were not finite" in sentence


def test_idle_experts_and_the_busiest_are_named() -> None:
    frame = RoutingFrame(40, 1, np.array([2, 7]), np.array([[4, 4, 4, 4], [0, 12, 2, 2]]))
    text = facts.heat_sentence(_view("a", [1.0], frames=[frame]))
    assert "most uneven layer is 7: its expert 1 gets 3.00 times" in text
    assert "1 of 8 experts got no token, in layer 7" in text


def test_thinning_keeps_every_spike_and_says_so() -> None:
    values = np.zeros(10_000)
    values[1234], values[7777] = 9.0, -9.0
    chosen = thin(values, 600)
    assert len(chosen.keep) <= 602
    assert {1234, 7777, 0, 9999} <= set(chosen.keep.tolist())
    assert "10,000 steps" in chosen.note
    assert thin(np.arange(600.0), 600).note == ""


def test_frames_keep_the_first_and_the_last() -> None:
    chosen = thin_frames(1000, 24)
    assert (chosen.keep[0], chosen.keep[-1], len(chosen.keep)) == (0, 999, 24)
    assert "24 of them" in chosen.note


def test_columns_keep_an_idle_and_an_overloaded_expert() -> None:
    ratio = np.ones((1, 513))
    ratio[0, 100], ratio[0, 512] = 0.0, 6.0
    put = thin_experts(ratio, 128)
    assert put.width == 5
    assert put.quietest[0, 20] == 0.0
    assert put.busiest[0, 102] == 6.0, "the last, narrower column counts too"
    assert "5 neighbouring experts" in put.note


@pytest.mark.parametrize(
    ("number", "text"), [(0.5, "0.5"), (307_200, "307k"), (1.5e9, "1.5G"), (999, "999"), (4_300, "4300")]
)
def test_short_numbers(number: float, text: str) -> None:
    assert facts.short(number) == text


def test_runs_that_trained_equally_long_are_compared_from_their_own_start() -> None:
    # Samples of 10 tokens, 4 a step. Two runs go on from a dense one of 10 steps, one starts from nothing.
    dense = _view("dense", [6.0] * 10, samples=0)
    upcycled = _view("upcycled", [4.0] * 20, samples=40)
    scratch = _view("scratch", [5.0] * 20, samples=0)
    longer = _view("continued", [4.5] * 20, first=11, samples=40)
    assert [view.own_tokens() for view in (dense, upcycled, scratch, longer)] == [400.0, 800.0, 800.0, 800.0]
    alike = facts.equally_long([dense, upcycled, scratch, longer])
    assert [view.label for view in alike] == ["upcycled", "scratch", "continued"]
    for view in alike:
        own = view.from_start(view.loss())
        assert (own.steps[0], own.steps[-1]) == (1, 20)
        assert own.tokens is not None
        assert (own.tokens[0], own.tokens[-1]) == (40.0, 800.0)
    said = facts.equal_tokens_sentence(alike)
    assert said == "After 800 tokens of their own, training loss: upcycled 4.000, continued 4.500, scratch 5.000."
    views = [dense, upcycled, scratch, longer]
    assert facts.loss_sentences(views)[-1] == said
    common, own = sections.loss(views).figures
    assert own.title.startswith("From each run's own start")
    assert common.chart.item != own.chart.item


def test_runs_side_by_side_need_no_second_chart() -> None:
    assert facts.equally_long([_view("a", [5.0] * 9, samples=0), _view("b", [4.0] * 9, samples=0)]) == []
    assert facts.equally_long([_view("a", [5.0] * 9, samples=0), _view("b", [4.0] * 30, samples=36)]) == []
    assert facts.equally_long([_view("a", [5.0] * 9), _view("b", [4.0] * 9, samples=0)]) == []
