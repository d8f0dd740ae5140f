"""On a GPU: a real trace of torch's profiler, against what the profiler itself counts and what was launched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_ext.cli import main
from megatron_ext.trace import read_trace, summarize, work_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not torch.version.cuda, reason="needs a CUDA device"),
]
PRODUCTS, SYNCHRONIZATIONS = 20, 4


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """Two steps: products, a wait of the host in item(), a copy to pageable memory, a side stream, and a long pause."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    host = torch.randn(1 << 22)

    def step() -> None:
        for _ in range(PRODUCTS // 2):
            a @ a
        with torch.cuda.stream(side):
            torch.randn(1 << 24, device="cuda").mul_(2)
        for _ in range(SYNCHRONIZATIONS // 2):
            a.float().sum().item()
        host.cuda()
        torch.cuda.synchronize()
        sum(range(2_000_000))  # the host is busy, the GPU has nothing to do
        (a @ a).sum().item()

    step()
    path = tmp_path_factory.mktemp("trace") / "rank-0.json.gz"
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1)
    with torch.profiler.profile(schedule=schedule, acc_events=True) as profiler:
        for _ in range(3):
            profiler.step()
            step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    counted: dict[str, int] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            counted[event.name] = counted.get(event.name, 0) + 1
    return path, counted


def test_kernels_gaps_and_waits_of_a_real_trace(profiled, capsys):
    path, counted = profiled
    trace = read_trace(path)
    found = summarize(trace, work_of(trace))
    assert found.device
    assert len(found.steps) == 2
    spans = {row.kind: row.span_ns for row in found.rows}
    assert sum(spans.values()) == found.span_ns
    names = {named.name: named.count for named in found.names}
    assert {name: names.get(name) for name in counted} == counted
    products = {row.kind: row.count for row in found.rows}["GEMM"]
    assert products >= PRODUCTS + 2
    calls = {(wait.call, wait.place) for wait in found.waits}
    assert any("Synchronize" in call and "aten::item" in place for call, place in calls), calls
    assert any("Memcpy" in call for call, _ in calls), calls  # the copy from pageable memory
    # The pause lies between a synchronization and a product; a loop of two million takes milliseconds.
    assert found.gaps[0].took_ns > 5_000_000, found.gaps[0]
    assert found.idle_after_wait_ns >= found.gaps[0].took_ns
    assert main(["trace", str(path), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"][0]["span_ns"] == found.span_ns
    gap = found.gaps[0]
    print(f"trace: {found.span_ns / 1e6:.1f} ms, {len(names)} kernels by name, waits {sorted(calls)}")
    print(f"trace: gap {gap.took_ns / 1e6:.1f} ms, {gap.before} to {gap.after}: {gap.host}, after {gap.wait}")
