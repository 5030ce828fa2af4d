"""``kvprobe gqa``: what do shared keys and values cost: trained from the start, uptrained or just pooled?"""

from typing import Any

import click

from kvprobe.cli.options import COUNT, CountFrom, Finite, common, load_subject, passage_options

COLUMNS = ("n_kv_heads", "seed", "best_val_loss", "attention_params", "cache_bytes_per_token")
UPTRAINED = ("loss_before", "loss_pooled", "loss_after")
POOLED = ("n_kv_heads", "best_val_loss", "perplexity", "delta", "delta_low", "delta_high", *COLUMNS[3:])
# options of training, and of reading a pretrained model: each is refused if it would do nothing
OF_TRAINING = (
    "seeds", "steps", "corpus", "quick", "uptrain", "margin", "learning_rate", "train_windows", "valid_windows",
)  # fmt: skip
OF_POOLING = ("text", "tokens", "bos", "score_from")


@click.command("gqa", short_help="What do shared keys and values (GQA, MQA) cost in loss?")
@click.argument("model", required=False)
@click.option(
    "--kv-heads",
    type=COUNT,
    multiple=True,
    help="Key/value heads to train with. Repeat for several.  [default: 8, 4, 2, 1; with --pool all divisors]",
)
@click.option(
    "--seeds",
    type=click.IntRange(1, 1000),
    default=3,
    show_default=True,
    help="Models for each head count, seeded from --seed on.",
)
@click.option("--steps", type=CountFrom(1), help="Training steps.  [default: 600; 60 with --quick]")
@click.option(
    "--corpus",
    default="time-machine",
    show_default=True,
    help="Text to train on: a UTF-8 file or a name, as for --text.",
)
@click.option(
    "--train-windows", type=CountFrom(1), help="Windows to train on, from the start of the corpus.  [default: 100000]"
)
@click.option(
    "--valid-windows", type=CountFrom(1), help="Windows after them to validate on.  [default: 3000; 300 with --quick]"
)
@click.option(
    "--learning-rate", type=Finite(0, min_open=True), help="Constant learning rate of AdamW.  [default: 0.001]"
)
@click.option(
    "--quick",
    is_flag=True,
    help="Five minutes on two cores: a smaller model and fewer steps, not the published protocol.",
)
@click.option(
    "--uptrain",
    type=Finite(0, 1, min_open=True),
    is_flag=False,
    flag_value=0.05,
    help="Train multi-head, pool its heads, then train for this fraction of the steps.  [0.05 if no number follows]",
)
@click.option(
    "--margin",
    type=Finite(0, min_open=True),
    default=0.05,
    show_default=True,
    help="Nat per token within which two losses count as equivalent.",
)
@click.option("--pool", is_flag=True, help="With MODEL: pool the KV heads of a pretrained model, without training.")
@click.option(
    "--score-from", type=COUNT, help="With --pool: the token after this one is the first target.  [default: half]"
)
@passage_options
@common
def command(model: str | None, **options: Any) -> None:
    """What do query heads that share keys and values (GQA; with one KV head, MQA) cost in loss, and what do they save?

    Trains the published small GPT once for every head count and seed, and tests each head count for equivalence to
    multi-head (TOST), which must be among them. Pairs share a seed: the same batches in the same order, but weights
    drawn for each model separately. It takes hours on two cores: finished models are kept in kvprobe's directory and
    not trained again, and an interrupted one continues from at most about a minute earlier. The text is cut into
    windows of 128 characters and the one that follows; a token is a character.

    \b
    Columns: best_val_loss          lowest of all validations, nat per token: small models soon overfit
             attention_params       in one layer's four projections
             cache_bytes_per_token  one token in all layers, float32
             best_step              where the lowest was (json, csv)
             last_val_loss          at the validation after the last step (json, csv)
    --uptrain: loss_before          the multi-head model after its last step
             loss_pooled            the same with its heads pooled
             loss_after             after uptraining; best_val_loss then counts validations after pooling
    --pool:  best_val_loss          the passage's loss; nothing is validated or chosen
             cache_bytes_per_token  at --dtype
             delta                  loss beyond the unchanged model's; delta_low to delta_high: 95 % interval
    Verdicts: equivalent  the 90 % interval of the difference lies within the margin
              different   it lies entirely outside the margin
              undecided   neither: more seeds are needed

    \b
    Examples:
      kvprobe gqa --quick
      kvprobe gqa --kv-heads 8 --kv-heads 1 --seeds 5 --plot gqa.png
      kvprobe gqa --uptrain 0.1                 trained multi-head, then pooled and trained further
      kvprobe gqa smollm2-135m --pool           a pretrained model, without training
    """
    _refuse_strays(model, pool=options["pool"])

    from kvprobe.cli.console import emit, save_plot

    result = _pool(model or "gpt2", options) if options["pool"] else _train(options)
    from kvprobe.experiments import gqa

    columns = POOLED if options["pool"] else (*COLUMNS, *(UPTRAINED if options["uptrain"] else ()))
    summary = ["", *gqa.sentences(result)]
    emit(result, format_=options["format_"], out=options["out"], columns=columns, summary=summary)
    if options["plot"]:
        from kvprobe.plots.gqa import figure

        save_plot(figure(result.rows, result.run), options["plot"])


def _train(options: dict[str, Any]) -> Any:
    from dataclasses import replace

    from kvprobe.cells.run_store import RunStore
    from kvprobe.cli.console import notice, progress_bar
    from kvprobe.experiments import gqa
    from kvprobe.files.store import home
    from kvprobe.models.loading import device_for
    from kvprobe.text.corpus import characters, enough
    from kvprobe.text.texts import read_text

    quiet = options["quiet"]
    protocol = gqa.QUICK if options["quick"] else gqa.Protocol()
    device = str(device_for(options["device"]))
    plan = replace(protocol.plan, dtype=options["dtype"], steps=options["steps"] or protocol.plan.steps)
    plan = replace(plan, learning_rate=options["learning_rate"] or plan.learning_rate)
    n_train = options["train_windows"] or protocol.n_train
    n_valid = options["valid_windows"] or protocol.n_valid
    protocol = replace(protocol, plan=plan, n_train=n_train, n_valid=n_valid)
    store = RunStore(home() / "gqa")
    seeds = range(options["seed"], options["seed"] + options["seeds"])
    try:
        with progress_bar(quiet) as progress:
            n_bytes = enough(n_train + n_valid, protocol.length)
            text = read_text(options["corpus"], n_bytes=n_bytes, progress=progress)
            corpus = characters(text, length=protocol.length, n_train=n_train, n_valid=n_valid)
            if options["quick"]:
                notice(f"--quick is {gqa.words_of(protocol, corpus)}", quiet=quiet)
            return gqa.run(
                corpus,
                store,
                protocol,
                kv_heads=options["kv_heads"] or (8, 4, 2, 1),
                seeds=seeds,
                uptrain=options["uptrain"],
                margin=options["margin"],
                device=device,
                progress=progress,
            )
    except KeyboardInterrupt:
        notice("kept: the same command continues with the models that are not finished", quiet=quiet)
        raise


def _pool(model: str, options: dict[str, Any]) -> Any:
    from kvprobe.cli.console import progress_bar
    from kvprobe.experiments import gqa

    settings = {name: options[name] for name in ("kv_heads", "score_from", "seed")}
    with progress_bar(options["quiet"]) as progress:
        return gqa.pool(load_subject(model, options, progress), **settings, progress=progress)


def _refuse_strays(model: str | None, *, pool: bool) -> None:
    context = click.get_current_context()
    if model is not None and not pool:
        raise click.UsageError(f"MODEL {model!r} is only read with --pool; without it, small models are trained")
    default = click.core.ParameterSource.DEFAULT
    given = [name for name in context.params if context.get_parameter_source(name) != default]
    if stray := [name for name in given if name in (OF_TRAINING if pool else OF_POOLING)]:
        where = "trains small models: leave out --pool" if pool else "reads a pretrained model: give --pool too"
        raise click.UsageError(f"--{stray[0].replace('_', '-')} {where}")
    if not pool and context.params["dtype"] == "float16":
        raise click.UsageError("--dtype float16 cannot be trained without scaling the loss: use bfloat16 or float32")
