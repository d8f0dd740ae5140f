"""Reading a run directory back: torn lines, resumes, odd numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_ext.errors import UserError
from megatron_ext.tracking.rundir import read_run


def _write(folder: Path, name: str, *lines: object) -> None:
    folder.mkdir(exist_ok=True)
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    (folder / name).write_text(text)


def _row(step: int, start: int = 1, **metrics: object) -> dict[str, object]:
    return {"step": step, "time": 1.0, "start": start, "metrics": metrics}


def test_torn_last_line_is_skipped_and_counted(tmp_path: Path) -> None:
    _write(tmp_path, "metrics.jsonl", _row(1, loss=2.0), '{"step": 2, "time": 1.0, "met')
    run = read_run(tmp_path)
    assert [row.step for row in run.rows] == [1]
    assert run.skipped_lines == 1


def test_torn_line_in_the_middle_costs_only_itself(tmp_path: Path) -> None:
    _write(tmp_path, "metrics.jsonl", _row(1, loss=2.0), '{"step": 2, "ti\n', _row(3, loss=1.0))
    assert [row.step for row in read_run(tmp_path).rows] == [1, 3]


def test_later_start_replaces_from_its_first_step_on(tmp_path: Path) -> None:
    first = [_row(step, 1, loss=float(step)) for step in range(1, 16)]
    second = [_row(step, 2, loss=-float(step)) for step in range(11, 13)]
    _write(tmp_path, "metrics.jsonl", *first, *second)
    steps, losses = read_run(tmp_path).series("loss")
    # Steps 13 to 15 came from weights that were lost with the kill: they are not part of this run's history.
    assert steps.tolist() == list(range(1, 13))
    assert losses.tolist() == [*map(float, range(1, 11)), -11.0, -12.0]


def test_two_lines_of_one_start_are_one_row(tmp_path: Path) -> None:
    _write(tmp_path, "metrics.jsonl", _row(1, loss=2.0), _row(1, norm=3.0))
    (row,) = read_run(tmp_path).rows
    assert row.metrics == {"loss": 2.0, "norm": 3.0}


def test_straggler_of_a_replaced_start_is_ignored(tmp_path: Path) -> None:
    _write(tmp_path, "metrics.jsonl", _row(1, 1, loss=1.0), _row(1, 2, loss=2.0), _row(9, 1, loss=9.0))
    assert [(row.step, row.metrics["loss"]) for row in read_run(tmp_path).rows] == [(1, 2.0)]


def test_nan_and_infinity_come_back(tmp_path: Path) -> None:
    _write(tmp_path, "metrics.jsonl", _row(1, a="NaN", b="Infinity", c="-Infinity"))
    (row,) = read_run(tmp_path).rows
    assert math.isnan(row.metrics["a"])
    assert (row.metrics["b"], row.metrics["c"]) == (math.inf, -math.inf)


def test_routing_with_norms_and_sources(tmp_path: Path) -> None:
    _write(
        tmp_path,
        "routing.jsonl",
        {
            "step": 5,
            "layers": [1, 3],
            "tokens_per_expert": [[4, 0], [2, 2]],
            "expert_rms": [[1.5, None], [1, 2]],
            "sources": ["code", "prose"],
            "tokens_per_source": [[[1, 0], [3, 0]], [[2, 0], [0, 2]]],
        },
        {"step": 6, "layers": [1], "tokens_per_expert": [[4, 0], [2, 2]]},
    )
    _write(tmp_path, "metrics.jsonl", _row(5, loss=1.0))
    run = read_run(tmp_path)
    (frame,) = run.routing
    assert frame.layers.tolist() == [1, 3]
    assert frame.expert_rms is not None
    assert math.isnan(frame.expert_rms[0, 1])
    assert frame.source_counts is not None
    assert frame.source_counts.sum() == frame.counts.sum()
    assert run.skipped_lines == 1, "a frame whose layers don't match its rows is foreign"


def test_alarm_of_a_replaced_step_is_dropped(tmp_path: Path) -> None:
    _write(tmp_path, "metrics.jsonl", *[_row(s, 1, loss=1.0) for s in range(1, 9)], _row(5, 2, loss=1.0))
    alarm = {"name": "dead_expert", "state": "raised"}
    _write(
        tmp_path,
        "alarms.jsonl",
        {**alarm, "step": 3, "start": 1},
        {**alarm, "step": 7, "start": 1},
        {**alarm, "step": 5, "start": 2},
    )
    assert [alarm["step"] for alarm in read_run(tmp_path).alarms] == [3, 5]


def test_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        read_run(tmp_path)
    with pytest.raises(UserError, match="no such run directory"):
        read_run(tmp_path / "gone")


def _resumed(step: int, after: int, start: int = 2, **metrics: object) -> dict[str, object]:
    return {**_row(step, start, **metrics), "after": after}


def test_a_finished_run_that_is_started_again_keeps_its_last_row(tmp_path: Path) -> None:
    rows = [_row(step, loss=float(step)) for step in (1, 2, 3)]
    _write(tmp_path, "metrics.jsonl", *rows, _resumed(3, 3, test=9.0))
    _write(tmp_path, "alarms.jsonl", {"name": "dead_expert", "state": "raised", "step": 3, "start": 1})
    run = read_run(tmp_path)
    assert [(row.step, row.metrics) for row in run.rows][-1] == (3, {"loss": 3.0, "test": 9.0})
    assert len(run.alarms) == 1


def test_steps_of_a_killed_start_end_where_the_next_one_resumed(tmp_path: Path) -> None:
    """The resumed start's own first line may be for a later step: with a logging interval, or a frame a sample."""
    rows = [_row(step, loss=1.0) for step in (5, 10, 15, 20)]
    _write(tmp_path, "metrics.jsonl", *rows, _resumed(15, 8, loss=2.0))
    frame = {"layers": [0], "tokens_per_expert": [[1, 1]]}
    frames = [{"step": step, "start": 1, **frame} for step in (5, 9, 13)]
    _write(tmp_path, "routing.jsonl", *frames, {"step": 14, "start": 2, "after": 8, **frame})
    run = read_run(tmp_path)
    assert [(row.step, row.start) for row in run.rows] == [(5, 1), (15, 2)]
    assert [(one.step, one.start) for one in run.routing] == [(5, 1), (14, 2)]


def test_alarm_lines_that_are_none_are_counted_and_left_out(tmp_path: Path) -> None:
    lines = [{"name": "x", "step": 1}, {"name": None, "step": 1}, {"name": "x", "step": "one"}, {"state": "raised"}]
    _write(tmp_path, "alarms.jsonl", *lines)
    _write(tmp_path, "metrics.jsonl", _row(1, loss=1.0))
    run = read_run(tmp_path)
    assert len(run.alarms) == 1
    assert run.skipped_lines == 3


def test_folder_around_or_inside_a_run_names_the_run(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (runs / "moe" / "checkpoints").mkdir(parents=True)
    _write(runs / "moe", "metrics.jsonl", _row(1, 1, loss=1.0))
    for wrong in (runs, runs / "moe" / "checkpoints"):
        with pytest.raises(UserError) as raised:
            read_run(wrong)
        assert raised.value.remedy == f"name a run: {runs / 'moe'}"
