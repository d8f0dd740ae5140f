"""Faults of a cluster, put into real starts of training: each ends before step 1, with the remedy.

NCCL needs GPUs: what it would write into each rank's log is written for it. The slow node and the preflight's own disk
check are in test_preflight_ranks.py; the launch scripts' part of a bad manifest in tests/cluster/.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron_run import MOCK, MODEL, ROOT, TRAIN, environment, losses

from megatron_ext.cli import main
from tests.ext.preflight import samples

CHILD = """
import os, pathlib, shutil, sys
from megatron_ext.errors import UserError
from megatron_ext.runtime import hooks
from megatron_ext.runtime.pretrain import train
start = hooks.watch_transport
def watch(args):
    start(args)
    written = pathlib.Path(os.environ["NCCL_LOGS"]) / os.environ["RANK"]
    if written.exists():
        shutil.copy(written, hooks._session.transport_log)
hooks.watch_transport = watch
try:
    train(sys.argv[1:], asked_device="cpu")
except UserError as error:
    print(error.text(), file=sys.stderr, flush=True)
    sys.exit(1)
"""
EFA = {"NCCL_NET_PLUGIN": "ofi", "NCCL_NET": "Libfabric", "FI_PROVIDER": "efa"}
FLAGS = [*MODEL, *TRAIN, *MOCK, "--train-iters", "1", "--micro-batch-size", "1", "--global-batch-size", "6"]


def _train(tmp_path: Path, logs: list[str | None], *flags: str, **environ: str) -> tuple[int, str]:
    """Start real training, one rank a log (None: a rank whose NCCL wrote none); return exit status and output."""
    folder = tmp_path / "logs"
    folder.mkdir()
    for rank, text in enumerate(logs):
        if text is not None:
            (folder / str(rank)).write_text(text)
    (tmp_path / "child.py").write_text(CHILD)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(logs))]
    words = [sys.executable, *launcher, str(tmp_path / "child.py"), *FLAGS, "--moe-ext-run-dir", str(tmp_path / "run"),
             "--moe-ext-transport", "Libfabric", *flags]  # fmt: skip
    given = {**environment(), **EFA, "NCCL_LOGS": str(folder), **environ}
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(words, stdout=log, stderr=log, env=given, cwd=ROOT, timeout=300, check=False)
    return done.returncode, (tmp_path / "log").read_text()


GOOD, SOCKET = samples.log(samples.GOOD_LOG), samples.log(samples.SOCKET_LOG)


@pytest.mark.nightly
def test_ranks_on_the_fabric_train(tmp_path: Path) -> None:
    status, text = _train(tmp_path, [GOOD])
    assert status == 0, text[-3000:]
    assert losses(text).keys() == {1}


def test_each_rank_that_is_not_on_the_fabric_is_named_and_all_stop(tmp_path: Path) -> None:
    status, text = _train(tmp_path, [GOOD, SOCKET, None], MOE_NODE_NAME="node-a")
    assert status != 0
    said = text.split("error:")[1].split("try:")[0]
    assert "rank 1 (node-a): uses Socket: plugin not loaded: libnccl-net-ofi.so" in said
    assert "rank 2 (node-a): no `Using network` line" in said
    assert "rank 0" not in said
    assert "\ntry:" in text
    # None makes a step.
    assert losses(text) == {}
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_wrong_plugin_name_stops_the_run_before_anything_is_written(tmp_path: Path) -> None:
    # It stops before the ranks meet, so one without a launcher will do.
    words = [sys.executable, "-m", "megatron_ext.cli", "train", "--device", "cpu", "--", *FLAGS,
             "--moe-ext-transport", "Libfabric", "--moe-ext-run-dir", str(tmp_path / "run")]  # fmt: skip
    given = {**environment(), **EFA, "NCCL_NET_PLUGIN": "spcx"}
    done = subprocess.run(words, capture_output=True, text=True, env=given, cwd=ROOT, timeout=200, check=False)
    assert done.returncode == 1
    assert "spcx" in done.stderr
    assert "try:   export NCCL_NET_PLUGIN=ofi" in done.stderr
    assert list(tmp_path.iterdir()) == []


def _refused(flags: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Start training in this process, up to the refusal; return what it says."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    assert main(["train", "--device", "cpu", "--", *FLAGS, *flags]) == 1
    return capfd.readouterr().err


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield small
    subprocess.run(["umount", str(small)], check=True)


def test_full_disk_stops_the_run(
    full: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = _refused(["--save", str(full / "run" / "checkpoints"), "--save-interval", "1"], capfd, monkeypatch)
    assert "No space left on device" in said
    assert f"--save {full}/run/checkpoints" in said
    assert "try:   free space" in said
    assert list(full.iterdir()) == []


@pytest.mark.parametrize("content", [None, "{half a manif"], ids=["missing", "cut-off"])
def test_unreadable_manifest_stops_the_run(
    content: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = tmp_path / "manifest.json"
    if content is not None:
        manifest.write_text(content)
    said = _refused(["--moe-ext-manifest", str(manifest)], capfd, monkeypatch)
    assert str(manifest) in said
    assert "\ntry:" in said
