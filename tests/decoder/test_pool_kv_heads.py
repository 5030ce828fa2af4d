import pytest
import torch

from kvprobe.decoder.model import from_hf
from kvprobe.decoder.pool_kv_heads import pool_kv_heads
from support.decoders import rope_decoder
from support.tiny import tiny_ids, tiny_model


def heads_of(decoder, name, layer=0):
    """The rows of one projection, a head each: ``[n_kv_heads, head_dim, hidden]``."""
    weight = decoder.state_dict()[f"blocks.{layer}.attention.{name}.weight"]
    return weight.unflatten(0, (-1, decoder.config.head_dim))


@pytest.mark.parametrize("n_kv_heads", [1, 3])
def test_pooling_identical_heads_changes_nothing(n_kv_heads):
    decoder = rope_decoder(n_heads=6, n_kv_heads=6)
    for block in decoder.blocks:
        for projection in (block.attention.key, block.attention.value):
            one_a_group = projection.weight.unflatten(0, (n_kv_heads, 6 // n_kv_heads, 8))[:, :1]
            projection.weight.copy_(one_a_group.expand(-1, 6 // n_kv_heads, -1, -1).flatten(0, 2))
    shared = pool_kv_heads(decoder, n_kv_heads)
    for name in ("key", "value"):
        assert torch.equal(heads_of(shared, name), heads_of(decoder, name)[:: 6 // n_kv_heads])
    ids = tiny_ids(24)
    torch.testing.assert_close(shared(ids), decoder(ids), atol=1e-5, rtol=0)


def test_a_group_is_neighbours_and_its_head_is_their_mean():
    decoder = rope_decoder()
    shared = pool_kv_heads(decoder, 2)
    for name in ("key", "value"):
        first, second, third, fourth = heads_of(decoder, name, layer=1)
        expected = torch.stack([(first + second) / 2, (third + fourth) / 2])
        torch.testing.assert_close(heads_of(shared, name, layer=1), expected)
    assert shared.config.n_kv_heads == 2
    assert torch.equal(heads_of(shared, "query"), heads_of(decoder, "query"))


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_what_attention_reads_is_the_mean_of_what_it_read(family):
    # the projections are linear, biases too, and RoPE turns every head alike: true of the first layer's realized K, V
    decoder, ids, seen = from_hf(tiny_model(family)), tiny_ids(12), {}
    for name, model in (("whole", decoder), ("shared", pool_kv_heads(decoder, 1))):

        def watch(call, name=name):
            if call.layer == 0:
                seen[name] = call.key, call.value
            return call.attend()

        model(ids, attend=watch)
    for shared, whole in zip(seen["shared"], seen["whole"], strict=True):
        assert shared.shape[1] == 1
        torch.testing.assert_close(shared, whole.mean(dim=1, keepdim=True), atol=1e-5, rtol=0)


def test_where_keys_are_normalised_the_mean_is_of_what_is_normalised():
    decoder, ids, seen = from_hf(tiny_model("qwen3")), tiny_ids(12), []

    def watch(call):
        if call.layer == 0:
            seen.append((call.key, call.value))
        return call.attend()

    for model in (decoder, pool_kv_heads(decoder, 1)):
        model(ids, attend=watch)
    (keys, values), (shared_keys, shared_values) = seen
    torch.testing.assert_close(shared_values, values.mean(dim=1, keepdim=True), atol=1e-5, rtol=0)
    # each key has the norm of a normalised one; a mean of several different ones is shorter
    assert bool((shared_keys.norm(dim=-1) > 1.01 * keys.mean(dim=1, keepdim=True).norm(dim=-1)).all())


def test_the_decoder_given_is_left_as_it_was_and_shares_no_memory():
    decoder = rope_decoder()
    before = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    shared = pool_kv_heads(decoder, 1)
    for parameter in shared.parameters():
        parameter.fill_(7.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in decoder.state_dict().items())
    assert decoder.config.n_kv_heads == 4


def test_pooling_to_as_many_as_there_are_gives_the_same_bits():
    decoder, ids = rope_decoder(), tiny_ids(24)
    assert torch.equal(pool_kv_heads(decoder, 4)(ids), decoder(ids))


@pytest.mark.parametrize("n_kv_heads", [0, -1, 3, 8])
def test_a_number_that_does_not_divide_is_refused_with_those_that_do(n_kv_heads):
    with pytest.raises(ValueError, match=f"4 key/value heads cannot be pooled to {n_kv_heads} evenly: .* 1, 2, 4$"):
        pool_kv_heads(rope_decoder(), n_kv_heads)


def test_a_shared_decoder_can_be_trained_if_the_one_given_could():
    decoder = rope_decoder().requires_grad_(True)
    assert all(parameter.requires_grad for parameter in pool_kv_heads(decoder, 2).parameters())
    assert not any(parameter.requires_grad for parameter in pool_kv_heads(rope_decoder(), 2).parameters())
