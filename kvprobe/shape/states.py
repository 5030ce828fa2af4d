"""How many elements does a layer without growing K and V carry from token to token? Its state and its inputs.

Each rule returns ``state``, which sums over tokens and is kept in float32, and ``conv``, the last inputs that a short
convolution or a token shift still needs, the newest token's included, as transformers keeps them.
"""

from collections.abc import Callable

from kvprobe.shape.reading import Reading

Sizes = tuple[int, int]


def _mamba1(of: Reading) -> Sizes:
    """Every channel has its own state; only the input is convolved (Gu and Dao, 2023)."""
    channels = int(of.factor("expand", "mamba_expand") * of.number("hidden_size"))
    # a pure Mamba model may state its width here; elsewhere it is the MLP's
    if of.config.get("mamba_expand") is None:
        channels = of.optional("intermediate_size", least=0) or channels
    return channels * of.number("state_size", "mamba_d_state"), channels * of.number("conv_kernel", "mamba_d_conv")


def _mamba2(of: Reading) -> Sizes:
    """Every head has head_dim × state elements; input, B and C of each group are convolved (Dao and Gu, 2024)."""
    heads = of.number("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    state = of.number("ssm_state_size", "mamba_d_state", "state_size")
    groups = of.number("mamba_n_groups", "mamba_ngroups", "n_groups")
    kernel = of.number("mamba_d_conv", "conv_kernel")
    channels = _mamba2_channels(of, heads)
    return channels * state, (channels + 2 * groups * state) * kernel


def _mamba2_channels(of: Reading, heads: int) -> int:
    if of.config.get("mamba_num_heads") is not None:
        return heads * of.number("mamba_head_dim")
    if (given := of.optional("mamba_d_ssm")) is not None:
        return given
    return int(of.factor("mamba_expand", "expand") * of.number("hidden_size"))


def _gated_delta(of: Reading) -> Sizes:
    """Each value head's state is key width × value width; q, k and v are convolved (Yang et al., 2024)."""
    values = of.number("linear_num_value_heads") * of.number("linear_value_head_dim")
    keys = of.number("linear_num_key_heads") * of.number("linear_key_head_dim")
    return of.number("linear_key_head_dim") * values, (2 * keys + values) * of.number("linear_conv_kernel_dim")


def _kda(of: Reading) -> Sizes:
    """Kimi delta attention: head_dim × head_dim a head, q, k and v convolved."""
    own = of.part("linear_attn_config")
    heads = own.optional("num_heads") or of.number("linear_num_heads")
    width = own.optional("head_dim") or of.number("linear_head_dim")
    kernel = own.optional("short_conv_kernel_size") or of.number("linear_conv_kernel_dim")
    return heads * width * width, 3 * heads * width * kernel


def _lightning(of: Reading) -> Sizes:
    """Lightning attention (MiniMax-01): every query head sums K outer V."""
    width = of.optional("head_dim") or of.number("hidden_size") // of.number("n_heads")
    return of.number("n_heads") * width * width, 0


def _gla(of: Reading) -> Sizes:
    """Gated linear attention and its kin in flash-linear-attention: heads of key × value, which divide the widths."""
    heads, hidden = of.number("num_heads"), of.number("hidden_size")
    keys, values = int(of.factor("expand_k") * hidden), int(of.factor("expand_v") * hidden)
    conv = (2 * keys + values) * of.number("conv_size") if of.flag("use_short_conv") else 0
    return keys * values // heads, conv


def _gated_deltanet(of: Reading) -> Sizes:
    heads, width = of.number("num_heads"), of.number("head_dim")
    wide, value_heads = int(width * of.factor("expand_v")), of.optional("num_v_heads") or heads
    channels = 2 * heads * width + value_heads * wide
    return value_heads * width * wide, channels * of.number("conv_size") if of.flag("use_short_conv") else 0


def _rg_lru(of: Reading) -> Sizes:
    """Griffin's gated recurrence (De et al., 2024): one number a channel, and the inputs before the newest."""
    width = of.optional("lru_width") or of.number("hidden_size")
    return width, width * (of.number("conv1d_width") - 1)


def _short_conv(of: Reading) -> Sizes:
    """LFM2: the last inputs of its convolution and nothing else."""
    return 0, of.number("hidden_size") * of.number("conv_L_cache")


def _rwkv4(of: Reading) -> Sizes:
    """RWKV-4: numerator, denominator and maximum a channel, and the last input of both halves of a layer."""
    hidden = of.number("hidden_size")
    return 3 * (of.optional("attention_hidden_size") or hidden), 2 * hidden


def _rwkv(of: Reading) -> Sizes:
    """RWKV-5 and later: head_size × head_size a head, and the last input of both halves of a layer."""
    hidden = of.number("hidden_size")
    if of.config.get("expand_k") is not None or of.config.get("expand_v") is not None:  # flash-linear-attention
        keys, values = (int((of.real(f"expand_{name}") or usual) * hidden) for name, usual in (("k", 0.5), ("v", 1.0)))
        return keys * values // of.number("num_heads"), 2 * hidden
    widths = of.config.get("value_dim")
    if widths is not None and {hidden} != set(of.numbers("value_dim") or () if isinstance(widths, list) else [widths]):
        raise of.refusal(f"says value_dim, which kvprobe reads only if it equals the hidden_size, {hidden}")
    return (of.optional("attention_hidden_size") or hidden) * of.number("head_dim", "head_size"), 2 * hidden


def _xlstm(of: Reading) -> Sizes:
    """The mLSTM of xLSTM: matrix memory, normaliser and stabiliser of each head."""
    heads, hidden = of.number("num_heads"), of.number("hidden_size")
    keys, values = (int(of.factor(f"{name}_dim_factor") * hidden) // heads for name in ("qk", "v"))
    return heads * (keys * values + keys + 1), 0


STATES: dict[str, Callable[[Reading], Sizes]] = {
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "gated_delta": _gated_delta,
    "kda": _kda,
    "lightning": _lightning,
    "gla": _gla,
    "gated_deltanet": _gated_deltanet,
    "rg_lru": _rg_lru,
    "short_conv": _short_conv,
    "rwkv4": _rwkv4,
    "rwkv": _rwkv,
    "xlstm": _xlstm,
}
