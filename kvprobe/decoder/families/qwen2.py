"""Qwen 2: Llama with biases on queries, keys and values, and some local layers."""

from torch import nn

from kvprobe.decoder.config import DecoderConfig
from kvprobe.decoder.families import llama
from kvprobe.decoder.families.family import Family, windows_by_type


def _config(model: nn.Module) -> DecoderConfig:
    return llama.config_of(model, qkv_bias=True, windows=windows_by_type("qwen2", model.config))


FAMILY = Family(
    name="qwen2",
    config=_config,
    outer=llama.OUTER,
    inner=llama.INNER,
    tiny=("Qwen2Config", "Qwen2ForCausalLM", {key: llama.TINY[key] for key in llama.TINY if key != "head_dim"}),
)
