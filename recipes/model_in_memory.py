"""How do a fine-tuned model and a merged one, both only in memory, differ from the model that they were made of?"""

import copy
import sys

import torch

import kvprobe
from kvprobe.probes.losses import token_losses


def run(name, string, steps=3, rate=1e-4):
    loaded = kvprobe.load(name)
    ids = loaded.tokenizer(string, return_tensors="pt").input_ids.to(loaded.device)
    tuned = copy.deepcopy(loaded.model).train().requires_grad_(True)
    optimizer = torch.optim.SGD(tuned.parameters(), lr=rate)
    for _ in range(steps):
        tuned(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    merged, half = copy.deepcopy(loaded.model), tuned.state_dict()
    merged.load_state_dict({key: (value + half[key]) / 2 for key, value in merged.state_dict().items()})
    models = {"before": loaded.model, "tuned": tuned.eval(), "merged": merged}
    subjects = {key: kvprobe.prepare(model, tokenizer=loaded.tokenizer, string=string) for key, model in models.items()}
    return {key: float(token_losses(of.model, of.input_ids, score_from=0).mean()) for key, of in subjects.items()}


if __name__ == "__main__":
    print(run(*sys.argv[1:]))
