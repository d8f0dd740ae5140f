"""Experts without Transformer Engine: Megatron's local experts in grouped matrix products of torch's own.

`switch` chooses, `module` is the layer, `grouped` one differentiable product, `order` guards the optimizer's state.
"""

from megatron_ext.experts.switch import add_arguments, builder, configure, settle

__all__ = ["add_arguments", "builder", "configure", "settle"]
