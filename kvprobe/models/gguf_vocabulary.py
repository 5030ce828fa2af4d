"""Can a tokenizer be made from the vocabulary of a GGUF file, and is every key of it understood?"""

from collections.abc import Mapping
from typing import Any

from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.models.gguf_header import Skipped, shown

_PREFIX = "tokenizer.ggml."
_DAMAGED = "the header is damaged; fetch the file again"

# ids that are not added to a text
_IDS = {f"{name}_token_id" for name in ("eot", "eom", "seperator", "mask", "cls", "prefix", "suffix", "middle")}
_IDS |= {f"fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")}
_USED_IDS = {f"{name}_token_id" for name in ("bos", "eos", "unknown", "padding")}
_FLAGS = {"add_bos_token", "add_eos_token", "add_space_prefix"}
# for encoders and T5, or for what follows an answer: they do not affect a passage
_IDLE = {"token_type_count", "remove_extra_whitespaces", "precompiled_charsmap", "add_sep_token", "eos_token_ids"}
_LISTS = {"tokens", "scores", "token_type", "merges"}
_KNOWN = _IDS | _USED_IDS | _FLAGS | _IDLE | _LISTS | {"model", "pre"}
_KNOWN |= {"suppress_tokens", "normalizer.lowercase"}

# how a byte-level vocabulary splits text before merging: as GPT-2, also digit by digit, or as transformers knows
AS_GPT2 = {"default", "gpt-2", "phi-2", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code"}
AS_GPT2 |= {"roberta-bpe", "gigachat", "a.x-4.0", "mellum", "modern-bert", "mpt", "olmo", "jais", "trillion"}
AS_GPT2 |= {"granite-docling"}
DIGITS_ALONE = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
# these have BOS in front unless a key says otherwise, and do not merge inside a word that is a token
AS_LLAMA3 = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"}
AS_LLAMA3 |= {"tekken"}
_OF_TRANSFORMERS = AS_LLAMA3 | {"dbrx", "smaug-bpe", "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"}
_OF_TRANSFORMERS |= {"qwen35", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"}


def check_vocabulary(keys: Mapping[str, Any], *, text: bool = True) -> int:
    """The number of tokens. Raises KvprobeError, naming the key that is damaged, missing or not understood.

    Without ``text``, when none will be read, how it splits a text into words need not be known.
    """
    for key in keys:
        name = key.removeprefix(_PREFIX)
        if key.startswith("tokenizer.") and name not in _KNOWN and not _is_template(key):
            raise UnsupportedModelError(
                f"the effect of {shown(key)} on the tokens of a text is not understood: take the model's own files"
            )
    if text and not cuts_as_known(keys):
        raise UnsupportedModelError(
            f"how tokenizer.ggml.pre {shown(str(keys[_PREFIX + 'pre']))} splits a text into words is not known: "
            "take the model's own files"
        )
    own = {key.removeprefix(_PREFIX): value for key, value in keys.items() if key.startswith(_PREFIX)}
    tokens, kind = own.get("tokens"), own.get("model")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise KvprobeError(f"tokenizer.ggml.tokens is missing or not a list of texts: {_DAMAGED}")
    if not isinstance(kind, str):
        raise KvprobeError(f"tokenizer.ggml.model is missing: {_DAMAGED}")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise UnsupportedModelError(
            f"tokenizer.ggml.model is {shown(kind)}; gpt2, llama and gemma4 are read: take the model's own files"
        )
    for name in sorted(_USED_IDS & own.keys()):
        if type(own[name]) is not int or not 0 <= own[name] < len(tokens):
            raise KvprobeError(f"{_PREFIX}{name} is {own[name]!r}, but there are {len(tokens):,} tokens: {_DAMAGED}")
    for name in sorted(_FLAGS & own.keys()):
        if not isinstance(own[name], bool):
            raise KvprobeError(f"{_PREFIX}{name} is {own[name]!r}, neither true nor false: {_DAMAGED}")
    for name in ("scores", "token_type"):
        if name in own and _length(own[name]) != len(tokens):
            raise KvprobeError(
                f"{_PREFIX}{name} has {_length(own[name]):,} entries for {len(tokens):,} tokens: {_DAMAGED}"
            )
    if kind == "gpt2":
        _check_byte_level(own, tokens)
    elif "scores" not in own and "merges" not in own:
        raise KvprobeError(f"tokenizer.ggml.scores is missing: {_DAMAGED}")
    return len(tokens)


def cuts_as_known(keys: Mapping[str, Any]) -> bool:
    """Whether a tokenizer made from the file would split a text into words as the file says."""
    known = AS_GPT2 | DIGITS_ALONE | _OF_TRANSFORMERS
    return keys.get(f"{_PREFIX}model") != "gpt2" or keys.get(f"{_PREFIX}pre", "default") in known


def _is_template(key: str) -> bool:
    return key.startswith(("tokenizer.chat_template", "tokenizer.huggingface.", "tokenizer.rwkv."))


def _length(value: Any) -> int:
    return value.count if isinstance(value, Skipped) else len(value) if isinstance(value, list) else -1


def _check_byte_level(own: Mapping[str, Any], tokens: list[str]) -> None:
    merges = own.get("merges")
    if not isinstance(merges, list):
        raise KvprobeError(f"tokenizer.ggml.merges is missing or not a list of texts: {_DAMAGED}")
    known = set(tokens)
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else ()
        if len(pair) != 2 or pair[0] not in known or pair[1] not in known or "".join(pair) not in known:
            raise KvprobeError(f"the merge {shown(str(merge))} is not of two tokens into a third: {_DAMAGED}")
