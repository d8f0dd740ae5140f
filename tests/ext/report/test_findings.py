"""What to look at first, and the sections beside the curves: faults are found, a sound run has none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest
from synthetic import DEAD, ROGUE, make_run

from megatron_ext.report import extras, norms, sections
from megatron_ext.report.first_look import findings, peak_memory
from megatron_ext.report.summary import standing_alarms
from megatron_ext.report.view import load_views
from megatron_ext.tracking.lines import alarm_line, metric_line


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


def test_a_jump_of_the_loss_is_named_with_its_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "jump", steps=60)
    assert "jumped" not in " ".join(findings(load_views([run])))
    lines = [orjson.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    # Step 17: before the alarm knows the noise of this run.
    lines[16]["metrics"]["lm loss"] += 2.0
    (run / "metrics.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)) + b"\n")
    (sentence,) = [text for text in findings(load_views([run])) if "jumped" in text]
    assert "at step 17, " in sentence
    assert "was back there at step 1" in sentence


def test_an_alarm_that_moved_to_another_expert_is_one_alarm(tmp_path: Path) -> None:
    run = make_run(tmp_path / "moved", steps=60, layers=2)
    records = [
        {"name": "dead_expert", "state": state, "layer": 1, "expert": expert, "step": step, "since_step": 10}
        for state, expert, step in (("raised", 5, 10), ("changed", 3, 30), ("cleared", 3, 50))
    ]
    for number, (stands, end) in enumerate([(1, None), (1, None), (0, 50)], 1):
        (run / "alarms.jsonl").write_bytes(b"".join(alarm_line(1, record) + b"\n" for record in records[:number]))
        (view,) = load_views([run])
        assert len(standing_alarms(view)) == stands
        (span,) = extras.alarm_spans(view)
        assert span["end"] == end
        assert span["expert"] == (5 if number == 1 else 3)


def _rows(folder: Path, steps, **config) -> Path:
    folder.mkdir()
    (folder / "run.json").write_bytes(orjson.dumps({"id": "x", "name": folder.name, "config": config}))
    lines = [metric_line(step, 1, None, {"lm loss": 4.0 - step / 100}) for step in steps]
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return folder


def test_steps_without_a_row_and_torn_lines_are_told(tmp_path: Path) -> None:
    folder = _rows(tmp_path / "gaps", [*range(1, 31), *range(36, 50), 51])
    with (folder / "metrics.jsonl").open("ab") as stream:
        stream.write(b'{"step": 52, "ti')
    text = " ".join(findings(load_views([folder])))
    assert "no row for steps 31 to 35, 50." in text
    assert "1 lines of its files can't be read" in text
    assert "Nothing stands out" not in text


def test_a_logging_interval_is_no_gap(tmp_path: Path) -> None:
    steps = [1, *range(5, 60, 5)]
    (sentence,) = findings(load_views([_rows(tmp_path / "sparse", steps, tensorboard_log_interval=5)]))
    assert sentence.endswith("no step is missing.")


def test_a_run_without_a_loss_is_not_said_to_have_a_finite_one(tmp_path: Path) -> None:
    assert findings(load_views([_rows(tmp_path / "new", [])])) == ["Nothing stands out: no alarm stands."]
