"""The bundle for a node without a network: gathered from the real index, cut, carried, installed with no index."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packing import ROOT

from tools.mpatch.cli import main
from tools.mpatch.errors import DownloadMismatch
from tools.package import resolve
from tools.package.bundle import check_cuda
from tools.package.target import Target

LIMIT = 1 << 20
SERIES = f"{sys.version_info[0]}.{sys.version_info[1]}"
# Torch and the other large ones stay out: a small bundle goes the same way as one of gigabytes.
HAD = ("torch", "bokeh", "numpy", "tensorboard", "tokenizers", "trackio", "transformers")


def words(folder: Path, wheel: Path, *more: str) -> list[str]:
    had = [word for name in HAD for word in ("--without", name)]
    return ["bundle", str(folder), "--root", str(ROOT), "--te", "none", "--wheel", str(wheel), *had, *more]


@pytest.fixture(scope="module")
def small(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "carried"
    assert main(words(folder, wheel, "--python", SERIES, "--split", "1M")) == 0
    return folder


def install(folder: Path, environment: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the install script as on a node: an address where nothing answers stands for the missing network."""
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(environment.parent),
        "PYTHON": os.path.realpath(sys.executable),
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        **more,
    }
    command = ["bash", str(folder / "install.sh"), str(environment)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def test_each_folder_keeps_to_the_size_and_every_piece_is_summed(small: Path, wheel: Path) -> None:
    folders = sorted(path for path in small.iterdir() if path.is_dir())
    beside = sum(path.stat().st_size for path in small.iterdir() if path.is_file())
    assert len(folders) > 3
    for folder in folders:
        assert beside + sum(path.stat().st_size for path in folder.iterdir()) <= LIMIT
    record = json.loads((small / "bundle.json").read_text())
    (own,) = [file for file in record["files"] if file["name"] == wheel.name]
    assert len(own["pieces"]) > 1
    assert b"".join((small / piece).read_bytes() for piece in own["pieces"]) == wheel.read_bytes()
    names = {line.split("  ")[1] for line in (small / "SHA256SUMS").read_text().splitlines()}
    assert names == {str(path.relative_to(small)) for path in small.rglob("*") if path.is_file()} - {"SHA256SUMS"}
    assert record["locked"] >= 8
    assert record["without"] == sorted(HAD)
    assert "numpy" not in (small / "requirements.txt").read_text()


def test_it_installs_without_an_index(small: Path, tmp_path: Path) -> None:
    # Carried: another folder, read only.
    carried = tmp_path / "node"
    shutil.copytree(small, carried)
    subprocess.run(["chmod", "-R", "a-w", str(carried)], check=True)
    done = install(carried, tmp_path / "env")
    assert f"installed: {tmp_path / 'env'}" in done.stdout, done.stdout + done.stderr
    python = str(tmp_path / "env" / "bin" / "python")
    code = "import rich, orjson, megatron_ext; print(rich.__file__)"
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert said.stdout.startswith(str(tmp_path / "env")), said.stderr
    command = str(tmp_path / "env" / "bin" / "megatron-moe")
    assert subprocess.run([command, "--version"], capture_output=True, timeout=60, cwd=tmp_path).returncode == 0
    # The exit status is doctor's, which misses the first of the packages that the node was said to have.
    assert (done.returncode, "the package numpy is not installed" in done.stderr) == (1, True)
    subprocess.run(["chmod", "-R", "u+w", str(carried)], check=True)
    again = install(small, tmp_path / "env")
    assert (again.returncode, "is there already" in again.stderr) == (64, True)


@pytest.mark.parametrize("damage", ["lost", "changed"])
def test_a_damaged_bundle_installs_nothing(small: Path, tmp_path: Path, damage: str) -> None:
    carried = tmp_path / "node"
    shutil.copytree(small, carried)
    piece = next(iter(sorted(carried.glob("00*/*.part-0001"))))
    if damage == "lost":
        piece.unlink()
    else:
        data = bytearray(piece.read_bytes())
        data[100] ^= 1
        piece.write_bytes(data)
    done = install(carried, tmp_path / "env")
    assert done.returncode == 1
    assert piece.name in done.stderr
    assert "copy them again" in done.stderr
    assert not (tmp_path / "env").exists()


def test_another_python_is_refused(small: Path, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 3.9\n")
    fake.chmod(0o755)
    done = install(small, tmp_path / "env", PYTHON=str(fake))
    assert done.returncode == 1
    assert f"the bundle is for Python {SERIES}" in done.stderr
    assert not (tmp_path / "env").exists()


def test_options_that_make_no_sense_write_nothing(
    wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = "3.13" if SERIES == "3.12" else "3.12"
    (tmp_path / "there").mkdir()
    for code, said, more in (
        (64, "no wheel for Python", ("--python", other)),
        (64, "not a size", ("--python", SERIES, "--split", "12X")),
        (64, "not a Python series", ("--python", "312")),
        (2, "no set of packages fits", ("--python", SERIES, "--more", "rich==0.0.0.1")),
    ):
        assert main(words(tmp_path / "out", wheel, *more)) == code
        assert said in capsys.readouterr().err
    assert main(words(tmp_path / "there", wheel, "--python", SERIES)) == 64
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]


def test_libraries_for_another_cuda_are_named() -> None:
    pins = {"nvidia-cudnn-cu13": "9", "nvidia-nccl-cu12": "2", "torch": "2"}
    check_cuda({"nvidia-cudnn-cu13": "9", "some-libs-cu12": "1", "some-libs-cu13": "1"}, Target("3.12", cuda="13"))
    with pytest.raises(resolve.CannotGather, match="nvidia-nccl-cu12"):
        check_cuda(pins, Target("3.12", cuda="13"))


def test_a_file_that_is_not_locked_is_refused(small: Path, tmp_path: Path) -> None:
    (wheel,) = small.glob("*/rich-*.whl")
    version = wheel.name.split("-")[1]
    lock = tmp_path / "lock.txt"
    lock.write_text(f"rich=={version} \\\n    --hash=sha256:{resolve.sha256(wheel)}\n    # via x\n")
    assert resolve.check_locked([wheel], lock) == 1
    lock.write_text(f"rich=={version} \\\n    --hash=sha256:{'0' * 64}\n")
    with pytest.raises(DownloadMismatch, match="rich"):
        resolve.check_locked([wheel], lock)


@pytest.mark.nightly
def test_a_pure_package_without_a_wheel_is_built(tmp_path: Path) -> None:
    """Transformer Engine's tools need one such; the index has its sdist only."""
    resolve.download({"antlr4-python3-runtime": "4.9.3"}, Target(SERIES), tmp_path)
    assert [path.name for path in tmp_path.glob("*.whl")] == ["antlr4_python3_runtime-4.9.3-py3-none-any.whl"]
