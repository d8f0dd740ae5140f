"""The images: no version of their own, the linter's main rules, and scripts that can be read by bash."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megatron_ext.cli import main

REPO = Path(__file__).resolve().parents[2]
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")
HADOLINT = Path(sys.executable).with_name("hadolint")
FILES = sorted([*REPO.glob("docker/*"), *REPO.glob("examples/moe/*")])


def _pinned() -> set[str]:
    found: set[str] = set()

    def walk(value: object) -> None:
        if isinstance(value, dict):
            for inner in value.values():
                walk(inner)
        elif isinstance(value, str) and re.search(r"\d", value):
            found.add(value)

    walk(tomllib.loads((REPO / "upstream.toml").read_text()))
    return found - {"3.12"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_version_is_written_twice(file: Path) -> None:
    text = file.read_text()
    assert not [value for value in _pinned() if value in text]
    # Not even one that nobody pins.
    assert not re.findall(r"(?<![\w.])v?\d+\.\d+\.\d+(?![\w.])", text)


def test_build_args_are_the_pins() -> None:
    done = subprocess.run(
        [sys.executable, str(REPO / "docker/build_args.py"), "env"], capture_output=True, text=True, check=True
    )
    values = dict(line.split("=", 1) for line in done.stdout.splitlines())
    pins = tomllib.loads((REPO / "upstream.toml").read_text())
    assert values["EFA_INSTALLER"] == pins["efa"]["installer"]
    assert values["BASE"] == pins["container"]["base"]
    assert values["SERIES_DIGEST"] == json.loads((REPO / "build/pins.json").read_text())["series_digest"]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_every_argument_is_given_and_used(name: str) -> None:
    text = (REPO / "docker" / name).read_text()
    done = subprocess.run(
        [sys.executable, str(REPO / "docker/build_args.py"), "env"], capture_output=True, text=True, check=True
    )
    given = {line.split("=")[0] for line in done.stdout.splitlines()}
    scripts = "".join(file.read_text() for file in REPO.glob("docker/*.sh"))
    for argument in set(re.findall(r"^ARG (\w+)", text, re.MULTILINE)):
        assert argument in given
        assert f"${{{argument}}}" in text or f"{argument}:?" in scripts


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_has_nothing_to_say_and_the_user_is_not_root(name: str) -> None:
    file = REPO / "docker" / name
    done = subprocess.run([str(HADOLINT), str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert re.findall(r"^USER (.+)$", file.read_text(), re.MULTILINE)[-1] == "10001"


def test_hadolint_would_have_said_something(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM debian:latest\nRUN apt-get install g++\n")
    done = subprocess.run([str(HADOLINT), str(bad)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DL3007" in done.stdout


def test_image_makes_a_missing_plugin_an_error() -> None:
    text = (REPO / "docker/Dockerfile").read_text()
    assert "NCCL_NET=Libfabric" in text
    assert "NCCL_NET_PLUGIN=ofi" in text
    assert "--skip-kmod" in (REPO / "docker/install_efa.sh").read_text()


def test_cpu_build_without_docker_prints_its_steps() -> None:
    suite = tomllib.loads((REPO / "upstream.toml").read_text())["container"]["cpu_suite"]
    command = ["bash", str(REPO / "docker/build_cpu.sh"), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    steps = done.stdout.splitlines()
    assert re.match(rf"debootstrap .*python3-venv.* {suite} ", steps[0])
    assert f"--build-arg CPU_BASE=localhost/moe-base-{suite}" in steps[-1]
    # The last one counts.
    assert steps[-1].rindex("CPU_BASE=") == steps[-1].index(f"CPU_BASE=localhost/moe-base-{suite}")


def test_enroot_build_goes_on_after_a_failure_and_cleans_up(tmp_path: Path) -> None:
    """A stand-in for enroot that fails once in the plugin's build; Enroot itself is in no registry reached here."""
    calls, fake = tmp_path / "calls", tmp_path / "enroot"
    fake.write_text(
        "#!/usr/bin/env bash\n"
        f'echo "$*" >> {calls}\n'
        f'if [[ "$*" == *install_efa* && ! -e {tmp_path}/failed ]]; then touch {tmp_path}/failed; exit 1; fi\n'
        'if [ "$1" = export ]; then touch "$3"; fi\n'
    )
    fake.chmod(0o755)
    output = tmp_path / "image.sqsh"
    command = ["bash", str(REPO / "docker/build_enroot.sh"), str(output)]
    environ = {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    first = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert first.returncode == 1
    assert "start the same command again" in first.stderr
    assert not output.exists()
    second = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    assert output.exists()
    said = calls.read_text().splitlines()
    assert len([line for line in said if line.startswith("import")]) == 1
    assert len([line for line in said if "install_efa" in line]) == 2
    assert said[-1].startswith("remove")
    assert sorted(path.name for path in tmp_path.glob("image*")) == ["image.sqsh"]
    assert subprocess.run(command, env=environ, capture_output=True, check=False).returncode == 64


def test_doctor_says_what_is_here(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    rows = {row["check"]: row for row in json.loads(capfd.readouterr().out)["findings"]}
    assert "patches" in rows["patched Megatron"]["value"]
    assert rows["dataset helper"]["status"] == "good"
