"""The two places where setuptools is told otherwise: the wheel is for one Python, and carries an SBOM."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import Distribution
from setuptools.command.bdist_wheel import bdist_wheel

SBOM_FOLDER = "sboms"


class Compiled(Distribution):
    """A distribution with a compiled file: Megatron's dataset helper, made by tools/setup/build_helpers.py."""

    def has_ext_modules(self) -> bool:
        """Make setuptools tag the wheel with this Python and platform."""
        return True


class Wheel(bdist_wheel):
    """A wheel with the SBOM at the place that PEP 770 gives it: .dist-info/sboms."""

    def egg2dist(self, egginfo_path: str, distinfo_path: str) -> None:
        """Write .dist-info, then the SBOM of the stage into it; RECORD is made afterwards and has it."""
        super().egg2dist(egginfo_path, distinfo_path)
        sboms = Path(SBOM_FOLDER)
        if sboms.is_dir():
            shutil.copytree(sboms, Path(distinfo_path) / SBOM_FOLDER)
