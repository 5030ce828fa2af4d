"""How fast can this machine be? Its ceilings, measured.

A data sheet's figure is not a ceiling: what counts is the best that real kernels reach on this machine now.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvprobe.bench.busy import cores
from kvprobe.bench.roofline import Ceilings
from kvprobe.bench.timing import timed
from kvprobe.decoder.torch_engine import Clock, device_clock
from kvprobe.progress import Progress, silent

# several times the last-level cache of any current processor, so that memory is read
BUFFER_BYTES = 512 * 2**20
SECONDS_A_KERNEL = 0.25
# widths of square matrices, the next one only if the last was quick: some processors multiply bfloat16 a thousand times
# slower than float32
GEMM_WIDTHS = (128, 512, 1024, 2048)


@dataclass(frozen=True)
class Machine:
    """The best rate of each kernel: ``reads`` in bytes/s, ``products`` in FLOP/s."""

    reads: dict[str, float]
    products: dict[str, float]

    @property
    def ceilings(self) -> Ceilings:
        """The best rate of each kind."""
        return Ceilings(bandwidth=max(self.reads.values()), matrix_rate=max(self.products.values()))

    def best_of(self, other: "Machine") -> "Machine":
        """The higher rate of each kernel: a shared machine drifts, and a ceiling is what it can do."""
        return Machine(_higher(self.reads, other.reads), _higher(self.products, other.products))

    def record(self) -> dict[str, Any]:
        """The machine in a run record: ceilings, ridge point, and the kernels they are the best of."""
        ceilings = self.ceilings
        return {
            "bandwidth_bytes_per_s": ceilings.bandwidth,
            "matrix_flops_per_s": ceilings.matrix_rate,
            "ridge_point": ceilings.ridge_point,
            "bandwidth_kernels": self.reads,
            "matrix_kernels": self.products,
            "cores": cores(),
            "torch_threads": torch.get_num_threads(),
        }


def measure_machine(
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    buffer_bytes: int = BUFFER_BYTES,
    gemm_widths: Sequence[int] = GEMM_WIDTHS,
    seconds: float = SECONDS_A_KERNEL,
    clock: Clock | None = None,
    progress: Progress = silent,
) -> Machine:
    """Read bandwidth, and the rate of matrix products in ``dtype``, with every available kernel, ``seconds`` each.

    Reading uses as many threads as there are processors; matrix products use torch's.
    """
    device = torch.device(device)
    clock = clock or device_clock(device)
    what = "measuring the machine"
    reads: dict[str, float] = {}
    products: dict[str, float] = {}
    with readers(device, buffer_bytes) as kernels:
        for done, (name, run) in enumerate(kernels.items()):
            progress(what, done, len(kernels) + 1)
            reads[name] = buffer_bytes / _best(run, clock, seconds)
    progress(what, len(reads), len(reads) + 1)
    slow: set[str] = set()
    for width in gemm_widths:
        for name, run in _multipliers(dtype, device, width).items():
            if name not in slow:
                taken = _best(run, clock, seconds / len(gemm_widths))
                products[name] = max(products.get(name, 0.0), 2 * width**3 / taken)
                # the next matrices are up to four times as wide
                if 64 * taken > 4 * seconds:
                    slow.add(name)
    progress(what, len(reads) + 1, len(reads) + 1)
    return Machine(reads, products)


def _best(run: Callable[[], object], clock: Clock, seconds: float) -> float:
    # the shortest time, not the median: a ceiling is what can be reached
    return min(timed(run, clock=clock, repeats=1000, seconds=seconds).seconds)


@contextmanager
def readers(device: torch.device | str, n_bytes: int = BUFFER_BYTES) -> Iterator[dict[str, Callable[[], object]]]:
    """Kernels by name, each of which reads a buffer of ``n_bytes`` once, with as many threads as there are cores."""
    device = torch.device(device)
    buffer = torch.ones(n_bytes // 4, device=device)
    ways: dict[str, Callable[[], object]] = {"torch sum": buffer.sum, "torch dot": lambda: _halves_dot(buffer)}
    if device.type != "cpu":
        yield ways
        return
    matrix = buffer.view(-1, 1024)
    ways["torch matrix-vector"] = lambda: matrix.mv(matrix[0])
    parts = np.array_split(buffer.numpy(), cores())
    kernels: dict[str, Callable[[Any], object]] = {"numpy sum": np.sum, "numpy dot": _numpy_dot}
    if (ours := _our_dots()) is not None:
        kernels["numba dot"] = ours
    with ThreadPoolExecutor(len(parts)) as pool:

        def spread(kernel: Callable[[Any], object]) -> Callable[[], object]:
            return lambda: list(pool.map(kernel, parts))

        for name, kernel in kernels.items():
            ways[f"{name}, {len(parts)} threads"] = spread(kernel)
        yield ways


def _halves_dot(buffer: Tensor) -> Tensor:
    first, second = buffer.chunk(2)
    return first.dot(second)


def _numpy_dot(part: Any) -> object:
    half = len(part) // 2
    return np.dot(part[:half], part[half : 2 * half])


def _our_dots() -> Callable[[Any], object] | None:
    """The compiled decode step's own kernel, with rows as wide as a small model's; None without numba."""
    try:
        from kvprobe.native.products import dots as kernel
    except ImportError:
        return None
    width = 1024
    vector, zero = np.ones(width, np.float32), np.float32(0)

    def dots(part: Any) -> object:
        n_rows = len(part) // width
        out = np.empty(n_rows, np.float32)
        kernel(part.ctypes.data, 4, n_rows, width, vector, out, zero)
        return out

    return dots


def _multipliers(dtype: torch.dtype, device: torch.device, width: int) -> dict[str, Callable[[], object]]:
    """Ways to multiply two square matrices of ``width``."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(width, width, generator=generator).to(device, dtype) for _ in range(2))
    ways: dict[str, Callable[[], object]] = {"torch matmul": lambda: left @ right}
    if device.type != "cpu":
        return ways
    if dtype == torch.float32:
        first, second = left.numpy(), right.numpy()
        ways["numpy matmul"] = lambda: first @ second
    if dtype != torch.float32:
        # the fastest way on a processor without instructions for the dtype
        ways["through float32"] = lambda: (left.float() @ right.float()).to(dtype)
    if dtype != torch.float16 and torch.backends.mkldnn.is_available():
        # torch's matmul is not always its fastest: oneDNN with weights in its own order can be twice as fast. It
        # refuses bfloat16 on processors without instructions for it, and its operators are not a public interface.
        with suppress(RuntimeError, AttributeError):
            packed = torch.ops.mkldnn._reorder_linear_weight(right.to_mkldnn(), width)
            linear = partial(torch.ops.mkldnn._linear_pointwise, left, packed, None, "none", [], "")
            linear()
            ways["oneDNN linear"] = linear
    if (ours := _our_tiles(width)) is not None:
        ways["numba tiles" if dtype == torch.float32 else "numba tiles, through float32"] = ours
    return ways


def _our_tiles(width: int) -> Callable[[], object] | None:
    """The compiled prefill's own float32 product, with torch's number of threads; None without numba."""
    try:
        from kvprobe.native.products import multiply
        from kvprobe.native.tiles import BLOCK, TILE_ROWS
    except ImportError:
        return None
    n_threads, n_blocks, n_tiles = torch.get_num_threads(), -(-width // BLOCK), -(-width // TILE_ROWS)
    generator = torch.Generator().manual_seed(0)
    plain: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    matrix = torch.randn(n_tiles * TILE_ROWS, width, generator=generator, **plain)
    blocks = torch.randn(n_blocks, width, BLOCK, generator=generator, **plain)
    edges = [TILE_ROWS * (n_tiles * i // n_threads) for i in range(n_threads + 1)]
    outs = [torch.empty(n_blocks * (stop - start), BLOCK, **plain) for start, stop in pairwise(edges)]

    def share(i: int) -> None:
        rows = matrix[edges[i] : edges[i + 1]]
        multiply(rows.data_ptr(), len(rows), width, blocks.data_ptr(), n_blocks, outs[i].data_ptr())

    def product() -> None:
        with ThreadPoolExecutor(len(outs)) as pool:
            list(pool.map(share, range(len(outs))))

    return product


def _higher(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    return {name: max(first.get(name, 0.0), second.get(name, 0.0)) for name in first | second}
