"""The CPU image really built, from debootstrap on, without a Docker engine; and used as its user would.

Nightly: minutes, and 13 GB of disk while it runs. BUILD_VOLUMES may bring caches and certificates: docker/build_cpu.sh.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
TOOLS = [name for name in ("buildah", "debootstrap") if not shutil.which(name)]
TOY = """
cd && export MOE_DEVICE=cpu MOE_SCALE=toy GPUS_PER_NODE=2 OMP_NUM_THREADS=1 TRAIN_ITERS=3 STOP_AT=3
export SHARED_ROOT=$HOME RUN_DIR=$HOME/run DATA_MANIFEST=$HOME/tok/manifest.json
megatron-moe tokenize --builtin-corpus text --output tok --train-tokenizer --vocab-size 512 --held-out 0.1 >&2
bash /opt/moe/examples/moe/first_run.sbatch moe >&2
megatron-moe doctor --json
megatron-moe health run --json || true
id -u
"""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0, reason="debootstrap needs root"),
    pytest.mark.skipif(bool(TOOLS), reason=f"not installed: {', '.join(TOOLS)}"),
]


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Build the image in a store of its own and return the words that start buildah on it."""
    store = tmp_path_factory.mktemp("images")
    driver = "overlay" if "overlay" in Path("/proc/filesystems").read_text() else "vfs"
    words = ["buildah", "--root", f"{store}/root", "--runroot", f"{store}/run", "--storage-driver", driver]
    environ = {**os.environ, "STORE": str(store), "STORAGE_DRIVER": driver}
    try:
        with (store / "log").open("w") as log:
            command = ["bash", str(REPO / "docker/build_cpu.sh")]
            done = subprocess.run(command, env=environ, stdout=log, stderr=log, check=False)
        assert done.returncode == 0, (store / "log").read_text()[-4000:]
        yield words
    finally:
        subprocess.run([*words, "rm", "--all"], capture_output=True, check=False)
        subprocess.run([*words, "rmi", "--all", "--force"], capture_output=True, check=False)
        shutil.rmtree(store, ignore_errors=True)


def test_image_says_what_it_holds_and_trains_the_toy_as_its_user(buildah: list[str]) -> None:
    name = subprocess.run([*buildah, "from", "--pull-never", "localhost/megatron-moe-cpu"], capture_output=True,
                          text=True, check=True).stdout.strip()  # fmt: skip
    entry = ["bash", "/opt/moe/docker/entry.sh", "bash", "-euc", TOY]
    # buildah gives the container a name that nothing resolves, and torchrun wants to.
    words = [*buildah, "run", "--isolation", "chroot", "--hostname", "localhost", name, "--", *entry]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    # What the entry prints before the command.
    assert "verdict: good" in done.stderr
    doctor, end = json.JSONDecoder().raw_decode(done.stdout)
    health, _ = json.JSONDecoder().raw_decode(done.stdout[end:].lstrip())
    assert {row["check"]: row["status"] for row in doctor["findings"]}["dataset helper"] == "good"
    assert health["step"] == 3
    assert done.stdout.split()[-1] == "10001"


def test_labels_are_the_pins(buildah: list[str]) -> None:
    inspect = [*buildah, "inspect", "--type", "image", "localhost/megatron-moe-cpu"]
    found = json.loads(subprocess.run(inspect, capture_output=True, text=True, check=True).stdout)
    labels = found["Docker"]["config"]["Labels"]
    pins = json.loads((REPO / "build/pins.json").read_text())
    assert labels["megatron.series"] == pins["series_digest"]
