"""The bill of materials (CycloneDX): the pinned Megatron, each patch on it, what is compiled in, what is asked for."""

from __future__ import annotations

import hashlib
import re
import tomllib
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pybind11
from cyclonedx.model import AttachedText, HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import (
    Component,
    ComponentScope,
    ComponentType,
    Diff,
    Patch,
    PatchClassification,
    Pedigree,
)
from cyclonedx.model.issue import IssueClassification, IssueType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement

from tools.mpatch.checkout import Checkout
from tools.mpatch.patchfile import Patch as SeriesPatch
from tools.mpatch.pins import Base, SdistBase
from tools.mpatch.series import load_series

NAME = "megatron-moe"
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, NAME)


def render(patched: Checkout, pins: Mapping[str, Any], *, root: Path, epoch: int) -> str:
    """Return the SBOM as JSON; the same input gives the same text.

    Args:
        patched: The scratch checkout with the applied series.
        pins: What `mpatch apply` recorded there.
        root: The checkout, for the dependencies' names and tested versions.
        epoch: The time to write, in seconds since 1970.
    """
    wheel = Component(
        type=ComponentType.APPLICATION,
        name=NAME,
        version=pins["version"],
        bom_ref=NAME,
        purl=_purl(NAME, pins["version"]),
        properties=[Property(name=f"{NAME}:{key}", value=str(pins[key])) for key in ("patched_tree", "series_digest")],
    )
    megatron = _megatron(patched, pins)
    compiled = _library("pybind11", pybind11.__version__, compiled_into="megatron/core/datasets/helpers_cpp")
    needed = list(_needed(root))
    bom = Bom(components=[megatron, compiled, *needed])
    bom.metadata.component = wheel
    bom.metadata.timestamp = datetime.fromtimestamp(epoch, UTC)
    bom.serial_number = uuid.uuid5(_NAMESPACE, f"{pins['version']} {pins['series_digest']}")
    bom.register_dependency(wheel, [megatron, compiled, *needed])
    text: str = JsonV1Dot6(bom).output_as_string(indent=1)
    return text + "\n"


def _megatron(patched: Checkout, pins: Mapping[str, Any]) -> Component:
    base = patched.pins().base(str(pins["base"]))
    series = load_series(patched)
    return Component(
        type=ComponentType.LIBRARY,
        name="megatron-core",
        version=pins["version"],
        bom_ref="megatron",
        description=f"{base.describe()} with {len(series.patches)} patches",
        pedigree=Pedigree(
            ancestors=[_ancestor(base)],
            patches=[_patch(patch, data) for patch, data in zip(series.patches, series.data, strict=True)],
        ),
    )


def _ancestor(base: Base) -> Component:
    if not isinstance(base, SdistBase):
        owner, _, name = base.repository.partition("/")
        purl = PackageURL("github", owner.lower(), name.lower(), base.commit)
        return Component(type=ComponentType.LIBRARY, name=base.repository, version=base.commit, purl=purl)
    return Component(
        type=ComponentType.LIBRARY,
        name=base.package,
        version=base.version,
        bom_ref="upstream",
        purl=_purl(base.package, base.version),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=base.sha256)],
        properties=[Property(name=f"{NAME}:tree", value=base.tree)],
    )


def _patch(patch: SeriesPatch, data: bytes) -> Patch:
    backport = patch.message.trailer("Upstream-Status").startswith("Backport")
    reason = patch.message.trailer("Reason")
    return Patch(
        type=PatchClassification.BACKPORT if backport else PatchClassification.UNOFFICIAL,
        diff=Diff(text=AttachedText(content=data.decode(), content_type="text/x-patch")),
        resolves=[
            IssueType(
                type=IssueClassification.DEFECT,
                id=f"{patch.slug}@{hashlib.sha256(data).hexdigest()[:12]}",
                name=patch.message.subject,
                description=reason,
            )
        ],
    )


def _needed(root: Path) -> Iterator[Component]:
    """Yield what the wheel asks an installer for, with the version that the lock file has: tested, not contained."""
    locked = dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", _lock(root).read_text(), re.MULTILINE))
    for line in tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]:
        name = Requirement(line).name
        yield _library(name, locked[name], contained="no, asked for at installation; this version is tested")


def _lock(root: Path) -> Path:
    return root / "tools" / "requirements" / "train.txt"


def _library(name: str, version: str, **told: str) -> Component:
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        bom_ref=f"{name}@{version}",
        purl=_purl(name, version),
        scope=ComponentScope.REQUIRED,
        properties=[Property(name=f"{NAME}:{key}", value=value) for key, value in told.items()],
    )


def _purl(name: str, version: str) -> PackageURL:
    return PackageURL("pypi", None, name, version)
