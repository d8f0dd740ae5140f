"""Small real Megatron GPTs: built under the current process groups, saved, loaded and run as training does it."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import process_groups
import torch
from torch.nn import functional as F

from megatron_ext.upcycle import target
from megatron_ext.upcycle.offline import OWN_NORM_NAME

SEQ, BATCH, VOCAB = 16, 4, 64
CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
ACTIVATIONS = {"swiglu": F.silu, "gelu": F.gelu, "squared_relu": lambda x: F.relu(x).pow(2)}


@dataclass(frozen=True)
class Shape:
    """What the dense model looks like."""

    activation: str = "swiglu"
    biases: bool = False
    tied: bool = False
    layers: int = 4
    hidden: int = 32
    ffn: int = 64
    mtp: int | None = None
    dtype: torch.dtype = torch.float32

    @property
    def gated(self) -> bool:
        return self.activation == "swiglu"


@dataclass(frozen=True)
class Layout:
    """How it is spread over ranks."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None

    @property
    def ranks(self) -> int:
        return max(self.tp * self.pp, self.pp * self.ep * (self.etp or 1))


@dataclass(frozen=True)
class Moe:
    """The MoE, with Megatron's names in `more`."""

    experts: int = 8
    topk: int = 2
    ffn: int = 64
    freq: int | list[int] = 1
    more: dict[str, Any] = field(default_factory=dict)


def init_std(shape: Shape) -> float:
    """Return a spread that makes the MLPs matter; in bf16 a lower one, where rounding alone moves the loss less."""
    return 0.1 if shape.dtype == torch.bfloat16 else 0.3


def use_groups(layout: Layout) -> None:
    """Make Megatron's process groups anew for a layout."""
    from megatron.core import parallel_state, tensor_parallel

    process_groups.destroy_all()
    # A layout of fewer ranks runs as data-parallel copies.
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(7)


def config(shape: Shape, layout: Layout, moe: Moe | None = None) -> Any:
    """Return Megatron's configuration."""
    from megatron.core.activations import squared_relu
    from megatron.core.transformer import TransformerConfig

    activation = squared_relu if shape.activation == "squared_relu" else ACTIVATIONS[shape.activation]
    values: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": 4,
        "normalization": "RMSNorm",
        "gated_linear_unit": shape.gated,
        "activation_func": activation,
        "add_bias_linear": shape.biases,
        "bias_activation_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": shape.dtype,
        "pipeline_dtype": shape.dtype,
        "bf16": shape.dtype == torch.bfloat16,
        "autocast_dtype": shape.dtype,
        "use_cpu_initialization": True,
        "mtp_num_layers": shape.mtp,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "gradient_accumulation_fusion": False,
        "init_method_std": init_std(shape),
    }
    if moe is not None:
        values |= {
            "num_moe_experts": moe.experts,
            "moe_router_topk": moe.topk,
            "moe_ffn_hidden_size": moe.ffn,
            "moe_layer_freq": moe.freq,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.etp,
            **moe.more,
        }
    return TransformerConfig(**values)


def args_of(shape: Shape, moe: Moe | None = None) -> Namespace:
    """Return the training arguments that a checkpoint of this shape carries."""
    args = Namespace(
        num_layers=shape.layers, hidden_size=shape.hidden, ffn_hidden_size=shape.ffn, num_attention_heads=4,
        swiglu=shape.gated, squared_relu=shape.activation == "squared_relu", add_bias_linear=shape.biases,
        transformer_impl="local", init_method_std=init_std(shape), num_experts=None, consumed_train_samples=48,
        consumed_valid_samples=4, iteration=12, normalization="RMSNorm", position_embedding_type="rope",
        untie_embeddings_and_output_weights=not shape.tied, max_position_embeddings=SEQ, seq_length=SEQ,
        mtp_num_layers=shape.mtp,
    )  # fmt: skip
    if moe is not None:
        more = {"num_experts": moe.experts, "moe_router_topk": moe.topk, "moe_ffn_hidden_size": moe.ffn,
                "moe_layer_freq": moe.freq, "moe_router_load_balancing_type": "none", **moe.more}
        vars(args).update(more)
    return args


def build(shape: Shape, layout: Layout, moe: Moe | None = None) -> list[Any]:
    """Return this rank's model chunks, in the dtype of `shape`, wrapped as training wraps them."""
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module

    cfg = config(shape, layout, moe)
    chunks = []
    for stage in range(layout.vpp or 1):
        vp_stage = stage if layout.vpp else None
        spec = get_gpt_decoder_block_spec(cfg, use_transformer_engine=False, vp_stage=vp_stage)
        mtp = get_gpt_mtp_block_spec(cfg, spec, False, vp_stage=vp_stage) if shape.mtp else None
        model = GPTModel(
            config=cfg,
            transformer_layer_spec=spec,
            mtp_block_spec=mtp,
            vocab_size=VOCAB,
            max_sequence_length=SEQ,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        chunks.append((Float16Module(cfg, model) if shape.dtype != torch.float32 else model).cuda())
    return chunks


def unwrapped(chunks: list[Any]) -> list[Any]:
    """Return the chunks without the mixed-precision wrapper."""
    return [getattr(chunk, "module", chunk) for chunk in chunks]


def sharded(chunks: list[Any], content: dict[str, Any]) -> dict[str, Any]:
    """Return Megatron's sharded state dict of the chunks, with the content metadata that training passes."""
    from megatron.core import parallel_state as mpu

    metadata = {**content, "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    if len(chunks) == 1:
        return {"model": chunks[0].sharded_state_dict(metadata=metadata)}
    return {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}


def save(chunks: list[Any], root: Path, common: dict[str, Any], *, iteration: int = 12) -> None:
    """Save a checkpoint as training does, tracker included."""
    from megatron.core import dist_checkpointing

    folder = root / f"iter_{iteration:07d}"
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    content = common["content_metadata"]
    state = {**sharded(chunks, content), **common, "iteration": iteration, "checkpoint_version": 3.0}
    dist_checkpointing.save(state, str(folder))
    if torch.distributed.get_rank() == 0:
        (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    torch.distributed.barrier()


def save_dense(chunks: list[Any], root: Path, shape: Shape, moe: Moe | None = None, *, older: bool = False) -> None:
    """Save a dense model, or with `moe` an MoE, with the arguments that an upcycling reads.

    `older` saves as Megatron does without checkpoint/local-moe-norm-name.
    """
    content = CONTENT if older else {**CONTENT, OWN_NORM_NAME: True}
    save(chunks, root, {"args": args_of(shape, moe), "content_metadata": content,
                        "opt_param_scheduler": {"num_steps": 48, "max_lr": 1e-3}})


def load(chunks: list[Any], folder: Path) -> None:
    """Load a checkpoint folder into the chunks, strictly."""
    from megatron.core import dist_checkpointing

    content = dist_checkpointing.load_content_metadata(str(folder))
    state = dist_checkpointing.load(sharded(chunks, content), str(folder), strict="assume_ok_unexpected")
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(state["model" if len(chunks) == 1 else f"model{i}"], strict=True)


def loss(chunks: list[Any], shape: Shape) -> float | None:
    """Return the mean next-token loss on a fixed batch, on the last pipeline stage (None elsewhere)."""
    each = losses(chunks)
    return float(torch.tensor(each).mean()) if each else None


def losses(chunks: list[Any]) -> list[float] | None:
    """Return the loss of each micro-batch of a fixed batch, on the last pipeline stage (None elsewhere)."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    # Evaluation mode: Megatron trains an MoE under TP only with sequence parallelism, which the CPU lacks.
    for chunk in chunks:
        chunk.eval()
    total: list[torch.Tensor] = []

    def step(iterator: Any, model: Any) -> Any:
        tokens, labels = next(iterator)
        position = torch.arange(SEQ, device="cuda").expand(BATCH, SEQ)
        out = model(tokens.cuda(), position, None, labels=labels.cuda())

        def keep(output: torch.Tensor) -> Any:
            value = output.float().mean()
            # A copy: the schedule divides the value in place.
            total.append(value.detach().clone())
            return value, {"loss": total[-1]}

        return out, keep

    batches = [iter([batch(0), batch(1), batch(2), batch(3)]) for _ in chunks]
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=batches if len(batches) > 1 else batches[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=4,
            seq_length=SEQ,
            micro_batch_size=BATCH,
            forward_only=True,
        )
    return torch.stack(total).tolist() if total else None


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels [BATCH, SEQ] of a fixed micro-batch."""
    rng = torch.Generator().manual_seed(number)
    words = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=rng)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def moe_flags(moe: Moe) -> list[str]:
    """Return the command-line flags of `megatron-moe upcycle` for an MoE."""
    names = {
        "moe_router_score_function": "--moe-router-score-function",
        "moe_router_topk_scaling_factor": "--moe-router-topk-scaling-factor",
        "moe_router_num_groups": "--moe-router-num-groups",
        "moe_shared_expert_intermediate_size": "--moe-shared-expert-intermediate-size",
    }
    switches = {
        "moe_router_pre_softmax": "--moe-router-pre-softmax",
        "moe_router_enable_expert_bias": "--moe-router-enable-expert-bias",
        "moe_shared_expert_gate": "--moe-shared-expert-gate",
    }
    words = ["--num-experts", str(moe.experts), "--router-topk", str(moe.topk), "--moe-ffn-hidden-size", str(moe.ffn)]
    words += ["--moe-layer-freq", str(moe.freq).replace(" ", "")]
    for name, value in moe.more.items():
        words += [names[name], str(value)] if name in names else []
        words += [switches[name]] if name in switches and value else []
    return words


__all__ = [
    "Layout", "Moe", "Shape", "build", "load", "loss", "losses", "moe_flags", "replace", "save_dense", "use_groups",
]  # fmt: skip


def write_and_die(made: Path, content: target.Content, after: int) -> NoReturn:
    """Write a checkpoint in this forked process, which is killed once `after` blocks are made."""
    left = [after]

    def count(block: target.Block) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), 9)

    target.write_checkpoint(made, "release", "release", content, progress=count)
    os._exit(0)
