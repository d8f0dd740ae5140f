"""What a kernel or an operator is for, told by its name: the one place that knows such names."""

from __future__ import annotations

import re
from functools import cache

# In order of precedence: the first pattern that a name matches gives its kind, and where kernels of two kinds run at
# the same time, the table gives that time to the first of the two.
_KERNELS: tuple[tuple[str, str], ...] = (
    # Before the products: kernels of flash attention are CUTLASS kernels too.
    ("attention", r"fmha|flash|attention|cudnn|compute_dot_do_o|softmax_warp|ScaledMaskedSoftmax|scaled_.*softmax"),
    # cuBLASLt's products of many groups have "ptrGroup" in their names.
    ("grouped GEMM", r"[Gg]rouped|GroupProblem|GroupGEMM|ptrGroup|grouped_mm|MoeGemm"),
    ("GEMM", r"nvjet|gemm|gemv|xmma|cublas|splitK|cutlass"),
    # The second half is our dispatchers' own.
    (
        "permute",
        r"permute|sort_chunks|row_id_map|radixSort|RadixSort"
        r"|^_(spread|sum|mark|look_up|count|choose|fixed_slots|(un)?pack|gather_weights)(_grad|_weights)?_kernel",
    ),
    ("router", r"topk|router|fused_score|aux_loss|moe_"),
    ("activation", r"silu|swiglu|gelu|sigmoid|^_(forward|backward)_kernel"),
    ("norm, rope", r"rms_?norm|[Ll]ayer_?[Nn]orm|rope|norm_(fwd|bwd)"),
    ("loss", r"cross_entropy|log_softmax|nll|SoftMax(Forward|Backward)"),
    ("optimizer", r"multi_tensor|[aA]dam|l2norm|MultiTensor|NormTwoOps"),
    ("monitor", r"^_(logit|weight|flip|aux|row|segment)_kernel"),
    ("copy, fill, cast", r"copy|fill|Fill|Copy|cast|CatArray"),
    ("elementwise, sums", r"elementwise|reduce_kernel|triton_|index|gather|scatter|[sS]can|DeviceReduce"),
)
_OPERATORS: tuple[tuple[str, str], ...] = (
    ("grouped GEMM", r"grouped_mm"),
    ("GEMM", r"^aten::(mm|bmm|addmm|addmv|mv|linear|baddbmm|matmul|_addmm)"),
    ("attention", r"scaled_dot_product|_softmax|softmax_backward"),
    ("permute", r"^aten::(index|gather|scatter|sort|argsort|masked_select|nonzero|_index_put)"),
    ("router", r"topk|logsumexp"),
    ("activation", r"silu|gelu|sigmoid|glu"),
    ("norm, rope", r"_norm|rsqrt"),
    ("loss", r"log_softmax|nll_loss|cross_entropy"),
    ("copy, fill, cast", r"^aten::(copy_|fill_|zero_|cat|clone|_to_copy|contiguous|empty|zeros|ones|full|detach)"),
    ("elementwise, sums", r"^aten::(add|sub|mul|div|neg|sum|mean|pow|sqrt|exp|log|sin|cos|eq|ne|where|max|min|cumsum)"),
)
# What these call counts as theirs, whatever it is: the sums of an optimizer are no elementwise operators of the model.
_CALLERS: tuple[tuple[str, str], ...] = (
    ("optimizer", r"^Optimizer\."),
    ("loss", r"CrossEntropy"),
)
OTHER_KERNELS = "other kernels"
# Mostly what autograd and Megatron wrap around operators. Such a wrapper also waits in a collective, so its time yields
# to communication and is no computation that hides one.
OTHER_OPERATORS = "autograd, other operators"
COMPUTE = (*(kind for kind, _ in _KERNELS), OTHER_KERNELS)
PRODUCTS = ("grouped GEMM", "GEMM", "attention")
# On the GPU's copy engines, or a fill that the driver does; no kernel.
MEMORY = "memcpy, memset"

ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER = "all-to-all", "all-gather", "reduce-scatter"
ALL_REDUCE, SEND_RECV, BROADCAST = "all-reduce", "send/recv", "broadcast"
EXPERT_TRANSPORT = "dispatch, combine"
OTHER_COLLECTIVE, UNKNOWN_PAIRS = "other collective", "all-to-all or send/recv"
COMMUNICATION = (
    EXPERT_TRANSPORT, ALL_TO_ALL, REDUCE_SCATTER, ALL_GATHER, ALL_REDUCE, UNKNOWN_PAIRS, SEND_RECV, BROADCAST,
    OTHER_COLLECTIVE,
)  # fmt: skip
# In this order, letters only: "reducescatter" holds "reduce", "allgather" holds "gather".
_COLLECTIVES = (
    ("alltoall", ALL_TO_ALL), ("reducescatter", REDUCE_SCATTER), ("allgather", ALL_GATHER), ("allreduce", ALL_REDUCE),
    ("broadcast", BROADCAST), ("barrier", ALL_REDUCE), ("sendrecv", UNKNOWN_PAIRS), ("send", SEND_RECV),
    ("recv", SEND_RECV), ("reduce", OTHER_COLLECTIVE), ("gather", OTHER_COLLECTIVE), ("scatter", OTHER_COLLECTIVE),
)  # fmt: skip


@cache
def kernel_kind(name: str) -> str:
    """Return what a kernel is for, by its name; one of COMPUTE or COMMUNICATION."""
    if re.search(r"deep_ep|hybrid_ep|(intra|inter)node::(dispatch|combine|notify)", name):
        return EXPERT_TRANSPORT
    if re.match(r"nccl", name) or re.search(r"symm_mem|multimem|nvshmem", name):
        return collective(name)
    return _first(_KERNELS, name) or OTHER_KERNELS


@cache
def operator_kind(name: str) -> str | None:
    """Return what an operator on the host is for; None where its callers say it."""
    if name.startswith(("c10d::", "gloo:", "nccl:")):
        return collective(name)
    return _first(_OPERATORS, name)


@cache
def caller_kind(name: str) -> str | None:
    """Return the kind that an operator gives to everything that it calls, or None."""
    return _first(_CALLERS, name)


def collective(name: str) -> str:
    """Return the kind of a collective from a kernel's or a call's name; one of COMMUNICATION."""
    letters = re.sub(r"[^a-z]", "", name.lower().replace("record_param_comms", ""))
    return next((kind for part, kind in _COLLECTIVES if part in letters), OTHER_COLLECTIVE)


@cache
def short(name: str) -> str:
    """Return what tells a kernel from the others, in at most 44 characters."""
    words = re.findall(r"[A-Za-z_]\w{5,}", re.sub(r"\b(void|at|native|anonymous namespace|std|array)\b", "", name))
    return " ".join(words)[:44] or name[:44]


def _first(table: tuple[tuple[str, str], ...], name: str) -> str | None:
    return next((kind for kind, pattern in table if re.search(pattern, name)), None)
