"""Functions that are one kernel on a device, or a few, and plain operators on a CPU.

A device runs a chain of small operators at the pace of its memory, and of the host that launches
each. So the chains around products and attention are written as pure functions here and compiled
there, for any number of tokens. They are operators of torch (``torch.ops.headrace``), so that what
counts operators, or runs them on tensors without contents, sees one. A few that the compiler makes
slow are Triton kernels (``headrace.ops.triton_kernels``). Where compiling fails (no Triton, an old
compiler) the plain operators run, which is said once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch._guards import detect_fake_mode

__all__ = [
    "FUSED",
    "Fused",
    "fused",
    "index_tensor",
    "kept",
    "to_device",
    "widened",
]

FUSED: dict[str, Fused] = {}
"""All fused functions by name."""

_MOST_GRAPHS = 64
"""Combinations of sizes, strides and types for which one function may be compiled."""

_LIBRARY = torch.library.Library("headrace", "FRAGMENT")


class Fused:
    """A pure function of tensors that is called as the function is. ``kernels`` is how many kernels
    a device runs for it: sums over tokens take more than one. ``plain`` is what a CPU runs, by
    default the function itself; ``written`` is its hand-written Triton kernel, None where there is
    none, where it has failed, and before the first call on a device."""

    def __init__(
        self,
        function: Callable[..., Any],
        schema: str,
        kernels: int,
        plain: Callable[..., Any] | None,
    ) -> None:
        """Register ``function`` as the operator that ``schema`` declares, with torch's syntax, in
        the namespace ``headrace``."""
        self.function, self.kernels = function, kernels
        self.name = schema.partition("(")[0]
        self._plain = plain or function
        self._compiled: Callable[..., Any] | None = None
        self.written: Callable[..., Any] | None = None
        self._searched = False  # whether ``written`` has been looked up
        _LIBRARY.define(schema)
        _LIBRARY.impl(self.name, self._on_device, "CUDA")
        # tensors without contents: the function itself gives the results' shapes
        _LIBRARY.impl(self.name, function, "Meta")
        self.operator: Callable[..., Any] = getattr(torch.ops.headrace, self.name).default

    def __call__(self, x: torch.Tensor, *others: Any) -> Any:
        """Run the kernel for the device of the first tensor; under autograd, which the operator
        does not support, plain operators."""
        if x.device.type == "cpu":
            return self._plain(x, *others)
        if torch.is_grad_enabled() and any(
            isinstance(y, torch.Tensor) and y.requires_grad for y in (x, *others)
        ):
            return self.function(x, *others)
        return self.operator(x, *others)

    def _on_device(self, *args: Any) -> Any:
        """Run the Triton kernel that was written for the function, or where there is none the
        compiled function. A kernel that fails is not tried again."""
        if not self._searched:
            self._searched, self.written = True, _written_kernel(self.name)
        if self.written is not None:
            try:
                return self.written(*args)
            except Exception as error:  # whatever Triton, its compiler and the driver raise
                # says nothing about the kernel, which may succeed with more memory
                if _lacked_memory(error):
                    raise
                self.written = None
                self._warn("the compiler's kernel", error)
        return self.of_compiler(*args)

    def of_compiler(self, *args: Any) -> Any:
        """Run the function as torch.compile makes it; one that cannot be compiled runs as plain
        operators from then on, with a warning."""
        if self._compiled is None:
            self._compiled = torch.compile(self.function, dynamic=True, fullgraph=True)
        # an earlier call could not compile it: see the end of this method
        if self._compiled is self.function:
            return self.function(*args)
        try:
            try:
                return self._compiled(*args)
            except torch._dynamo.exc.FailOnRecompileLimitHit:  # noqa: SLF001
                # torch compiles again for sizes that are 1 or equal each other: one function needs
                # more graphs than torch allows by default.
                with torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS):  # noqa: SLF001
                    return self._compiled(*args)
        except (
            torch._dynamo.exc.TorchDynamoException,  # noqa: SLF001
            torch._dynamo.exc.FailOnRecompileLimitHit,  # noqa: SLF001
        ) as error:
            if _lacked_memory(error):
                # Compiling may succeed in a later call, with more memory.
                raise torch.OutOfMemoryError(f"out of memory: compiling {self.name}") from error
            self._compiled = self.function
            self._warn("plain operators", error)
            return self.function(*args)

    def _warn(self, instead: str, error: Exception) -> None:
        """Warn that from now on ``instead`` runs, as what is faster failed with ``error``."""
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        warnings.warn(f"{self.name} runs as {instead}, slower: {why}", stacklevel=3)


def _lacked_memory(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, says that memory ran out."""
    seen = set[int]()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, torch.OutOfMemoryError | MemoryError):
            return True
        if "out of memory" in str(current).lower():
            return True
        # torch's compiler wraps the original error as ``inner_exception``
        current = getattr(current, "inner_exception", None) or current.__cause__
    return False


def _written_kernel(name: str) -> Callable[..., Any] | None:
    """The Triton kernel of a function; None where there is none, or no Triton."""
    if find_spec("triton") is None:
        return None
    from headrace.ops import triton_kernels

    return getattr(triton_kernels, name) if name in triton_kernels.__all__ else None


def fused(
    schema: str, *, kernels: int = 1, plain: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Fused]:
    """Decorator that makes a :class:`Fused` of a pure function of tensors, listed in ``FUSED``.

    ``schema`` is the operator's name and signature in torch's syntax; ``kernels`` and ``plain`` are
    those of the class."""

    def make(function: Callable[..., Any]) -> Fused:
        operator = Fused(function, schema, kernels, plain)
        FUSED[operator.name] = operator
        return operator

    return make


def widened(x: torch.Tensor) -> torch.Tensor:
    """x in the type in which sums are taken: fp64 stays, all else becomes fp32."""
    return x if x.dtype == torch.float64 else x.float()


_MOST_KEPT = 256
"""Most tensors that :func:`kept` caches."""

_made: dict[Hashable, torch.Tensor] = {}
"""The tensors that :func:`kept` has cached, by key."""


def index_tensor(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """The values as an int64 tensor on ``device``, which is cached: nobody may write to it."""
    key = (tuple(values), device)
    return kept(key, lambda: to_device(torch.tensor(key[0], dtype=torch.int64), device))


def kept(key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of ``make()``, which is cached under ``key``: it must depend on ``key`` alone, and
    nobody may write to it. Tensors without contents (of a fake mode) are not cached, as they belong
    to that mode."""
    if detect_fake_mode() is not None:
        return make()
    tensor = _made.get(key)
    if tensor is None:
        # a tensor made in inference mode could not be used in training later
        with torch.inference_mode(mode=False):
            tensor = _made[key] = make()
        # the oldest goes first, as dicts keep the order of insertion
        if len(_made) > _MOST_KEPT:
            _made.pop(next(iter(_made)), None)
    return tensor


def to_device(x: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """x on ``device``. A copy from host memory to a GPU goes through pinned memory, so that the
    host does not wait for work that was issued there before."""
    if (
        x.device.type == "cpu"
        and torch.device(device).type == "cuda"
        and detect_fake_mode() is None
    ):
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
