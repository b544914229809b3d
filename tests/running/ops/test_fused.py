"""Functions that devices compile: what they give, that they compile, and that they need not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.models import transformer  # with all that it is made of
from headrace.ops.fused import FUSED, Fused

T, H = 5, 24


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def of_norm(tokens: int, dtype: torch.dtype, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return draw(tokens, H, dtype=dtype), *(x.to(dtype) for x in others)


def tables(tokens: int, features: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    angle = draw(tokens, features // 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def stats(tokens: int, dtype: torch.dtype, count: int = 1) -> list[torch.Tensor]:
    wide = dtype if dtype == torch.float64 else torch.float32
    return [draw(tokens, 1 + i).to(wide)[:, :1].abs() + 0.5 for i in range(count)]


def words(tokens: int) -> torch.Tensor:
    return (torch.arange(tokens) * 11 + 3) % 37 * (torch.arange(tokens) % 3 != 1) - (
        100 * (torch.arange(tokens) % 3 == 1)
    )


def parts(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [draw(tokens, 3, 8, i, dtype=dtype)[..., 0] for i in (1, 2)]


Arguments = Callable[[int, torch.dtype], tuple[Any, ...]]
ARGUMENTS: dict[str, Arguments] = {
    "rms_norm": lambda t, d: (*of_norm(t, d, draw(H)), 1e-5),
    "rms_norm_again": lambda t, d: (*of_norm(t, d, draw(H)), *stats(t, d)),
    "rms_norm_backward": lambda t, d: (
        draw(t, H, 1, dtype=d)[..., 0],
        *of_norm(t, d, draw(H)),
        *stats(t, d),
        draw(t, H, dtype=d),
    ),
    "layer_norm": lambda t, d: (*of_norm(t, d, draw(H), draw(H + 1)[1:]), 1e-5),
    "layer_norm_again": lambda t, d: (*of_norm(t, d, draw(H), draw(H + 1)[1:]), *stats(t, d, 2)),
    "layer_norm_backward": lambda t, d: (
        draw(t, H, 1, dtype=d)[..., 0],
        *of_norm(t, d, draw(H)),
        *stats(t, d, 2),
        None,
    ),
    "cross_entropy": lambda t, d: (draw(t, 37, dtype=d), words(t)),
    "cross_entropy_backward": lambda t, d: (
        draw(t, 37, dtype=d),
        words(t),
        *(x[:, 0] for x in stats(t, d, 2)),
    ),
    "swiglu": lambda t, d: (draw(t, 2 * H, dtype=d), 4),
    "swiglu_backward": lambda t, d: (draw(t, H, dtype=d), draw(t, 2 * H, dtype=d), 4),
    "rotate_and_sort": lambda t, d: (draw(t, 2, 5, 8, dtype=d), *tables(t, 8, d), None),
    "unrotate_and_unsort": lambda t, d: (
        *draw(t, 10, 8, dtype=d).split([6, 2, 2], dim=1),
        *tables(t, 8, d),
        torch.arange(t - 1, -1, -1),
    ),
    "log_sum_": lambda t, d: (draw(3, t), [draw(3, t, i + 1)[..., i] for i in range(3)]),
    "weigh_up_": lambda t, d: (
        draw(t, 3, 8),
        draw(3, t),
        [draw(t, 3, 8, i, dtype=d)[..., 0] for i in (1, 2, 3)],
        [draw(3, t, i)[..., 0] for i in (1, 2, 3)],
    ),
    "add_up_": lambda t, d: (draw(t, 3, 8, dtype=d), parts(t, d)),
    "add_to_": lambda t, d: (draw(t, 3, 8, dtype=d), parts(t, d)),
    "sum_onto_": lambda t, d: (draw(t, H, dtype=d), draw(3, t, H, dtype=d), draw(t, H, dtype=d)),
    "put_up_": lambda t, d: (draw(t, 3, 8, dtype=d), torch.arange(t - 1, -1, -1), parts(t, d)),
}


def results(made: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """What a function gave, or wrote to its first argument."""
    return list(args[:1]) if made is None else list(made) if isinstance(made, tuple) else [made]


def call(function: Callable[..., Any], name: str, tokens: int, dtype: torch.dtype) -> list[Any]:
    args = ARGUMENTS[name](tokens, dtype)
    return results(function(*args), args)


def test_all_are_here() -> None:
    """Catches a function that is compiled on devices and compared nowhere."""
    assert transformer.Transformer
    assert FUSED.keys() == ARGUMENTS.keys()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_device_computes_what_a_cpu_does(name: str) -> None:
    """Catches a formula that is another on devices, and half types that are rounded more often
    there: what is compiled is as near to fp64 as plain operators in the same type."""
    fused = FUSED[name]
    for tokens in (0, 1, T):
        wanted = call(fused, name, tokens, torch.float64)
        for one, other in zip(
            call(fused.function, name, tokens, torch.float64), wanted, strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
    rounded = [x.to(torch.bfloat16) if x.is_floating_point() else x for x in wanted]
    for one, exact, near in zip(
        call(fused.function, name, T, torch.bfloat16), wanted, rounded, strict=True
    ):
        room = 0.02 * exact.abs().max() + (near.double() - exact).abs().max()
        assert (one.double() - exact).abs().max() <= room


@pytest.mark.parametrize("name", ARGUMENTS)
def test_operators_without_contents(name: str) -> None:
    """Catches an operator whose shapes or types are others than what it gives."""
    for dtype in (torch.bfloat16, torch.float32):
        args = ARGUMENTS[name](T, dtype)
        wanted = results(FUSED[name](*args), args)
        meta = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), args)
        for one, other in zip(results(FUSED[name](*meta), meta), wanted, strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)


@pytest.mark.apart
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.slow
def test_all_compile_once_for_any_number_of_tokens(backend: str) -> None:
    """Catches what a compiler cannot take, and one compilation for each length."""
    for name, fused in FUSED.items():
        times = 0

        def counted(module: Any, inputs: Any) -> Any:
            nonlocal times
            times += 1
            return torch._dynamo.lookup_backend(backend)(module, inputs)

        compiled = torch.compile(fused.function, backend=counted, dynamic=True, fullgraph=True)
        for tokens in (11, 13, 17):  # none of them the size of another dim
            for one, other in zip(
                call(compiled, name, tokens, torch.float32),
                call(fused, name, tokens, torch.float32),
                strict=True,
            ):
                torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
        assert times == 1, name


@pytest.mark.slow
@pytest.mark.apart
def test_many_kinds_of_sizes() -> None:
    """Catches a function that falls back to plain operators when it was compiled for some kinds of
    sizes, though it could be for others."""
    fused = FUSED["swiglu"]
    other = Fused(fused.function, "swiglu_of_many(Tensor x, int block) -> Tensor", 1, None)
    other._compiled = torch.compile(
        fused.function, backend="aot_eager", dynamic=True, fullgraph=True
    )
    with torch._dynamo.config.patch(recompile_limit=1), warnings.catch_warnings():
        warnings.simplefilter("error")
        for tokens in (T, 1, 0):
            args = ARGUMENTS["swiglu"](tokens, torch.float64)
            torch.testing.assert_close(other._on_device(*args), fused(*args))
    assert other._compiled is not other.function


def test_autograd_goes_through_plain_operators() -> None:
    """Catches gradients that end at an operator: they would be missing, and nobody told."""
    args = [
        x.to("meta") if isinstance(x, torch.Tensor) else x
        for x in ARGUMENTS["swiglu"](T, torch.float32)
    ]
    args[0].requires_grad_()
    assert FUSED["swiglu"](*args).grad_fn is not None
    with torch.no_grad():
        assert FUSED["swiglu"](*args).grad_fn is None


@pytest.mark.apart
def test_what_cannot_be_compiled_runs_all_the_same() -> None:
    """Catches a machine without a compiler on which nothing runs, or which tries each time."""
    tried = []

    def broken(module: Any, inputs: Any) -> Any:
        tried.append(1)
        raise RuntimeError("no compiler here")

    fused = FUSED["swiglu"]
    other = Fused(fused.function, "swiglu_for_a_test(Tensor x, int block) -> Tensor", 1, None)
    other._compiled = torch.compile(fused.function, backend=broken)
    args = ARGUMENTS["swiglu"](T, torch.float64)
    with pytest.warns(UserWarning, match="swiglu_for_a_test runs as plain operators.*no compiler"):
        found = other._on_device(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = other._on_device(*args)
    torch.testing.assert_close(found, fused(*args))
    assert torch.equal(found, again)
    assert len(tried) == 1


@pytest.mark.apart
def test_a_compiler_without_memory() -> None:
    """Catches a lack of memory while compiling that a rank takes for a function that cannot be
    compiled: it would be slow from then on, and out of memory elsewhere."""
    tried = []

    def broken(module: Any, inputs: Any) -> Any:
        tried.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    fused = FUSED["swiglu"]
    other = Fused(fused.function, "swiglu_without_memory(Tensor x, int block) -> Tensor", 1, None)
    other._compiled = torch.compile(fused.function, backend=broken)
    args = ARGUMENTS["swiglu"](T, torch.float64)
    for times in (1, 2):
        with pytest.raises(torch.OutOfMemoryError, match="memory"):
            other._on_device(*args)
        assert len(tried) == times
