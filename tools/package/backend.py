"""The PEP 517 backend: setuptools, run in a stage that holds exactly what belongs into the wheel.

The checkout is only read. Building in it would mix the leftovers of earlier builds (build/lib) into the wheel, and an
open `mpatch edit` with them. Times and modes are fixed, so that two builds give the same bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from setuptools import build_meta

from tools.package import archive, stage

ROOT = Path(__file__).resolve().parents[2]
# The earliest time that a zip file can hold. SOURCE_DATE_EPOCH overrides it.
EPOCH = "315532800"
Settings = dict[str, str | list[str] | None] | None


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """Build the wheel: the patched Megatron, its dataset helper compiled, and megatron_ext. Return its file name."""
    with _fixed() as epoch, stage.for_wheel(ROOT, epoch) as folder, contextlib.chdir(folder):
        return build_meta.build_wheel(wheel_directory, config_settings)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """Build the sdist: the checkout's own files, without Megatron. Return its file name."""
    with _fixed() as epoch, stage.for_sdist(ROOT) as folder, contextlib.chdir(folder):
        name: str = build_meta.build_sdist(sdist_directory, config_settings)
        archive.normalise(Path(sdist_directory) / name, epoch)
    return name


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    """Write the wheel's metadata without building it, so that a resolver gets its answer in a second."""
    with _fixed(), stage.for_metadata(ROOT) as folder, contextlib.chdir(folder):
        return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Make a development install: the checkout itself, with the command `mpatch`."""
    with _environment(MOE_BUILD="development"):
        return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings = None) -> str:
    """Write the metadata of a development install."""
    with _environment(MOE_BUILD="development"):
        return build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)


# Everything that is needed stands in pyproject.toml, with its version.
def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Return no further requirement."""
    return []


get_requires_for_build_sdist = get_requires_for_build_editable = get_requires_for_build_wheel


@contextlib.contextmanager
def _fixed() -> Iterator[int]:
    """Fix what differs from one user to the next: modes by the umask, times by SOURCE_DATE_EPOCH, which is given."""
    umask = os.umask(0o022)
    epoch = os.environ.get("SOURCE_DATE_EPOCH", EPOCH)
    try:
        with _environment(SOURCE_DATE_EPOCH=epoch):
            yield int(epoch)
    finally:
        os.umask(umask)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
