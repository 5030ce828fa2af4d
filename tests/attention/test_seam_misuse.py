"""The seam in wrong hands: threads, blocks that close out of order, copies, train(): right or refused, never silent."""

import asyncio
import copy
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvprobe.attention.call import AttentionCall
from kvprobe.attention.seam import attending
from kvprobe.errors import KvprobeError, NotIntercepted
from kvprobe.models.loading import Loaded
from kvprobe.shape.spec import Spec
from support.tiny import tiny_ids, tiny_model

IDS = tiny_ids(24)


def same(call: AttentionCall) -> Tensor:
    return call.attend()


def zero(call: AttentionCall) -> Tensor:
    return torch.zeros_like(call.attend())


def half(call: AttentionCall) -> Tensor:
    return call.attend() / 2


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS, use_cache=False).logits


def under(model: Any, attend: Callable[[AttentionCall], Tensor]) -> Tensor:
    with attending(model, attend):
        return logits(model)


def state_of(model: nn.Module) -> tuple[Any, ...]:
    return (
        [part.config._attn_implementation_internal for part in model.modules() if hasattr(part, "config")],
        [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()],
        sorted(ALL_ATTENTION_FUNCTIONS.valid_keys()),
        sorted(ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()),
    )


@pytest.fixture(params=["llama", "gpt_oss"])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A model that leaves every test as it came: by its state, and by what it computes."""
    made = tiny_model(request.param)
    before, plain = state_of(made), logits(made)
    yield made
    assert state_of(made) == before
    assert torch.equal(logits(made), plain)


def apart(work: Callable[[], Any]) -> Future[Any]:
    """``work`` done in another thread, to its end."""
    with ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
        return pool.submit(work)


# --- threads ---


def test_a_second_threads_block_is_refused_by_name(model: Any) -> None:
    want = under(model, zero)
    with attending(model, zero):
        with pytest.raises(KvprobeError, match=r"model is in use: thread 'MainThread' has an attending block open"):
            apart(lambda: under(model, half)).result()
        with pytest.raises(KvprobeError, match="is in use"):
            apart(lambda: under(model.model, half)).result()  # its body is the same model
        assert torch.equal(logits(model), want)
    assert torch.equal(apart(lambda: under(model, zero)).result(), want)


def test_a_second_threads_forward_in_a_block_is_refused(model: Any) -> None:
    calls = []

    def watch(call: AttentionCall) -> Tensor:
        calls.append(call.layer)
        return call.attend()

    with attending(model, watch):
        with pytest.raises(KvprobeError, match=r"was called by thread 'other_0' while thread 'MainThread' has an att"):
            apart(lambda: logits(model)).result()
        assert not calls


def test_a_forward_that_began_before_another_threads_block_is_never_a_mixture(model: Any) -> None:
    plain = logits(model)
    # the main thread's block opens in the middle of the other thread's forward, after its mask was made
    with ExitStack() as blocks, ThreadPoolExecutor(1) as pool:
        middle, on = Barrier(2), Barrier(2)

        def waits(*_: Any) -> None:
            middle.wait(30)
            on.wait(30)

        hook = model.model.layers[0].register_forward_hook(waits)
        running = pool.submit(lambda: logits(model))
        middle.wait(30)
        hook.remove()
        blocks.enter_context(attending(model, zero))
        on.wait(30)
        with pytest.raises(KvprobeError, match="was called by thread"):
            running.result()
    assert torch.equal(logits(model), plain)


def test_of_two_threads_that_hurry_none_gets_the_others_numbers(model: Any) -> None:
    want = {attend: under(model, attend) for attend in (zero, half)}
    start = Barrier(2)

    def work(attend: Callable[[AttentionCall], Tensor]) -> list[bool]:
        start.wait(30)
        right = []
        for _ in range(30):
            try:
                right.append(torch.equal(under(model, attend), want[attend]))
            except KvprobeError as error:
                assert not isinstance(error, NotIntercepted)  # noqa: PT017  (either is right, but not this one)
        return right

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(work, want))
    assert all(all(right) for right in done)
    assert any(done)


def test_two_threads_may_each_have_a_model() -> None:
    models = {attend: tiny_model("llama") for attend in (zero, half)}
    want = {attend: under(model, attend) for attend, model in models.items()}
    start = Barrier(2)

    def work(attend: Callable[[AttentionCall], Tensor]) -> bool:
        start.wait(30)
        return all(torch.equal(under(models[attend], attend), want[attend]) for _ in range(20))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, models)) == [True, True]


# --- blocks that close out of order ---


def stepwise(model: Any, attend: Callable[[AttentionCall], Tensor]) -> Iterator[Tensor]:
    with attending(model, attend):
        while True:
            yield logits(model)


@pytest.mark.parametrize("first_closed", [0, 1])
def test_generators_get_each_their_own_block_in_any_order(model: Any, first_closed: int) -> None:
    functions = (half, zero)
    want = [under(model, attend) for attend in functions]
    steps = [stepwise(model, attend) for attend in functions]
    for index in (0, 1, 0, 1, 1, 0):
        assert torch.equal(next(steps[index]), want[index])
    steps[first_closed].close()  # type: ignore[attr-defined]
    left = 1 - first_closed
    assert torch.equal(next(steps[left]), want[left])
    steps[left].close()  # type: ignore[attr-defined]


def test_a_generator_that_is_dropped_gives_the_model_back(model: Any) -> None:
    plain = logits(model)
    step = stepwise(model, zero)
    next(step)
    del step
    assert torch.equal(logits(model), plain)


def test_tasks_of_one_loop_get_each_their_own_block(model: Any) -> None:
    functions = (half, zero, same)
    want = [under(model, attend) for attend in functions]

    async def task(index: int) -> bool:
        right = True
        with attending(model, functions[index]):
            for _ in range(index + 2):
                right &= torch.equal(logits(model), want[index])
                await asyncio.sleep(0)
        return right

    async def all_of_them() -> list[bool]:
        return await asyncio.gather(*(task(index) for index in range(3)))

    assert asyncio.run(all_of_them()) == [True] * 3


def test_the_inner_block_acts_however_it_was_opened(model: Any) -> None:
    inner, outer = under(model, zero), under(model, half)

    @contextmanager
    def mine() -> Iterator[None]:
        with attending(model, zero):
            yield

    def open_in(stack: ExitStack) -> None:
        stack.enter_context(attending(model, zero))

    with attending(model, half):
        with mine():
            assert torch.equal(logits(model), inner)
        assert torch.equal(logits(model), outer)
        with ExitStack() as stack:
            open_in(stack)
            assert torch.equal(logits(model), inner)
            stack.enter_context(mine())
            assert torch.equal(logits(model), inner)
        assert torch.equal(logits(model), outer)


def test_contexts_entered_and_left_by_hand_in_the_wrong_order(model: Any) -> None:
    plain, want = logits(model), under(model, zero)
    first, second = attending(model, half), attending(model, zero)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(logits(model), want)
    second.__exit__(None, None, None)
    assert torch.equal(logits(model), plain)


# --- the model changed inside a block ---


@pytest.mark.parametrize("layer", [None, 1], ids=["whole", "one layer"])
def test_train_inside_a_block_is_refused_at_the_next_attention(model: Any, layer: int | None) -> None:
    with attending(model, same):
        (model if layer is None else model.model.layers[layer]).train()
        with pytest.raises(ValueError, match=r"in training mode.*not model.train\(\) inside the block"):
            logits(model)
    model.eval()


def test_another_implementation_set_inside_a_block_is_noticed(model: Any) -> None:
    with attending(model, zero):
        logits(model)
        model.set_attn_implementation("eager")
        with pytest.raises(NotIntercepted, match=r"layer 0 \(\w+\) does not go through transformers' attention int"):
            logits(model)


def test_a_deep_copy_made_inside_a_block_is_the_plain_model(model: Any) -> None:
    plain, zeroed = logits(model), under(model, zero)
    with attending(model, zero):
        twin = copy.deepcopy(model)
        assert torch.equal(logits(twin), plain)
        assert torch.equal(logits(model), zeroed)
    assert torch.equal(logits(twin), plain)
    assert twin.config._attn_implementation_internal == model.config._attn_implementation_internal
    assert torch.equal(under(twin, zero), zeroed)


def test_a_model_that_shares_its_config_is_not_taken_for_the_other(model: Any) -> None:
    other = type(model)(model.config).eval()
    with attending(model, zero), pytest.raises(NotIntercepted, match="belongs to no open attending block"):
        logits(other)
    assert logits(other).isfinite().all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo says what it leaves to Python
@pytest.mark.parametrize("inside", [True, False])
def test_a_compiled_model_is_seen(inside: bool) -> None:
    model = tiny_model("llama")
    want = {attend: under(model, attend) for attend in (zero, half)}
    plain = logits(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    # compiled for the plain model first: what is kept of it must not answer for a block
    close = {"rtol": 0.0, "atol": 1e-5}
    torch.testing.assert_close(logits(compiled), plain, **close)
    for attend in (zero, half):
        with attending(compiled if inside else model, attend):
            torch.testing.assert_close(logits(compiled), want[attend], **close)
    torch.testing.assert_close(logits(compiled), plain, **close)
    torch._dynamo.reset()


def test_under_autocast_the_seam_changes_nothing_and_the_record_says_so() -> None:
    model = tiny_model("llama")
    about = {"name": "tiny", "source": "directory", "revision": "", "dtype": "float32", "device": "cpu"}
    loaded = Loaded(model=model, tokenizer=None, spec=Spec.from_config(model.config.to_dict()), **about)
    assert loaded.record()["autocast"] is None
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(under(model, same), logits(model))
        assert loaded.record()["autocast"] == "bfloat16"
