"""Which decoder is it? Its numbers, from which the modules, their caches and their rotations are made."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch

from kvprobe.attention.rope import Rope
from kvprobe.shape.layers import Layer


@dataclass(frozen=True)
class Rotary:
    """How positions turn queries and keys: RoPE (Su et al., 2021), over the whole head.

    Pair j turns by ``theta ** (-2j / head_dim)`` radians a position, or by ``frequencies[j]`` where the model
    stretches them (linear, Llama 3, YaRN). ``scale`` multiplies cosine and sine (YaRN). ``interleaved`` pairs
    component 2j with 2j + 1 (GPT-J) instead of j with j + head_dim / 2 (Llama).
    """

    theta: float = 10_000.0
    frequencies: tuple[float, ...] | None = None
    scale: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder. ``n_kv_heads`` equal to ``n_heads`` is multi-head attention, 1 is multi-query.

    ``rotary`` None means learned positions. ``windows``, one a layer, are the layers' own local windows, the query
    included (None = global); local layers use ``local_rotary`` where there is one (Gemma 3). ``norm_offset`` is added
    to every RMSNorm weight (Gemma: 1). ``post_norms`` norms what attention and MLP add (Gemma 3). ``scale`` multiplies
    the scores (default head_dim ** -0.5), divided by the layer's number from 1 with ``scale_by_layer`` (GPT-2's
    option). ``final_softcap`` bounds the logits. Raises ValueError where the numbers contradict each other.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden: int
    mlp_width: int
    vocab: int
    max_positions: int
    rotary: Rotary | None = field(default_factory=Rotary)
    local_rotary: Rotary | None = None
    windows: tuple[int | None, ...] = ()
    norm: Literal["layer", "rms"] = "rms"
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    post_norms: bool = False
    qk_norm: bool = False
    activation: Literal["gelu_tanh", "swiglu", "geglu"] = "swiglu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    scale: float | None = None
    scale_by_layer: bool = False
    embedding_scale: float = 1.0
    tied_head: bool = True
    final_softcap: float | None = None

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"{self.n_heads} query heads cannot share {self.n_kv_heads} key/value heads evenly")
        if self.rotary is not None and self.head_dim % 2:
            raise ValueError(f"RoPE turns pairs, so head_dim must be even, got {self.head_dim}")
        if self.windows and len(self.windows) != self.n_layers:
            raise ValueError(f"windows must name one a layer, {self.n_layers}, got {len(self.windows)}")

    def rotary_of(self, layer: int) -> Rotary | None:
        """The rotation of one layer; None under learned positions."""
        local = bool(self.windows) and self.windows[layer] is not None
        return self.local_rotary if local and self.local_rotary is not None else self.rotary

    def rope_of(self, layer: int, device: torch.device) -> Rope | None:
        """The same as a table of frequencies on ``device``, as :meth:`AttentionCall.rotate` turns with it."""
        rotary = self.rotary_of(layer)
        return None if rotary is None else _rope(rotary, self.head_dim, device)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """What each layer keeps of a token, as a cache must know it."""
        return tuple(
            Layer(
                kind="sliding" if limit else "full",
                n_heads=self.n_heads,
                n_kv_heads=self.n_kv_heads,
                head_dim=self.head_dim,
                v_head_dim=self.head_dim,
                limit=limit,
            )
            for limit in self.windows or (None,) * self.n_layers
        )


@lru_cache(maxsize=64)
def _rope(rotary: Rotary, head_dim: int, device: torch.device) -> Rope:
    # float32 whatever the weights' dtype, and so no buffer of the module, which a cast would round
    if rotary.frequencies is None:
        inv_freq = 1.0 / rotary.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    else:
        inv_freq = torch.tensor(rotary.frequencies, dtype=torch.float32, device="cpu")
    return Rope(inv_freq.to(device), interleaved=rotary.interleaved)
