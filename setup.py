"""What pyproject.toml cannot say: the version comes from upstream.toml, and a wheel that holds Megatron is compiled.

Run by tools/package/backend.py, in the checkout for a development install, in a stage that holds the patched Megatron
beside `megatron_ext` for a wheel.
"""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import Distribution, find_namespace_packages, setup

from tools.mpatch.pins import load_pins
from tools.package.commands import Compiled, Wheel

HERE = Path(__file__).resolve().parent
COMMANDS = ["megatron-moe = megatron_ext.cli:main"]
# The patch queue works on a checkout, so its command comes with a development install only.
DEVELOPMENT = ["mpatch = tools.mpatch.__main__:main"]
development = os.environ.get("MOE_BUILD") == "development"

setup(
    version=load_pins(HERE / "upstream.toml").version(),
    packages=find_namespace_packages(include=["megatron_ext", "megatron_ext.*", "megatron", "megatron.*"])
    + (find_namespace_packages(include=["tools", "tools.*"]) if development else []),
    package_data={"": ["*"]},
    include_package_data=False,
    entry_points={"console_scripts": COMMANDS + (DEVELOPMENT if development else [])},
    distclass=Compiled if (HERE / "megatron").is_dir() else Distribution,
    cmdclass={"bdist_wheel": Wheel},
)
