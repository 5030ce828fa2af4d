"""A training of seconds: eleven letters drawn at random, two layers, seven steps."""

import torch

from kvprobe.cells.run_store import gpt_config
from kvprobe.text.corpus import Corpus
from kvprobe.training.loop import TrainConfig

CONFIG = gpt_config(2, vocab=11, length=8, n_layers=2, n_heads=4, width=16)
PLAN = TrainConfig(steps=7, batch=6, micro_batch=4, validate_every=3, seed=1)


def corpus(**split):
    ids = torch.randint(11, (300,), generator=torch.Generator().manual_seed(5))
    return Corpus("random", "", "ids", 11, ids, **({"length": 8, "n_train": 200, "n_valid": 10} | split))
