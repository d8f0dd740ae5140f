"""The real Trackio: one run after a kill, no harm from any accident, everything importable later."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_ext import tracking
from megatron_ext.tracking.feeder import child_environment
from megatron_ext.tracking.options import from_args
from megatron_ext.tracking.rundir import MetricRow, RoutingFrame
from megatron_ext.tracking.trackio_rows import picture, pictured, wanted

# A stand-in for training in a process that can be killed: 20 ms a step, as fast as Megatron's toy runs.
TRAIN = textwrap.dedent("""
    import argparse, sys, time
    import numpy as np
    from megatron_ext import tracking
    parser = argparse.ArgumentParser()
    tracking.add_arguments(parser)
    parser.add_argument("--first", type=int)
    parser.add_argument("--last", type=int)
    args = parser.parse_args()
    args.rank, args.world_size, args.iteration = 0, 1, args.first - 1
    writer = tracking.RunWriter.from_args(args, {})
    step = args.first
    while args.last < 0 or step <= args.last:
        writer.scalars(step, {"lm loss": 10.0 / step, "first": args.first})
        writer.routing(step, [0, 1], np.full((2, 4), step))
        print(step, flush=True)
        time.sleep(0.02)
        step += 1
    writer.close()
""")


def _command(run_dir: Path, first: int, last: int, *flags: str) -> list[str]:
    place = ["--moe-ext-run-dir", str(run_dir), "--first", str(first), "--last", str(last)]
    return [sys.executable, "-c", TRAIN, *place, *flags]


def _train(run_dir: Path, first: int, last: int, *flags: str) -> subprocess.Popen[str]:
    command = _command(run_dir, first, last, *flags)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _import(args) -> tuple[int, str]:
    options = from_args(args)
    assert options is not None
    done = subprocess.run(
        [sys.executable, "-m", "megatron_ext.tracking.feed", json.dumps(options.to_plain()), "--once"],
        env=child_environment(options),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


def test_killed_and_restarted_is_one_run_without_a_doubled_step(tmp_path: Path, kept) -> None:
    process = _train(tmp_path / "moe", 1, -1)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= 150:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = _train(tmp_path / "moe", 101, 200)
    _, errors = again.communicate(timeout=120)
    assert again.returncode == 0
    assert errors == ""
    assert kept.runs() == {"moe"}
    assert len(kept.run_ids()) == 1
    rows = kept.rows()
    assert sorted(step for step, _ in rows) == list(range(1, 201))
    # The steps that ran twice show the values of the weights that live on.
    assert {step for step, values in rows if values["first"] == 101} == set(range(101, 201))
    assert kept.query("SELECT count(*) FROM metrics WHERE CAST(metrics AS TEXT) LIKE '%trackio.image%'")[0][0] > 5


def test_two_runs_at_once_on_one_database(tmp_path: Path, kept) -> None:
    both = [_train(tmp_path / name, 1, 120) for name in ("dense", "moe")]
    for process in both:
        _, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (0, "")
    assert kept.runs() == {"dense", "moe"}
    for name in ("dense", "moe"):
        assert sorted(step for step, _ in kept.rows(name)) == list(range(1, 121))


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_end_is_heard_though_a_forked_worker_holds_the_pipe(make_args, kept, caplog) -> None:
    """As with `--num-workers 1` and an exit in mid-training: the loader's worker outlives the writer."""
    writer = tracking.RunWriter.from_args(make_args(), {})
    assert writer is not None
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,), daemon=True)
    worker.start()
    writer.scalars(1, {"x": 1.0})
    with caplog.at_level(logging.WARNING):
        writer.close()
    alive = worker.is_alive()
    worker.kill()
    worker.join()
    assert alive
    assert caplog.messages == []
    assert [step for step, _ in kept.rows()] == [1]


def test_equal_names_in_two_places_stay_two_runs(make_args, tmp_path: Path, kept) -> None:
    for place in ("a/moe", "b/moe"):
        writer = tracking.RunWriter.from_args(
            make_args("--moe-ext-trackio-dir", str(tmp_path / "trackio"), run=place), {}
        )
        assert writer is not None
        writer.scalars(1, {"x": 1.0})
        writer.close()
    first, second = sorted(kept.runs(), key=len)
    assert first == "moe"
    assert second.startswith("moe-")


def test_locked_database_costs_one_warning_and_imports_later(
    make_args, tmp_path: Path, kept, caplog, monkeypatch
) -> None:
    args = make_args()
    first = tracking.RunWriter.from_args(args, {})
    assert first is not None
    first.scalars(1, {"x": 1.0})
    first.close()
    args.iteration = 1
    # The child would wait for the lock as long as it may; the test need not.
    monkeypatch.setattr("megatron_ext.tracking.feeder.CLOSE_WAIT_S", 4.0)
    holder = sqlite3.connect(kept.path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with caplog.at_level(logging.WARNING):
        writer = tracking.RunWriter.from_args(args, {})
        assert writer is not None
        slowest = 0.0
        for step in range(2, 200):
            before = time.monotonic()
            writer.scalars(step, {"x": float(step)})
            slowest = max(slowest, time.monotonic() - before)
        writer.close()
    holder.execute("ROLLBACK")
    assert slowest < 1.0, "a step waited for the tracker's lock"
    messages = [record.message for record in caplog.records]
    assert len(messages) == 1
    assert "report --import" in messages[0]
    assert [step for step, _ in kept.rows()] == [1]
    code, out = _import(args)
    assert code == 0, out
    assert json.loads(out)["added"] == 198
    assert sorted(step for step, _ in kept.rows()) == list(range(1, 200))
    assert len(kept.run_ids()) == 1
    assert json.loads(_import(args)[1]) == {"name": "moe", "added": 0, "removed": 0, "present": 199}


def test_missing_package_costs_one_warning(make_args, tmp_path: Path, caplog, monkeypatch) -> None:
    broken = tmp_path / "broken" / "trackio"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'trackio'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    with caplog.at_level(logging.WARNING):
        writer = tracking.RunWriter.from_args(make_args(), {})
        assert writer is not None
        writer.scalars(1, {"x": 1.0})
        writer.close()
    (message,) = [record.message for record in caplog.records]
    assert "No module named 'trackio'" in message
    assert "report --import" in message
    assert (tmp_path / "moe" / "metrics.jsonl").read_text().count("\n") == 1


def test_folder_that_cannot_be_costs_one_warning(make_args, tmp_path: Path, caplog) -> None:
    (tmp_path / "trackio").write_text("a file in place of the folder: fails for root too")
    with caplog.at_level(logging.WARNING):
        writer = tracking.RunWriter.from_args(make_args(), {})
        assert writer is not None
        writer.scalars(1, {"x": 1.0})
        writer.close()
    (message,) = [record.message for record in caplog.records]
    assert "Trackio" in message


def test_read_only_folder_warns_and_training_goes_on_then_resumes_where_it_is_writable(tmp_path: Path, kept) -> None:
    run_dir = tmp_path / "moe"
    run_dir.mkdir(mode=0o555)
    # Root may write anywhere: it has to give up that right first.
    drop = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    done = subprocess.run([*drop, *_command(run_dir, 1, 20)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 20, "every step ran"
    assert done.stderr.count("cannot be written (Permission denied)") == 1
    assert "could not be written" in done.stderr
    assert list(run_dir.iterdir()) == []
    run_dir.chmod(0o755)
    again = _train(run_dir, 1, 20)
    _, errors = again.communicate(timeout=120)
    assert (again.returncode, errors) == (0, "")
    assert sorted(step for step, _ in kept.rows()) == list(range(1, 21))


def test_full_disk_costs_one_warning_and_imports_later(make_args, tmp_path: Path, kept) -> None:
    # 300 kB hold the empty database (about 200 kB) and a few rows; every write beyond fails as on a full disk.
    script = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))\n"
        + TRAIN.replace('{"lm loss"', '{**{f"k{n}": float(step) for n in range(200)}, "lm loss"')
    )
    command = [
        sys.executable,
        "-c",
        script,
        "--moe-ext-run-dir",
        str(tmp_path / "moe"),
        "--first",
        "1",
        "--last",
        "60",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tracking: ") == 1, done.stderr
    code, out = _import(make_args())
    assert code == 0, out
    assert sorted({step for step, _ in kept.rows()}) == list(range(1, 61))


def test_thousand_keys_a_step_are_capped_in_trackio_and_kept_in_the_file(make_args, tmp_path: Path, kept) -> None:
    writer = tracking.RunWriter.from_args(make_args(), {})
    assert writer is not None
    values = {f"moe/max_vio/layer_{layer}": float(layer) for layer in range(990)}
    for step in range(1, 21):
        writer.scalars(step, {**values, **{f"top{number}": 1.0 for number in range(10)}})
    writer.close()
    rows = kept.rows()
    assert len(rows) == 20
    assert all(len(metrics) == 400 for _, metrics in rows)
    assert all(f"top{number}" in metrics for _, metrics in rows for number in range(10))
    line = json.loads((tmp_path / "moe" / "metrics.jsonl").read_text().splitlines()[0])
    assert len(line["metrics"]) == 1000


def test_every_value_arrives_exactly_with_reserved_names_and_odd_numbers(make_args, kept) -> None:
    writer = tracking.RunWriter.from_args(make_args(), {})
    assert writer is not None
    values = {"lm loss": 0.1 + 0.2, "step": 7.0, "nan": float("nan"), "inf": float("inf"), "tiny": 1e-300}
    writer.scalars(3, values)
    writer.alarm(
        {
            "name": "dead_expert",
            "state": "raised",
            "step": 3,
            "since_step": 2,
            "layer": 1,
            "expert": 4,
            "value": 0.0,
            "why": "It learns nothing.",
            "remedy": "raise the coefficient",
        }
    )
    writer.close()
    assert kept.rows() == [
        (3, {"lm loss": 0.1 + 0.2, "value/step": 7.0, "nan": "NaN", "inf": "Infinity", "tiny": 1e-300})
    ]
    ((title, text, step),) = kept.query("SELECT title, text, step FROM alerts")
    assert title == "dead_expert raised: layer 1, expert 4"
    assert "It learns nothing." in text
    assert step == 3


def test_group_and_configuration_are_recorded(make_args, kept) -> None:
    writer = tracking.RunWriter.from_args(
        make_args("--moe-ext-group", "dense", num_layers=2, _private=1), {"base": "x"}
    )
    assert writer is not None
    writer.scalars(1, {"x": 1.0})
    writer.close()
    ((text,),) = kept.query("SELECT config FROM configs")
    config = json.loads(text)
    assert config["_Group"] == "dense"
    assert config["num_layers"] == 2
    assert config["pins"] == {"base": "x"}


def test_feeding_leaves_no_process_behind(make_args) -> None:
    writer = tracking.RunWriter.from_args(make_args(), {})
    assert writer is not None
    writer.scalars(1, {"x": 1.0})
    child = writer._feeder._process.pid  # type: ignore[union-attr]
    writer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_pictures_are_few_and_early() -> None:
    chosen = [index for index in range(1, 20_000) if pictured(index, 40)]
    assert chosen[:5] == [1, 2, 3, 4, 5]
    assert 20 < len(chosen) <= 40
    assert chosen[-1] > 2000
    assert not any(pictured(index, 0) for index in range(1, 100))


def test_picture_shows_load_as_brightness() -> None:
    frame = RoutingFrame(1, 1, np.array([0, 1]), np.array([[8, 0, 0, 0], [2, 2, 2, 2]]))
    image = picture(frame)
    width, height = image.shape[1] // 4, image.shape[0] // 2
    brightness = image.astype(float).sum(axis=2)
    assert brightness[0, 0] > brightness[height, 0] > brightness[0, width]
    assert image.dtype == np.uint8


def test_cap_drops_layers_before_totals() -> None:
    row = MetricRow(1, 0.0, 1, None, {"moe/x/layer_0": 1.0, "moe/x/layer_10": 1.0, "moe/x/max": 2.0, "loss": 3.0})
    assert set(wanted(row, 3)) == {"moe/x/layer_0", "moe/x/max", "loss"}
