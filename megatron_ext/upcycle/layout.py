"""Names of Megatron's model tensors in a checkpoint, layer by layer.

A layer's tensors have the same short names (`mlp.linear_fc1.weight`) whether they are stacked for all layers
(`decoder.layers.mlp.linear_fc1.weight`, [L, ...]) or stored one by one (`decoder.layers.3.mlp...`). Layers of the
multi-token prediction are always stored one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_STACK = re.compile(r"decoder\.layers\.(?P<short>\D.*)")
_SINGLE = re.compile(r"(?P<owner>(?:decoder\.layers|mtp\.layers)\.\d+\.(?:(?:transformer|mtp_model)_layer\.)?)"
                     r"(?P<short>.*)")
_SHARD = re.compile(r"(?P<name>.*)/shard_(?P<offsets>[\d.]+)_(?P<shape>[\d.]+)")
# Optimizer, random state and so on: not the model.
NOT_MODEL = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine|common_state")
# Its state by the model's own names; another format keeps it by place in a buffer.
_STATE = re.compile(r"(?P<prefix>(?:chained_\d+\.)?optimizer\.state\.[^.]+\.)(?P<model>.+)")
OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
MLP = "mlp."


@dataclass(frozen=True)
class Layer:
    """One transformer layer: a decoder layer (by number from 0) or one of the multi-token prediction (by its prefix).

    Attributes:
        prefix: `decoder.layers.3.` or `mtp.layers.0.transformer_layer.`; also the name in seeds.
        number: Among the decoder's layers, or None.
        total: Number of decoder layers.
    """

    prefix: str
    number: int | None
    total: int

    def place(self, short: str, *, stacked: bool) -> Place:
        """Return where a tensor of this layer lies in a checkpoint."""
        if stacked and self.number is not None:
            return Place(f"decoder.layers.{short}", (self.number,), (self.total,))
        return Place(self.prefix + short, (), ())


@dataclass(frozen=True)
class Place:
    """A layer's tensor in a checkpoint: its stored name and the leading axes in front of its own shape."""

    name: str
    offsets: tuple[int, ...]
    counts: tuple[int, ...]

    def object_name(self) -> str:
        """Return the full name of a non-tensor entry at this place (Megatron's `ShardedObject.unique_key`)."""
        offsets, counts = self.offsets or (0,), self.counts or (1,)
        return f"{self.name}/shard_{'.'.join(map(str, offsets))}_{'.'.join(map(str, counts))}"

    def inner(self, index: int, count: int) -> Place:
        """Return the place with one more leading axis (an expert of many)."""
        return Place(self.name, (*self.offsets, index), (*self.counts, count))


def decoder_layer(number: int, total: int) -> Layer:
    """Return decoder layer `number` of `total`."""
    return Layer(f"decoder.layers.{number}.", number, total)


@dataclass(frozen=True)
class Found:
    """A stored name understood: the layer it belongs to (None for the rest of the model) and its short name."""

    layer: Layer | None
    short: str


def understand(name: str, *, num_layers: int) -> Iterator[Found]:
    """Yield what a stored tensor name stands for: every decoder layer for a stacked one, else one."""
    stack = _STACK.fullmatch(name)
    if stack:
        for number in range(num_layers):
            yield Found(decoder_layer(number, num_layers), stack["short"])
        return
    single = _SINGLE.fullmatch(name)
    if not single or (single["owner"].startswith("mtp") and not single["owner"].endswith("layer.")):
        yield Found(None, name)
        return
    owner = single["owner"]
    own_number = int(owner.split(".")[2]) if owner.startswith("decoder") else None
    yield Found(Layer(owner, own_number, num_layers), single["short"])


def split_state(name: str) -> tuple[str, str]:
    """Return the prefix of the optimizer's state ("" for a weight) and the model's own name."""
    match = _STATE.fullmatch(name)
    return (match["prefix"], match["model"]) if match else ("", name)


def is_stacked(name: str) -> bool:
    """Say whether a stored name, a weight's or its state's, holds all decoder layers on a leading axis."""
    return _STACK.fullmatch(split_state(name)[1]) is not None


def object_parts(full_name: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return name, offsets and counts of a non-tensor entry's full name."""
    match = _SHARD.fullmatch(full_name)
    if match is None:
        return full_name, (), ()
    return match["name"], _numbers(match["offsets"]), _numbers(match["shape"])


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
