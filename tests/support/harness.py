"""lm-evaluation-harness, imported when it is first used, and a task whose clue lies far before the question."""

import json
import random
import warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import kvprobe

NAMES = ("Anna", "Peter", "Maria", "John", "Laura", "David", "Emma", "Thomas", "Sarah", "Robert")
NAMES += ("Alice", "Henry", "Julia", "Martin", "Helen", "Frank", "Clara", "Oscar", "Ruth", "Simon")
COLOURS = ("blue", "red", "green", "black", "white", "gold", "silver", "pink", "brown", "yellow")
FILLER = (
    "The harbour was quiet in the morning. Boats came in with the tide, and people carried baskets of fish to the "
    "market. In the afternoon the wind turned, the nets were hung up to dry, and children ran along the wall. An old "
    "man mended his boat with tar and rope, and two gulls watched him from the roof of the shed."
)
TASK = """
task: passwords
dataset_path: json
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@contextmanager
def its_own_warnings():
    """What the harness and what it imports warn of is not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def harness():
    """The harness's functions and classes, and our model for it, which this registers."""
    with its_own_warnings():
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        from kvprobe.clients.lm_eval import KvprobeLM
    return SimpleNamespace(evaluate=lm_eval.simple_evaluate, HFLM=HFLM, TaskManager=TaskManager, KvprobeLM=KvprobeLM)


def last_64(call):
    return call.attend(keep=call.last(64))


def around(model, attend):
    """A block in which the model has this attention, or its own."""
    return nullcontext() if attend is None else kvprobe.attending(model, attend)


def request(*args):
    """What the harness hands to a model: the arguments are all that either reads."""
    return SimpleNamespace(args=args, task_name=None)


def passwords(n_items):
    """Texts with four choices each, of which ``answer`` is right and stands more than 64 tokens before the end."""
    rng = random.Random(0)
    for name in NAMES[:n_items]:
        choices, answer = rng.sample(COLOURS, 4), rng.randrange(4)
        text = f"The password of {name} is {choices[answer]}. {FILLER} The password of {name} is"
        yield {"text": text, "choices": choices, "answer": answer}


def write_passwords(folder, n_items=20):
    """Writes them as the task ``passwords`` into ``folder``, for the harness's ``include_path``."""
    lines = "".join(json.dumps(item) + "\n" for item in passwords(n_items))
    (folder / "items.jsonl").write_text(lines, encoding="utf-8")
    where = {"data_files": {"test": str(folder / "items.jsonl")}, "cache_dir": str(folder / "cache")}
    (folder / "passwords.yaml").write_text(f"{TASK}dataset_kwargs: {json.dumps(where)}\n", encoding="utf-8")
    return folder
