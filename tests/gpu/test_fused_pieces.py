"""The pieces that the gpu/ patches put in, against references: loss, weight gradient, SwiGLU, router, AdamW."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
CHECKS = ("swiglu_check.py", "megatron_check.py", "adam_check.py", "adam_megatron_check.py")


def _relative(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.double() - reference.double()).norm() / reference.double().norm())


def test_fused_weight_gradient_adds_the_product_in_fp32() -> None:
    from megatron_ext.runtime import wgrad

    assert wgrad.is_available()
    tokens, inputs, outputs = 1024, 256, 640
    x = torch.randn(tokens, inputs, device="cuda").bfloat16()
    grad = torch.randn(tokens, outputs, device="cuda").bfloat16()
    start = torch.randn(outputs, inputs, device="cuda") * 100
    main_grad = start.clone()
    wgrad.wgrad_gemm_accum_fp32(x, grad, main_grad)
    wgrad.wgrad_gemm_accum_fp32(x, grad, main_grad)
    expected = start.double() + 2 * (grad.double().t() @ x.double())
    assert _relative(main_grad, expected) < 1e-5


def test_te_cross_entropy_equals_the_fp32_loss_and_gradient() -> None:
    import transformer_engine.pytorch.cross_entropy as te

    seq, batch, vocab = 256, 2, 50_001
    logits = (4 * torch.randn(seq, batch, vocab, device="cuda")).bfloat16().requires_grad_()
    labels = torch.randint(vocab, (seq, batch), device="cuda")
    weight = torch.rand(seq, batch, device="cuda")
    exact = logits.detach().double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact.view(-1, vocab), labels.view(-1), reduction="none")
    (expected * weight.view(-1)).sum().backward()
    work = logits * 1  # not a leaf: the loss may overwrite it
    loss = te.parallel_cross_entropy(work, labels, 0.0, False, None, overwrite_input=True)
    (loss * weight).sum().backward()
    assert _relative(loss.view(-1), expected) < 1e-5
    assert exact.grad is not None
    assert logits.grad is not None
    assert _relative(logits.grad, exact.grad) < 5e-3


def _check(script: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "ext" / "fused" / script), "cuda"]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def checks() -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """All at once: each imports and compiles for most of its time."""
    with ThreadPoolExecutor(len(CHECKS)) as pool:
        yield {script: pool.submit(_check, script) for script in CHECKS}


@pytest.mark.parametrize("script", CHECKS)
def test_kernels_pass_the_checks_of_the_cpu_tests_compiled(
    script: str, checks: dict[str, Future[subprocess.CompletedProcess[str]]]
) -> None:
    done = checks[script].result()
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    print(done.stdout.strip())


def _swiglu_errors(
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    values: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    exact: list[torch.Tensor],
) -> list[float]:
    """Relative errors of output, gradient of y, gradient of the weights."""
    y, weights, grad = values
    y, weights = y.clone().requires_grad_(), weights.clone().requires_grad_()
    out = run(y, weights)
    out.backward(grad.to(out.dtype))
    assert y.grad is not None
    assert weights.grad is not None
    return [_relative(a.detach(), b) for a, b in zip((out, y.grad, weights.grad), exact, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_swiglu_kernels_are_as_exact_as_upstreams_compiled_function(dtype: torch.dtype) -> None:
    from megatron.core.fusions.fused_bias_swiglu import WeightedSwiGLUFunction

    from megatron_ext.fused import swiglu

    rows, columns = 4096, 1024
    y = (2 * torch.randn(rows, 2 * columns, device="cuda")).to(dtype)
    weights = torch.rand(rows, 1, device="cuda")
    grad = torch.randn(rows, columns, device="cuda").to(dtype)
    assert swiglu.takes(y, weights)
    y64, weights64 = y.double().requires_grad_(), weights.double().requires_grad_()
    gate, up = y64.chunk(2, dim=-1)
    out = torch.nn.functional.silu(gate) * up * weights64
    out.backward(grad.double())
    assert y64.grad is not None
    assert weights64.grad is not None
    exact = [out.detach(), y64.grad, weights64.grad]
    ours = _swiglu_errors(swiglu.swiglu, (y, weights, grad), exact)
    upstream = _swiglu_errors(lambda y, w: WeightedSwiGLUFunction.apply(y, w, False), (y, weights, grad), exact)
    print(f"{dtype}: relative errors, ours {ours}, upstream {upstream}")
    # Alike but for the last bits of fp32's exp and the order of its sums, which the rounding to 16 bits hides.
    alike, fp32 = (1.01, 0.0) if dtype != torch.float32 else (1.5, 2.0**-22)
    for mine, theirs in zip(ours[:2], upstream[:2], strict=True):
        assert mine <= max(alike * theirs, fp32)
    assert ours[2] <= max(1.5 * upstream[2], 2.0**-22)


def _router_errors(tokens: int, experts: int, hidden: int) -> dict[str, list[float]]:
    """Relative errors of the gradients of tokens and weight through Megatron's function: ours, and upstream's."""
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    from megatron_ext.fused import router

    x = torch.randn(tokens, hidden, device="cuda").bfloat16().requires_grad_()
    weight = (0.02 * torch.randn(experts, hidden, device="cuda")).bfloat16().requires_grad_()
    # A softmax's gradient: sizes over some decades, rows that sum to nothing.
    grad = torch.randn(tokens, experts, device="cuda") * (3 * torch.randn(tokens, experts, device="cuda")).softmax(-1)
    assert router.takes(x, weight, grad)
    exact = (grad.double() @ weight.detach().double(), grad.double().t() @ x.detach().double())
    errors: dict[str, list[float]] = {}
    for name in ("bf16", "megatron"):
        x.grad = weight.grad = None
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv(router.VARIABLE, name)
            router_gating_linear(x, weight, None, torch.float32).backward(grad)
        assert x.grad is not None
        assert weight.grad is not None
        errors[name] = [_relative(x.grad, exact[0]), _relative(weight.grad, exact[1])]
    return errors


@pytest.mark.parametrize(("tokens", "experts"), [(4096, 64), (65_536, 64), (8192, 128), (4096, 256)])
def test_router_gradients_are_no_less_exact_than_upstreams(tokens: int, experts: int) -> None:
    errors = _router_errors(tokens, experts, 2048)
    print(f"{tokens} x {experts}: relative errors of dX and dW, {errors}")
    for ours, upstream in zip(errors["bf16"], errors["megatron"], strict=True):
        # Both are mostly the last rounding to bf16, which may fall either way.
        assert ours <= 1.002 * upstream


@pytest.mark.parametrize(
    ("tokens", "experts", "hidden"),
    [(1, 64, 2048), (33, 6, 2048), (1000, 20, 2048), (4099, 6, 2048), (777, 20, 50), (5, 1, 33)],
)
def test_router_gradients_of_odd_sizes_are_exact_up_to_bf16(tokens: int, experts: int, hidden: int) -> None:
    from megatron_ext.fused import router

    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    weight, grad = torch.randn(experts, hidden, device="cuda").bfloat16(), torch.randn(tokens, experts, device="cuda")
    of_x, of_weight = router.gradients(x, weight, grad)
    for got, a, b in ((of_x, grad.double(), weight.double()), (of_weight, grad.double().t(), x.double())):
        # Half of bf16's step; of the terms the halves leave 2^-17 out, sums in fp32 less.
        allowed = 2.0**-8 * (a @ b).abs() + 2.0**-16 * (a.abs() @ b.abs())
        assert bool(((got.double() - a @ b).abs() <= allowed).all())


def test_router_gradients_make_no_copy_of_the_tokens() -> None:
    from megatron_ext.fused import router

    tokens, experts, hidden = 16_384, 64, 2048
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    weight, grad = torch.randn(experts, hidden, device="cuda").bfloat16(), torch.randn(tokens, experts, device="cuda")
    router.gradients(x, weight, grad)  # the library's workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    router.gradients(x, weight, grad)
    # The result in bf16, and next to nothing beside it; an fp32 copy alone is twice the result.
    assert torch.cuda.max_memory_allocated() - before < 1.25 * x.nbytes


def test_a_router_gradient_of_inf_or_nan_shows_on_the_gpu() -> None:
    from megatron_ext.fused import router

    for value in (float("inf"), float("nan"), 3.4e38):
        x, weight = torch.randn(64, 256, device="cuda").bfloat16(), torch.randn(16, 256, device="cuda").bfloat16()
        grad = torch.randn(64, 16, device="cuda")
        grad[2, 4] = value
        of_x, of_weight = router.gradients(x, weight, grad)
        assert bool(of_x[2].isnan().all())
        assert bool(of_weight[4].isnan().all())
        assert int((~of_x.isfinite()).any(1).sum()) == int((~of_weight.isfinite()).any(1).sum()) == 1


def test_adamw_kernel_is_as_exact_as_transformer_engines() -> None:
    from transformer_engine.pytorch.optimizers import FusedAdam

    from megatron_ext.fused.adam_kernels import Addresses, Hyper

    sizes, lr, betas, eps, decay = [2_097_152, 65_537, 2048, 1], 1e-3, (0.9, 0.95), 1e-8, 0.1
    theirs = [torch.nn.Parameter(torch.randn(size, device="cuda")) for size in sizes]
    mine = [parameter.detach().clone() for parameter in theirs]
    exact = [[p.double(), *torch.zeros(2, p.numel(), device="cuda", dtype=torch.float64)] for p in mine]
    first, second = ([torch.zeros_like(p) for p in mine] for _ in range(2))
    outs = [torch.empty_like(p, dtype=torch.bfloat16) for p in mine]
    adam = FusedAdam(theirs, lr=lr, betas=betas, eps=eps, weight_decay=decay)
    launch = Addresses(sizes, torch.bfloat16, mine[0].device)
    for step in range(1, 21):
        clip = torch.full((1,), 1 / step, device="cuda")
        grads = [torch.randn_like(p) for p in mine]
        tensors = zip(mine, first, second, grads, outs, strict=True)
        launch.point([tuple(tensor.data_ptr() for tensor in row) for row in tensors])
        launch.adamw(Hyper(lr, *betas, eps, decay, step), clip)
        for parameter, grad, (p, m, v) in zip(theirs, grads, exact, strict=True):
            parameter.grad = grad * clip
            g = parameter.grad.double()
            m.lerp_(g, 1 - betas[0])
            v.lerp_(g * g, 1 - betas[1])
            update = (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
            p.sub_(lr * (update + decay * p))
        adam.step()
    for parameter, p, out, (want, _, _) in zip(theirs, mine, outs, exact, strict=True):
        errors = [float((got.double() - want).norm()) for got in (p, parameter.detach())]
        print(f"{p.numel()} values: distance from fp64, ours {errors[0]:.3e}, Transformer Engine's {errors[1]:.3e}")
        # One value alone may be lucky: a rounding of it is allowed.
        assert errors[0] <= 1.1 * errors[1] + 2.0**-23 * float(want.abs().max())
        assert torch.equal(out, p.bfloat16())
