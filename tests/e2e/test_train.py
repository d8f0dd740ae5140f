"""Real Megatron on two ranks: dense, resumed after SIGKILL, upcycled, expert parallel."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from megatron_run import MOCK, MODEL, MOE, TRAIN, consumed, losses, megatron_moe, train, train_and_kill

from megatron_ext.tracking import rundir

TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Dense:
    """The uninterrupted dense run: where it saved, what it printed."""

    checkpoints: Path
    run_dir: Path
    text: str


def _flags(folder: Path, *, last: int) -> list[str]:
    return [
        *MODEL,
        *TRAIN,
        *MOCK,
        *("--train-iters", str(last), "--save-interval", "4"),
        *("--save", str(folder / "checkpoints"), "--moe-ext-run-dir", str(folder)),
    ]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Dense:
    folder = tmp_path_factory.mktemp("dense")
    done = train(_flags(folder, last=10))
    assert done.returncode == 0, done.stdout[-3000:]
    return Dense(folder / "checkpoints", folder, done.stdout)


def test_scalars_reach_the_run_directory_at_their_step(dense: Dense) -> None:
    printed = {step: float(loss) for step, loss in losses(dense.text).items()}
    assert sorted(printed) == list(range(1, 11))
    written = {row.step: row.metrics for row in rundir.read_run(dense.run_dir).rows if "lm loss" in row.metrics}
    assert sorted(written) == sorted(printed)
    # A start's second line prints the mean of its first two steps, so step 2 is not comparable.
    for step in (1, *range(3, 11)):
        assert written[step]["lm loss"] == pytest.approx(printed[step], abs=2e-6)
    assert all("learning-rate" in values and "grad-norm" in values for values in written.values())


def test_killed_run_goes_on_from_its_checkpoint_as_if_nothing_had_happened(dense: Dense, tmp_path: Path) -> None:
    flags = [*_flags(tmp_path, last=10), "--load", str(tmp_path / "checkpoints")]
    # Its rows up to the checkpoint are on the disk when that is: the resumed run does not write them again.
    train_and_kill(flags, after_step=5, log=tmp_path / "first.log")
    assert (tmp_path / "checkpoints" / TRACKER).read_text() == "4"
    again = train(flags)
    assert again.returncode == 0, again.stdout[-3000:]
    # Same losses on the same samples from step 5 on: none skipped, none seen twice, optimizer state and all. (Megatron
    # prints the mean of a start's first two steps at its second, so step 6 is read from the run directory.)
    resumed, whole = losses(again.stdout), losses(dense.text)
    assert sorted(resumed) == [5, 6, 7, 8, 9, 10]
    assert {s: resumed[s] for s in (5, 7, 8, 9, 10)} == {s: whole[s] for s in (5, 7, 8, 9, 10)}
    assert consumed(again.stdout)[5] == consumed(dense.text)[5] == 40
    run, reference = rundir.read_run(tmp_path), rundir.read_run(dense.run_dir)
    history = [(row.step, row.metrics["lm loss"]) for row in run.rows if "lm loss" in row.metrics]
    assert history == [(row.step, row.metrics["lm loss"]) for row in reference.rows if "lm loss" in row.metrics]
    assert len(run.info.starts) == 2


def test_rows_up_to_a_checkpoint_are_on_the_disk_when_it_is(tmp_path: Path) -> None:
    moe = list(MOE)
    moe[moe.index("--expert-model-parallel-size") + 1] = "1"
    # A format that is saved in milliseconds: the writer, which keeps a row open for two seconds, gets no time.
    flags = [*_flags(tmp_path, last=40), *moe, "--moe-ext-observe-interval", "1", "--ckpt-format", "torch"]
    tracker = tmp_path / "checkpoints" / TRACKER
    train_and_kill(flags, after_step=4, log=tmp_path / "log", ranks=1, ready=tracker.is_file)
    rows = {row.step: row.metrics for row in rundir.read_run(tmp_path).rows}
    for step in range(1, int(tracker.read_text()) + 1):
        assert {"lm loss", "grad-norm", "moe/max_vio/max"} <= set(rows.get(step, ())), step


@pytest.mark.nightly
def test_the_alarms_of_a_killed_run_are_those_of_one_that_was_not(tmp_path: Path) -> None:
    moe = list(MOE)
    moe[moe.index("--expert-model-parallel-size") + 1] = "1"
    # Thresholds at which a small healthy run raises, changes and clears alarms of many kinds.
    alarms = "--moe-ext-alarm-flat-ratio 1.6 --moe-ext-alarm-collapse-limit 0.1 --moe-ext-alarm-collapse-steps 4"
    alarms += " --moe-ext-alarm-sharp-weight 0.6 --moe-ext-alarm-dead-norm 0.8 --moe-ext-observe-window 1"
    run_dirs = tmp_path / "whole", tmp_path / "killed"
    for folder in run_dirs:
        flags = [*_flags(folder, last=40), *moe, *alarms.split(), "--moe-ext-observe-interval", "1", "--lr", "3e-2"]
        flags += ["--moe-ext-no-trackio"]
        # Killed after the only checkpoint, and after an alarm was cleared that the resumed run has to clear again.
        flags += ["--save-interval", "32", "--ckpt-format", "torch", "--load", str(folder / "checkpoints")]
        if folder.name == "killed":
            train_and_kill(flags, after_step=35, log=tmp_path / "log", ranks=1)
        done = train(flags, ranks=1)
        assert done.returncode == 0, done.stdout[-3000:]
    whole, killed = (_said(folder) for folder in run_dirs)
    assert {state for lines in whole.values() for state, _ in lines} >= {"raised", "cleared"}
    assert sorted(killed) == sorted(whole)
    for key, first in whole.items():
        assert [state for state, _ in killed[key]] == [state for state, _ in first], key
        # An alarm is cleared by two good samples in a row; of the two the resumed run may have seen one.
        assert all(0 <= late[1] - step[1] <= 1 for step, late in zip(first, killed[key], strict=True)), key


def _said(folder: Path) -> dict[str, list[tuple[str, int]]]:
    """Return what was said of each alarm, by name and layer: (state, step) pairs."""
    found: dict[str, list[tuple[str, int]]] = {}
    for one in rundir.read_run(folder).alarms:
        found.setdefault(f"{one['name']} {one['layer']}", []).append((one["state"], one["step"]))
    return found


def test_a_run_s_checkpoint_is_upcycled_grown_and_verified_by_the_commands(dense: Dense, tmp_path: Path) -> None:
    """The arguments of a real training start are many more than those that the quick tests give."""
    moe, larger = tmp_path / "moe", tmp_path / "larger"
    for words in (
        ["upcycle", dense.checkpoints, moe, "--num-experts", "8", "--moe-ffn-hidden-size", "32"],
        ["upcycle", moe, larger, "--num-experts", "16", "--router-topk", "4", "--router-noise", "0"],
    ):
        made = megatron_moe(*map(str, words))
        assert made.returncode == 0, made.stderr[-3000:]
    for source, target in ((dense.checkpoints, moe), (moe, larger)):
        done = megatron_moe("upcycle", "verify", str(source), str(target))
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        assert "promised  exact" in done.stdout
        assert done.stdout.rstrip().endswith("verdict: as promised")


def test_upcycled_model_starts_at_the_loss_of_the_dense_one(dense: Dense, tmp_path: Path) -> None:
    source = tmp_path / "dense"
    shutil.copytree(dense.checkpoints, source)
    (source / TRACKER).write_text("8")
    flags = [
        *MODEL,
        *MOE,
        *TRAIN,
        *MOCK,
        *(
            "--moe-router-load-balancing-type",
            "aux_loss",
            "--moe-aux-loss-coeff",
            "1e-2",
            "--train-iters",
            "2",
            "--save-interval",
            "4",
        ),
        *("--load", str(source), "--save", str(tmp_path / "moe"), "--moe-use-upcycling"),
        *("--moe-ext-run-dir", str(tmp_path / "run"), "--moe-ext-experts", "torch"),
    ]
    done = train(flags)
    assert done.returncode == 0, done.stdout[-3000:]
    assert float(losses(done.stdout)[1]) == pytest.approx(float(losses(dense.text)[9]), abs=1e-4)
    assert "[moe] experts: torch's grouped products" in done.stdout
    # The batch is the one that the dense run saw next.
    assert consumed(done.stdout)[1] == consumed(dense.text)[9]
    first = next(row for row in rundir.read_run(tmp_path / "run").rows if row.step == 1)
    assert any(name.startswith("moe/max_vio") for name in first.metrics), sorted(first.metrics)

    # A folder that holds another run's checkpoint is refused, untouched; a requeued job's own folder is not
    # (tests/ext/patches/test_upcycle_requeue.py).
    other = tmp_path / "other"
    shutil.copytree(source, other)
    flags[flags.index("--save") + 1] = str(other)
    refused = train(flags)
    assert refused.returncode != 0
    assert "error:" in refused.stdout
    assert str(other) in refused.stdout
    assert (other / TRACKER).read_text() == "8"
