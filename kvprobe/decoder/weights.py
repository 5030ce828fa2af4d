"""Which tensor of a Hugging Face model is which of the decoder's? Read by name and shape, shared and never copied.

Reads a loaded model's ``config`` and ``state_dict`` and imports nothing of transformers.
"""

from torch import Tensor, nn

from kvprobe.decoder.config import DecoderConfig
from kvprobe.decoder.families import gemma3_text, gpt2, llama, mistral, qwen2, qwen3
from kvprobe.decoder.families.family import Family, family_of
from kvprobe.errors import UnsupportedModelError

FAMILIES: dict[str, Family] = {
    file.FAMILY.name: file.FAMILY for file in (gpt2, llama, mistral, qwen2, qwen3, gemma3_text)
}


def config_of(model: nn.Module) -> DecoderConfig:
    """The decoder that computes what ``model`` computes.

    Raises UnsupportedModelError, naming the family and the setting, for what the decoder does not have.
    """
    return _family(model).config(model)


def load_weights(decoder: nn.Module, model: nn.Module) -> None:
    """Give ``decoder`` the weights of ``model``: the same storage, GPT-2's as transposed views of it.

    Raises UnsupportedModelError naming the tensor that is missing, left over, or of another shape.
    """
    family = _family(model)
    state = family.state(model.state_dict())
    if not hasattr(decoder, "head"):
        state.pop("lm_head.weight", None)
    placed: dict[str, Tensor] = {}
    for ours, wanted in decoder.state_dict().items():
        theirs = family.theirs(ours)
        if theirs not in state:
            raise UnsupportedModelError(f"family {family.name}: the model has no tensor {theirs!r}")
        tensor = state.pop(theirs)
        if tensor.shape != wanted.shape:
            raise UnsupportedModelError(
                f"family {family.name}: {theirs!r} is {[*tensor.shape]}, its config asks for {[*wanted.shape]}"
            )
        if tensor.is_meta:
            raise UnsupportedModelError(f"{theirs!r} is not in memory: load the model without offloading")
        placed[ours] = tensor
    if state:
        tensor_name = next(iter(state))
        raise UnsupportedModelError(f"family {family.name}: the decoder has no place for the tensor {tensor_name!r}")
    decoder.load_state_dict(placed, assign=True)


def _family(model: nn.Module) -> Family:
    name = family_of(model)
    if name not in FAMILIES:
        raise UnsupportedModelError(f"unknown family {name}: the decoder reads {', '.join(FAMILIES)}")
    return FAMILIES[name]
