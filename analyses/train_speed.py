"""How fast does our loop train beside a plain loop over transformers: same size, batch, dtype and threads?

\b
    python -m analyses.train_speed

A way's time is one step of the published small GPT at batch 64 of 128 tokens, optimizer included: ours is
``kvprobe.training.loop.train``; transformers' is ``LlamaForCausalLM`` of the same shape, the whole batch at once and
AdamW as torch gives it, and once more with our loop's two habits, parts of the batch and the fused optimizer. The
ratio of a way is its time to ours in the same turn. Goal: the plain loop at 1.2 or more, and never below 1.
"""

from functools import partial
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor

from analyses.common import script, show
from analyses.timing import compare
from kvprobe.bench.busy import Watch, cores
from kvprobe.cells.run_store import gpt_config
from kvprobe.decoder.config import DecoderConfig
from kvprobe.results.record import run_record
from kvprobe.results.result import Result
from kvprobe.text.corpus import Corpus
from kvprobe.training.loop import TrainConfig, seeded, train

OURS = "kvprobe"
PLAIN = "transformers, plain loop"
SAME_HABITS = "transformers, parts and fused AdamW"


def run(
    *,
    n_kv_heads: int = 8,
    n_layers: int = 6,
    width: int = 256,
    length: int = 128,
    batch: int = 64,
    threads: int | None = None,
    repeats: int = 7,
) -> Result:
    """Rows ``way, ms_median, ms_low, ms_high, ratio, tokens_per_s, parameters``, a row a way; ours is the reference."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or cores())
    try:
        config = gpt_config(n_kv_heads, vocab=28, length=length, n_layers=n_layers, width=width)
        ids = torch.randint(28, (batch + length + 1,), generator=torch.Generator().manual_seed(0))
        corpus = Corpus("random ids", "", "ids", 28, ids, length=length, n_train=batch, n_valid=1)
        plan = TrainConfig(steps=1, batch=batch)
        decoder, plain, same = seeded(config, seed=0), _llama(config), _llama(config)
        windows = corpus.train_batch(0, batch=batch, seed=0)
        optimizers = [torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)]
        optimizers += [torch.optim.AdamW(same.parameters(), lr=1e-3, weight_decay=0.0, fused=True)]
        ways = {
            OURS: partial(train, decoder, corpus, plan),
            PLAIN: partial(_step, plain, optimizers[0], windows, batch),
            SAME_HABITS: partial(_step, same, optimizers[1], windows, plan.micro_batch),
        }
        watch = Watch()
        rows = compare(ways, repeats=repeats, watch=watch)
        settings = {"n_kv_heads": n_kv_heads, "n_layers": n_layers, "width": width, "length": length, "batch": batch}
        record = run_record(settings, watch.record(), repeats=repeats, threads=torch.get_num_threads(), dtype="float32")
    finally:
        torch.set_num_threads(before)
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (decoder, plain, same)]
    for row, size in zip(rows, sizes, strict=True):
        row |= {"tokens_per_s": 1e3 * batch * length / row["ms_median"], "parameters": size}
    return Result("train_speed", rows, record)


def _llama(config: DecoderConfig) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab,
                hidden_size=config.hidden,
                intermediate_size=config.mlp_width,
                num_hidden_layers=config.n_layers,
                num_attention_heads=config.n_heads,
                num_key_value_heads=config.n_kv_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_positions,
                rms_norm_eps=config.norm_eps,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=None,
            )
        ).train()


def _step(model: Any, optimizer: torch.optim.Optimizer, windows: Tensor, part: int) -> None:
    for some in windows.split(part):
        logits = model(input_ids=some[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), some[:, 1:].flatten(), reduction="sum")
        (loss / windows[:, 1:].numel()).backward()
    optimizer.step()
    optimizer.zero_grad()


@click.command(help=__doc__)
@click.option("--kv-heads", type=int, default=8, show_default=True)
@click.option("--threads", type=int, help="[default: all cores]")
@click.option("--repeats", type=int, default=7, show_default=True)
@click.option("--save/--no-save", default=True, help="Keep results/train_speed.{csv,json}.")
def main(kv_heads: int, threads: int | None, repeats: int, save: bool) -> None:
    """Print the table and keep it."""
    result = run(n_kv_heads=kv_heads, threads=threads, repeats=repeats)
    show(result, save=save)


if __name__ == "__main__":
    script(main)
