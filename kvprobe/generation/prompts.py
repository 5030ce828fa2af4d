"""Which ids does a model read for a prompt: the text as it stands, or as a message in the model's chat template?"""

from typing import Any

from kvprobe.errors import KvprobeError, Wording
from kvprobe.models.loading import Loaded
from kvprobe.text import passages
from kvprobe.text.passages import Bos, Passage
from kvprobe.text.texts import Text


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer has a chat template, as those of instruct models do."""
    return bool(getattr(tokenizer, "chat_template", None))


def in_template(loaded: Loaded, prompt: str, *, system: str | None = None) -> str:
    """The chat that the model expects: ``prompt`` as the user's message, and the beginning of the answer.

    The model's own template is rendered by transformers, in jinja2's sandbox. ``system`` is the message before it;
    without one, many templates add their own. Raises KvprobeError for a model without a template, and for a template
    that refuses the messages or leaves out ``system``.
    """
    if not has_template(loaded.tokenizer):
        raise KvprobeError(
            Wording(
                "{0} has no chat template, so it is probably not an instruct model: leave out {chat} and write the "
                "prompt as text to be continued",
                loaded.name,
            )
        )
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt})
    try:
        chat = str(loaded.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is foreign code, which may raise anything
        why = " ".join(str(error).split()) or type(error).__name__
        hint = "leave out {chat}" if system is None else "leave out {system}, which some templates do not know"
        said = "the chat template of {0} cannot be used ({1}): " + hint
        raise KvprobeError(Wording(said, loaded.name, why[:200])) from None
    if system is not None and system.strip() not in chat:
        said = "the chat template of {0} drops the system message: leave out {system}"
        raise KvprobeError(Wording(said, loaded.name))
    return chat


def encoded(
    loaded: Loaded, prompt: str, *, chat: bool = False, system: str | None = None, bos: Bos = "auto"
) -> Passage:
    """The ids of a prompt. The name of a special token in it becomes that token, as the tokenizer reads it.

    In a chat, nothing is added in front: the template has its own BOS. Raises KvprobeError as `in_template` does.
    """
    if loaded.tokenizer is None:
        raise ValueError(f"{loaded.name} has no tokenizer to read a prompt with: give tokenizer=…")
    if not isinstance(prompt, str):
        raise ValueError(
            f"a prompt must be a string, got {type(prompt).__name__}: give a message's text with chat=True, which puts "
            "it into the model's template, and system=… beside it"
        )
    if system is not None and not chat:
        raise ValueError("a system message needs a chat: give chat=True too")
    if chat:
        prompt, bos = in_template(loaded, prompt, system=system), "drop"
    return passages.whole(loaded.tokenizer, Text("the prompt", "", prompt), bos=bos)


def end_ids(loaded: Loaded) -> list[int]:
    """The ids that end a text: the generation config's, or the tokenizer's if absent."""
    given = getattr(getattr(loaded.model, "generation_config", None), "eos_token_id", None)
    given = loaded.tokenizer.eos_token_id if given is None else given
    return [] if given is None else [given] if isinstance(given, int) else list(given)
