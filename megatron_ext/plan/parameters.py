"""Count the weights of a GPT model, dense or MoE, from its shape alone.

H hidden, L layers, F the dense MLP's width, f an expert's width, E experts, K top-k, V vocabulary (padded). A layer has
    attention   H * (heads + 2 * groups) * channels + heads * channels * H
    MLP         3 * H * F with a gate, else 2 * H * F; an MoE layer E times 3 * H * f, its router E * H
    norms       two of H
and the model an embedding V * H (twice where input and output are not tied) and a last norm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_ext.errors import UserError


@dataclass(frozen=True)
class ModelShape:
    """A GPT model with rotary positions; the values are those of Megatron's flags.

    Attributes:
        num_layers: L.
        hidden: H.
        ffn: F, the width of a dense layer's MLP.
        heads: Attention heads.
        vocab: V, padded as the checkpoint has it.
        query_groups: Of grouped-query attention; 0: as many as heads.
        channels: Of a head; 0: H / heads.
        gated: The activation has a gate (SwiGLU).
        biases: Linear layers have biases.
        norm_biases: The norms have biases (LayerNorm; RMSNorm has none).
        tied: Input and output embedding are one.
        num_experts: E; 0: a dense model.
        moe_ffn: f.
        topk: K.
        moe_layers: How many of the L layers are MoE layers.
        shared_ffn: Width of the shared experts of an MoE layer; 0: none.
    """

    num_layers: int
    hidden: int
    ffn: int
    heads: int
    vocab: int
    query_groups: int = 0
    channels: int = 0
    gated: bool = True
    biases: bool = False
    norm_biases: bool = False
    tied: bool = True
    num_experts: int = 0
    moe_ffn: int = 0
    topk: int = 0
    moe_layers: int = 0
    shared_ffn: int = 0

    def dense(self) -> ModelShape:
        """Return the dense model that this one is upcycled from."""
        return replace(self, num_experts=0, moe_ffn=0, topk=0, moe_layers=0, shared_ffn=0)


def check(shape: ModelShape) -> None:
    """Raise `UserError` for shapes that cannot be."""
    faults = (
        (min(shape.num_layers, shape.hidden, shape.ffn, shape.heads, shape.vocab) < 1,
         "layers, hidden size, widths, heads and vocabulary", "a size is not positive"),
        (not shape.channels and shape.heads > 0 and shape.hidden % shape.heads,
         f"hidden size {shape.hidden}, {shape.heads} heads", "the heads do not divide the hidden size"),
        (not 0 <= shape.moe_layers <= shape.num_layers, f"{shape.moe_layers} of {shape.num_layers} layers",
         "there are not that many layers"),
        (shape.num_experts and not 0 < shape.topk <= shape.num_experts, f"top-k {shape.topk}, {shape.num_experts} "
         "experts", "a token cannot choose that many experts"),
    )  # fmt: skip
    for bad, where, what in faults:
        if bad:
            raise UserError(what, where=where, remedy="give the values of the training command", exit_code=64)


def total(shape: ModelShape) -> int:
    """Return the weights of the whole model."""
    return _count(shape, shape.num_experts)


def active(shape: ModelShape) -> int:
    """Return the weights that a token meets: K of the E experts, and all else (embedding included)."""
    return _count(shape, shape.topk)


def checkpoint_bytes(shape: ModelShape, value_bytes: int = 2) -> int:
    """Return the size in bytes of a checkpoint of the weights alone (bf16: 2 a value), without optimizer state."""
    return total(shape) * value_bytes


def _count(shape: ModelShape, experts: int) -> int:
    check(shape)
    hidden = shape.hidden
    norm = hidden * (2 if shape.norm_biases else 1)
    moe_layers = shape.moe_layers if shape.num_experts else 0
    moe = experts * _mlp(shape, shape.moe_ffn) + shape.num_experts * (hidden + shape.biases)
    moe += _mlp(shape, shape.shared_ffn) if shape.shared_ffn else 0
    dense = (shape.num_layers - moe_layers) * _mlp(shape, shape.ffn)
    every = shape.num_layers * (_attention(shape) + 2 * norm)
    return every + dense + moe_layers * moe + norm + shape.vocab * hidden * (1 if shape.tied else 2)


def _attention(shape: ModelShape) -> int:
    channels = shape.channels or shape.hidden // shape.heads
    queries, keys = shape.heads * channels, (shape.query_groups or shape.heads) * channels
    wide = queries + 2 * keys
    return shape.hidden * (wide + queries) + (wide + shape.hidden if shape.biases else 0)


def _mlp(shape: ModelShape, width: int) -> int:
    wide = width * (2 if shape.gated else 1)
    return shape.hidden * (wide + width) + (wide + shape.hidden if shape.biases else 0)
