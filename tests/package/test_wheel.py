"""What the wheel holds: the verified tree file by file, licences, pins, a valid SBOM; and the same bytes twice."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packing import ROOT, build, build_sdist

from megatron_ext.guard import blob_id
from tools.mpatch.cli import main as mpatch
from tools.mpatch.pins import load_pins
from tools.setup.build_helpers import compile_helper


def _named(archive: zipfile.ZipFile, end: str) -> bytes:
    (name,) = [name for name in archive.namelist() if name.endswith(end)]
    return archive.read(name)


def _metadata(archive: zipfile.ZipFile) -> Message:
    return Parser().parsestr(_named(archive, ".dist-info/METADATA").decode())


def _tree() -> dict[str, str]:
    """Return git's own list of the verified tree: path -> blob id."""
    assert mpatch(["verify", "--root", str(ROOT)]) == 0
    out = subprocess.run(
        ["git", "ls-tree", "-r", "-z", "HEAD", "--", "megatron"],
        cwd=ROOT / "build" / "megatron", capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    rows = [row.split("\t") for row in out.split("\0") if row]
    return {path: head.split()[2] for head, path in rows}


def test_the_wheel_is_the_verified_tree_file_by_file(archive: zipfile.ZipFile) -> None:
    tree = _tree()
    assert len(tree) > 500
    held = {name: blob_id(archive.read(name)) for name in archive.namelist() if name.startswith("megatron/")}
    added = sorted(set(held) - set(tree))
    assert added[0] == "megatron/PATCHED.txt"
    assert [name.partition(".")[0] for name in added[1:]] == ["megatron/core/datasets/helpers_cpp"]
    assert {name: held[name] for name in tree} == tree
    recorded = json.loads(archive.read("megatron_ext/_files.json"))
    assert recorded["files"] == held


def test_the_wheel_holds_our_own_files_and_nothing_of_the_workshop(archive: zipfile.ZipFile) -> None:
    ours = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "megatron_ext", "examples"], cwd=ROOT, capture_output=True,
        text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    wanted = {
        path.replace("examples/", "megatron_ext/_examples/", 1) if path.startswith("examples/") else path
        for path in ours
        if (ROOT / path).is_file()
    }
    held = {name for name in archive.namelist() if not name.startswith("megatron/") and ".dist-info/" not in name}
    assert held == wanted | {"megatron_ext/_pins.json", "megatron_ext/_files.json"}
    assert "megatron_ext/py.typed" in held


def test_metadata_says_version_licences_and_one_command(archive: zipfile.ZipFile, wheel: Path) -> None:
    told = _metadata(archive)
    pins = load_pins(ROOT / "upstream.toml")
    assert told["Version"] == pins.version() == f"{pins.base().version}+moe.{pins.number}"
    assert wheel.name.startswith(f"megatron_moe-{told['Version']}-cp")
    assert told["License-Expression"] == "BSD-3-Clause AND Apache-2.0"
    files = set(told.get_all("License-File") or [])
    assert files == {"LICENSE", "NOTICE", "LICENSE.megatron-core", "NOTICE.megatron-core", "LICENSE.pybind11"}
    assert b"Apache License" in _named(archive, "licenses/LICENSE.megatron-core")
    assert pins.base().sha256.encode() in _named(archive, "licenses/NOTICE.megatron-core")
    assert b"megatron-moe = megatron_ext.cli:main" in _named(archive, "entry_points.txt")
    assert b"mpatch" not in _named(archive, "entry_points.txt")


def test_pins_are_the_checkout_s(archive: zipfile.ZipFile) -> None:
    carried = json.loads(archive.read("megatron_ext/_pins.json"))
    assert carried == json.loads((ROOT / "build" / "pins.json").read_text())
    told = tomllib.loads((ROOT / "upstream.toml").read_text())
    assert {key: carried[key] for key in told} == told


def test_sbom_validates_and_names_every_patch(archive: zipfile.ZipFile) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = _named(archive, ".dist-info/sboms/megatron-moe.cdx.json").decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bom = json.loads(text)
    parts = {part["name"]: part for part in bom["components"]}
    pins = load_pins(ROOT / "upstream.toml")
    pedigree = parts["megatron-core"]["pedigree"]
    assert pedigree["ancestors"][0]["hashes"] == [{"alg": "SHA-256", "content": pins.base().sha256}]
    slugs = json.loads((ROOT / "build" / "pins.json").read_text())["patches"]
    carried = {patch["resolves"][0]["id"]: patch["diff"]["text"]["content"] for patch in pedigree["patches"]}
    wanted = {slug: (ROOT / "patches" / f"{slug}.patch").read_bytes() for slug in slugs}
    assert carried == {f"{s}@{hashlib.sha256(data).hexdigest()[:12]}": data.decode() for s, data in wanted.items()}
    assert "pybind11" in parts
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert set(asked) <= set(parts)


def test_build_requirements_are_exact_and_locked() -> None:
    """The wheel is reproducible only while what builds it is fixed, and CI builds with the lock's versions."""
    lock = (ROOT / "tools" / "requirements" / "dev.txt").read_text().splitlines()
    for requirement in tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]:
        assert "==" in requirement
        assert any(line.split(" ")[0] == requirement for line in lock), requirement


def test_times_and_modes_are_fixed(archive: zipfile.ZipFile) -> None:
    assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    modes = {info.filename: info.external_attr >> 16 & 0o777 for info in archive.infolist()}
    assert {mode for name, mode in modes.items() if not name.endswith("/RECORD")} == {0o644, 0o755}


def test_sdist_holds_the_checkout_without_megatron(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        top = f"megatron_moe-{load_pins(ROOT / 'upstream.toml').version()}/"
        names = {name.removeprefix(top) for name in archive.getnames()}
        assert {member.mtime for member in archive} == {315532800}
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
                            check=True).stdout.splitlines()  # fmt: skip
    assert {name for name in listed if (ROOT / name).is_file()} <= names
    assert not [name for name in names if name.startswith("megatron/")]
    build_sdist(tmp_path, TMPDIR=str(_folder(tmp_path / "elsewhere")))
    (again,) = tmp_path.glob("*.tar.gz")
    assert again.read_bytes() == sdist.read_bytes()


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.nightly
def test_the_wheel_of_the_sdist_is_the_wheel_of_the_checkout(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    """Another folder, another temporary folder, the helper compiled anew: the same bytes."""
    cache = str(ROOT / "build" / "cache")
    made = build(sdist, tmp_path / "out", TMPDIR=str(_folder(tmp_path / "elsewhere")), MPATCH_CACHE=cache)
    assert made.name == wheel.name
    assert made.read_bytes() == wheel.read_bytes()


@pytest.mark.nightly
def test_the_helper_compiles_to_the_same_bytes_anywhere(tmp_path: Path) -> None:
    source = ROOT / "build" / "megatron" / "megatron" / "core" / "datasets" / "helpers.cpp"
    made = []
    for name in ("one", "another/deeper"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "helpers.cpp").write_bytes(source.read_bytes())
        assert compile_helper(folder / "helpers.cpp", folder / "out" / "helpers_cpp.so")
        made.append((folder / "out" / "helpers_cpp.so").read_bytes())
    assert made[0] == made[1]
    assert str(tmp_path).encode() not in made[0]
