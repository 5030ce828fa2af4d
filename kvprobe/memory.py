"""Does it fit into memory? Checked before anything is built."""

from typing import TYPE_CHECKING

from kvprobe.errors import KvprobeError

if TYPE_CHECKING:
    import torch


HINT = "a shorter --context, a smaller --batch or --dtype bfloat16"


def check_memory(what: str, need: int, device: "torch.device | str", *, hint: str = HINT) -> None:
    """Raise KvprobeError, with both numbers and ``hint``, if ``device`` has fewer than ``need`` bytes free."""
    import torch

    if torch.device(device).type == "cuda":
        free, where = torch.cuda.mem_get_info(device)[0], "on the GPU"
    else:
        import psutil

        free, where = psutil.virtual_memory().available, "in memory"
    if need > free:
        raise KvprobeError(
            f"{what} would need {need / 2**30:,.2f} GiB and {free / 2**30:,.2f} GiB are free {where}: use {hint}"
        )
