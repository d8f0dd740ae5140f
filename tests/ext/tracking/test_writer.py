"""RunWriter and the tee: one row a step, and no accident reaches the training loop."""

from __future__ import annotations

import enum
import json
import logging
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from megatron_ext import tracking
from megatron_ext.errors import UserError
from megatron_ext.observe.sink import Sink
from megatron_ext.tracking.appender import Appender
from megatron_ext.tracking.rundir import read_run
from megatron_ext.tracking.writer import FLUSH_WAIT_S


def _open(args) -> tracking.RunWriter:
    writer = tracking.RunWriter.from_args(args, {"base": "release"})
    assert writer is not None
    return writer


def test_satisfies_the_sink_protocol(make_args) -> None:
    writer = _open(make_args("--moe-ext-no-trackio"))
    assert isinstance(writer, Sink)
    writer.close()


def test_one_row_a_step_from_both_sides(make_args, tmp_path: Path) -> None:
    writer = _open(make_args("--moe-ext-no-trackio"))
    tee = tracking.TeeSummaryWriter(writer)
    for step in (1, 2):
        tee.add_scalar("lm loss", torch.tensor(5.0 - step), step)
        tee.add_scalar("lm loss vs samples", torch.tensor(5.0 - step), step * 8)
        writer.scalars(step, {"moe/max_vio/max": 0.5 * step})
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / "moe" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["samples"], line["metrics"]) for line in lines] == [
        (1, 8, {"lm loss": 4.0, "moe/max_vio/max": 0.5}),
        (2, 16, {"lm loss": 3.0, "moe/max_vio/max": 1.0}),
    ]


def test_late_numbers_join_the_row_of_their_step(make_args, tmp_path: Path) -> None:
    writer = _open(make_args("--moe-ext-no-trackio"))
    for step in range(1, 8):
        writer.scalars(step, {"lm loss": float(step)})
        writer.samples(step, 8 * step)
        if step > 1:
            writer.scalars(step - 1, {"moe/max_vio/max": float(step - 1)})
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / "moe" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 8))
    assert all(line["samples"] == 8 * line["step"] for line in lines)
    assert all(line["metrics"]["moe/max_vio/max"] == line["step"] for line in lines[:-1])


def test_tee_is_a_summary_writer_and_passes_everything_on(make_args, tmp_path: Path) -> None:
    inner = SummaryWriter(tmp_path / "tb")
    tee = tracking.TeeSummaryWriter(_open(make_args("--moe-ext-no-trackio")), inner)
    assert isinstance(tee, SummaryWriter)
    tee.add_scalar("a", 1.0, 1)
    tee.add_text("args", "text", global_step=1)
    tee.add_histogram("h", np.arange(4.0), 1)
    tee.flush()
    tee.close()
    (events,) = (tmp_path / "tb").iterdir()
    assert events.stat().st_size > 200
    assert list((tmp_path / "moe").glob("events*")) == []


def test_tee_without_a_stock_writer_swallows_what_is_no_scalar(make_args) -> None:
    tee = tracking.TeeSummaryWriter(_open(make_args("--moe-ext-no-trackio")))
    tee.add_text("args", "text")
    tee.add_histogram("h", np.arange(4.0), 1)
    tee.add_scalars("group", {"x": 1}, 3)
    tee.close()


def test_megatron_timers_reach_the_run_directory(make_args, tmp_path: Path) -> None:
    timers = pytest.importorskip("megatron.core.timers", reason="needs build/megatron (make setup)")

    class OneRank(timers.Timers):
        """Real Timers without a process group: only the gathering over ranks is replaced."""

        def _get_global_min_max_time(self, *args, **kwargs):
            return {"forward": (0.1, 0.2)}

    tee = tracking.TeeSummaryWriter(_open(make_args("--moe-ext-no-trackio")))
    # Its type test decides: a look-alike of SummaryWriter would get nothing.
    OneRank(2, "max").write(["forward"], tee, 7)
    tee.close()
    (row,) = read_run(tmp_path / "moe").rows
    assert row.step == 7
    assert any("forward" in key for key in row.metrics)


def test_only_the_last_rank_writes(make_args, tmp_path: Path) -> None:
    assert tracking.RunWriter.from_args(make_args(rank=0, world_size=2), {}) is None
    assert not (tmp_path / "moe").exists()


def test_stock_entry_script_names_the_directory_in_the_environment(monkeypatch, tmp_path: Path) -> None:
    import argparse

    args = argparse.Namespace(rank=0, world_size=1)
    assert tracking.RunWriter.from_args(args, {}) is None
    monkeypatch.setenv("MOE_EXT_RUN_DIR", str(tmp_path / "stock"))
    writer = _open(args)
    writer.close()
    assert (tmp_path / "stock" / "run.json").exists()


def test_run_json_holds_configuration_pins_and_starts(make_args, tmp_path: Path) -> None:
    class Kind(enum.Enum):
        FAST = 1

    for iteration in (0, 40):
        writer = _open(make_args("--moe-ext-no-trackio", iteration=iteration, kind=Kind.FAST, dtype=torch.bfloat16))
        writer.scalars(iteration + 1, {"lm loss": 1.0})
        writer.close()
    info = read_run(tmp_path / "moe").info
    assert info.config["kind"] == "FAST"
    assert info.config["dtype"] == "torch.bfloat16"
    assert info.pins == {"base": "release"}
    assert [start.iteration for start in info.starts] == [0, 40]
    assert len(info.id) == 32


def test_lost_run_json_does_not_reset_the_start_number(make_args, tmp_path: Path) -> None:
    for step in (5, 3):
        writer = _open(make_args("--moe-ext-no-trackio"))
        writer.scalars(step, {"x": float(step)})
        writer.close()
        (tmp_path / "moe" / "run.json").unlink()
    assert [row.step for row in read_run(tmp_path / "moe").rows] == [3]


def test_second_writer_is_refused_with_a_remedy(make_args) -> None:
    writer = _open(make_args("--moe-ext-no-trackio"))
    with pytest.raises(UserError, match="another process is writing"):
        _open(make_args("--moe-ext-no-trackio"))
    writer.close()
    _open(make_args("--moe-ext-no-trackio")).close()


def test_run_directory_that_is_a_file_is_refused_at_start(make_args, tmp_path: Path) -> None:
    (tmp_path / "moe").write_text("")
    with pytest.raises(UserError, match="is a file"):
        _open(make_args())


def test_state_comes_back_in_the_next_start(make_args) -> None:
    writer = _open(make_args("--moe-ext-no-trackio"))
    assert writer.load_state() is None
    writer.save_state({"raised": [["dead_expert", 3, 7]], "lowest": 4.5})
    writer.close()
    again = _open(make_args("--moe-ext-no-trackio"))
    assert again.load_state() == {"raised": [["dead_expert", 3, 7]], "lowest": 4.5}
    again.close()


def test_last_row_of_a_hung_run_gets_to_the_disk(make_args, tmp_path: Path) -> None:
    writer = _open(make_args("--moe-ext-no-trackio"))
    writer.scalars(1, {"lm loss": 1.0})
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not read_run(tmp_path / "moe").rows:
        time.sleep(0.1)
    writer.scalars(1, {"late": 2.0})
    writer.close()
    (row,) = read_run(tmp_path / "moe").rows
    assert row.metrics == {"lm loss": 1.0, "late": 2.0}


def test_a_flush_leaves_every_row_on_the_disk_and_late_numbers_join_them(make_args, tmp_path: Path) -> None:
    writer = _open(make_args("--moe-ext-no-trackio"))
    for step in (1, 2, 3, 4):
        writer.scalars(step, {"lm loss": float(step)})
    writer.routing(4, [0], np.array([[3, 1]]))
    writer.flush()
    written = read_run(tmp_path / "moe")  # nothing waits: a kill would lose nothing
    assert [(row.step, row.metrics["lm loss"]) for row in written.rows] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert [frame.step for frame in written.routing] == [4]
    writer.scalars(4, {"late": 5.0})
    writer.close()
    writer.flush()  # after the end: nothing to do, nothing to wait for
    assert read_run(tmp_path / "moe").rows[-1].metrics == {"lm loss": 4.0, "late": 5.0}


def test_a_flush_does_not_wait_for_a_disk_that_refuses(make_args, tmp_path: Path, caplog) -> None:
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "metrics.jsonl").symlink_to("/dev/full")
    writer = _open(make_args("--moe-ext-no-trackio"))
    writer.scalars(1, {"lm loss": 1.0})
    begin = time.monotonic()
    writer.flush()
    assert time.monotonic() - begin < FLUSH_WAIT_S / 2
    assert "training goes on" in caplog.text
    writer.close()


def test_routing_with_extra_fields(make_args, tmp_path: Path) -> None:
    writer = _open(make_args("--moe-ext-no-trackio"))
    counts = np.array([[3, 1], [2, 2]])
    writer.routing(4, [0, 11], counts, {"expert_rms": [[1.0, None], [2.0, 2.0]]})
    counts[:] = 0  # the monitor reuses its buffer
    writer.close()
    (frame,) = read_run(tmp_path / "moe").routing
    assert frame.layers.tolist() == [0, 11]
    assert frame.counts.tolist() == [[3, 1], [2, 2]]
    assert frame.expert_rms is not None


def test_full_disk_warns_once_and_training_goes_on(make_args, tmp_path: Path, caplog) -> None:
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "metrics.jsonl").symlink_to("/dev/full")
    writer = _open(make_args("--moe-ext-no-trackio"))
    with caplog.at_level(logging.WARNING):
        for step in range(1, 51):
            writer.scalars(step, {"lm loss": 1.0})
        writer.close()
    messages = [record.message for record in caplog.records]
    assert sum("No space left" in message for message in messages) == 1
    assert sum("50 lines could not be written" in message for message in messages) == 1


def test_lines_wait_for_the_disk_and_a_short_write_is_healed(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import resource, signal, sys
        from pathlib import Path
        from megatron_ext.tracking.appender import Appender
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (105, hard))
        file = Appender(Path(sys.argv[1]), retry_s=0)
        for number in range(20):
            file.append(b'{"n": %d}' % number)
        assert file.error and file.waiting, (file.error, file.waiting)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert file.flush()
    """)
    target = tmp_path / "lines"
    subprocess.run([sys.executable, "-c", script, str(target)], check=True, timeout=60)
    whole = []
    for line in target.read_text().splitlines():
        try:
            whole.append(json.loads(line)["n"])
        except ValueError:
            continue
    assert whole == list(range(20))


def test_backlog_is_bounded_and_counts_what_it_drops(tmp_path: Path) -> None:
    (tmp_path / "in_the_way").write_text("")
    file = Appender(tmp_path / "in_the_way" / "lines", backlog_bytes=100)
    for _ in range(50):
        file.append(b"0123456789")
    assert file.error
    assert file.waiting == 10
    assert file.lost == 40


def test_appending_to_a_torn_file_starts_a_new_line(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b'{"n": 1}\n{"n": 2')
    Appender(tmp_path / "lines").append(b'{"n": 3}')
    assert (tmp_path / "lines").read_bytes() == b'{"n": 1}\n{"n": 2\n{"n": 3}\n'


def test_folder_taken_away_and_given_back(make_args, tmp_path: Path, caplog) -> None:
    writer = _open(make_args("--moe-ext-no-trackio"))
    writer.scalars(1, {"x": 1.0})
    writer.scalars(2, {"x": 2.0})
    time.sleep(0.3)
    os.rename(tmp_path / "moe", tmp_path / "away")
    (tmp_path / "moe").write_text("a file in place of the folder")
    writer.scalars(3, {"x": 3.0})
    writer.scalars(4, {"x": 4.0})
    time.sleep(0.3)
    (tmp_path / "moe").unlink()
    os.rename(tmp_path / "away", tmp_path / "moe")
    with caplog.at_level(logging.WARNING):
        writer.close()
    assert [row.step for row in read_run(tmp_path / "moe").rows] == [1, 2, 3, 4]


def test_value_that_is_no_number_costs_its_row_only(make_args, tmp_path: Path, caplog) -> None:
    writer = _open(make_args("--moe-ext-no-trackio"))
    with caplog.at_level(logging.WARNING):
        writer.scalars(1, {"x": "not a number"})  # type: ignore[dict-item]
        writer.scalars(2, {"x": 2.0})
        writer.close()
    assert [row.step for row in read_run(tmp_path / "moe").rows] == [2]
    assert any("could not be written" in record.message for record in caplog.records)


def test_lines_of_a_resumed_start_say_where_it_resumed(make_args, tmp_path: Path) -> None:
    for iteration in (0, 3):
        writer = _open(make_args("--moe-ext-no-trackio", iteration=iteration))
        for step in range(iteration + 1, 5):
            writer.scalars(step, {"start": float(iteration)})
            writer.routing(step, [0], np.array([[3, 1]]))
        writer.close()
    # Run to its end: Megatron evaluates and writes for the last step once more.
    writer = _open(make_args("--moe-ext-no-trackio", iteration=4))
    writer.scalars(4, {"lm loss test": 2.0})
    writer.close()
    run = read_run(tmp_path / "moe")
    assert [(row.step, row.metrics) for row in run.rows] == [
        (1, {"start": 0.0}), (2, {"start": 0.0}), (3, {"start": 0.0}), (4, {"start": 3.0, "lm loss test": 2.0})
    ]  # fmt: skip
    assert [frame.start for frame in run.routing] == [1, 1, 1, 2]


def test_alarms_of_earlier_starts_come_back_without_the_steps_run_again(make_args) -> None:
    for iteration, steps in ((0, (5, 20)), (10, (12,)), (8, ())):
        writer = _open(make_args("--moe-ext-no-trackio", iteration=iteration))
        writer.scalars(iteration + 1, {"x": 1.0})
        for step in steps:
            writer.alarm({"name": "loss_spike", "state": "raised", "step": step, "value": float("nan")})
        found = [(record["step"], record["value"]) for record in writer.earlier_alarms()]
        writer.close()
    assert found == [(5, "NaN")]


def test_the_last_value_comes_with_its_step(make_args) -> None:
    writer = _open(make_args("--moe-ext-no-trackio"))
    assert writer.last("lm loss") is None
    writer.scalars(5, {"lm loss": 2.0})
    writer.scalars(6, {"grad-norm": 1.0})
    assert writer.last("lm loss") == (5, 2.0)
    writer.close()
