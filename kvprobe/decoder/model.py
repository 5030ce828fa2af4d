"""What does a decoder-only transformer compute? One that can be read whole, exact against Hugging Face's.

A token's embedding passes through pre-norm blocks, x + attention(norm(x)), then x + mlp(norm(x)), a last norm and
the head. Attention goes through :class:`AttentionCall`, so whatever is written for the hooks runs here unchanged:

    logits = decoder(ids, attend=watch)

Its weights are random, or those of a model of Hugging Face's: :func:`from_hf`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvprobe.attention.call import Attend, AttentionCall
from kvprobe.attention.masks import keep_by_index
from kvprobe.caches import registry
from kvprobe.caches.full import FullCache
from kvprobe.caches.layer import KVCache, Place
from kvprobe.caches.rolling import RollingCache
from kvprobe.decoder.config import DecoderConfig, Rotary
from kvprobe.decoder.weights import config_of, load_weights


@dataclass(frozen=True, eq=False)
class _Pass:
    """What every layer of one forward shares: the cache, who attends, the angles and the masks made so far."""

    config: DecoderConfig
    q_len: int
    positions: Tensor
    left_pad: Tensor | None
    cache: KVCache | None
    attend: Attend
    angles: dict[Rotary, tuple[Tensor, Tensor]] = field(default_factory=dict)
    keeps: dict[int | None, Tensor | None] = field(default_factory=dict)

    def turn(self, x: Tensor, layer: int) -> Tensor:
        """``x`` ``[batch, heads, q_len, head_dim]`` turned by the positions of this pass."""
        rotary, rope = self.config.rotary_of(layer), self.config.rope_of(layer, x.device)
        if rotary is None or rope is None:
            return x
        if rotary not in self.angles:
            angle = self.positions[..., None].float() * rope.inv_freq
            angle = angle if self.positions.ndim == 1 else angle[:, None]
            self.angles[rotary] = (angle.cos() * rotary.scale).to(x.dtype), (angle.sin() * rotary.scale).to(x.dtype)
        cos, sin = self.angles[rotary]
        first, second = (x[..., 0::2], x[..., 1::2]) if rotary.interleaved else x.chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.stack(turned, dim=-1).flatten(-2) if rotary.interleaved else torch.cat(turned, dim=-1)

    def keep(self, layer: int) -> Tensor | None:
        """Which of the new keys each query may see, bool ``[batch or 1, 1, q_len, q_len]``, made once for layers alike.

        With a cache None: the cache makes the mask. None also where all is plainly causal: the kernel without a mask is
        faster.
        """
        local = self.config.windows[layer] if self.config.windows else None
        if self.cache is not None or (self.left_pad is None and (local is None or self.q_len <= local)):
            return None
        if local not in self.keeps:
            index = torch.arange(self.q_len, device=self.positions.device)
            self.keeps[local] = keep_by_index(index, index, local=local, first=self.left_pad)
        return self.keeps[local]


class Norm(nn.Module):
    """RMSNorm (Zhang and Sennrich, 2019), in float32, with an offset on its weight."""

    def __init__(self, width: int, *, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width]``, each vector brought to length sqrt(width), then weighted."""
        weight = self.weight.float() + self.offset if self.offset else self.weight.float()
        return F.rms_norm(x.float(), self.weight.shape, weight, self.eps).type_as(x)


def _norm(config: DecoderConfig, width: int) -> nn.Module:
    if config.norm == "layer":
        return nn.LayerNorm(width, eps=config.norm_eps)
    return Norm(width, eps=config.norm_eps, offset=config.norm_offset)


class Attention(nn.Module):
    """Multi-head, grouped-query (Ainslie et al., 2023) and multi-query attention: one class, ``n_kv_heads`` apart."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        hidden, head_dim = config.hidden, config.head_dim
        # three projections and no fused one, whose output a cached view would keep alive
        self.query = nn.Linear(hidden, config.n_heads * head_dim, bias=config.qkv_bias)
        self.key = nn.Linear(hidden, config.n_kv_heads * head_dim, bias=config.qkv_bias)
        self.value = nn.Linear(hidden, config.n_kv_heads * head_dim, bias=config.qkv_bias)
        self.out = nn.Linear(config.n_heads * head_dim, hidden, bias=config.out_bias)
        self.query_norm = _norm(config, head_dim) if config.qk_norm else nn.Identity()
        self.key_norm = _norm(config, head_dim) if config.qk_norm else nn.Identity()
        self.scale = head_dim**-0.5 if config.scale is None else config.scale
        if config.scale_by_layer:
            self.scale /= layer + 1

    def forward(self, x: Tensor, now: _Pass) -> Tensor:
        """What the heads add to ``x`` ``[batch, q_len, hidden]``."""
        query = now.turn(self.query_norm(self._heads(self.query(x))), self.layer)
        key = now.turn(self.key_norm(self._heads(self.key(x))), self.layer)
        value = self._heads(self.value(x))
        rope = self.config.rope_of(self.layer, x.device)
        call = AttentionCall(
            layer=self.layer,
            query=query,
            key=key,
            value=value,
            scale=self.scale,
            mask=now.keep(self.layer),
            turn=None if rope is None else rope.turn,
        )
        output = now.attend(call) if now.cache is None else now.cache.layers[self.layer].attend(call, then=now.attend)
        wanted = (*query.shape[:3], value.shape[-1])
        if output.shape != wanted:
            raise ValueError(
                f"attend must return [batch, n_heads, q_len, head_dim] = {[*wanted]}, got {[*output.shape]}"
            )
        return self.out(output.to(x.dtype).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """GELU in its tanh form (GPT-2), or a gated unit (Shazeer, 2020): SwiGLU with SiLU, GeGLU with the same GELU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.up = nn.Linear(config.hidden, config.mlp_width, bias=config.mlp_bias)
        self.down = nn.Linear(config.mlp_width, config.hidden, bias=config.mlp_bias)
        if config.activation != "gelu_tanh":
            self.gate = nn.Linear(config.hidden, config.mlp_width, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """What the MLP adds to ``x`` ``[batch, q_len, hidden]``."""
        if self.activation == "gelu_tanh":
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        gate = self.gate(x)
        gate = F.silu(gate) if self.activation == "swiglu" else F.gelu(gate, approximate="tanh")
        return self.down(gate * self.up(x))


class Block(nn.Module):
    """One layer: attention, then MLP, each normed before and added to what passes by."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = _norm(config, config.hidden)
        self.attention = Attention(config, layer)
        self.mlp_norm = _norm(config, config.hidden)
        self.mlp = MLP(config)
        self.attention_post_norm = _norm(config, config.hidden) if config.post_norms else nn.Identity()
        self.mlp_post_norm = _norm(config, config.hidden) if config.post_norms else nn.Identity()

    def forward(self, x: Tensor, now: _Pass) -> Tensor:
        """``[batch, q_len, hidden]`` to the same."""
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x), now))
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))


class Decoder(nn.Module):
    """A decoder-only transformer with random weights: embeddings of σ 0.02, linear maps as torch draws them."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if config.rotary is None:
            self.position = nn.Embedding(config.max_positions, config.hidden)
            nn.init.normal_(self.position.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = _norm(config, config.hidden)
        if not config.tied_head:
            self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(
        self,
        ids: Tensor,
        *,
        cache: KVCache | None = None,
        left_pad: Tensor | None = None,
        positions: Tensor | None = None,
        attend: Attend = AttentionCall.attend,
    ) -> Tensor:
        """Logits ``[batch, q_len, vocab]`` of the token after each of ``ids`` ``[batch, q_len]``.

        With a ``cache`` the ids continue what it holds. ``left_pad`` int ``[batch]`` is the left padding of each row; a
        cache keeps its own. ``positions`` ``[q_len]`` or ``[batch, q_len]`` replace the right ones, for experiments.
        ``attend`` stands in for attention in every layer. Raises ValueError beyond the model's positions, and where
        the cache is too small.
        """
        return self.logits(self.body(ids, cache=cache, left_pad=left_pad, positions=positions, attend=attend))

    def body(
        self,
        ids: Tensor,
        *,
        cache: KVCache | None = None,
        left_pad: Tensor | None = None,
        positions: Tensor | None = None,
        attend: Attend = AttentionCall.attend,
    ) -> Tensor:
        """As :meth:`forward`, up to the last norm: ``[batch, q_len, hidden]``."""
        batch, q_len = ids.shape
        past = 0
        if cache is not None:
            if left_pad is not None:
                raise ValueError(
                    "with a cache the padding is the cache's own: set cache.left_pad before the first token"
                )
            past, left_pad = cache.length, cache.left_pad
        self.check_length(past + q_len, cache)
        if cache is not None:
            cache.begin(batch, q_len)
        if positions is None:
            positions = torch.arange(q_len, device=ids.device) if cache is None else cache.positions(q_len)
            if cache is None and left_pad is not None:
                positions = (positions - left_pad[:, None]).clamp(min=0)
        x = self.embedding(ids)
        if self.config.embedding_scale != 1:
            # rounded to the weights' dtype, as Gemma was trained
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype).item()
        if self.config.rotary is None:
            x = x + self.position(positions)
        now = _Pass(self.config, q_len, positions, left_pad, cache, attend)
        for block in self.blocks:
            x = block(x, now)
        if cache is not None:
            cache.end()
        return self.norm(x)

    def logits(self, x: Tensor) -> Tensor:
        """The head: ``[..., hidden]`` from :meth:`body` to ``[..., vocab]``."""
        logits = F.linear(x, self.embedding.weight) if self.config.tied_head else self.head(x)
        cap = self.config.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @contextmanager
    def attending(self, attend: Attend) -> Iterator[None]:
        """Let ``attend(call)`` stand in for attention while the block runs; what a pass brings itself goes before it.

        Blocks may be nested: the inner one acts. Compiled engines refuse a decoder with a block open on it; one made
        before the block does not see it.
        """

        def stand_in(_attention: nn.Module, inputs: tuple[Tensor, _Pass]) -> tuple[Tensor, _Pass]:
            x, now = inputs
            # a function of its own, so that an outer block leaves alone what an inner one put there
            return x, replace(now, attend=lambda call: attend(call)) if now.attend is AttentionCall.attend else now

        attentions = [module for module in self.modules() if isinstance(module, Attention)]
        handles = [module.register_forward_pre_hook(stand_in, prepend=True) for module in attentions]
        try:
            # what was compiled before the block would not see it
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def cache(self, kind: str, capacity: int, *, batch: int = 1, **settings: Any) -> KVCache:
        """A cache of this decoder's shape, dtype, device and rotation; ``kind`` is one of `kvprobe.caches.registry`.

        ``capacity`` is the most tokens a row that it is asked to take; ``settings`` are those of the kind's class.
        """
        return registry.build(kind, self.place(capacity, batch=batch), **settings)

    def full_cache(self, capacity: int, *, batch: int = 1, **settings: Any) -> FullCache:
        """A cache of this decoder's shape, dtype and device for ``capacity`` tokens; settings as of the class."""
        return FullCache.fit(self.place(capacity, batch=batch), **settings)

    def rolling_cache(self, window: int, *, batch: int = 1, n_sink: int = 0, **settings: Any) -> RollingCache:
        """A rolling cache of this decoder's shape, dtype, device and rotation; settings as of the class."""
        place = self.place(window + max(0, n_sink), batch=batch)
        return RollingCache.fit(place, window=window, n_sink=n_sink, **settings)

    def place(self, capacity: int, *, batch: int = 1) -> Place:
        """What a cache of this decoder for ``capacity`` tokens must know."""
        weight = self.embedding.weight
        ropes = [self.config.rope_of(layer, weight.device) for layer in range(self.config.n_layers)]
        return Place(
            shape=self.config.layers,
            capacity=capacity,
            batch=batch,
            ropes=None if self.config.rotary is None else tuple(rope for rope in ropes if rope is not None),
            dtype=weight.dtype,
            device=weight.device,
        )

    def check_length(self, n_tokens: int, cache: KVCache | None = None) -> None:
        """Raise ValueError if a sequence of ``n_tokens`` has more positions than the model."""
        limit = self.config.max_positions
        if n_tokens <= limit or (cache is not None and cache.unbounded):
            return
        if self.config.rotary is None:
            why = "learned positions have no entry beyond them; use fewer"
        else:
            why = "use fewer, or a rolling cache (a window) with positions='cache', which has no last position"
        raise ValueError(f"{n_tokens} tokens are more than the model's {limit} positions: {why}")


def from_hf(model: nn.Module) -> Decoder:
    """The decoder that computes what a loaded Hugging Face model does, with the same weights in the same storage.

    Families: gpt2, llama, mistral, qwen2, qwen3, gemma3_text. Whoever changes one model's weights changes both.
    Raises UnsupportedModelError for another family, a setting that the decoder has not, and, naming it, a tensor that
    is missing, left over or of another shape.
    """
    with torch.device("meta"):
        decoder = Decoder(config_of(model))
    load_weights(decoder, model)
    return decoder.eval().requires_grad_(False)
