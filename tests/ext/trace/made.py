"""Traces of a GPU that no GPU made: a generator of what torch's profiler writes, for tests on machines without one.

What is made up are the events; the layout of the file, the categories and the arguments are those of torch 2.11's
profiler. `tests/gpu/test_trace.py` reads real ones.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GEMM = "nvjet_sm90_tst_192x192_64x3_1x2_h_bz_coopB_NNN"
GROUPED = "nvjet_sm90_tst_256x128_64x4_1x2_h_bx_coopA_ptrGroup_NNT"
FLASH = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_32_64x256x64_4x1x1_cga1x1x1_kernel0_0"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
STREAM, NCCL_STREAM = 7, 20
MAIN, BACKWARD = 100, 101


@dataclass
class Made:
    """Events of one rank; times in microseconds."""

    rank: int | None = 0
    world_size: int = 2
    clock: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)
    number: int = 0

    def add(self, category: str, name: str, at: float, took: float, tid: int, **args: object) -> None:
        """One event of the kind that has a duration."""
        event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": at + self.clock, "dur": took}
        self.events.append({**event, "args": args})

    def step(self, number: int, at: float, took: float) -> None:
        """The mark of a step."""
        self.add("user_annotation", f"ProfilerStep#{number}", at, took, MAIN)

    def op(self, name: str, at: float, took: float, tid: int = MAIN) -> None:
        """An operator on the host."""
        self.add("cpu_op", name, at, took, tid)

    def call(self, name: str, at: float, took: float, tid: int = MAIN, correlation: int = 0) -> None:
        """A call of the CUDA runtime."""
        self.add("cuda_runtime", name, at, took, tid, correlation=correlation)

    def kernel(self, name: str, at: float, took: float, stream: int = STREAM, *, launched: float | None = None,
               tid: int = MAIN, **args: object) -> None:  # fmt: skip
        """A kernel, and its launch where one is wanted."""
        self.number += 1
        if launched is not None:
            self.call("cudaLaunchKernel", launched, 2.0, tid, self.number)
        self.add("kernel", name, at, took, stream, stream=stream, correlation=self.number, **args)

    def copy(self, name: str, at: float, took: float, *, launched: float, waited: float) -> None:
        """A copy that the host waits for."""
        self.number += 1
        self.call("cudaMemcpyAsync", launched, waited, MAIN, self.number)
        self.add("gpu_memcpy", name, at, took, STREAM, stream=STREAM, correlation=self.number)

    def all_to_all(self, at: float, took: float, elements: int = 1 << 20, ranks: int = 2) -> None:
        """An all-to-all of bf16 over NCCL, with what the profiler says about it."""
        self.kernel(
            SEND_RECV, at, took, NCCL_STREAM,
            **{"Collective name": "all_to_allv", "In msg nelems": elements, "Out msg nelems": elements,
               "Group size": ranks, "dtype": "BFloat16", "Process Group Description": "EXPERT_MODEL_PARALLEL_GROUP",
               "Process Group Ranks": str(list(range(ranks)))},
        )  # fmt: skip

    def document(self) -> dict[str, Any]:
        """The whole file's content."""
        about = {"backend": "nccl", "rank": self.rank, "world_size": self.world_size}
        where = {} if self.rank is None else {"distributedInfo": about}
        return {"schemaVersion": 1, **where, "baseTimeNanoseconds": 0, "traceEvents": self.events, "traceName": "made"}

    def text(self) -> str:
        """The file as the profiler lays it out: every event on lines of its own, two columns in."""
        whole = self.document()
        events = whole.pop("traceEvents")
        head = json.dumps({name: value for name, value in whole.items() if name != "traceName"})[:-1]
        body = ",\n".join("  " + json.dumps(event, indent=2).replace("\n", "\n  ") for event in events)
        return f'\n{head},\n  "traceEvents": [\n{body}\n  ],\n  "traceName": "made"\n}}'

    def write(self, folder: Path, name: str = "", *, packed: bool = False) -> Path:
        """Write it where a rank's trace would lie."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / (name or f"rank-{self.rank}.json{'.gz' if packed else ''}")
        data = self.text().encode()
        path.write_bytes(gzip.compress(data) if packed else data)
        return path


def two_ranks(folder: Path, *, late: float = 40.0, clock: float = 5000.0) -> list[Path]:
    """Two ranks of one step of 1,000 us: rank 1's first grouped product takes `late` us longer, its clock is ahead.

    On rank 0's clock, in us: GEMM 10-110; grouped 110-150 (rank 1: to 150 + late); all-to-all from there to 300;
    attention 300-400 with an all-to-all beside it, 320-380; grouped 400-450; all-to-all 450-550 on both; idle to 1,000.
    """
    paths = []
    for rank in (0, 1):
        made = Made(rank, clock=clock * rank)
        done = 150 + late * rank
        made.step(3, 0, 1000)
        made.kernel(GEMM, 10, 100, launched=1)
        made.kernel(GROUPED, 110, done - 110, launched=4)
        made.all_to_all(done, 300 - done)
        made.kernel(FLASH, 300, 100, launched=6)
        made.all_to_all(320, 60)
        made.kernel(GROUPED, 400, 50, launched=8)
        made.all_to_all(450, 100)
        paths.append(made.write(folder))
    return paths
