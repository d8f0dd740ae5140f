"""A power cut in the middle: SIGKILL at random moments; afterwards `status` is right and the next command works."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from lab import REPOSITORY, Lab, release

NORMAL, NIGHTLY = 4, 50


def start(lab, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "tools.mpatch", words[0], "--root", str(lab.root), *words[1:]],
        cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


def killed(lab, moment_s, *words):
    """Run a command and kill it and its gits after a while."""
    process = start(lab, *words)
    time.sleep(moment_s)
    # By its own group: the git that it has started must die with it, as in a power cut.
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # A git that was being started holds what its parent held, the lock too, until the machine comes to end it.
    deadline = time.monotonic() + 30
    while alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)


def alive(group):
    """Return whether a process of the group is still there; one that only waits to be reaped holds nothing."""
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):  # ended meanwhile
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
    return False


def duration(lab, folder, *words):
    """Return how long the command takes here, on a copy."""
    copy = copied(lab, folder / "timing")
    begin = time.monotonic()
    start(copy, *words).wait()
    return time.monotonic() - begin


def copied(lab, folder):
    shutil.copytree(lab.root.parent, folder, symlinks=True)
    return Lab(folder / "checkout", folder / "shelf")


def moments(count, seconds, seed):
    # Imports take most of the time; the part that writes is what is cut.
    dice = random.Random(seed)
    return [dice.uniform(0.3, 1.05) * seconds for _ in range(count)]


def counts():
    return [NORMAL, pytest.param(NIGHTLY, marks=pytest.mark.nightly)]


def patches_of(lab):
    return {
        str(path.relative_to(lab.root)): path.read_bytes()
        for path in (lab.root / "patches").rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("count", counts())
def test_apply_killed_at_random_moments(three, tmp_path, count):
    before = patches_of(three)
    shutil.rmtree(three.root / "build")
    three.apply()
    three.good("drop", "core/top-k-more", "--because", "x")
    for name, data in before.items():  # a pulled series: the tree is stale and apply has to replace it
        (three.root / name).parent.mkdir(exist_ok=True)
        (three.root / name).write_bytes(data)
    words = ("apply", "--offline", str(three.shelf))
    for number, moment in enumerate(moments(count, duration(three, tmp_path, *words), 1)):
        lab = copied(three, tmp_path / f"cut-{number}")
        killed(lab, moment, *words)
        tree = (lab.tree / "fake/core/router.py").read_text()
        assert ("sorted(tokens)" in tree) or ("list(tokens)" in tree)  # the old tree or the new one, whole
        said = lab.run("status")
        assert ("applied (3 of 3)" in said.out) == (said.code == 0), said
        lab.apply()
        assert lab.good("verify").code == 0
        assert not list((lab.root / "build").glob(".megatron*"))
        shutil.rmtree(lab.root.parent)


@pytest.mark.parametrize("count", counts())
def test_refresh_killed_at_random_moments(three, tmp_path, count):
    three.good("edit", "core/guard")
    three.replace("fake/core/loss.py", "    # mean", "    # the mean")
    for number, moment in enumerate(moments(count, duration(three, tmp_path, "refresh"), 2)):
        lab = copied(three, tmp_path / f"cut-{number}")
        killed(lab, moment, "refresh")
        assert "# the mean" in (lab.tree / "fake/core/loss.py").read_text()
        said = lab.run("status")
        if "edit of core/guard is open" in said.out:
            assert "changed  fake/core/loss.py" in said.out
            if lab.run("refresh").code:  # the series was written, the tree not yet: apply finishes
                lab.apply()
        elif said.code:
            lab.apply()
        assert b"+    # the mean" in lab.patch("core/guard")
        assert lab.good("verify").code == 0
        shutil.rmtree(lab.root.parent)


@pytest.mark.parametrize("count", counts())
def test_rebase_killed_at_random_moments(three, tmp_path, count):
    three.add_base("moved", release("moved"))
    words = ("rebase", "--onto", "moved", "--offline", str(three.shelf))
    before = patches_of(three)
    for number, moment in enumerate(moments(count, duration(three, tmp_path, *words), 3)):
        lab = copied(three, tmp_path / f"cut-{number}")
        killed(lab, moment, *words)
        status = lab.run("status")
        if 'default_base = "moved"' in (lab.root / "upstream.toml").read_text():
            lab.apply()
        else:
            assert patches_of(lab) == before
            assert "applied (3 of 3) on 1.0" in status.out
            lab.good(*words)
        assert lab.good("verify").code == 0
        assert "(default): fake moved" in lab.good("status").out
        shutil.rmtree(lab.root.parent)


def test_waiting_rebase_survives_a_kill_between_plan_and_tree(three, monkeypatch):
    from tools.mpatch import move

    files = release("clean")
    files["fake/core/loss.py"] = "def loss(values):\n    return 0\n"
    three.add_base("2.0", files)

    def power_cut(*words):
        raise KeyboardInterrupt

    monkeypatch.setattr(move, "lay_out", power_cut)
    assert three.run("rebase", "--onto", "2.0", "--offline", str(three.shelf)).code == 130
    monkeypatch.undo()
    assert "waits" in three.run("status").out
    assert "MoveConflict" in three.run("rebase", "--continue").err  # lays the conflict out now
    assert "<<<<<<<" in (three.tree / "fake/core/loss.py").read_text()
    three.good("rebase", "--abort")
    assert three.good("verify").code == 0


def test_two_at_once_one_says_busy(three):
    from tools.mpatch.files import locked

    with locked(three.root / "build/mpatch/lock", "test"):
        said = three.run("apply")
    assert said.code == 2
    assert "Busy" in said.err
