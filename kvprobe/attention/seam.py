"""What stands between a model and its attention? The seam: one function, called once per layer per forward.

    def watch(call):
        print(call.layer, call.key.shape)
        return call.attend()

    with attending(model, watch):
        model(input_ids, use_cache=False)

It goes through transformers' two documented extension points, the attention interface and the mask interface of the
same name; without the second, causality would silently be lost.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from kvprobe.attention.blocks import intercepting
from kvprobe.attention.call import Attend, Turn
from kvprobe.attention.layers import family_of
from kvprobe.attention.rope_finding import rope_of

__all__ = ["attending", "family_of", "rope_of"]


@contextmanager
def attending(model: nn.Module, attend: Attend) -> Iterator[None]:
    """Let ``attend(call)`` stand in for attention in every layer of ``model`` while the block runs.

    ``attend`` gets an :class:`AttentionCall` and returns ``[batch, n_heads, q_len, v_head_dim]``; ``call.attend()``
    is what the model would have done. A call has:

    - ``query`` ``[batch, n_heads, q_len, head_dim]``, ``key`` ``[batch, n_kv_heads, kv_len, head_dim]`` and ``value``
      ``[batch, n_kv_heads, kv_len, v_head_dim]``, after position encoding and QK-norm;
    - ``layer``, its index; ``n_heads``, ``n_kv_heads``; ``scale``, ``softcap``, ``sink_logits`` of the scores;
    - ``keep``, bool ``[batch or 1, 1 or n_heads, q_len, kv_len]``: what the model lets each query see;
    - ``last(n)``, ``top(n, values)``: the last visible keys, the visible keys of greatest value, as a ``keep``;
    - ``weights()``: attention weights, a block of queries at a time; ``rotate(key, by)``: the layer's own RoPE.

    ``attend(query=…, key=…, value=…, keep=…)`` of a call is attention with what is replaced. With a cache, as in
    Hugging Face's ``generate``, ``q_len`` is 1 after the prompt and ``kv_len`` what the cache holds. Blocks may be
    nested: the inner one acts. A model of text and images is seen where it reads text; its other towers stay as they
    are. The model leaves as it entered, also on an error, and whatever the order in which generators leave their
    blocks. A kvprobe decoder has a block of its own (:meth:`kvprobe.decoder.model.Decoder.attending`).

    A model belongs to one thread at a time: KvprobeError if another one has a block open on it, or calls it
    meanwhile. Raises NotIntercepted if the family goes round transformers' attention interface (on entering where
    the family says so itself, else at the end of a forward in which a layer with keys and values ran and never
    reached ``attend``, since the result would be the plain model's), and if it hands attention an argument that
    is not honoured. Raises ValueError if the model is in training mode, where dropout makes attention random, and
    UnsupportedModelError for any other module.

    >>> import kvprobe
    >>> subject = kvprobe.prepare("smollm2-135m", tokens=32)
    >>> def last_four(call):
    ...     return call.attend(keep=call.keep.triu(-3))
    >>> with kvprobe.attending(subject.model, last_four):
    ...     logits = subject.model(subject.input_ids, use_cache=False).logits
    >>> tuple(logits.shape)
    (1, 32, 49152)
    """
    # what torch.compile gives back stands around the model
    model = getattr(model, "_orig_mod", model)
    if own := getattr(model, "attending", None):
        with own(attend):
            yield
        return

    def turn_of(layer: int) -> Turn:
        return lambda x, by: rope_of(model)[layer].turn(x, by)

    with intercepting(model, attend, turn_of):
        yield
