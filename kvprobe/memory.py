"""Does it fit into memory? Checked before anything is built."""

from typing import TYPE_CHECKING

from kvprobe.errors import KvprobeError, Wording

if TYPE_CHECKING:
    import torch


HINT = "a smaller {context} or {batch}, or {dtype} bfloat16"


def check_memory(what: str, need: int, device: "torch.device | str", *, hint: str = HINT) -> None:
    """Raise KvprobeError if ``device`` has fewer than ``need`` bytes free, with both numbers and what to use instead.

    ``hint`` names settings as a `Wording` does.
    """
    import torch

    if torch.device(device).type == "cuda":
        free, where = torch.cuda.mem_get_info(device)[0], "on the GPU"
    else:
        import psutil

        free, where = psutil.virtual_memory().available, "in memory"
    if need > free:
        said = "{0} would need {1:,.2f} GiB and {2:,.2f} GiB are free {3}: use " + hint
        raise KvprobeError(Wording(said, what, need / 2**30, free / 2**30, where))
