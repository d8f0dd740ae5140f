# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""AdamW over many tensors in one launch, with the gradients' clip coefficient and the 16-bit copy in the same pass.

    g  = clip * grad                        m = beta1 * m + (1 - beta1) * g         v = beta2 * v + (1 - beta2) * g^2
    p -= lr * ((m / c1) / (sqrt(v / c2) + eps) + weight_decay * p)                  c = 1 - beta^step
    out = p, rounded to 16 bits

(Loshchilov and Hutter, arXiv:1711.05101, algorithm 2.) A parameter of 4 bytes with a 16-bit copy moves 16 bytes in and
14 out, each once; `benchmarks/fused_adam.py` measures that against a copy of as many bytes and against the three
kernels of Transformer Engine and torch that it stands for. Transformer Engine's own Adam cannot be used so: the form
that takes a factor from the GPU wants gradients of the parameters' type and writes them back, the one for fp32
gradients beside bf16 parameters takes no factor.

The tensors are found through a table of their addresses in GPU memory, so their number costs no launches. A program
takes a chunk of one tensor. Arithmetic is fp32, the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_OUT = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
DTYPES = tuple(_OUT)


@dataclass(frozen=True)
class Tile:
    """How the tensors are cut.

    Args:
        chunk: Values of a program, a multiple of `128 * num_warps`.
        num_warps: Warps of a program. A thread takes 4 values at a time: 16 bytes of each fp32 operand.
        registers: The most that a thread may use (None: as the compiler likes), so that more of them run at once.
    """

    chunk: int
    num_warps: int
    registers: int | None = None


# benchmarks/fused_adam.py --tune tries others.
TILE = Tile(chunk=8192, num_warps=8, registers=48)


@dataclass(frozen=True)
class Hyper:
    """One parameter group's numbers at one step (`step` counts from 1)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    bias_correction: bool = True


class Addresses:
    """Where the tensors of one launch lie: p, m, v, grad (fp32) and out, alike in size and contiguous.

    Args:
        numels: Values of each tensor.
        out_dtype: Of `out`: fp32, fp16 or bf16.
        device: Where all tensors are.
        tile: How they are cut.
    """

    def __init__(self, numels: Sequence[int], out_dtype: torch.dtype, device: torch.device, tile: Tile = TILE) -> None:
        self.out_dtype, self.device, self.tile = out_dtype, device, tile
        self._numels = list(numels)
        chunks = torch.tensor([triton.cdiv(numel, tile.chunk) for numel in numels], dtype=torch.int64)
        first = chunks.cumsum(0) - chunks
        owner = torch.repeat_interleave(torch.arange(len(chunks)), chunks)
        within = torch.arange(len(owner)) - first[owner]
        # [2, chunks]: the tensor of each chunk, and which of its chunks it is.
        self._chunks = torch.stack([owner, within]).to(torch.int32).to(device)
        self._table = torch.empty(0, dtype=torch.int64, device=device)

    def point(self, rows: list[tuple[int, int, int, int, int]]) -> None:
        """Take new addresses.

        Args:
            rows: Of p, m, v, grad and out for each tensor, in bytes (`data_ptr`). Nothing here keeps them alive.
        """
        assert len(rows) == len(self._numels)
        out_bytes = 4 * self.out_dtype.itemsize
        table = [
            (*row, numel, int(not (any(address % 16 for address in row[:4]) or row[4] % out_bytes)))
            for row, numel in zip(rows, self._numels, strict=True)
        ]
        self._table = torch.tensor(table, dtype=torch.int64).to(self.device)

    def adamw(self, hyper: Hyper, clip: Tensor) -> None:
        """Take one step with all tensors, in place, in one launch on the current stream.

        Args:
            hyper: The numbers of the step.
            clip: [1], fp32, on the device: every gradient is multiplied by it first; the gradients stay as they are.
        """
        chunks = self._chunks.shape[1]
        if not chunks:
            return
        correct = hyper.bias_correction
        # From doubles, each rounded to fp32 once: 1 - beta in fp32 would lose bits of a beta close to one.
        _adamw_kernel[(chunks,)](
            self._table,
            self._chunks,
            clip,
            chunks,
            hyper.lr,
            hyper.beta1,
            1 - hyper.beta1,
            hyper.beta2,
            1 - hyper.beta2,
            1 / (1 - hyper.beta1**hyper.step) if correct else 1.0,
            1 / (1 - hyper.beta2**hyper.step) if correct else 1.0,
            hyper.eps,
            hyper.weight_decay,
            OUT=_OUT[self.out_dtype],
            OUT_BYTES=4 * self.out_dtype.itemsize,
            CHUNK=self.tile.chunk,
            BLOCK=128 * self.tile.num_warps,
            num_warps=self.tile.num_warps,
            maxnreg=self.tile.registers,
        )


@triton.jit
def _chunk(
    places,  # addresses of p, m, v, grad, out
    start,  # of the chunk in the tensor, in values
    left,  # values from there to the tensor's end
    clip,
    numbers,  # lr; beta1, 1 - beta1, beta2, 1 - beta2; 1 / (1 - beta^step) of both; eps; weight decay
    OUT: tl.constexpr,
    OUT_BYTES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,  # no mask and known alignment: 16 bytes a thread and load
):
    lr, betas, inverses, eps, weight_decay = numbers
    p = places[0].to(tl.pointer_type(tl.float32))
    m = places[1].to(tl.pointer_type(tl.float32))
    v = places[2].to(tl.pointer_type(tl.float32))
    grad = places[3].to(tl.pointer_type(tl.float32))
    out = places[4].to(tl.pointer_type(OUT))
    if WHOLE:
        p, m = tl.multiple_of(p, 16), tl.multiple_of(m, 16)
        v, grad = tl.multiple_of(v, 16), tl.multiple_of(grad, 16)
        out = tl.multiple_of(out, OUT_BYTES)
    p, m, v, grad, out = p + start, m + start, v + start, grad + start, out + start
    for begin in range(0, CHUNK, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = None if WHOLE else at < left
        value = tl.load(p + at, mask=inside)
        first = tl.load(m + at, mask=inside)
        second = tl.load(v + at, mask=inside)
        given = tl.load(grad + at, mask=inside) * clip
        first = betas[0] * first + betas[1] * given
        second = betas[2] * second + betas[3] * given * given
        # Rounded like torch's: `/` and tl.sqrt are approximations on a GPU.
        step = tl.div_rn(first * inverses[0], tl.sqrt_rn(second * inverses[1]) + eps)
        value = value - lr * (step + weight_decay * value)
        tl.store(p + at, value, mask=inside)
        tl.store(m + at, first, mask=inside)
        tl.store(v + at, second, mask=inside)
        tl.store(out + at, value.to(OUT), mask=inside)


# The number of chunks must not compile the kernel anew.
@triton.jit(do_not_specialize=["num_chunks"])
def _adamw_kernel(
    table,  # [tensors, 7], int64: addresses of p, m, v, grad, out; values; whether all addresses are aligned
    chunks,  # [2, num_chunks], int32
    clip,  # [1]
    num_chunks,
    lr,
    beta1,
    rest1,
    beta2,
    rest2,
    inverse1,
    inverse2,
    eps,
    weight_decay,
    OUT: tl.constexpr,
    OUT_BYTES: tl.constexpr,  # of the 4 values that a thread writes
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = table + tl.load(chunks + chunk).to(tl.int64) * 7
    start = tl.load(chunks + num_chunks + chunk).to(tl.int64) * CHUNK
    left = tl.load(row + 5) - start
    aligned = tl.load(row + 6)
    coefficient = tl.load(clip)
    places = (tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4))
    numbers = (lr, (beta1, rest1, beta2, rest2), (inverse1, inverse2), eps, weight_decay)
    if (aligned != 0) & (left >= CHUNK):
        _chunk(places, start, left, coefficient, numbers, OUT, OUT_BYTES, CHUNK, BLOCK, WHOLE=True)
    else:
        _chunk(places, start, left, coefficient, numbers, OUT, OUT_BYTES, CHUNK, BLOCK, WHOLE=False)
