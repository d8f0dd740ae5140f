"""Build Megatron's own GPT from a checkpoint's arguments on one CPU process, and fill it without running code from it.

The shape comes from the checkpoint's arguments laid over the defaults of Megatron's parser; what belongs to a cluster
(parallelism, fused kernels, low precision) is set to the plain form. Weights are read by `source`, piece by piece,
into the model's own tensors; Megatron's sharded state dict says which belongs where. All in fp32, so that what differs
are the weights and not their rounding on the way.
"""

from __future__ import annotations

import contextlib
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any

import torch

from megatron_ext.errors import UserError
from megatron_ext.runtime import cpu
from megatron_ext.upcycle.layout import MLP, decoder_layer, understand
from megatron_ext.upcycle.offline import NORM, OWN_NORM
from megatron_ext.upcycle.source import Source, missing

EMBEDDING = "embedding.word_embeddings.weight"
# What one CPU process needs, whatever the run had.
_PLAIN: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "context_parallel_size": 1,
    "hierarchical_context_parallel_sizes": None,
    "cp_comm_type": ["p2p"],
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "tp_comm_overlap": False,
    "transformer_impl": "local",
    "attention_backend": None,
    "params_dtype": torch.float32,
    "bf16": False,
    "fp16": False,
    "fp8": None,
    "fp4": None,
    "fp8_param_gather": False,
    "fp4_param_gather": False,
    "te_precision_config_file": None,
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "gradient_accumulation_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "no_persist_layer_norm": True,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": None,
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "cpu_offloading": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "spec": None,
    "yaml_cfg": None,
    "config_logger_dir": "",
    "overlap_p2p_comm": False,
    "overlap_moe_expert_parallel_comm": False,
    "delay_wgrad_compute": False,
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_shared_expert_overlap": False,
    "moe_router_dtype": "fp32",
    "moe_router_force_load_balancing": False,
    "moe_expert_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": False,
    "moe_router_padding_for_quantization": False,
    "moe_input_jitter_eps": None,
}


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Give this process the CPU runtime and Megatron's groups of one, as long as the context lasts.

    Must be entered before anything imports Megatron, or under the CPU runtime.
    """
    cpu.install()
    from megatron.core import parallel_state, tensor_parallel

    mine = not torch.distributed.is_initialized()
    if mine:
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
    try:
        yield
    finally:
        if mine:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def build(source: Source) -> Any:
    """Return Megatron's GPT of a checkpoint, with its weights, in fp32 and evaluation mode.

    Raises:
        UserError: The arguments are those of a model that the CPU cannot build, or a tensor is missing.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    try:
        config = gpt_config_from_args(_arguments(source))
        config.finalize()
        model = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups(), True, True)
    except (AssertionError, ValueError, NotImplementedError, ImportError) as error:
        raise UserError(
            "this model cannot be built on the CPU",
            where=str(source.folder),
            why=str(error) or type(error).__name__,
            remedy="compare the first loss of the two training runs instead",
        ) from error
    fill(model, source)
    return model.eval()


def fill(model: Any, source: Source) -> None:
    """Read every tensor of the model from a checkpoint into place.

    Raises:
        UserError: One is missing, or has another shape.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True,
                "dp_cp_group": _data_parallel_group()}
    state = model.sharded_state_dict(metadata=metadata)
    apply_factories(state)
    with torch.no_grad():
        for tensor in _tensors(state, ShardedTensor):
            name, offsets = _place(source, tensor.key, tuple(tensor.global_offset))
            lead = len(offsets) - len(tensor.local_shape)
            sizes = (*(1 for _ in range(lead)), *tensor.local_shape)
            _check_shape(source, name, tensor)
            tensor.data.copy_(source.read(name, offsets, sizes).reshape(tensor.local_shape))


def vocab_size(source: Source) -> int:
    """Return the padded vocabulary of a checkpoint: the rows of its embedding."""
    return source.tensor(EMBEDDING).shape[0]


def _arguments(source: Source) -> Namespace:
    from megatron.training.arguments import add_megatron_arguments

    known = add_megatron_arguments(ArgumentParser(allow_abbrev=False)).parse_args([])
    for name, value in vars(source.args).items():
        setattr(known, name, value)
    for name, value in _PLAIN.items():
        setattr(known, name, value)
    known.padded_vocab_size = vocab_size(source)
    known.max_position_embeddings = known.max_position_embeddings or known.seq_length or 1
    return known


def _data_parallel_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _tensors(state: Any, kind: type) -> Iterator[Any]:
    if isinstance(state, kind):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value, kind)
    elif isinstance(state, list):
        for value in state:
            yield from _tensors(value, kind)


def _place(source: Source, key: str, offsets: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return where a checkpoint keeps what the model calls `key` at `offsets`.

    A checkpoint may store layers stacked or one by one (whatever the arguments suggest), and the norm before the
    experts under its own name or, from older local layers, under that of dense ones (see `offline.new_short`).

    Raises:
        UserError: It is nowhere.
    """
    if key in source.tensors:
        return key, offsets
    total = int(source.args.num_layers)
    found = next(understand(key, num_layers=total))
    if found.layer is None:
        raise missing(key, source)
    stacked = key.startswith("decoder.layers.") and not key.split(".")[2].isdigit()
    layer = decoder_layer(offsets[0], total) if stacked else found.layer
    own = offsets[1:] if stacked else offsets
    for short in (found.short, _other_norm(found.short)):
        for place in (layer.place(short, stacked=True), layer.place(short, stacked=False)):
            if place.name in source.tensors:
                return place.name, (*place.offsets, *own)
    raise missing(key, source)


def _other_norm(short: str) -> str:
    fused = MLP + NORM
    if short.startswith(fused):
        return OWN_NORM + short.removeprefix(fused)
    return fused + short.removeprefix(OWN_NORM) if short.startswith(OWN_NORM) else short


def _check_shape(source: Source, name: str, tensor: Any) -> None:
    lead = len(tensor.global_shape) - len(tensor.local_shape)
    wanted, found = tuple(tensor.global_shape[lead:]), tuple(source.tensor(name).shape)[-len(tensor.local_shape):]
    if wanted != found:
        raise UserError("a tensor has another shape than the arguments promise", where=f"{name} in {source.folder}",
                        why=f"it is {found}, the model needs {wanted}",
                        remedy="the checkpoint mixes two models; take another one")
