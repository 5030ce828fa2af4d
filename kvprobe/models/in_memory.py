"""How is a model used that is already in memory: fine-tuned, merged or made by hand?"""

from collections import Counter
from pathlib import Path
from typing import Any

from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.models import arrivals, checkpoint_checks
from kvprobe.models.loading import Loaded
from kvprobe.models.revisions import weights_digest
from kvprobe.shape.cache_bytes import DTYPE_BYTES


def from_memory(model: Any, tokenizer: Any = None, *, name: str | None = None) -> Loaded:
    """As `kvprobe.models.loading.load`, for a Hugging Face causal model in memory, which is left unchanged.

    ``name`` defaults to the last part of the name that the model was loaded by, or else to its class. The revision is
    ``memory:`` and 16 hexadecimal digits over the shape and some elements of every parameter: it tells weights apart,
    but does not prove them equal. Raises KvprobeError for a model in training mode, on no or several devices, or with
    weights that are not finite; UnsupportedModelError for a family or kind of weights that is refused.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise UnsupportedModelError(f"{type(model).__name__} has no config: give a Hugging Face causal model")
    name = name or Path(str(getattr(config, "_name_or_path", ""))).name or type(model).__name__
    if model.training:
        raise KvprobeError(f"{name} is in training mode, in which dropout is random: call model.eval() first")
    settings = config.to_dict()
    checkpoint_checks.refuse_foreign(name, settings)
    spec = checkpoint_checks.read_spec(name, settings)
    arrivals.refuse_undequantised(name, model)
    parameters = dict(model.named_parameters())
    devices = sorted({str(parameter.device) for parameter in parameters.values()})
    if len(devices) != 1 or devices == ["meta"]:
        raise KvprobeError(f"{name} is on {', '.join(devices) or 'no device'}: move it to one device first")
    sizes: Counter[str] = Counter()
    for parameter in parameters.values():
        sizes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    dtype, _ = sizes.most_common(1)[0]
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModelError(f"{name} has {dtype} weights; {', '.join(DTYPE_BYTES)} are read")
    checkpoint_checks.refuse_broken(name, model)
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        spec=spec,
        name=name,
        source="memory",
        revision=f"memory:{weights_digest(model)}",
        dtype=dtype,
        device=devices[0],
    )
