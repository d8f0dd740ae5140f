"""Names: the kernels of a real profile, ours, and the flags that the last line recommends."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_ext.trace import advice, kinds


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bx_coopA_ptrGroup_NNT", "grouped GEMM"),
        ("nvjet_sm90_tss_128x256_64x4_2x1_v_badd_coopA_NTN", "GEMM"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...> > >(...)", "attention"),
        ("_permute_kernel", "permute"),
        ("_spread_kernel", "permute"),
        ("_backward_kernel", "activation"),
        ("cross_entropy_backward_kernel", "loss"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", kinds.UNKNOWN_PAIRS),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce-scatter"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all-gather"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all-reduce"),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "broadcast"),
        ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)", kinds.EXPERT_TRANSPORT),
        ("nobody_knows_this", kinds.OTHER_KERNELS),
    ],
)
def test_kernels(name, kind):
    assert kinds.kernel_kind(name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("all_to_allv", "all-to-all"), ("alltoall_base", "all-to-all"), ("_allgather_base", "all-gather"),
        ("allgather_into_tensor_coalesced", "all-gather"), ("_reduce_scatter_base", "reduce-scatter"),
        ("allreduce_coalesced", "all-reduce"), ("send", "send/recv"), ("recvAnySource", "send/recv"),
        ("c10d::barrier", "all-reduce"), ("gloo:all_to_all", "all-to-all"), ("reduce", kinds.OTHER_COLLECTIVE),
    ],
)  # fmt: skip
def test_collectives(name, kind):
    assert kinds.collective(name) == kind


def test_the_kernels_of_a_real_step_are_known(root: Path):
    """The profile of the eight-layer slice on an H200: what has no kind is under 1 % of its kernel time."""
    profile = json.loads((root / "benchmarks/results/gpu_profile-h200-2026-11-30.json").read_text())
    by_kind: dict[str, float] = {}
    for name, (took, _) in profile["kernels_ms"].items():
        if not name.startswith("Mem"):
            kind = kinds.kernel_kind(name)
            by_kind[kind] = by_kind.get(kind, 0.0) + took
    whole = sum(by_kind.values())
    assert by_kind[kinds.OTHER_KERNELS] < 0.01 * whole
    # The three grouped products of the experts, 32 launches each, and what sets them up.
    assert by_kind["grouped GEMM"] == pytest.approx(470.8, abs=0.1)
    assert {"attention", "permute", "activation", "loss", "optimizer", "norm, rope", "router"} <= set(by_kind)


def test_every_triton_kernel_of_ours_has_a_kind(root: Path):
    found = {}
    for path in (root / "megatron_ext").rglob("*kernels.py"):
        for name in re.findall(r"^ *def (_\w+_kernel)\(", path.read_text(), re.MULTILINE):
            found[name] = kinds.kernel_kind(name)
    assert len(found) > 10
    assert [name for name, kind in found.items() if kind == kinds.OTHER_KERNELS] == []


def test_recommended_flags_exist():
    """Megatron's parser, with ours in it, knows every flag that the last line can name."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    from megatron_ext.runtime.pretrain import add_extra_arguments

    known = add_megatron_arguments(add_extra_arguments(argparse.ArgumentParser()))._option_string_actions
    source = Path(advice.__file__).read_text()
    flags = {flag for flag in re.findall(r"--[a-z][\w-]+", source) if flag != "--json"}
    assert len(flags) > 12
    assert sorted(flags - set(known)) == []
