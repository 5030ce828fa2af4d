"""Mistral: Llama with one window for every layer, unless its configuration names types of layers."""

from typing import Any

from torch import nn

from kvprobe.decoder.config import DecoderConfig
from kvprobe.decoder.families import llama
from kvprobe.decoder.families.family import WINDOW, Family, windows_by_type


def _config(model: nn.Module) -> DecoderConfig:
    given: Any = model.config
    everywhere = (given.sliding_window,) * given.num_hidden_layers
    typed = getattr(given, "layer_types", None) is not None
    return llama.config_of(model, windows=windows_by_type("mistral", given) if typed else everywhere)


FAMILY = Family(
    name="mistral",
    config=_config,
    outer=llama.OUTER,
    inner=llama.INNER,
    tiny=("MistralConfig", "MistralForCausalLM", llama.TINY | {"sliding_window": WINDOW}),
)
