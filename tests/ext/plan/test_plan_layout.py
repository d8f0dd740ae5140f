"""Layouts against what two H200 measured, against real Megatron's groups, and against the formulas they are made of."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from megatron_ext.cli import main
from megatron_ext.dispatch import formula
from megatron_ext.errors import UserError
from megatron_ext.plan import memory
from megatron_ext.plan.layout import Plan, first, layouts, straddling
from megatron_ext.plan.parameters import ModelShape

HANDBOOK = ModelShape(16, 2048, 8192, 32, 128256, 4, num_experts=64, moe_ffn=1024, topk=8, moe_layers=16)
LIMIT = 138020.0
FLAGS = (
    "--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 4 --swiglu --disable-bias-linear --normalization RMSNorm --seq-length 4096 --bf16 "
    "--micro-batch-size 8 --use-distributed-optimizer --vocab-size 128256 --num-experts 64 --moe-ffn-hidden-size 1024 "
    "--moe-router-topk 8 --moe-ext-preset hopper --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend dedup "
    "--expert-model-parallel-size 2 --global-batch-size 48"
)


def plan(ranks: int, global_batch: int, **more: object) -> Plan:
    run = memory.Run(HANDBOOK, 4096, 1, ranks=ranks)
    return Plan(run, global_batch, LIMIT, **more)


def test_two_h200_get_what_was_measured_there() -> None:
    """Expert parallel 1 ran at micro-batch 6 and 2 at 8, the largest of each; the former was faster (docs/gpu.md)."""
    found = layouts(plan(2, 48))
    assert [(one.expert_parallel, one.micro_batch, one.fits) for one in found] == [(1, 6, True), (2, 8, True)]
    assert [one.peak_mib for one in found] == pytest.approx([126395, 131693], rel=0.01)
    assert first(found) is found[0]
    assert [one.expert_rows for one in found] == [3072, 8192]
    common, experts = memory.parameters_of_rank(memory.Run(HANDBOOK, 4096, 1, ranks=2))
    # bf16 weights out and fp32 gradients in, half of each by a ring of two.
    assert found[0].expert_bytes == 3 * experts
    assert found[1].expert_bytes == 0
    assert [one.dense_bytes for one in found] == [3 * common] * 2


@pytest.mark.parametrize(("ranks", "share"), [(2, 60), (4, 24), (16, 36)])
def test_the_micro_batch_is_the_largest_that_divides_and_fits(ranks: int, share: int) -> None:
    asked = plan(ranks, share * ranks)
    for one in layouts(asked):
        run = replace(asked.run, expert_parallel=one.expert_parallel, rank_load=one.rank_load)
        peak = {size: memory.estimate(replace(run, micro_batch=size)).total for size in range(1, share + 1)}
        fitting = [size for size in peak if peak[size] <= LIMIT]
        assert one.most == max(fitting)
        assert one.micro_batch == max(size for size in fitting if share % size == 0)
        assert one.peak_mib == peak[one.micro_batch]


@pytest.mark.parametrize(("dispatcher", "off_rank", "off_node"), [
    ("alltoall", formula.copies_per_expert(8, 16), formula.copies_per_expert(8, 2)),
    ("dedup", formula.copies_off_set(64, 8, 16), formula.copies_rank_to_other_node(64, 8, 16, 2)),
])  # fmt: skip
@pytest.mark.parametrize(("recompute", "ways"), [("", 4), ("full", 6)])
def test_what_travels_is_the_formulas(
    dispatcher: str, off_rank: float, off_node: float, recompute: str, ways: int
) -> None:
    asked = plan(16, 256, dispatcher=dispatcher)
    found = {one.expert_parallel: one for one in layouts(replace(asked, run=replace(asked.run, recompute=recompute)))}
    row = ways * 16 * 2048 * 2
    wide = found[16]
    assert wide.off_node_bytes == pytest.approx(off_node * row, rel=0.02)
    assert wide.in_node_bytes == pytest.approx((off_rank - off_node) * row, rel=0.02)
    assert wide.exchange_bytes == pytest.approx((wide.in_node_bytes + wide.off_node_bytes) * 4096 * 16)
    assert found[8].off_node_bytes == found[1].in_node_bytes == 0


def test_too_few_rows_an_expert_ask_for_more_ranks() -> None:
    shape = replace(HANDBOOK, num_experts=256, moe_ffn=2048)
    asked = replace(plan(16, 256), run=memory.Run(shape, 4096, 1, ranks=16))
    found = layouts(asked)
    assert [(one.expert_parallel, one.micro_batch) for one in found if one.fits] == [(4, 1), (8, 2), (16, 4)]
    chosen = first(found)
    assert chosen is not None
    assert (chosen.expert_parallel, chosen.expert_rows) == (8, 2048)
    assert first(found, min_rows=1) is found[2]
    # More than any gives: the most.
    assert first(found, min_rows=1e6) is found[-1]
    assert first(layouts(replace(asked, limit_mib=1000))) is None


@pytest.mark.parametrize(("ranks", "gpus", "tensor", "pipeline", "experts"), [
    (16, 8, 1, 1, 64), (16, 8, 2, 2, 64), (32, 8, 1, 4, 64), (12, 4, 1, 1, 24), (24, 8, 1, 1, 48), (24, 8, 1, 2, 48),
])  # fmt: skip
def test_groups_lie_where_real_megatron_puts_them(
    ranks: int, gpus: int, tensor: int, pipeline: int, experts: int
) -> None:
    from megatron.core.parallel_state import RankGenerator

    shape = replace(HANDBOOK, num_experts=experts)
    asked = replace(
        plan(ranks, ranks, gpus_per_node=gpus, model_ranks=tensor * pipeline, pipeline=pipeline),
        run=memory.Run(shape, 4096, 1, ranks=ranks),
    )
    found = {one.expert_parallel: one for one in layouts(asked)}
    sizes = [size for size in range(1, ranks + 1) if ranks % (pipeline * size) == 0 and experts % size == 0]
    assert sorted([*found, *straddling(asked)]) == sizes
    for size in sizes:
        held = ranks // pipeline // size
        groups = RankGenerator(tp=1, ep=size, dp=held, pp=pipeline, cp=1, order="tp-cp-ep-dp-pp").get_ranks("ep")
        members = [Counter(rank // gpus for rank in group) for group in groups]
        even = len({count for group in members for count in group.values()}) == 1
        assert even == (size in found)
        if even:
            assert found[size].expert_data_parallel == held
            assert bool(found[size].off_node_bytes) == (len(members[0]) > 1)


def run(capsys: pytest.CaptureFixture[str], words: str, more: str = "") -> tuple[int, str]:
    code = main(["plan", "layout", *words.split(), "--", *FLAGS.split(), *more.split()])
    return code, capsys.readouterr().out


def test_the_command_names_one_and_says_on_what_it_relies(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "--ranks 2 --json")
    found = json.loads(text)
    assert code == 0
    assert [(one["expert_parallel"], one["micro_batch"]) for one in found["layouts"]] == [(1, 6), (2, 8)]
    assert [one["rank_load"] for one in found["layouts"]] == [1, 1.2]
    words = ("--expert-model-parallel-size 1 --micro-batch-size 6 --moe-token-dispatcher-type alltoall "
             "--overlap-grad-reduce --overlap-param-gather:", "only evidence",
             "between nodes nothing was measured")  # fmt: skip
    assert all(part in found["advice"] for part in words)
    code, text = run(capsys, "--ranks 2", "--moe-router-force-load-balancing --recompute-granularity full")
    assert code == 0
    assert "Kept as given: global batch 48, dispatcher dedup, recompute full" in text
    assert "as a learned router's first steps" not in text
    code, text = run(capsys, "--ranks 2 --gpu-mib 40000")
    assert code == 1
    assert "None fits into 38,400 MiB" in text
    code, text = run(capsys, "--ranks 2", "--moe-flex-dispatcher-backend deepep")
    assert "What deepep sends is not simulated" in text


def test_other_parallelism_is_respected_and_its_memory_is_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    more = "--pipeline-model-parallel-size 2 --context-parallel-size 2 --global-batch-size 64"
    code, text = run(capsys, "--ranks 16 --json", more)
    found = json.loads(text)
    assert code == 0
    # Sixteen ranks are two stages of eight, and four copies of the model of eight micro-batches' sequences each.
    assert [(one["expert_parallel"], one["micro_batch"]) for one in found["layouts"]] == [(n, 8) for n in (1, 2, 4, 8)]
    assert {one[key] for one in found["layouts"] for key in ("fits", "peak_mib", "expert_bytes")} == {None}
    assert [one["expert_rows"] for one in found["layouts"]] == [2048 * n for n in (1, 2, 4, 8)]
    assert found["first"] is None
    assert more.rsplit(" ", 2)[0] in found["notes"][0]


@pytest.mark.parametrize(("words", "more", "named"), [
    ("--ranks 2", "--global-batch-size 49", "does not divide over the data-parallel ranks"),
    ("--ranks 12", "", "do not fill whole nodes"),
    ("--ranks 3", "--pipeline-model-parallel-size 2", "do not divide into copies"),
    ("--ranks 16", "--pipeline-model-parallel-size 2", "the micro-batches do not divide"),
    ("--ranks 2", "--num-experts 0", "no experts"),
    ("--ranks 2", "--tensor-model-parallel-size 2", "--expert-tensor-parallel-size 1"),
    ("--ranks 2", "--mtp-num-layers 1", "--mtp-num-layers 1"),
    ("--ranks 0", "", "not positive"),
    ("--ranks 2 --rank-load 0", "", "rank load 0"),
])  # fmt: skip
def test_refuses_what_cannot_be(words: str, more: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "layout", *words.split(), "--", *FLAGS.split(), *more.split()]) == 64
    assert named in capsys.readouterr().err


def test_sizes_must_be_given() -> None:
    from argparse import ArgumentParser

    from megatron_ext.plan import layout_cli

    parser = ArgumentParser()
    layout_cli.add_arguments(parser)
    words = FLAGS.split()
    without = words[: words.index("--global-batch-size")]
    with pytest.raises(UserError, match="--global-batch-size"):
        layout_cli.plan_from_flags(without, parser.parse_args(["--ranks", "2"]))
