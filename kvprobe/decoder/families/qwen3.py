"""Qwen 3: Llama with norms of queries and keys, and some local layers."""

from torch import nn

from kvprobe.decoder.config import DecoderConfig
from kvprobe.decoder.families import llama
from kvprobe.decoder.families.family import Family, windows_by_type


def _config(model: nn.Module) -> DecoderConfig:
    return llama.config_of(model, qk_norm=True, windows=windows_by_type("qwen3", model.config))


FAMILY = Family(
    name="qwen3",
    config=_config,
    outer=llama.OUTER,
    inner=llama.INNER,
    tiny=("Qwen3Config", "Qwen3ForCausalLM", llama.TINY | {"head_dim": 12}),
)
