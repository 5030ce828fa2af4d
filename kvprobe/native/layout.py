"""How is work cut into pieces, and which outputs are neighbours in memory?"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def edges_of(total: int, count: int, multiple: int) -> list[int]:
    """Where about ``count`` parts of about the same size begin, each a multiple, and the end."""
    count = max(1, count)
    inner = {multiple * round(total * i / count / multiple) for i in range(1, count)}
    return [0, *sorted(edge for edge in inner if 0 < edge < total), total]


def side_by_side(products: Sequence[tuple[Any, Tensor]]) -> list[tuple[list[Any], Tensor]]:
    """Modules whose outputs are neighbours, as those of GPT-2's one matrix of queries, keys and values, as one."""
    together: list[tuple[list[Any], Tensor]] = []
    for module, target in products:
        if together:
            modules, first = together[-1]
            before, weight = modules[-1].weight, module.weight
            n_before = sum(part.weight.shape[0] for part in modules)
            follows = weight.data_ptr() == before.data_ptr() + before.shape[0] * before.element_size()
            if follows and weight.stride() == before.stride() and target.data_ptr() == first.data_ptr() + 4 * n_before:
                modules.append(module)
                continue
        together.append(([module], target))
    return together


def stride(rows: Tensor) -> int:
    """Bytes from one sequence's vector to the next one's, of float32 ``[batch, width]``."""
    return 4 * rows.stride(0)
