"""Hold a new checkpoint's weights against what its options make of the source, and count its experts.

Both are read block by block in one pass; no model is built. `upcycle.json` says the options; the plan that wrote the
checkpoint is made again from them and from the source.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_ext.errors import UserError
from megatron_ext.upcycle.layout import NOT_MODEL, understand
from megatron_ext.upcycle.source import Source
from megatron_ext.upcycle.target import Block, Content

EXPERT = "mlp.experts.experts."
# Numbers that differ by no more than this, relative to the largest of their tensor, differ by rounding: random draws
# may come out one unit apart on another processor.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@dataclass(frozen=True)
class WrongTensor:
    """A tensor that is not what the options make: where, which expert (or None), which rows, by how much at most."""

    layer: str
    tensor: str
    expert: int | None
    rows: tuple[int, ...]
    largest: float

    def text(self) -> str:
        """Return one line for people."""
        expert = "" if self.expert is None else f", expert {self.expert}"
        shown = ", ".join(map(str, self.rows[:4])) + (f" and {len(self.rows) - 4} more" if len(self.rows) > 4 else "")
        rows = f", row{'s' if len(self.rows) > 1 else ''} {shown}" if self.rows else ""
        return f"{self.layer}{expert}: {self.tensor}{rows} differs, by up to {self.largest:.3g}"


@dataclass(frozen=True)
class ExpertCounts:
    """One layer's experts, in the checkpoint and as the options make them.

    Attributes:
        layer: `layer N`, or the prefix of a multi-token-prediction layer.
        count: Experts found.
        distinct: Experts with different weights.
        expected_distinct: What the options make.
        kept: Of the distinct experts that the options make, how many are there to the bit.
        silent: Experts with a projection that is all zero, or numbers that are not finite.
        norm_min: Smallest Frobenius norm of an expert's weights.
        norm_mean: Mean norm.
        norm_max: Largest norm.
        same: For each expert the first one with the same weights.
    """

    layer: str
    count: int
    distinct: int
    expected_distinct: int
    kept: int
    silent: int
    norm_min: float
    norm_mean: float
    norm_max: float
    same: tuple[int, ...]


@dataclass(frozen=True)
class Survey:
    """What the pass found: tensors compared, equal but for rounding, wrong ones, experts by layer."""

    tensors: int
    rounded: int
    wrong: tuple[WrongTensor, ...]
    experts: tuple[ExpertCounts, ...]


@dataclass
class _Layer:
    """Digests and norms of one layer's experts while the pass goes on."""

    found: dict[int, list[bytes]] = field(default_factory=dict)
    made: dict[int, list[bytes]] = field(default_factory=dict)
    squares: dict[int, float] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)


def survey(content: Content, target: Source, *, progress: Callable[[Block], None] = lambda block: None) -> Survey:
    """Compare every block of the plan with the checkpoint.

    Args:
        content: The plan, made again from the source and the options.
        target: The checkpoint that it should have made.
        progress: Called after each block.

    Raises:
        UserError: The checkpoint lacks a tensor of the plan, has another shape of it, or has more than the plan.
    """
    _check_names(content, target)
    num_layers = int(target.args.num_layers)
    wrong, layers, rounded = [], dict[str, _Layer](), 0
    for block in content.blocks:
        made, found = block.make(), target.read(block.name, block.offsets, block.sizes)
        place = _where(block, num_layers)
        expert = _expert(block)
        same = torch.equal(made, found)
        if not same and _is_rounding(made, found):
            rounded += 1
        elif not same:
            wrong.append(_difference(made, found, place[0], place[1], expert, block))
        if expert is not None:
            _count(layers.setdefault(place[0], _Layer()), place[1], expert, made, found)
        progress(block)
    counts = tuple(_counts(name, layer) for name, layer in layers.items())
    return Survey(len(content.blocks), rounded, tuple(wrong), counts)


def _check_names(content: Content, target: Source) -> None:
    planned = {block.name: block.shape for block in content.blocks}
    found = {name: stored.shape for name, stored in target.tensors.items() if not NOT_MODEL.match(name)}
    for name in sorted(planned.keys() ^ found.keys()):
        raise UserError(
            "source and target are not the two sides of one upcycling",
            where=f"{name} in {target.folder}",
            why="the target lacks it" if name in planned else "nothing in the source and the options makes it",
            remedy="give the source that upcycle.json in the target names",
            exit_code=64,
        )
    for name, shape in planned.items():
        if tuple(found[name]) != tuple(shape):
            raise UserError("source and target are not the two sides of one upcycling", exit_code=64,
                            where=f"{name} in {target.folder}", why=f"it is {found[name]}; the options make {shape}",
                            remedy="give the source that upcycle.json in the target names")


def _where(block: Block, num_layers: int) -> tuple[str, str]:
    """Return the layer's name for people, and the tensor's short name."""
    found = next(understand(block.name, num_layers=num_layers))
    if found.layer is None:
        return "outside the layers", block.name
    if found.layer.number is None:
        return found.layer.prefix.removesuffix("."), found.short
    stacked = not block.name.split(".")[2].isdigit()
    return f"layer {block.offsets[0] if stacked else found.layer.number}", found.short


def _expert(block: Block) -> int | None:
    """Return the expert of an expert's block: the last of the axes in front of its own shape."""
    if f".{EXPERT}" not in block.name:
        return None
    own = 1 if block.name.endswith(".bias") else 2
    return block.offsets[-own - 1]


def _is_rounding(made: Tensor, found: Tensor) -> bool:
    bound = ROUNDING.get(made.dtype, 0.0) * float(made.abs().max())
    return bool((made.float() - found.float()).abs().max() <= bound)


def _difference(made: Tensor, found: Tensor, layer: str, short: str, expert: int | None, block: Block) -> WrongTensor:
    """Describe a difference; rows are those of a matrix, or of a router the experts."""
    gap = (made.float() - found.float()).abs()
    own = gap.reshape(gap.shape[-2], -1) if gap.dim() > 1 else gap.reshape(-1, 1)
    rows = torch.nonzero(~(own.amax(1) == 0)).flatten().tolist()
    return WrongTensor(layer, short, expert, tuple(rows), float(gap.max()))


def _count(layer: _Layer, short: str, expert: int, made: Tensor, found: Tensor) -> None:
    layer.found.setdefault(expert, []).append(_digest(found))
    layer.made.setdefault(expert, []).append(_digest(made))
    square = float(found.double().pow(2).sum())
    layer.squares[expert] = layer.squares.get(expert, 0.0) + square
    if not math.isfinite(square) or (short.endswith(".weight") and square == 0):
        layer.silent.add(expert)


def _digest(tensor: Tensor) -> bytes:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).digest()


def _counts(name: str, layer: _Layer) -> ExpertCounts:
    weights = [b"".join(parts) for _, parts in sorted(layer.found.items())]
    found = set(weights)
    made = {b"".join(parts) for parts in layer.made.values()}
    norms = [square**0.5 for square in layer.squares.values()]
    return ExpertCounts(name, len(layer.found), len(found), len(made), len(found & made), len(layer.silent),
                        min(norms), sum(norms) / len(norms), max(norms), tuple(map(weights.index, weights)))
