"""What do shared keys and values cost in loss: trained from the start, uptrained, or pooled without training?"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from kvprobe.experiments.experiment import Experiment, SettingError, seed, setting
from kvprobe.progress import Progress
from kvprobe.results.columns import Column, amount
from kvprobe.results.phrases import counted, passage_of, training_of
from kvprobe.results.result import Result, Row

if TYPE_CHECKING:
    from kvprobe.experiments.gqa_training import Protocol, TrainingSubject
    from kvprobe.models.subject import Subject

KV_HEADS = (8, 4, 2, 1)


@dataclass(frozen=True, kw_only=True)
class Gqa(Experiment):
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

    name = "gqa"
    needs = "corpus"
    short = "What do shared keys and values (GQA, MQA) cost in loss?"
    columns = (
        Column("n_kv_heads", "KV heads"),
        Column("seed", "seed"),
        Column("best_val_loss", "best loss (nat)", ".3f"),
        Column("attention_params", "parameters of attention"),
        Column("cache_bytes_per_token", "cache a token", amount),
    )

    kv_heads: tuple[int, ...] = setting(
        (),
        "Key/value heads to train with. Repeat for several.",
        kind=int,
        shown="8, 4, 2, 1; with --pool all divisors",
    )
    seeds: int = setting(3, "Models for each head count, seeded from --seed on.", least=1, most=1000)
    steps: int | None = setting(None, "Training steps.", kind=int, least=1, shown="600; 60 with --quick")
    train_windows: int | None = setting(
        None, "Windows to train on, from the start of the corpus.", kind=int, least=1, shown="100000"
    )
    valid_windows: int | None = setting(
        None, "Windows after them to validate on.", kind=int, least=1, shown="3000; 300 with --quick"
    )
    learning_rate: float | None = setting(
        None, "Constant learning rate of AdamW.", kind=float, least=0, above=True, shown="0.001"
    )
    quick: bool = setting(
        False, "Five minutes on two cores: a smaller model and fewer steps, not the published protocol."
    )
    uptrain: float | None = setting(
        None,
        "Train multi-head, pool its heads, then train for this fraction of the steps.  [0.05 if no number follows]",
        kind=float,
        least=0,
        most=1,
        above=True,
        alone=0.05,
    )
    margin: float = setting(0.05, "Nat per token within which two losses count as equivalent.", least=0, above=True)
    pool: bool = setting(False, "With MODEL: pool the KV heads of a pretrained model, without training.")
    score_from: int | None = setting(
        None, "With --pool: the token after this one is the first target.", kind=int, shown="half"
    )
    dtype: str = setting(
        "float32",
        "Weights and activations. Published numbers are float32.",
        choices=("float32", "bfloat16", "float16"),
        common=True,
    )
    seed: int = seed()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool:
            return
        from kvprobe.experiments.gqa_training import N_HEADS

        if self.dtype == "float16":
            raise SettingError("{dtype} float16 needs {pool}: to train, use bfloat16 or float32")
        for n in self.kv_heads:
            if n < 1 or N_HEADS % n:
                raise SettingError(
                    "{kv_heads}: {0} query heads cannot share {1} key/value heads evenly: use 8, 4, 2, 1", N_HEADS, n
                )
            if self.kv_heads.count(n) > 1:
                raise SettingError("{kv_heads}: {0} KV heads are given twice", n)

    @property
    def protocol(self) -> "Protocol":
        """The model's size, how its text is cut and how it is trained."""
        from kvprobe.experiments import gqa_training

        protocol = gqa_training.QUICK if self.quick else gqa_training.Protocol()
        plan = replace(protocol.plan, dtype=cast(Any, self.dtype), steps=self.steps or protocol.plan.steps)
        return replace(
            protocol,
            plan=replace(plan, learning_rate=self.learning_rate or plan.learning_rate),
            n_train=self.train_windows or protocol.n_train,
            n_valid=self.valid_windows or protocol.n_valid,
        )

    def measure(self, subject: "TrainingSubject | Subject", progress: Progress) -> tuple[list[Row], dict[str, Any]]:
        """A row a head count and seed (:func:`kvprobe.experiments.gqa_training.train`), or with ``pool`` a head count.

        With ``pool`` the subject is a model and a passage (:func:`kvprobe.experiments.gqa_training.pool`). Raises as
        these do.
        """
        from kvprobe.experiments import gqa_training

        given: Any = subject
        if self.pool:
            how: dict[str, Any] = {"kv_heads": self.kv_heads, "score_from": self.score_from, "seed": self.seed}
            return gqa_training.pool(given, **how, progress=progress)
        return gqa_training.train(
            given,
            given.protocol or self.protocol,
            kv_heads=self.kv_heads or KV_HEADS,
            seeds=range(self.seed, self.seed + self.seeds),
            uptrain=self.uptrain,
            margin=self.margin,
            progress=progress,
        )

    def settings(self) -> dict[str, Any]:
        """The settings as a record has them: of training or of ``pool``; what a protocol has is not among them."""
        kept = ("kv_heads", "pool", "score_from", "seed") if self.pool else ("kv_heads", "pool", "uptrain", "margin")
        return {name: value for name, value in super().settings().items() if name in kept}

    @classmethod
    def table_columns(cls, result: Result) -> list[str]:
        """The fields that a table shows: pooled heads have no seed, uptrained ones a loss before and after."""
        fields = super().table_columns(result)
        if result.run["pool"]:
            return [fields[0], fields[2], "perplexity", "delta", "delta_low", "delta_high", *fields[3:]]
        return [*fields, *(name for name in ("loss_before", "loss_pooled", "loss_after") if name in result.rows[0])]

    @classmethod
    def sentence(cls, result: Result) -> str:
        """What the rows support."""
        return "; ".join(sentences(result))

    @classmethod
    def summary(cls, result: Result) -> list[str]:
        """The lines under the table."""
        return ["", *sentences(result)]


def sentences(result: Result) -> list[str]:
    """What the rows support, a plain sentence a head count."""
    run = result.run
    if run["pool"]:
        first, *pooled = result.rows
        said = [f"{passage_of(run)}, {run['n_targets']:,} targets: KV heads pooled by mean, nothing trained"]
        for row in pooled:
            said.append(
                f"{first['n_kv_heads']} KV heads to {row['n_kv_heads']}: loss {first['best_val_loss']:.3f} to "
                f"{row['best_val_loss']:.3f}, {_between(row['delta'], row['delta_low'], row['delta_high'], 95)}"
            )
        return said
    said = [training_of(run)]
    for row in run["summary"]:
        within = "no interval" if row["low"] is None else f"95 % interval {row['low']:.3f} to {row['high']:.3f}"
        first, last = row["best_steps"]
        at = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        line = f"{counted(row['n_kv_heads'], 'KV head')}: best validation loss {row['mean']:.3f} ({within}, "
        line += f"{counted(row['n_seeds'], 'seed')}; at {at}, {row['last']:.3f} after the last)"
        if row["verdict"] is not None:
            change = _between(row["difference"], row["difference_low"], row["difference_high"], 90)
            pairs = f" over the {row['n_pairs']} seeds of both" if row["n_pairs"] < row["n_seeds"] else ""
            line += f"; against multi-head{pairs} {change}: {row['verdict']} at a margin of {run['margin']:g} nat"
        elif row["n_kv_heads"] != run["n_heads"] and any(
            other["n_kv_heads"] == run["n_heads"] for other in run["summary"]
        ):
            line += "; not compared: no seed in common with multi-head"
        said.append(line)
    if any(row["verdict"] == "undecided" for row in run["summary"]):
        said.append("undecided: the interval includes the margin, or one seed gives no interval; more seeds narrow it")
    if run["n_heads"] not in run["kv_heads"]:
        said.append(f"nothing is compared without the multi-head model: add --kv-heads {run['n_heads']}")
    if run["missing"]:
        said.append(f"not trained yet: {'; '.join(run['missing'])}")
    return said


def _between(mean: float, low: float | None, high: float | None, level: int) -> str:
    within = "one seed, no interval" if low is None else f"{level} % interval {low:+.3f} to {high:+.3f}"
    return f"{mean:+.3f} nat a token ({within})".replace("-", "−")
