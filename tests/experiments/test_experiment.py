"""An experiment takes what its settings say, names what it refuses, and can be asked for by its options."""

import doctest
import pickle
import pydoc
import re
from dataclasses import dataclass

import numpy as np
import pytest

from kvprobe import errors, experiments
from kvprobe.errors import KvprobeError
from kvprobe.experiments import registry
from kvprobe.experiments.experiment import Experiment, SettingError, setting, settings_of
from kvprobe.experiments.lowrank import Lowrank
from kvprobe.experiments.relief import Relief
from kvprobe.experiments.sinks import Sinks
from kvprobe.experiments.window import Window
from kvprobe.models import loading
from kvprobe.models.subject import prepare
from support.tiny import tiny_ids


@dataclass(frozen=True, kw_only=True)
class Made(Experiment):
    share: float = setting(0.5, "A share.", least=0, most=1, above=True)
    sizes: tuple[int, ...] = setting((), "Sizes.", kind=int, flag="--size", least=1, most=9)
    rank: int | None = setting(None, "A rank.", kind=int)
    exact: bool = setting(False, "Whether.")
    way: str = setting("near", "A way.", choices=("near", "far"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"share": "a"}, "share must be a number, got 'a'"),
        ({"share": None}, "share must be a number, got None"),
        ({"share": True}, "share must be a number, got True"),
        ({"share": 0}, "share must be a number above 0 and at most 1, got 0"),
        ({"share": float("nan")}, "share must be a number above 0 and at most 1, got nan"),
        ({"sizes": 3}, "sizes must be a list, even of one, got 3"),
        ({"sizes": "3"}, "sizes must be a list, even of one, got '3'"),
        ({"sizes": None}, "sizes must be a list, even of one, got None"),
        ({"sizes": (1, 2.5)}, "sizes must be a whole number, got 2.5"),
        ({"sizes": (1, 10)}, "sizes must be a number between 1 and 9, got 10"),
        ({"rank": 1.0}, "rank must be a whole number, got 1.0"),
        ({"exact": 1}, "exact must be True or False, got 1"),
        ({"way": 1}, "way must be a string, got 1"),
        ({"way": "{0} {share}"}, "way must be one of near, far, got '{0} {share}'"),
    ],
)
def test_what_is_refused_is_named(settings, says):
    with pytest.raises(SettingError) as refused:
        Made(**settings)
    assert str(refused.value) == says
    assert str(pickle.loads(pickle.dumps(refused.value))) == says


def test_numbers_of_numpy_become_pythons_and_lists_tuples():
    made = Made(share=np.float32(0.25), sizes=np.arange(1, 3), rank=np.int64(4))
    assert made == Made(share=0.25, sizes=[1, 2], rank=4)
    assert [type(size) for size in (*made.sizes, made.rank)] == [int] * 3
    assert type(made.share) is float
    assert made.settings() == {"share": 0.25, "sizes": [1, 2], "rank": 4, "exact": False, "way": "near"}
    assert (Made(share=1).share, Made(sizes=range(1, 3)).sizes) == (1, (1, 2))


def test_the_examples_of_the_errors_run():
    assert doctest.testmod(errors).failed == 0


@pytest.mark.parametrize("name", registry.names())
def test_every_setting_of_every_experiment_refuses_what_it_is_not_by_name(name):
    kind = registry.experiment(name)
    for field in settings_of(kind):
        if (name, field) != ("lowrank", "fit_text"):
            with pytest.raises(SettingError, match=f"^{field} must be .*, got .*object object"):
                kind(**{field: object()})


def test_settings_that_contradict_each_other_are_named():
    with pytest.raises(SettingError, match=r"^fit_text needs basis heldout, not basis prefix$"):
        Lowrank(fit_text="manual", basis="prefix")
    with pytest.raises(SettingError, match=r"^epsilon must be a number, got 'a'$"):
        Sinks(epsilon="a")
    with pytest.raises(SettingError, match=r"^positions must be one of absolute, cache, recompute, got 'near'$"):
        Window(positions="near")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (Window(windows=(0,)), "windows must be at least 1 (the query itself), got 0"),
        (Lowrank(ranks=(33,)), "ranks must be between 1 and 32 (64 tokens fitted, width 32), got 33"),
        (Sinks(queries_from=64), "queries_from must be between 0 and 63 for tokens 64, got 64: give queries_from 32"),
        # what another experiment refused on its behalf
        (Relief(n_sink=65), "n_sink must be between 0 and 64 for 64 tokens, got 65"),
        (Relief(windows=(0,)), "windows must be at least 1 (the query itself), got 0"),
    ],
)
def test_what_a_model_or_passage_refuses_is_named_as_the_experiment_has_it(tiny_llama, asked, says):
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        asked.run(prepare(str(tiny_llama), tokens=64, device="cpu"))


def test_every_class_is_handed_out_by_the_package_and_help_has_its_settings():
    for name in registry.names():
        kind = registry.experiment(name)
        assert getattr(experiments, kind.__name__) is kind
        assert kind.__name__ in dir(experiments)
        shown = pydoc.plain(pydoc.render_doc(kind))
        assert f">>> from kvprobe.experiments import {kind.__name__}" in shown
        assert all(f"{setting}: " in shown for setting in settings_of(kind))
    with pytest.raises(AttributeError, match="no attribute 'Nosuch'"):
        _ = experiments.Nosuch


def test_an_experiment_takes_what_prepare_takes_and_names_what_it_does_not(tiny_llama):
    loaded = loading.load(str(tiny_llama), device="cpu")
    ids = tiny_ids(48)[0]
    rows = experiments.Sinks(queries_from=8).run(prepare(loaded, ids=ids)).rows
    assert len(rows) == loaded.spec.n_layers
    read = prepare(loaded, tokens=96)
    assert read.passage.n_tokens == 96
    memory = experiments.Memory(contexts=(8,))
    assert memory.run(read).rows == memory.run(loaded).rows == memory.run(str(tiny_llama)).rows
    assert experiments.Cache(contexts=(8,)).run(str(tiny_llama)).rows[0]["context"] == 8
    with pytest.raises(KvprobeError, match=r"positions, fewer than 1,024 tokens: use tokens 256"):
        experiments.Window().run(loaded)
    with pytest.raises(
        TypeError, match=r"Sinks\.run takes a model's name, or what kvprobe.load .* not LlamaForCausalLM"
    ):
        experiments.Sinks().run(loaded.model)
    with pytest.raises(SettingError, match="windows takes no None: the full pass is always the first row"):
        experiments.Window(windows=[16, None])
    with pytest.raises(ValueError, match=r"give queries_from 3"):
        experiments.Sinks().run(prepare(loaded, ids=ids[:7]))
