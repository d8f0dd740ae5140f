"""How a larger MoE's experts and router rows come from a smaller one's: pure functions on one tensor.

E experts become M * E. New expert j is copy c = j mod M of expert e = j // M: copies stand side by side, so that
routing groups and expert-parallel ranks keep their experts. Copy 0 is the expert itself, unchanged; the others are
what an option makes of it. Shapes: H hidden, f an expert's width; fc1 is [f, H], with a gated activation [2f, H] as
(gate rows, then up rows); fc2 is [H, f].

Drop-Upcycling (arXiv 2502.19261, section 3): of the f intermediate channels, a share r drawn at random is forgotten; in
each of the three projections those channels' weights are drawn anew from N(mean, std) of the very weights that they
replace, one mean and one std a projection. The paper names one set of channels for all projections and that is done
here; its authors' script draws a set for each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.upcycle import router

FC1, FC2 = "linear_fc1.weight", "linear_fc2.weight"
FC1_BIAS, FC2_BIAS = "linear_fc1.bias", "linear_fc2.bias"


def perturbed(tensor: Tensor, relative: float, *, seed: int, name: str) -> Tensor:
    """Return `tensor` plus noise from N(0, relative * its root mean square), in its dtype.

    Args:
        tensor: A router row [H] or one tensor of an expert.
        relative: Strength; 0 returns the tensor.
        seed: The upcycling seed.
        name: Makes the draw this tensor's own.
    """
    if not relative:
        return tensor
    noise = router.normal(tuple(tensor.shape), std=relative * rms(tensor), seed=seed, name=name)
    return (tensor.float() + noise).to(tensor.dtype)


def shift(rows: Tensor, strength: float, copy: int, *, seed: int, name: str) -> Tensor:
    """Return the vector [H] that copy `copy` adds to all of its router rows: zero for copy 0.

    Where all rows of a set of copies move by the same vector, the logits of the set move by one number a token. The
    order inside the set stays, and so does a softmax over chosen experts of one set (it does not see a common number).
    So a token goes to the set with the largest number and finds there the experts that it would have had.

    Args:
        rows: The layer's router rows [E, H].
        strength: Length of the vector over the rows' root mean square length.
        copy: c.
        seed: The upcycling seed.
        name: The router's name in the checkpoint.
    """
    if not strength or copy == 0:
        return torch.zeros(rows.shape[1])
    return router.normal((rows.shape[1],), std=strength * rms(rows), seed=seed, name=f"{name}.shift.{copy}")


def dropped_channels(width: int, share: float, *, seed: int, name: str) -> Tensor:
    """Return the sorted intermediate channels that one expert forgets: floor(share * width) of `width`, at random."""
    order = torch.randperm(width, generator=router.generator(seed, f"{name}.dropped"))
    return order[: int(share * width)].sort().values


def redrawn(part: str, tensor: Tensor, channels: Tensor, *, gated: bool, seed: int, name: str) -> Tensor:
    """Return one tensor of an expert with the channels drawn anew, each projection from its own statistics.

    Args:
        part: `linear_fc1.weight`, `linear_fc1.bias`, `linear_fc2.weight` or `linear_fc2.bias`; the last has no
            intermediate channels and stays.
        tensor: That tensor.
        channels: From `dropped_channels`.
        gated: fc1 holds gate and up rows.
        seed: The upcycling seed.
        name: The tensor's name, expert included.
    """
    if part == FC2_BIAS or not len(channels):
        return tensor
    result = tensor.clone()
    if part == FC2:
        result[:, channels] = _alike(tensor[:, channels], seed, name)
        return result
    width = len(tensor) // (2 if gated else 1)
    for number, start in enumerate(range(0, len(tensor), width)):
        rows = channels + start
        result[rows] = _alike(tensor[rows], seed, f"{name}.{number}")
    return result


def fresh(part: str, tensor: Tensor, *, init_std: float, num_layers: int, seed: int, name: str) -> Tensor:
    """Return one tensor of a new expert, drawn as Megatron initializes it.

    Source: megatron-core `transformer_config.py`: N(0, init_std), the last projection N(0, init_std / sqrt(2 L));
    biases zero.
    """
    if part in (FC1_BIAS, FC2_BIAS):
        return torch.zeros_like(tensor)
    std = init_std / (2 * num_layers) ** 0.5 if part == FC2 else init_std
    return router.normal(tuple(tensor.shape), std=std, seed=seed, name=name).to(tensor.dtype)


def rms(tensor: Tensor) -> float:
    """Return the root mean square of a tensor's numbers."""
    return float(tensor.float().pow(2).mean().sqrt())


def _alike(old: Tensor, seed: int, name: str) -> Tensor:
    """Return numbers from N(mean, std) of `old`, in its shape and dtype."""
    values = old.float()
    std = float(values.std()) if values.numel() > 1 else 0.0
    drawn = router.normal(tuple(old.shape), std=std, seed=seed, name=name)
    return (drawn + float(values.mean())).to(old.dtype)
