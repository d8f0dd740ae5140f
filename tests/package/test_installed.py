"""The wheel in an environment without the checkout: doctor proves it, damage is seen, uninstalling leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from packing import ROOT, Installed, environment

from tools.mpatch.pins import SdistBase, load_pins

GUARD = "import megatron.core; from megatron_ext import guard; print(guard.check_imported())"
ROUTER = "megatron/core/transformer/moe/router.py"
# What the guard says once the router is imported; importing all of Megatron takes seconds and adds nothing here.
LOOK = f"""
import types
from megatron_ext import guard
root = guard.load_record().root
module = types.SimpleNamespace(__file__=str(root / "{ROUTER}"))
guard.check_imported({{"megatron.core.transformer.moe.router": module}})
"""


def _findings(installed: Installed, code: int) -> dict[str, dict[str, str]]:
    done = installed.run("megatron-moe", "doctor", "--json")
    assert done.returncode == code, done.stdout + done.stderr
    return {one["check"]: one for one in json.loads(done.stdout)["findings"]}


def test_doctor_proves_the_installed_files_and_sees_damage(installed: Installed) -> None:
    found = _findings(installed, 0)
    assert found["Megatron's files"]["value"].endswith("all as recorded")
    assert found["the wheel's files"]["value"].endswith("all as recorded")
    done = installed.run("python", "-c", GUARD)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 50

    # An edit by hand, and a module of ours.
    for name in (ROUTER, "megatron_ext/pins.py"):
        with (installed.site / name).open("a") as stream:
            stream.write("# edited\n")
    (installed.site / "megatron/core/stray.py").write_text("")
    (helper,) = installed.site.glob("megatron/core/datasets/helpers_cpp*.so")
    helper.rename(helper.with_name("helpers_cpp.cpython-399-x86_64-linux-gnu.so"))
    found = _findings(installed, 1)
    assert ROUTER in found["Megatron's files"]["value"]
    assert found["dataset helper"]["status"] == "bad"
    assert "1 missing, e.g. megatron/core/datasets/helpers_cpp" in found["Megatron's files"]["value"]
    assert "1 foreign, e.g. megatron/core/stray.py" in found["Megatron's files"]["value"]
    assert "2 changed" in found["the wheel's files"]["value"]
    assert "force-reinstall" in found["the wheel's files"]["remedy"]


def test_an_installed_megatron_core_is_named_by_doctor_and_guard(installed: Installed) -> None:
    """Both bring `megatron`; the later install overwrites the earlier. A stand-in of two files is enough to show it."""
    told = installed.site / "megatron_core-9.9.9.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 9.9.9\n")
    with (installed.site / ROUTER).open("a") as stream:
        stream.write("# 9.9.9\n")
    found = _findings(installed, 1)
    assert "megatron-core 9.9.9" in found["installed Megatron"]["value"]
    assert "uninstall megatron-core" in found["installed Megatron"]["remedy"]
    done = installed.run("python", "-c", LOOK)
    assert done.returncode != 0
    assert "megatron.core.transformer.moe.router is not the file that the wheel brought" in done.stderr
    assert "uninstall megatron-core" in done.stderr


def test_version_prints_pin_trees_digest_and_patches(installed: Installed) -> None:
    pins = json.loads((ROOT / "build" / "pins.json").read_text())
    done = installed.run("megatron-moe", "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"megatron-moe {pins['version']}\n")
    for value in (pins["patched_tree"], pins["base_tree"], pins["series_digest"], *pins["patches"]):
        assert value in done.stdout
    assert json.loads(installed.run("megatron-moe", "--version", "--json").stdout)["patches"] == pins["patches"]


def test_examples_are_copied_and_start_from_anywhere(installed: Installed) -> None:
    done = installed.run("megatron-moe", "examples", "mine")
    assert done.returncode == 0, done.stderr
    copied = installed.home / "mine" / "examples"
    assert {path.name: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == {
        path.name: path.read_bytes() for path in (ROOT / "examples").rglob("*") if path.is_file()
    }
    script = [str(copied / "moe" / "first_run.sbatch"), "moe", "--dry-run"]
    dry = subprocess.run(["bash", *script], cwd=installed.home, capture_output=True, text=True, timeout=60,
                         env={**installed.environment, "DATA_MANIFEST": "/nowhere/manifest.json"})  # fmt: skip
    assert dry.returncode == 0, dry.stderr
    assert "megatron-moe train" in dry.stdout
    assert str(ROOT) not in dry.stdout

    # A second copy changes nothing; an edited script is not overwritten, and nothing else is written then.
    assert "0 files written" in installed.run("megatron-moe", "examples", "mine").stdout
    (copied / "moe" / "quickstart.sh").write_text("mine\n")
    (copied / "moe" / "lib.sh").unlink()
    refused = installed.run("megatron-moe", "examples", "mine")
    assert (refused.returncode, "quickstart.sh" in refused.stderr) == (1, True)
    assert not (copied / "moe" / "lib.sh").exists()
    assert installed.run("megatron-moe", "examples", "mine", "--force").returncode == 0
    assert (copied / "moe" / "quickstart.sh").read_bytes() == (ROOT / "examples/moe/quickstart.sh").read_bytes()


def test_the_quickstart_says_when_there_is_nothing_to_run(tmp_path: Path, installed: Installed) -> None:
    installed.run("megatron-moe", "examples", "mine")
    script = str(installed.home / "mine" / "examples" / "moe" / "quickstart.sh")
    done = subprocess.run(["bash", script], cwd=tmp_path, capture_output=True, text=True, timeout=60,
                          env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})  # fmt: skip
    assert done.returncode == 64
    assert "activate the environment" in done.stderr
    assert not (installed.home / "mine" / "runs").exists()


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_uninstalling_leaves_nothing(installer: str, wheel: Path, tmp_path: Path) -> None:
    made = environment(tmp_path / "venv", tmp_path / "home")
    made.uv("uninstall", "-q", "none-such")  # leaves a lock file of uv in the environment
    before = made.listing()
    made.uv("install", "-q", "--no-deps", "--no-index", str(wheel))
    assert (made.site / ROUTER).is_file()
    # Use leaves bytecode behind.
    assert made.run("python", "-c", "import megatron_ext.cli, megatron_ext.errors").returncode == 0
    assert list((made.site / "megatron_ext").rglob("*.pyc"))
    if installer == "uv":
        made.uv("uninstall", "-q", "megatron-moe")
    else:
        pip = [sys.executable, "-m", "pip", "--python", str(made.folder / "bin" / "python")]
        subprocess.run([*pip, "uninstall", "-q", "-y", "megatron-moe"], check=True, timeout=120)
    assert made.listing() == before


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("series", ["3.12", "3.13"])
def test_quickstart_from_the_installed_examples(series: str, tmp_path: Path) -> None:
    """An empty environment, the locked packages, the wheel built for that Python: doctor, training, uninstall."""
    uv = str(Path(sys.executable).with_name("uv"))
    python = subprocess.run(["bash", str(ROOT / "tools/setup/find_python.sh"), series], capture_output=True, text=True,
                            check=True).stdout.strip()  # fmt: skip
    if f"python{series}" not in python and series not in python:
        pytest.skip(f"no Python {series} here")
    made = environment(tmp_path / "venv", tmp_path / "home", python)
    made.uv("install", "-q", "--require-hashes", "-r", str(ROOT / "tools/requirements/train.txt"))
    made.uv("install", "-q", "pip")
    before = made.listing()
    subprocess.run([uv, "build", "-q", "--wheel", "--python", python, "--out-dir", str(tmp_path / "dist"), str(ROOT)],
                   check=True, timeout=600)  # fmt: skip
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert f"cp{series.replace('.', '')}" in wheel.name
    assert made.run("python", "-m", "pip", "install", "-q", "--no-index", str(wheel)).returncode == 0
    assert _findings(made, 0)
    assert made.run("megatron-moe", "examples", ".").returncode == 0
    log = tmp_path / "quickstart.log"
    with log.open("w") as out:
        done = subprocess.run(
            ["bash", "examples/moe/quickstart.sh"], cwd=made.home, stdout=out, stderr=out, timeout=1500,
            env={**made.environment, "HOME": str(made.home), "DENSE_STEPS": "10", "MOE_STEPS": "6"},
        )  # fmt: skip
    assert done.returncode == 0, log.read_text()[-3000:]
    assert (made.home / "runs/quickstart/report.html").stat().st_size > 10_000
    assert made.run("python", "-m", "pip", "uninstall", "-q", "-y", "megatron-moe").returncode == 0
    assert {path for path in made.listing() - before if "__pycache__" not in path} == set()


@pytest.mark.nightly
def test_the_real_megatron_core_over_ours_is_seen_and_mended(installed: Installed, wheel: Path) -> None:
    """The release itself, from the index, installed over the wheel; then the remedy that doctor names."""
    pins = load_pins(ROOT / "upstream.toml")
    base = pins.base()
    assert isinstance(base, SdistBase)
    installed.uv("install", "-q", "--no-deps", f"{base.package}=={base.version}")
    found = _findings(installed, 1)
    assert f"{base.package} {base.version}" in found["installed Megatron"]["value"]
    # Each file that the series touches, unpatched; and the index's wheel brings a helper of its own.
    touched = json.loads((installed.site / "megatron_ext/_files.json").read_text())["touched"]
    assert f"{len(touched) + 1} changed" in found["Megatron's files"]["value"]
    installed.uv("uninstall", "-q", base.package)
    installed.uv("install", "-q", "--no-deps", "--no-index", "--reinstall", str(wheel))
    assert "installed Megatron" not in _findings(installed, 0)
