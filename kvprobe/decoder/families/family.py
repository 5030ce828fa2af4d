"""What does the decoder need to know of a family, and what do several families share?"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from kvprobe.decoder.config import DecoderConfig, Rotary
from kvprobe.errors import UnsupportedModelError

# for tests: the vocabulary and layers of every tiny model, and the window of its local layers
VOCAB, N_LAYERS, WINDOW = 97, 3, 8


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of Hugging Face models that the decoder reads, by its ``model_type``.

    ``config`` gives the decoder that computes what a loaded model computes; it raises UnsupportedModelError, naming the
    setting, for what the decoder does not have. ``outer`` and ``inner`` map the decoder's modules, outside the blocks
    and inside one, to the checkpoint's; ``state`` is the model's state dict under those names. ``tiny`` is what tests
    build: the classes of its configuration and model, and the settings.
    """

    name: str
    config: Callable[[nn.Module], DecoderConfig]
    outer: Mapping[str, str]
    inner: Mapping[str, str]
    tiny: tuple[str, str, dict[str, Any]]
    state: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict

    def theirs(self, ours: str) -> str:
        """The checkpoint's name of one of the decoder's tensors."""
        module, _, leaf = ours.rpartition(".")
        if not module.startswith("blocks."):
            return f"{self.outer[module]}.{leaf}"
        _, layer, part = module.split(".", 2)
        return f"{self.outer['blocks']}.{layer}.{self.inner[part]}.{leaf}"


def refuse(family: str, setting: str, value: Any, *, allowed: tuple[Any, ...]) -> None:
    """Raise UnsupportedModelError for a setting that the decoder does not have."""
    if value not in allowed:
        wanted = ", ".join(str(option) for option in allowed)
        raise UnsupportedModelError(f"family {family} with {setting} {value}: the decoder has {wanted}")


def windows_by_type(family: str, given: Any) -> tuple[int | None, ...]:
    """The window of each layer by ``layer_types``; all None if the configuration has none."""
    window, kinds = getattr(given, "sliding_window", None), getattr(given, "layer_types", None)
    for kind in kinds or ():
        refuse(family, "layer type", kind, allowed=("full_attention", "sliding_attention"))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds or (None,) * given.num_hidden_layers)


def rotary_of(model: nn.Module, head_dim: int, prefix: str = "") -> Rotary:
    """The frequencies that the model itself rotates by, whatever scaling (linear, Llama 3, YaRN) made them."""
    family = family_of(model)
    module: Any = model.get_submodule("model.rotary_emb")
    if prefix and not hasattr(module, f"{prefix}inv_freq"):  # transformers before 5: a module for each kind of layer
        module = model.get_submodule("model.rotary_emb" + ("_local" if prefix.startswith("sliding") else ""))
        prefix = ""
    kind = module.rope_type[prefix.rstrip("_")] if prefix else module.rope_type
    if kind in ("dynamic", "longrope"):
        raise UnsupportedModelError(f"family {family} with {kind} RoPE: its frequencies change with the length")
    frequencies = getattr(module, f"{prefix}inv_freq")
    if 2 * len(frequencies) != head_dim:
        raise UnsupportedModelError(
            f"family {family} rotates {2 * len(frequencies)} of {head_dim} components; the decoder rotates whole heads"
        )
    return Rotary(frequencies=tuple(frequencies.tolist()), scale=float(getattr(module, f"{prefix}attention_scaling")))


def is_tied(model: nn.Module, embedding: str) -> bool:
    """Whether the output matrix is the embedding named: the same storage, or no tensor of its own."""
    state = model.state_dict()
    head = state.get("lm_head.weight")
    return head is None or head is state[embedding] or head.data_ptr() == state[embedding].data_ptr()


def family_of(model: nn.Module) -> str:
    """The ``model_type`` of a loaded model, or its class if it has none."""
    return str(getattr(model.config, "model_type", type(model).__name__))
