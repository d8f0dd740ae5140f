"""What to look at first, and the sections beside the curves: faults are found, a sound run has none."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from synthetic import DEAD, ROGUE, make_run

from megatron_ext.report import extras, norms, sections
from megatron_ext.report.first_look import findings, peak_memory
from megatron_ext.report.view import load_views
from megatron_ext.tracking.lines import metric_line


@pytest.fixture
def faulty(quickstart):
    return load_views([quickstart[1]])


def test_standing_alarms_come_first_with_reason_and_remedy(faulty) -> None:
    first, second = findings(faulty)[:2]
    assert f"dead expert at layer {DEAD[0]}, expert {DEAD[1]} since step 51" in first
    assert "Try: raise --moe-aux-loss-coeff" in first
    assert f"rogue expert at layer {ROGUE[0]}, expert {ROGUE[1]}" in second
    assert not any("loss spike" in text for text in findings(faulty)), "it was cleared"


def test_sound_run_says_what_was_checked(tmp_path: Path) -> None:
    views = load_views([make_run(tmp_path / "good", layers=2, experts=4, ranks=1)])
    (sentence,) = findings(views)
    assert sentence.startswith("Nothing stands out: no alarm stands")
    assert "every expert got tokens" in sentence


def test_broken_loss_and_a_held_out_loss_that_rose_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    folder.mkdir()
    values = [{"lm loss": 4.0, "lm loss validation": 4.0}, {"lm loss": float("nan")}, {"lm loss validation": 4.5}]
    lines = [metric_line(step, 1, None, row) for step, row in enumerate(values, 1)]
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    text = " ".join(findings(load_views([folder])))
    assert "not finite at 1 steps, first at step 2" in text
    assert "held-out loss ends at 4.500, not below its start of 4.000" in text


def test_alarm_spans_know_what_cleared(faulty) -> None:
    spans = {span["name"]: span["end"] for span in extras.alarm_spans(faulty[0])}
    assert spans == {"dead_expert": None, "rogue_expert": None, "loss_spike": 76}


def test_norm_fan_names_the_rogue_expert(faulty) -> None:
    fans = norms.spread(faulty[0])
    assert norms.worst_layer(fans) == ROGUE[0]
    assert f"its largest expert, {ROGUE[1]}," in norms.sentence(faulty[0], fans)


@pytest.mark.parametrize(
    ("counts", "bits"), [([[4, 0], [0, 4]], 1.0), ([[2, 2], [2, 2]], 0.0), ([[0, 0], [0, 0]], 0.0)]
)
def test_mutual_information(counts: list[list[int]], bits: float) -> None:
    assert extras.mutual_information(np.array(counts)) == pytest.approx(bits)


def test_step_parts_sum_to_the_step(faulty) -> None:
    parts = extras.step_split(faulty[0])
    total = float(np.median(faulty[0].series("iteration-time").values))
    assert sum(parts.values()) == pytest.approx(total)
    assert parts["optimizer"] == pytest.approx(0.02)


def test_memory_of_every_rank(faulty) -> None:
    assert list(peak_memory(faulty[0])) == [0, 1]
    assert "rank 1 peaked at" in " ".join(findings(faulty))


def test_all_sections_of_a_full_run(faulty) -> None:
    names = [section.anchor for section in sections.build(faulty)]
    assert names == ["first", "loss", "alarms", "balance", "experts", "norms", "sources", "time", "memory"]


def test_dense_run_has_no_expert_sections(quickstart) -> None:
    names = [section.anchor for section in sections.build(load_views([quickstart[0]]))]
    assert names == ["first", "loss", "time", "memory"]


@pytest.mark.nightly
def test_largest_run_stays_small_and_opens_fast(tmp_path: Path, browser) -> None:
    """10,000 steps, 64 layers, 512 experts: under 3 MB, and on the screen within 3 s."""
    import time

    from megatron_ext.report import html

    run = make_run(tmp_path / "large", steps=10_000, layers=64, experts=512, frames=100, ranks=64, faults=True)
    size = html.write(load_views([run]), tmp_path / "report.html")
    assert size < 3_000_000
    browser.look(1280, 900)
    began = time.monotonic()
    browser.open(tmp_path / "report.html")
    browser.wait("document.querySelector('#loss .chart').childElementCount > 0")
    assert time.monotonic() - began < 3.0
    browser.draw_all()
    assert re.search(r"10,000 steps are drawn as 300 intervals", browser.value("document.body.textContent"))
    assert browser.errors == []
