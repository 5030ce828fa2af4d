"""What does lm-evaluation-harness score with a window of 64 tokens: around its own model, by ours, on our cache?"""

import sys

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import kvprobe
import kvprobe.clients.lm_eval  # the harness then knows the model "kvprobe"


def last_64(call):
    return call.attend(keep=call.last(64))


def run(name, task, folder=None):
    manager = TaskManager(include_path=folder, include_defaults=folder is None)
    asked = {"tasks": [task], "task_manager": manager, "bootstrap_iters": 0}
    loaded = kvprobe.load(name)
    with kvprobe.attending(loaded.model, last_64):
        around = lm_eval.simple_evaluate(HFLM(loaded.model, tokenizer=loaded.tokenizer), **asked)
    ours = lm_eval.simple_evaluate("kvprobe", {"pretrained": loaded, "attend": f"{__file__}:last_64"}, **asked)
    cache = {"cache": "rolling", "window": 64, "n_sink": 0}
    cached = lm_eval.simple_evaluate("kvprobe", {"pretrained": loaded, **cache}, **asked)
    return {way: done["results"][task] for way, done in (("around", around), ("ours", ours), ("cached", cached))}


if __name__ == "__main__":
    print(run(*sys.argv[1:]))
