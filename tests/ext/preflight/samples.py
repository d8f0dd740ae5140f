# ruff: noqa: E501 - these lines are as long as the tools print them.
"""Outputs and logs in the form of the real tools, made to order."""

from __future__ import annotations

GOOD_LOG = """\
{host}:4021:4021 [{gpu}] NCCL INFO Bootstrap: Using eth0:10.0.0.7<0>
{host}:4021:4021 [{gpu}] NCCL INFO NCCL_NET_PLUGIN set by environment to ofi
{host}:4021:4102 [{gpu}] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.19.2
{host}:4021:4102 [{gpu}] NCCL INFO NET/OFI Selected provider is efa, fabric is efa (found 32 nics)
{host}:4021:4102 [{gpu}] NCCL INFO Using network Libfabric
{host}:4021:4102 [{gpu}] NCCL INFO ncclCommInitRankConfig comm 0x55 rank {gpu} nranks 16 - Init COMPLETE
"""
SOCKET_LOG = """\
{host}:4021:4021 [{gpu}] NCCL INFO NCCL_NET_PLUGIN set by environment to ofi
{host}:4021:4102 [{gpu}] NCCL INFO NET/Plugin: Could not find: ofi libnccl-net-ofi.so.
{host}:4021:4102 [{gpu}] NCCL INFO NET/IB : No device found.
{host}:4021:4102 [{gpu}] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.7<0>
{host}:4021:4102 [{gpu}] NCCL INFO Using network Socket
"""
VERSION_LOG = """\
{host}:4021:4102 [{gpu}] NCCL INFO NET/Plugin: dlerror=/lib/libefa.so.1: version `EFA_1.4' not found (required by libfabric.so.1) No plugin found (libnccl-net-ofi.so)
{host}:4021:4102 [{gpu}] NCCL INFO Using network Socket
"""
MISSING_NET_LOG = """\
{host}:4021:4102 [{gpu}] NCCL INFO NCCL_NET set by environment to Libfabric.
{host}:4021:4102 [{gpu}] NCCL WARN Error: network Libfabric not found.
"""


def log(form: str, host: str = "node-0", gpu: int = 0) -> str:
    """Return a rank's log."""
    return form.format(host=host, gpu=gpu)


def nccl_tests_output(rows: list[tuple[int, float, str, float, str]], nodes: int, gpus: int = 8) -> str:
    """Return alltoall_perf's output; a row is size, busbw and #wrong out of place, busbw and #wrong in place."""
    ranks = "".join(
        f"#  Rank {rank:2d} Group  0 Pid   4021 on     node-{rank // gpus} device {rank % gpus:2d} [0000:53:00] NVIDIA H100\n"
        for rank in range(nodes * gpus)
    )
    lines = "".join(
        f"{size:12d} {size // 4:13d}     float    none      -1   104391   82.29  {out:6.2f} {wrong:>6}   104503   82.20  "
        f"{inn:6.2f} {wrong_in:>6}\n"
        for size, out, wrong, inn, wrong_in in rows
    )
    return (
        "# nccl-tests version 2.17.1 nccl-headers=23004 nccl-library=23004\n# Collective test starting: alltoall_perf\n"
        "# nThread 1 nGpus 1 minBytes 8589934592 maxBytes 8589934592 step: 1048576(bytes) warmup iters: 5 iters: 20 agg "
        "iters: 1 validation: 1 graph: 0\n#\n# Using devices\n" + ranks + "NCCL version 2.30.4+cuda13.0\n#\n"
        "#                                                              out-of-place                       in-place\n"
        "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong\n"
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)\n"
        + lines
        + "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 77.1012\n#\n"
    )
