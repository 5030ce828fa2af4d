"""Which model has this shape but no training? Random weights from a configuration: enough for speed and memory."""

from pathlib import Path
from typing import Any

from kvprobe.memory import check_memory
from kvprobe.models import checkpoint_checks, loading, older_releases
from kvprobe.models.loading import Loaded
from kvprobe.progress import Progress, silent
from kvprobe.shape import published
from kvprobe.shape.cache_bytes import DTYPE_BYTES


def load_random(
    name: str, *, dtype: str = "float32", device: str | None = None, seed: int = 0, progress: Progress = silent
) -> Loaded:
    """A model of ``name``'s shape, initialised as by transformers with ``seed``; without a tokenizer.

    ``name`` is one that :func:`kvprobe.models.loading.load` takes, of which only the configuration is read, or a shape
    of the catalogue, such as ``gpt-124m``. Raises KvprobeError if the weights would not fit the free memory.
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    config, of = _config(name, progress)
    spec = checkpoint_checks.read_spec(of["name"], config)
    place = loading.device_for(device)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    progress(f"drawing the weights of {of['name']}", 0, None)
    config = config.get("text_config", config)
    with checkpoint_checks.quiet(), torch.random.fork_rng(devices=[]):
        checkpoint_checks.refuse_foreign(of["name"], config)
        config = older_releases.for_installed(of["name"], config)
        settings = {key: value for key, value in config.items() if key not in ("model_type", "dtype", "torch_dtype")}
        built = AutoConfig.for_model(config["model_type"], **settings)
        n_parameters = spec.n_parameters or checkpoint_checks.n_described(AutoModelForCausalLM, built)
        # initialised in memory, then moved
        need, what = n_parameters * DTYPE_BYTES[dtype], f"{of['name']} with random weights at {dtype}"
        check_memory(what, need, "cpu", hint="a smaller model or {dtype} bfloat16")
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(built, dtype=getattr(torch, dtype))
    model = model.to(place).eval().requires_grad_(False)
    return Loaded(model=model, tokenizer=None, spec=spec, dtype=dtype, device=str(place), **of)


def _config(name: str, progress: Progress) -> tuple[dict[str, Any], dict[str, str]]:
    """The configuration, and its origin for the run record."""
    item = published.look_up(name.removesuffix("-rope"))
    if item is not None and not Path(name).is_dir():
        return item.config, {"name": item.name, "source": "random weights, catalogue", "revision": item.source}
    checkpoint = loading.find(name, only_config=True, progress=progress)
    about = {"name": checkpoint.name, "source": f"random weights, {checkpoint.source}", "revision": checkpoint.revision}
    return loading.read_config(checkpoint), about
