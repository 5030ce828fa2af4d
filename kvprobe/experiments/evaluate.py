"""What does an attention function of one's own cost a model, in loss and in its next-token distribution?"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvprobe.experiments.experiment import Experiment, SettingError, seed, setting
from kvprobe.progress import Progress, silent
from kvprobe.results.columns import Column
from kvprobe.results.phrases import LOSS_COLUMNS, change_of, interval_of, passage_of
from kvprobe.results.result import Result, Row

if TYPE_CHECKING:
    from torch import Tensor

    from kvprobe.models.subject import Subject


@dataclass(frozen=True, kw_only=True)
class Evaluate(Experiment):
    """What does an attention function of your own cost, beside the model as it is?

    FILE.py is run: name only a file whose code you trust. NAME is a function in it that gets each layer's call and
    returns that layer's attention; `python -c "import kvprobe; help(kvprobe.attending)"` lists what a call has. This
    one keeps the last 64 keys and, of those before them, the 64 of smallest norm in their KV head:

    \b
      def small_norms(call):
          last = call.last(64)
          few = call.top(64, -call.key.norm(dim=-1), among=call.keep & ~last)
          return call.attend(keep=last | few)

    \b
    Columns: attend           the function; the first row is the model as it is
             delta            loss beyond the first row, nat a token; delta_low to delta_high: 95 % interval from a
                              paired bootstrap over blocks of tokens
             kld_mean         KL divergence of the next-token distribution, first row ‖ this one, nat a token
             kld_p99          the same, exceeded at one target in a hundred
             top1_agreement   share of targets at which the same token is the most likely

    \b
    Examples:
      kvprobe evaluate smollm2-135m --attend mine.py:small_norms
      kvprobe evaluate smollm2-135m --attend mine.py:small_norms --attend mine.py:last_128 --plot mine.png
      kvprobe evaluate MODEL --attend mine.py:small_norms --text book.txt --tokens 2048 --score-from 1024
    """

    name = "evaluate"
    example = "attend=[small_norms]"
    short = "What does an attention function of your own cost?"
    caption = "Loss beyond the model as it is, and KL divergence of the next-token distribution from its own."
    columns = (
        Column("attend", "attention"),
        *LOSS_COLUMNS,
        Column("kld_mean", "KL divergence (nat)", ".3f"),
        Column("kld_p99", "its 99th percentile", ".3f"),
        Column("top1_agreement", "same first token", ".1%"),
    )

    attend: tuple[Any, ...] = setting(
        (), "FILE.py:NAME, a function in a file, which is run. Repeat for several.", kind=str, loose=True
    )
    score_from: int | None = setting(
        None, "The token after this one is the first target.", kind=int, shown="half of --tokens"
    )
    seed: int = seed()

    def __post_init__(self) -> None:
        """Find the functions; raises as :func:`kvprobe.attention.named.named` does, and ValueError without any."""
        from kvprobe.attention.named import named

        super().__post_init__()
        functions = tuple(named(attend) for attend in self.attend)
        twice = [name for name, count in Counter(function.name for function in functions).items() if count > 1]
        if twice:
            raise SettingError("{attend}: two functions are called {0}: give each a name of its own", twice[0])
        if not functions:
            raise SettingError("{attend} needs at least one function of a call, or FILE.py:NAME")
        object.__setattr__(self, "attend", functions)

    def settings(self) -> dict[str, Any]:
        """The settings as a record has them: of each function its name, its file's name and that file's SHA-256."""
        return super().settings() | {"attend": [function.record() for function in self.attend]}

    def measure(self, subject: "Subject", progress: Progress) -> tuple[list[Row], dict[str, Any]]:
        """The model as it is, then a row a function, on the same targets.

        ``score_from`` defaults to half of the passage. Raises KvprobeError for a function that raises or returns
        another shape, naming it and the layer, for losses that are not finite and for what would not fit into memory.
        """
        from kvprobe.attention.language_model import language_model
        from kvprobe.memory import check_memory
        from kvprobe.probes.divergence import CHUNK, divergence
        from kvprobe.probes.intervals import default_block_length
        from kvprobe.probes.losses import check_score_from, scored_pass

        n_tokens, spec = subject.passage.n_tokens, subject.loaded.spec
        score_from = n_tokens // 2 if self.score_from is None else self.score_from
        check_score_from(n_tokens, score_from)
        # one layer's scores with a mask of each head, and two distributions with what is computed of them
        need = 12 * spec.n_heads * n_tokens**2 + 5 * 8 * CHUNK * spec.vocab_size
        check_memory(f"evaluating {n_tokens:,} tokens", need, subject.loaded.device, hint="fewer {tokens}")
        model, passes = language_model(subject.model), 1 + len(self.attend)
        progress("evaluating", 0, passes, "passes")
        full, reference = scored_pass(model, subject.input_ids, score_from=score_from)
        rows = [_row(None, reference[0], reference[0], divergence(model, full, full), self.seed)]
        for function in self.attend:
            progress("evaluating", len(rows), passes, "passes")
            hidden, losses = scored_pass(model, subject.input_ids, score_from=score_from, attend=function)
            rows.append(_row(function.name, losses[0], reference[0], divergence(model, full, hidden), self.seed))
        progress("evaluating", passes, passes, "passes")
        n_targets = n_tokens - 1 - score_from
        facts = {"score_from": score_from, "n_targets": n_targets}
        return rows, facts | {"interval": interval_of(default_block_length(n_targets))}

    @classmethod
    def sentence(cls, result: Result) -> str:
        """What the rows support, in one plain sentence, of the function closest to the model as it is."""
        row = min(result.rows[1:], key=lambda row: row["kld_mean"])
        closest = f", the closest of {len(result.rows) - 1}," if len(result.rows) > 2 else ""
        return (
            f"{passage_of(result.run)}, {result.run['n_targets']:,} targets: with {row['attend']}{closest} the loss "
            f"{change_of(row)}; the next-token distribution is {row['kld_mean']:.3f} nat from the full pass's, and the "
            f"same token is the most likely at {row['top1_agreement']:.1%} of the targets"
        )


def evaluate(
    subject: "Subject", attend: Any, *, score_from: int | None = None, seed: int = 0, progress: Progress = silent
) -> Result:
    """The loss of ``subject`` with ``attend`` in place of attention, beside its own, on the same targets.

    ``attend(call)`` is as for :func:`kvprobe.attending`; several functions are a list, and a text ``FILE.py:NAME``
    names one in a file, which is run. The first target is the token after ``score_from``, half of the passage by
    default. Rows have ``attend`` (None: the model as it is), ``loss``, ``perplexity``, ``delta`` in nat a token with
    its 95 % interval ``delta_low`` to ``delta_high`` (paired, by blocks of tokens), ``kld_mean`` and ``kld_p99`` of
    KL(full ‖ changed) in nat a token, and ``top1_agreement``. The interval stands on the targets of this passage alone,
    ``.run["n_targets"]`` of them. Raises as :class:`Evaluate` does.

    >>> import kvprobe
    >>> def small_norms(call):
    ...     last = call.last(64)
    ...     few = call.top(64, -call.key.norm(dim=-1), among=call.keep & ~last)
    ...     return call.attend(keep=last | few)
    >>> result = kvprobe.evaluate(kvprobe.prepare("smollm2-135m", tokens=256), small_norms)
    >>> [row["attend"] for row in result.rows], result.rows[1]["delta"] > 0
    ([None, 'small_norms'], True)
    """
    attends = attend if isinstance(attend, list | tuple) else [attend]
    return Evaluate(attend=tuple(attends), score_from=score_from, seed=seed).run(subject, progress=progress)


def _row(name: str | None, losses: "Tensor", reference: "Tensor", apart: Any, seed: int) -> Row:
    from kvprobe.probes.losses import loss_fields

    return {
        "attend": name,
        **loss_fields(losses, reference, seed=seed),
        "kld_mean": float(apart.kld.mean()),
        "kld_p99": float(apart.kld.quantile(0.99)),
        "top1_agreement": float(apart.agrees.double().mean()),
    }
