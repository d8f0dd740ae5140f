"""The batch, the loss and the datasets that Megatron's training loop asks its entry point for.

Megatron's package ships the model and the loop but no entry script. What a script must add is here, through the
package's own pieces: GPTDataset, the batch helpers of `megatron/core/utils.py`, the config container.

Shapes: B micro-batch size, S sequence length (this context-parallel rank's share).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_ext.runtime import hooks

# What the model's forward takes; the dataset's other fields (dataset_id) go to the hooks.
_FIELDS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
# Fields of packed sequences, which the helpers expect to find, empty here.
_NO_PACKING = dict.fromkeys(("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group"))

LossResult = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def _has_mtp(args: Namespace, vp_stage: int | None, *, ignore_virtual: bool = False) -> bool:
    if not args.mtp_num_layers:
        return False
    config = core_transformer_config_from_args(args)
    return bool(
        mtp_on_this_rank(
            layout=config.pipeline_model_parallel_layout,
            mtp_num_layers=config.mtp_num_layers,
            ignore_virtual=ignore_virtual,
            vp_stage=vp_stage,
        )
    )


def next_batch(data_iterator: Iterator[dict[str, torch.Tensor]], vp_stage: int | None) -> dict[str, Any]:
    """Return this rank's micro-batch; middle pipeline stages, which see hidden states only, get empty fields.

    Returns:
        `tokens`, `labels`, `position_ids` int64 [B, S]; `loss_mask` float32 [B, S]; `attention_mask` bool
        [B, 1, S, S] or None (the kernel makes it).
    """
    args = get_args()
    has_mtp = _has_mtp(args, vp_stage)
    if not is_first_or_last_pipeline_stage(vp_stage) and not has_mtp:
        return dict.fromkeys(_FIELDS)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        sample = next(data_iterator)
        hooks.batch_read(sample)
        present = {name: sample[name] for name in _FIELDS if sample.get(name) is not None}
        batch = dict.fromkeys(_FIELDS) | {
            name: value.cuda(non_blocking=True) for name, value in present.items()
        }
        batch |= _NO_PACKING
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group()
    )


def language_model_loss(loss_mask: torch.Tensor, token_losses: torch.Tensor) -> LossResult:
    """Sum the token losses where the mask is on.

    Args:
        loss_mask: [B, S] float, 1 where a token counts.
        token_losses: [B, S] cross entropy of each token, natural logarithm.

    Returns:
        The summed loss (fp32 scalar), the number of tokens counted (int32 scalar), and `lm loss` as [2] (sum and
        count), which Megatron reduces over the data-parallel ranks.
    """
    mask = loss_mask.reshape(-1).float()
    loss = torch.dot(token_losses.reshape(-1).float(), mask)
    num_tokens = mask.sum().detach().to(torch.int)
    _reject_unusable(loss)
    return loss, num_tokens, {"lm loss": torch.stack((loss.detach(), num_tokens.to(loss.dtype)))}


# Losses of the micro-batches of this step that were not checked yet (--moe-ext-loss-check step).
_unchecked: list[torch.Tensor] = []


def _reject_unusable(loss: torch.Tensor) -> None:
    # Through the rerun machine, not an assert: it can run the step again and tell a broken GPU from a broken run.
    args = get_args()
    if not args.check_for_nan_in_loss_and_grad:
        return
    if args.moe_ext_loss_check == "step" and torch.is_grad_enabled():
        # A check waits for the GPU to finish the forward pass; meanwhile it gets no new work. The sum over the step is
        # as bad as its worst micro-batch (infinities of both signs give NaN), and the last one comes before the
        # optimizer.
        _unchecked.append(loss.detach())
        if len(_unchecked) < get_num_microbatches():
            return
        total = torch.stack(_unchecked).sum()
        _unchecked.clear()
        _validate(total, lambda value: ~torch.isfinite(value), "the loss of this step is NaN or Inf")
        return
    for is_bad, kind in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
        _validate(loss, is_bad, f"the loss of this micro-batch is {kind}")


def _validate(result: torch.Tensor, is_bad: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    get_rerun_state_machine().validate_result(
        result=result, rejection_func=is_bad, message=message, tolerance=0.0, fatal=True
    )


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module, return_schedule_plan: bool = False
) -> tuple[Any, Callable[[torch.Tensor], LossResult]]:
    """Run one micro-batch forward; Megatron calls the returned function on the output of the last stage."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = next_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    hooks.require_model_built()
    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    options = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    loss = partial(language_model_loss, batch["loss_mask"])
    if return_schedule_plan:
        return model.build_schedule_plan(*inputs, **options), loss  # type: ignore[operator]
    return model(*inputs, **options), loss


def build_datasets(num_samples: list[int | None], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Return the train, validation and test datasets that `args` name, built on the ranks that read them."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )

    def reads_data() -> bool:
        return parallel_state.get_tensor_model_parallel_rank() == 0 and (
            is_first_or_last_pipeline_stage(vp_stage) or _has_mtp(args, vp_stage)
        )

    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, reads_data, config).build()


# Every rank builds its own share, rather than rank 0 building for all (training.py reads this mark).
build_datasets.is_distributed = True  # type: ignore[attr-defined]


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Return the ranks of a pipeline group that hold word embeddings: the ends that share them, and MTP's."""
    args = get_args()
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)
