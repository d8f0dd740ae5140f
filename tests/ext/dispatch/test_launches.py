"""The kernels of a whole dispatch, without a GPU: few launches, machine code for an H200, and right numbers.

Each in a process of its own: Triton reads the interpreter switch when it is imported.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _run(script: str, *words: str, interpret: bool = True) -> str:
    switches = {"TRITON_INTERPRET": "1", "MOE_EXT_DISPATCH_KERNELS": "interpret", "OMP_NUM_THREADS": "1"}
    environ = {**os.environ, **(switches if interpret else {}), "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[2]}"}
    done = subprocess.run([sys.executable, str(HERE / script), *words], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(120)
def test_a_forward_takes_few_launches() -> None:
    """71 and 50 before their arithmetic was put together: the host could not launch them as fast as a GPU ran them."""
    found = re.findall(r"(\w+): (\d+) launches", _run("launches.py"))
    assert [form for form, _ in found] == ["first", "static", "alltoallv"]
    first, static, alltoallv = (int(number) for _, number in found)
    assert first <= 15
    assert static <= 18
    assert alltoallv <= 19


@pytest.mark.timeout(300)
def test_kernels_compile_for_an_h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    built = _run("compile_check.py", "quick", interpret=False)
    assert len(re.findall(r"_\w+_kernel \d+", built)) == 12


@pytest.mark.timeout(300)
def test_another_number_of_rows_compiles_nothing_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Received rows change every micro-batch: a kernel compiled amid training would make all ranks wait."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    first, *later = (dict(re.findall(r"(_\w+_kernel) (\d+)", line)) for line in
                     _run("compile_check.py", "rows", interpret=False).splitlines())  # fmt: skip
    assert len(first) == 12
    assert len(later) == 3
    # Whether all weights or choices make whole vectors is worth a form of its own.
    by_size = {"_count_kernel", "_spread_weights_kernel", "_gather_weights_kernel"}
    assert {name for name in first if later[-1][name] != first[name]} == by_size


@pytest.mark.timeout(300)
def test_a_dispatch_by_kernels_alone_equals_dense() -> None:
    assert _run("interpreted_ranks.py", "2", "4") == "4 cases equal dense on 2 ranks\n"


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", ["2", "4"])
def test_more_dispatches_by_kernels_alone_equal_dense(ranks: str) -> None:
    assert _run("interpreted_ranks.py", ranks, "25") == f"25 cases equal dense on {ranks} ranks\n"


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_kernels_compile_for_an_h200_in_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert len(re.findall(r"_\w+_kernel \d+", _run("compile_check.py", interpret=False))) == 12
