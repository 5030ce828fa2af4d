"""How do several measurements of several models become one table? With pandas, from each result's `.frame`."""

import sys

import pandas as pd

import kvprobe
from kvprobe.experiments.lowrank import Lowrank
from kvprobe.experiments.window import Window


def run(*names, tokens=256):
    frames = []
    for name in names:
        subject = kvprobe.prepare(name, tokens=tokens)
        for experiment in (Window(windows=(32, 64), sinks=(4,)), Lowrank(ranks=(4, 8))):
            result = experiment.run(subject)
            frames.append(result.frame.assign(model=result.run["model"], experiment=result.analysis))
    rows = pd.concat(frames, ignore_index=True)
    # each experiment's first row, the model as it is, has neither
    rows["size"] = rows["window"].fillna(rows["rank"])
    return rows.dropna(subset="size").pivot_table("delta", ["experiment", "size"], "model")


if __name__ == "__main__":
    print(run(*sys.argv[1:]))
