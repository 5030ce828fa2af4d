"""By which rotation does each layer of a model turn its keys? Found by experiment, without knowledge of the family."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from kvprobe.attention.blocks import intercepting, once
from kvprobe.attention.call import AttentionCall, Turn
from kvprobe.attention.layers import body_of, decoder_of, family_of
from kvprobe.attention.rope import Rope
from kvprobe.errors import NotIntercepted, UnsupportedModelError

# the same tokens at positions 0 to 5 and 37 to 42: relative positions are the same, so hidden states are too
LENGTH, SHIFT = 6, 37

_ropes: "WeakKeyDictionary[nn.Module, dict[int, Rope]]" = WeakKeyDictionary()


def rope_of(model: nn.Module) -> dict[int, Rope]:
    """The rotation of every layer that holds keys, found by experiment and so without knowledge of the family.

    One short forward sees the same tokens at two places; in each layer exactly one way of turning (which of the
    model's frequencies, which components, which pairing, which sense) takes the keys of the first to those of the
    second, and the queries as well. A layer whose keys do not move, while others' do, has no position encoding, and
    its rotation is the identity. Raises UnsupportedModelError, naming the family, where the model has no rotary
    embedding (learned or no positions), one whose frequencies depend on the length, or one that is no such rotation.
    """
    if model not in _ropes:
        _ropes[model] = _find(model)
    return _ropes[model]


def rotates(model: nn.Module) -> bool:
    """True if the keys of ``model`` are turned by their positions, inside attention, in whatever way."""
    return bool(_tables(model)) or _moves_keys_alone(model)


def position_limit(model: nn.Module) -> int | None:
    """How many positions a table of sines holds (GPT-J), or None where they are computed."""
    return min((len(table) for name, table in _tables(model) if name == "embed_positions"), default=None)


def check_scores_by_distance(model: nn.Module, n_tokens: int) -> None:
    """Raise UnsupportedModelError if, within ``n_tokens`` tokens, a query's size depends on its position.

    Llama 4 and its kin scale the queries of distant positions up; a query that is moved to another position would
    keep the scale of the old one.
    """
    family = family_of(model)
    config = decoder_of(model).config
    parameters = getattr(config, "rope_parameters", None) or {}
    starts = None
    if getattr(config, "attn_temperature_tuning", False):
        # log1p(floor((position + 1) / floor_scale))
        starts = int(config.floor_scale) - 1  # type: ignore[union-attr,arg-type]
    elif isinstance(parameters, dict) and parameters.get("llama_4_scaling_beta"):
        # log(1 + floor(position / original_max_position_embeddings))
        starts = int(parameters["original_max_position_embeddings"])
    if starts is not None and n_tokens > starts:
        raise UnsupportedModelError(
            f"family {family} scales queries by their position from {starts} on, so turning them is not enough: ask "
            f"for at most {starts} tokens"
        )


@dataclass(frozen=True)
class _Seen:
    """Queries, keys and values of one layer, ``[2, heads, LENGTH, head_dim]``: here, and some positions on."""

    query: Tensor
    key: Tensor
    value: Tensor


def _find(model: nn.Module) -> dict[int, Rope]:
    family = family_of(model)
    tables = _tables(model)
    if not tables:
        if _moves_keys_alone(model):
            raise UnsupportedModelError(
                f"family {family} turns its keys by positions with frequencies that kvprobe does not find, so they "
                "cannot be turned back"
            )
        raise UnsupportedModelError(
            f"family {family} has no rotary position embedding (RoPE), so its keys cannot be turned by positions"
        )
    _refuse_lengthy(model)
    frequencies = [_frequencies(name, table) for name, table in tables]
    shift = min(SHIFT, (position_limit(model) or SHIFT + LENGTH) - LENGTH)
    ropes = {}
    for layer, seen in _look(model, shift).items():
        rope = _fit(seen.key, frequencies, shift)
        if rope is None:
            raise UnsupportedModelError(
                f"family {family}: the keys of layer {layer} are not turned by a rotation that kvprobe knows "
                "(whole or partial, halves or interleaved), so they cannot be turned back"
            )
        if not _fits(rope, seen.query, shift):
            raise UnsupportedModelError(
                f"family {family}: the queries of layer {layer} change with their position in more than the rotation "
                "of its keys, so no position can be given to them"
            )
        ropes[layer] = rope
    if not any(rope.rotary_dim for rope in ropes.values()):
        raise UnsupportedModelError(
            f"family {family} has frequencies of a rotary position embedding (RoPE), but turns the keys of no layer"
        )
    return ropes


def _look(model: nn.Module, shift: int) -> dict[int, _Seen]:
    """One short forward over two rows of the same tokens, the second ``shift`` positions on, layer by layer."""
    positions = torch.arange(LENGTH) + torch.tensor([[0], [shift]])
    embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    weight: Tensor = embedding.weight  # type: ignore[assignment]
    device = torch.device("cpu") if weight.is_meta else weight.device
    tokens = (torch.arange(LENGTH) % weight.shape[0]).expand(2, -1)

    seen: dict[int, _Seen] = {}

    def watch(call: AttentionCall) -> Tensor:
        seen[call.layer] = _Seen(call.query.detach().clone(), call.key.detach().clone(), call.value.detach().clone())
        return call.attend()

    inputs = {
        "input_ids": tokens,
        "position_ids": positions,
        # ones: without a mask, two rows with other positions could be taken for packed sequences
        "attention_mask": torch.ones_like(tokens),
    }
    try:
        # beneath the seam, which asks this file how a call is turned
        with torch.no_grad(), intercepting(model, once(family_of(model), watch), _unknown_turn):
            body_of(model)(**{name: ids.to(device) for name, ids in inputs.items()}, use_cache=False)
    except (IndexError, RuntimeError, TypeError) as error:
        first = str(error).partition("\n")[0]
        raise UnsupportedModelError(
            f"family {family_of(model)} cannot be run at positions that do not begin at 0 ({first}), so how it turns "
            "its keys is not seen"
        ) from error
    if not seen:
        raise NotIntercepted(f"family {family_of(model)}: no layer attends, so there is nothing to look at")
    return seen


def _unknown_turn(layer: int) -> Turn:
    def turn(x: Tensor, by: Tensor) -> Tensor:
        raise AssertionError(f"the rotation of layer {layer} is being looked for")

    return turn


def _fit(pair: Tensor, frequencies: list[Tensor], shift: int) -> Rope | None:
    """The rotation that takes keys ``[2, heads, LENGTH, head_dim]`` from here to there; None if none does."""
    unmoved = Rope(torch.zeros(0))
    candidates = [unmoved, *_candidates(frequencies, pair.shape[-1])]
    best = min(candidates, key=lambda rope: _misfit(rope, pair, shift))
    return best if _fits(best, pair, shift) else None


def _misfit(rope: Rope, pair: Tensor, shift: int) -> float:
    here, there = pair.float()
    return float(_distance(rope.turn(here[None], torch.tensor(shift, device=pair.device))[0], there))


def _fits(rope: Rope, pair: Tensor, shift: int) -> bool:
    tolerance = 1e-3 if pair.dtype == torch.float32 else 0.1
    here, there = pair.float()
    # nan where there is nothing to turn
    return _misfit(rope, pair, shift) < tolerance * float(_distance(here, there) if rope.rotary_dim else here.norm())


def _distance(here: Tensor, there: Tensor) -> Tensor:
    return (here - there).norm()


def _tables(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Name and values of what rotations are made from: ``inv_freq``, or a table of sines (GPT-J, CodeGen)."""
    for part in (decoder_of(model), model):
        named = ((path.rpartition(".")[2], buffer) for path, buffer in part.named_buffers())
        if found := [(name, buffer) for name, buffer in named if _is_table(name)]:
            return found
    return []


def _is_table(name: str) -> bool:
    return name == "embed_positions" or (name.endswith("inv_freq") and "original" not in name)


def _frequencies(name: str, table: Tensor) -> Tensor:
    if name != "embed_positions":
        return table
    # not read off the table, which half precision rounds; the experiment says whether it is of this base
    width = table.shape[-1]
    return 10000.0 ** (-torch.arange(0, width, 2, device=table.device) / width)


def _refuse_lengthy(model: nn.Module) -> None:
    kinds: set[str] = set()
    for part in decoder_of(model).modules():
        kind = getattr(part, "rope_type", ())
        kinds |= {kind} if isinstance(kind, str) else set(kind.values()) if isinstance(kind, dict) else set()
    if lengthy := sorted(kinds & {"dynamic", "longrope"}):
        raise UnsupportedModelError(
            f"family {family_of(model)} uses {lengthy[0]} RoPE, whose frequencies depend on the length of the "
            "sequence: turning a key by a distance is not defined there"
        )


def _moves_keys_alone(model: nn.Module) -> bool:
    """True if keys depend on their position and values do not: the positions are put in inside attention."""
    tolerance = 1e-3
    for seen in _look(model, SHIFT).values():
        moved = [float(_distance(*x.float()) / x[0].float().norm()) for x in (seen.key, seen.value)]
        if moved[0] > 0.1 and moved[1] < tolerance:
            return True
    return False


def _candidates(frequencies: list[Tensor], head_dim: int) -> list[Rope]:
    fitting = [inv_freq for inv_freq in frequencies if 2 * inv_freq.shape[0] <= head_dim]
    return [
        # nanochat turns the other way
        Rope(sense * inv_freq, start, interleaved)
        for inv_freq in fitting
        for start in sorted({0, head_dim - 2 * inv_freq.shape[0]})
        for interleaved in (False, True)
        for sense in (1, -1)
    ]
