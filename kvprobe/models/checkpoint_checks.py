"""Are a configuration, weights and tokenizer what they claim to be, and which model does transformers make of them?"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.files.jsonfile import read_object
from kvprobe.memory import check_memory
from kvprobe.models import arrivals, hub, older_releases
from kvprobe.models.headers import Tensor
from kvprobe.shape.cache_bytes import DTYPE_BYTES
from kvprobe.shape.spec import Spec
from kvprobe.text import tokenizer_panics

if TYPE_CHECKING:
    import torch

MOST = 10_000
"""The most layers, heads or experts that are believed: no published model has a tenth of it."""
STOCK_CODE = "transformers' own class, the repository's code is not run"
_COUNTED = re.compile(r"(?<!per)_(layers?|experts?|heads?|blocks)$")
# families with a class for images and text that still predict text token by token
_WITH_IMAGES = re.compile(
    r"llava(_next|_next_video|_onevision)?|v(ideo_|ip)llava|qwen2(_5)?_vl|qwen3_vl(_moe)?|mistral3|internvl|idefics[23]"
    r"|smolvlm|aria|aya_vision|cohere2_vision|glm4v(_moe)?|lfm2_vl|ovis2"
)
_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size")
# a tokenizer that gives no id for any of this cannot read text
_ANYTHING = "The quick brown fox, 0123456789\n ACGT"
_LARGEST_TOKENIZER = 1 << 29


def read_spec(name: str, config: Mapping[str, Any]) -> Spec:
    """The shape that a configuration describes. Raises UnsupportedModelError if it makes no sense."""
    refuse_nonsense(name, config)
    try:
        return Spec.from_config(config)
    except KvprobeError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise UnsupportedModelError(
            f"config.json of {name} does not make sense ({type(error).__name__}: {first_line(error)})"
        ) from error


def refuse_nonsense(name: str, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for counts that no model has and widths that are not positive integers."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        for key, value in part.items():
            if _COUNTED.search(key) and isinstance(value, int) and value > MOST:
                raise UnsupportedModelError(f"config.json of {name} says {value:,} for {key}: more than {MOST:,}")
            if key in _WIDTHS:
                widths = value if isinstance(value, list) else [value]
                if wrong := [width for width in widths if not _is_width(width)]:
                    raise UnsupportedModelError(
                        f"config.json of {name} says {wrong[0]!r} for {key}: it must be a whole number, at least 1"
                    )


def refuse_unlike(name: str, spec: Spec, tensors: Mapping[str, Tensor]) -> None:
    """Raise KvprobeError if the configuration describes far more than the files hold.

    transformers would build the configured model before it looks at the files.
    """
    held = n_held(tensors)
    least = spec.vocab_size * spec.hidden_size if spec.n_parameters is None else spec.n_parameters
    if least > 4 * held:
        at_least = "at least " if spec.n_parameters is None else ""
        raise KvprobeError(
            f"config.json of {name} describes {at_least}{least:,} parameters, but its weights hold {held:,}: "
            "they do not belong together"
        )
    if spec.n_layers > len(tensors):
        raise KvprobeError(
            f"config.json of {name} describes {spec.n_layers:,} layers, but its weights are {len(tensors):,} tensors: "
            "they do not belong together"
        )


def refuse_too_big(name: str, tensors: Mapping[str, Tensor], spec: Spec, *, dtype: str, device: "torch.device") -> None:
    """Raise KvprobeError if the weights at ``dtype`` need more memory than is free."""
    need = max(n_held(tensors), spec.n_parameters or 0) * DTYPE_BYTES[dtype]
    hint = "a smaller model" + (" or {dtype} bfloat16" if dtype == "float32" else "")
    check_memory(f"the weights of {name} at {dtype}", need, device, hint=hint)


def n_held(tensors: Mapping[str, Tensor]) -> int:
    """Elements of all tensors; 4-bit codes count two a byte."""
    return sum(t.n_elements * (2 if t.dtype in ("U8", "I8") else 1) for t in tensors.values())


def refuse_foreign(name: str, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for a family that transformers lacks, and for one that is not causal."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    family = config.get("model_type")
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        if own := config.get("auto_map"):
            wanted = own.get("AutoModelForCausalLM", "its own classes") if isinstance(own, dict) else own
            raise UnsupportedModelError(
                f"{name} needs Python code from its own repository ({family}, {wanted}), which kvprobe never runs"
            )
        raise UnsupportedModelError(f"{name} is of the family {family!r}, unknown to the installed transformers")
    why = None if family in CAUSAL or _WITH_IMAGES.fullmatch(family) else "transformers has no class for it"
    if why := why or _not_causal(CONFIG_MAPPING[family], config):
        raise UnsupportedModelError(f"{name} is not a causal language model, one that predicts the next token: {why}")


def model(name: str, directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], **given: Any) -> Any:
    """The model that transformers makes of a directory, with every weight as in the files.

    ``given``: ``spec``; ``dtype``, a torch dtype; ``method``, from `arrivals.refuse_codes`. Raises KvprobeError for
    weights that are missing, left over or of another shape, and for what transformers cannot build.
    """
    from safetensors import SafetensorError

    spec: Spec = given["spec"]
    build = _class_for(config)
    if spec.n_parameters is None:
        _refuse_larger(name, directory, build, n_held(tensors))
    settings = {"dtype": given["dtype"], "trust_remote_code": False, "local_files_only": True}
    settings |= {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    if given["method"] is not None:
        settings["quantization_config"] = _dequantising(given["method"])
    if older_releases.installed() < older_releases.TESTED:
        settings["config"] = _configuration(older_releases.for_installed(name, config))
    try:
        made, report = build.from_pretrained(directory, **settings)
    except SafetensorError as error:
        raise KvprobeError(f"the safetensors of {name} are damaged: {error}") from error
    except ImportError as error:
        raise UnsupportedModelError(f"{name} needs a package that is not installed: {first_line(error)}") from error
    except Exception as error:
        # a configuration with impossible values may fail anywhere inside, with any error
        raise UnsupportedModelError(
            f"transformers cannot load {name} ({type(error).__name__}: {first_line(error)}); check its config"
        ) from error
    towers = any(isinstance(config.get(f"{part}_config"), Mapping) for part in ("text", "vision", "audio"))
    arrivals.refuse_losses(name, report, tensors, n_layers=spec.n_layers, towers=towers)
    arrivals.refuse_undequantised(name, made)
    arrivals.refuse_other_rotation(name, directory, made, tensors)
    return made


def tokenizer(name: str, directory: Path) -> Any:
    """The tokenizer of a directory. Raises UnsupportedModelError for one that is missing, broken or reads nothing."""
    # without any of these, transformers silently makes up an empty tokenizer
    files = [directory / file for file in ("tokenizer.json", "tokenizer.model", "vocab.json")]
    if not any(file.is_file() for file in files):
        raise UnsupportedModelError(f"{name} has no tokenizer: tokenizer.json is missing")
    for file in files:
        if file.is_file() and file.stat().st_size > _LARGEST_TOKENIZER:
            raise UnsupportedModelError(
                f"the tokenizer of {name} is too large: {file.name} has {file.stat().st_size:,} bytes"
            )
    with tokenizer_panics.guarded(name):
        try:
            made = _tokenizer_class(name, directory).from_pretrained(
                directory, trust_remote_code=False, local_files_only=True
            )
            ids = list(made(_ANYTHING, verbose=False)["input_ids"])
        except Exception as error:
            raise UnsupportedModelError(f"{name} has no tokenizer that can be loaded: {first_line(error)}") from error
    if not ids:
        raise UnsupportedModelError(f"the tokenizer of {name} gives no ids at all: check its tokenizer.json")
    made.name_or_path = name  # instead of the directory, since errors name no path
    return made


def refuse_broken(name: str, model: Any) -> None:
    """Raise KvprobeError for weights that are not finite."""
    import torch

    for path, parameter in model.named_parameters():
        # one sum per tensor: a non-finite value survives it
        if not torch.isfinite(parameter.sum(dtype=torch.float32)):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise KvprobeError(f"{name} has weights that are not finite at {dtype}, first {path}: check the checkpoint")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' and the hub client's notices and bars; the settings are restored afterwards."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with hub.quiet():
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _not_causal(kind: Any, config: Mapping[str, Any]) -> str | None:
    """Why a model is not causal as configured, although transformers has a decoder for its family; None if it is."""
    family = config["model_type"]
    if config.get("is_encoder_decoder", getattr(kind, "is_encoder_decoder", False)):
        return f"{family} is an encoder with a decoder"
    if family == "xlnet" or (family == "xlm" and not config.get("causal", False)):
        return f"{family} reads a text from both sides"
    # GPT-NeoX is a decoder whatever is_decoder says
    if hasattr(kind, "is_decoder") and not family.startswith("gpt_neox") and not config.get("is_decoder", False):
        return f"{family} is an encoder, which reads a text from both sides, unless its config.json has is_decoder"
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        # "vision" does not affect text
        for key, both in (("is_causal", (False,)), ("use_bidirectional_attention", (True, "all"))):
            if part.get(key) in both:
                return f"its config.json says {part[key]!r} for {key}, so it reads a text from both sides"
    return None


def _class_for(config: Mapping[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if _WITH_IMAGES.fullmatch(config["model_type"]) else AutoModelForCausalLM


def _configuration(config: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))


def _tokenizer_class(name: str, directory: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = directory / "tokenizer_config.json"
    named = read_object(path, f"{path.name} of {name}").get("tokenizer_class") if path.is_file() else None
    # what release 5 calls a tokenizer.json without a class of its own
    return AutoTokenizer if named != "TokenizersBackend" else PreTrainedTokenizerFast


def _dequantising(method: str) -> Any:
    from transformers import FineGrainedFP8Config, Mxfp4Config

    # on a GPU too, so that the same is measured everywhere
    return Mxfp4Config(dequantize=True) if method == "mxfp4" else FineGrainedFP8Config(dequantize=True)


def _refuse_larger(name: str, directory: Path, build: Any, held: int) -> None:
    """Raise KvprobeError if a family without a closed form describes far more than the files hold."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        described = n_described(build, config)
    except Exception:  # building the model itself raises the same error
        return
    if described > 4 * held:
        raise KvprobeError(
            f"config.json of {name} describes {described:,} parameters, but its weights hold {held:,}: "
            "they do not belong together"
        )


def n_described(build: Any, config: Any) -> int:
    """Parameters of the model that a transformers class makes of a configuration, without allocating them."""
    import torch

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build.from_config(config).parameters())


def _is_width(value: Any) -> bool:
    return value is None or (type(value) is int and value > 0)
