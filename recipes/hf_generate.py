"""What does Hugging Face's `generate`, with its own cache, write if each token attends to the last 64 alone?"""

import sys

import kvprobe


def last_64(call):
    return call.attend(keep=call.last(64))


def run(name, prompt, max_new_tokens=32):
    loaded = kvprobe.load(name)
    read = loaded.tokenizer(prompt, return_tensors="pt").to(loaded.device)
    # transformers' DynamicCache
    how = {"cache_implementation": "dynamic", "max_new_tokens": max_new_tokens, "do_sample": False}
    with kvprobe.attending(loaded.model, last_64):
        made = loaded.model.generate(**read, **how)
    return made[0, read.input_ids.shape[1] :].tolist()


if __name__ == "__main__":
    ids = run(*sys.argv[1:])
    print(kvprobe.load(sys.argv[1]).tokenizer.decode(ids))
