"""An MoE run of before checkpoint/local-moe-norm-name goes on: same losses, weights and moments, new names."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron_run import MOCK, MODEL, MOE, ROOT, TRAIN, environment, losses, train

from megatron_ext.upcycle.layout import MLP
from megatron_ext.upcycle.offline import NORM, OWN_NORM, OWN_NORM_NAME
from megatron_ext.upcycle.source import TRACKER, open_source

pytestmark = pytest.mark.nightly

OLDER = Path(__file__).parent / "older_names.py"
FLAGS = [*MODEL, *MOE, *TRAIN, *MOCK, "--train-iters", "4", "--save-interval", "2", "--transformer-impl", "local",
         "--dist-ckpt-optim-fully-reshardable", "--moe-ext-no-trackio"]  # fmt: skip


def test_an_older_run_goes_on_under_the_new_names(tmp_path: Path) -> None:
    old, begun, new = (tmp_path / name for name in ("old", "begun", "new"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(OLDER)]
    words = [*torchrun, "train", "--device", "cpu", "--", *FLAGS, "--save", str(old)]
    whole = subprocess.run([*words, "--moe-ext-run-dir", str(tmp_path / "a")], cwd=ROOT, env=environment(), text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)  # fmt: skip
    assert whole.returncode == 0, whole.stdout[-3000:]
    shutil.copytree(old / "iter_0000002", begun / "iter_0000002")
    (begun / TRACKER).write_text("2")
    resumed = train([*FLAGS, "--load", str(begun), "--save", str(new), "--moe-ext-run-dir", str(tmp_path / "b")])
    assert resumed.returncode == 0, resumed.stdout[-3000:]
    # A start's second line prints the mean of its first two steps.
    assert losses(resumed.stdout)[3] == losses(whole.stdout)[3]
    before, after = open_source(old), open_source(new)
    assert OWN_NORM_NAME not in before.common["content_metadata"]
    assert after.common["content_metadata"][OWN_NORM_NAME]
    renamed = {name: name.replace(MLP + NORM, OWN_NORM) for name in before.tensors}
    assert set(renamed.values()) == set(after.tensors)
    # The weight, its fp32 copy and both moments; both layers are stored together.
    assert len([name for name, mine in renamed.items() if name != mine]) == 4
    assert [name for name, mine in renamed.items() if not torch.equal(before.read(name), after.read(mine))] == []
