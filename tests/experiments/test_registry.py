"""The fields of rows and records are a contract: written out here by hand, for every experiment that has one."""

from functools import partial

import pytest

from kvprobe.bench import machine
from kvprobe.cells.run_store import RunStore
from kvprobe.experiments import registry
from kvprobe.experiments.cache import KnownShape
from kvprobe.experiments.gqa_training import Protocol, TrainingSubject
from kvprobe.models.subject import prepare
from kvprobe.text.corpus import characters
from kvprobe.text.texts import Text
from kvprobe.training.loop import TrainConfig

# what may grow, but never change: the fields that every user can rely on
FIXED = {
    "sinks": "layer mass uniform sink_rate",
    "lowrank": "rank width limit loss perplexity delta delta_low delta_high energy bytes_full latent_bytes basis_bytes "
    "break_even_tokens",
    "window": "window n_sink positions loss perplexity delta delta_low delta_high cache_tokens",
    "relief": "lever kind window n_sink rank basis bits loss perplexity delta delta_low delta_high bytes "
    "bytes_per_token basis_bytes relief on_front",
    "cache": "lever support context batch dtype bytes bytes_per_token weights_bytes",
    "memory": "context formula_bytes measured_bytes pinned_bytes",
    "latency": "context batch dtype phase ms_median ms_low ms_high tokens_per_s bytes_moved flops intensity "
    "ceiling_tokens_per_s fraction_of_ceiling",
    "gqa": "n_kv_heads seed best_val_loss attention_params cache_bytes_per_token",
    "gqa --pool": "n_kv_heads seed best_val_loss attention_params cache_bytes_per_token",
}
# and what has grown since
GROWN = {
    "sinks": "top_position top_token top_mass window head_mass",
    "lowrank": "ratio notional_ratio of stage basis centered allocate",
    "window": "sink_choice sink_positions bos_kept local_layers has_sink_logits sink_logits_dropped",
    "relief": "n_tokens",
    "cache": "kind state_bytes stops_at relief outweighs_at note",
    "memory": "batch cache excess_bytes ratio",
    "latency": "step n_runs bytes_per_s weight_flops attention_flops attention_intensity bound",
    "gqa": "best_step last_val_loss",
    "gqa --pool": "perplexity delta delta_low delta_high",
}
RUN = "versions cpu wall_s date"
MODEL = f"model revision source dtype device family gpu threads autocast {RUN}"
PASSAGE = f"{MODEL} passage passage_sha256 passage_offset ids_sha256 n_tokens bos has_bos"
LOSSES = "score_from n_targets interval seed"
RECORDS = {
    "sinks": f"{PASSAGE} queries_from epsilon control control_id seed mass sink_rate",
    "lowrank": f"{PASSAGE} {LOSSES} ranks of stage basis fit_text centered allocate n_fitted ranks_by_layer "
    "has_local_layers",
    "window": f"{PASSAGE} {LOSSES} windows sinks positions sink_choice drop_sink_logits",
    "relief": f"{PASSAGE} {LOSSES} windows n_sink ranks bases bits",
    "cache": f"{RUN} model revision source family support shape spec n_parameters max_positions contexts batch dtype "
    "dtype_source window n_sink rank weights_bytes weights_source",
    "memory": f"{MODEL} contexts batch kinds window n_sink seed counted_by",
    "latency": f"{MODEL} contexts batches engine cache_kind compiled repeats seconds seed prompt_tokens new_tokens "
    "naive_samples notes start_up_s busy load cores torch_threads arithmetic_binds_at_batch "
    "bandwidth_bytes_per_s bandwidth_kernels matrix_flops_per_s matrix_kernels ridge_point",
    "gqa": f"{RUN} corpus corpus_kind corpus_sha256 vocab length n_train n_valid protocol n_layers width n_heads "
    "kv_heads seeds uptrain uptrain_steps pool device margin missing cells summary interval steps batch micro_batch "
    "learning_rate schedule warm_up floor betas eps weight_decay clip validate_every dtype skip",
    "gqa --pool": f"{PASSAGE} {LOSSES} n_heads kv_heads pool",
}
SMALL = {
    "sinks": {"queries_from": 8},
    "lowrank": {"ranks": (4,)},
    "window": {"windows": (8,)},
    "relief": {"windows": (8,), "ranks": (4,)},
    "memory": {"contexts": (8,)},
    "latency": {"contexts": (8,), "phases": ("cached",), "engine": "torch", "seconds": 0.0},
    "gqa": {"kv_heads": (8,), "seeds": 1},
    "gqa --pool": {"pool": True},
}


@pytest.fixture(scope="module")
def subjects(tiny_llama, tmp_path_factory):
    """What each experiment is asked of, by what it needs."""
    subject = prepare(str(tiny_llama), tokens=48, device="cpu")
    shape = KnownShape(subject.loaded.spec, {"model": "tiny", "revision": "0", "source": "test"})
    corpus = characters(Text("times", "", "it was the best of times " * 12), length=8, n_train=40, n_valid=8)
    plan = TrainConfig(steps=2, batch=4, validate_every=1)
    protocol = Protocol(n_layers=1, width=16, length=8, n_train=40, n_valid=8, plan=plan)
    training = TrainingSubject(corpus, RunStore(tmp_path_factory.mktemp("cells")), protocol=protocol)
    return {"passage": subject, "model": subject.loaded, "config": shape, "corpus": training}


@pytest.mark.parametrize("name", list(FIXED))
def test_rows_and_records_have_the_fields_that_are_promised(name, subjects, monkeypatch):
    quick = partial(machine.measure_machine, buffer_bytes=2**20, gemm_widths=(32,), seconds=0.001)
    monkeypatch.setattr(machine, "measure_machine", quick)
    kind = registry.experiment(name.split()[0])
    result = kind(**SMALL.get(name, {})).run(subjects["passage" if "--pool" in name else kind.needs])
    assert set(result.rows[0]) == {*FIXED[name].split(), *GROWN[name].split()}
    assert set(result.run) == set(RECORDS[name].split())
    shown = kind.shown(result).rows[0]
    assert set(kind.table_columns(result)) <= set(shown)
    assert kind.figure(result, width=3.35, title=False).get_figwidth() == 3.35


def test_every_experiment_that_kvprobe_offers_has_its_fields_here():
    assert {name.split()[0] for name in FIXED} <= set(registry.names())
    for name in registry.names():
        kind = registry.experiment(name)
        assert (kind.name, kind.needs in ("config", "model", "passage", "corpus")) == (name, True)
