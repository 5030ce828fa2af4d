"""Which part of a model reads text, and which of its layers hold keys and values?"""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

# layer types of transformers' configs that hold a state or nothing; every other type, known or not, holds keys and
# values and must be seen to call attention
WITHOUT_KEYS = frozenset({"linear_attention", "conv", "moe", "mlp", "mamba", "mamba2", "recurrent"})


def family_of(model: nn.Module) -> str:
    """The model's family as its config names it (``model_type``)."""
    config: Any = model.config
    return str(config.model_type)


def decoder_of(model: nn.Module) -> nn.Module:
    """The part of ``model`` that reads text: the model less its head, and without towers for images or sound."""
    inside = {id(part) for part in model.modules()}
    # ModernBERT calls its head a decoder, and a wrapper may hand out something that is no module of its own
    parts: list[nn.Module] = [model.get_decoder(), model.base_model, model]  # type: ignore[operator,list-item]
    return next((part for part in parts if id(part) in inside and any(_numbered(part))), model)


def body_of(model: nn.Module) -> nn.Module:
    """``model`` less its head; itself if it is its own body."""
    body: nn.Module = model.base_model  # type: ignore[assignment]
    # Gemma 3 before transformers 5 names a body that it does not have
    return decoder_of(model) if body is model else body


def entrances(model: nn.Module) -> list[nn.Module]:
    """The modules by which text enters: the whole, what stands between it and the decoder, and the decoder itself.

    OPT's forward goes round its own body, and a body may be called alone.
    """
    decoder = decoder_of(model)
    paths = {id(part): path for path, part in model.named_modules()}
    inner = paths[id(decoder)]
    around = [part for path, part in model.named_modules() if not path or f"{inner}.".startswith(f"{path}.")]
    return list({id(part): part for part in (*around, model.base_model, decoder)}.values())


def configs_of(model: nn.Module) -> list[Any]:
    """The configs that say how text is attended to, each once; those of other towers are left out."""
    parts = [*entrances(model), *decoder_of(model).modules()]
    found = {id(config): config for part in parts if (config := getattr(part, "config", None)) is not None}
    return [config for config in found.values() if hasattr(config, "_attn_implementation_internal")]


def attention_layers(model: nn.Module) -> dict[int, str]:
    """Layer index → class name of the modules that hold keys and values, read off the module tree and the config."""
    found: dict[int, str] = {}
    for layer, part in attention_modules(model):
        found.setdefault(layer, type(part).__name__)
    return found


def attention_modules(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Every module of the text decoder that is to call attention if it runs, with the number of its layer."""
    decoder = decoder_of(model)
    types = getattr(getattr(decoder, "config", None), "layer_types", None) or ()
    found = list(_numbered(decoder))
    # a tower that stands inside the decoder (Phi-4's, GIT's) has its layers further down
    nearest = min((depth for depth, _, _ in found), default=0)
    for depth, layer, part in found:
        if depth == nearest and (layer >= len(types) or types[layer] not in WITHOUT_KEYS):
            yield layer, part
    for path, stack in decoder.named_modules():
        if isinstance(stack, nn.ModuleList) and len(stack) == len(types) and path.count(".") + 1 == nearest:
            # whatever its parts are called, a layer that the config declares is to call
            yield from ((layer, part) for layer, part in enumerate(stack) if types[layer] not in WITHOUT_KEYS)


def _numbered(decoder: nn.Module) -> Iterator[tuple[int, int, nn.Module]]:
    """Depth of the list of layers, number of the layer, and module, for whatever attends."""
    for path, part in decoder.named_modules():
        names = path.split(".")
        depth = next((depth for depth, name in enumerate(names) if name.isdecimal()), None)
        if depth is not None and _attends(part):
            # a layer of LongCat has two attentions, each with a number of its own
            own = getattr(part, "layer_idx", None)
            yield depth, own if isinstance(own, int) else int(names[depth]), part


def _attends(part: nn.Module) -> bool:
    # LongCat's class is called MLA; what shares heads or is causal, and knows its layer, is attention by any name
    named = re.search(r"Attention|MLA", type(part).__name__) is not None
    return named or (
        hasattr(part, "layer_idx") and (hasattr(part, "num_key_value_groups") or hasattr(part, "is_causal"))
    )
