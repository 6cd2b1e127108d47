"""The one place that opens model folders, which are the work of strangers.

No code of a folder runs, and nobody is asked whether it may. A folder that cannot be used ends in one message.

Device of a new model's parameters: `accelerate.init_empty_weights` patches `nn.Module.register_parameter` for the whole
process, and `torch.device("meta")` is a mode of the thread. Code that builds a model inside a caller's context states
what it wants, by `real_tensors` and `meta_parameters`.
"""

from __future__ import annotations

import json
import re
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from torch import nn
from transformers import GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

from rlite.data.chat.template import check_template_limits
from rlite.errors import CheckpointError, ConfigError, RliteError
from rlite.files import expect, reading
from rlite.nn.options import model_folder
from rlite.runtime.parallel.shards import CheckpointReader

logger = getLogger(__name__)
_warn_once = cache(logger.warning)

GENERATION = "generation_config.json"
READ = (".json", ".safetensors", ".txt", ".model", ".jinja")
"""endings of the files of a folder that somebody reads"""
MAX_FILE_BYTES = 2**27
"""largest file beside the weights: the largest tokenizers of today have a quarter of it"""
MAX_ADDED_TOKENS = 20_000
"""most tokens beside a tokenizer's vocabulary, which are slow to read"""
MAX_SIZE, MAX_LAYERS = 2**31, 1_000
"""largest size in a config, and the most layers"""
ROPE_KINDS = ("default", *ROPE_INIT_FUNCTIONS)
_LAYERS = re.compile(r"(^|_)(n_)?(layers?|depth|experts)$")
_NO_CODE: Mapping[str, Any] = {"trust_remote_code": False}


QUANTISATIONS = ("fp8", "mxfp4")
"""methods whose weights are read: fp8 with a scale per block or per tensor, and MXFP4"""


def check_plain(config: Any, path: str | Path, reads: Collection[str] = QUANTISATIONS) -> None:
    """Refuse a checkpoint whose weights are quantised by a method that is not read; say once if it is read."""
    if (found := quantisation(config, path, reads)) is not None:
        told = "its weights are converted to bfloat16 as they are read, and exports of the model hold bfloat16"
        _warn_once("%s is stored in %s: %s", str(path), found["quant_method"], told)


def quantisation(config: Any, path: str | Path, reads: Collection[str] = QUANTISATIONS) -> Mapping[str, Any] | None:
    """Return the parameters of the quantisation of a checkpoint's weights; None if they are plain."""
    for part in (config, config.get_text_config()):
        for key in ("quantization_config", "compression_config"):
            if (found := vars(part).get(key)) is not None:
                method = found.get("quant_method") if isinstance(found, Mapping) else None
                if key == "compression_config" or method not in reads:
                    raise CheckpointError(f"{path}: {quantised(f'its config has {key}, method {method}')}")
                return found
    return None


def forget_quantisation(config: Any) -> None:
    """Remove the quantisation from a config whose model holds plain weights."""
    for part in (config, config.get_text_config()):
        vars(part).pop("quantization_config", None)


def causal_config(config: Any) -> Any:
    """Return the config of the causal language model in a checkpoint: of the text model inside a multimodal one."""
    text = config.get_text_config()
    if text is config or type(text) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    text.dtype = text.dtype or config.dtype
    text._name_or_path = config._name_or_path
    folder = Path(config._name_or_path)
    if config.tie_word_embeddings and not text.tie_word_embeddings and next(folder.glob("*.safetensors"), None):
        # transformers' model ties by the outer config, unless the head is stored
        text.tie_word_embeddings = not any(name.endswith("lm_head.weight") for name in CheckpointReader(folder).names())
    return text


def is_container(config: Any, model: Any) -> bool:
    """Return True if a checkpoint's config is of a model around a text model, and `model` is the text model."""
    text = config.get_text_config()
    return text is not config and isinstance(model, transformers.PreTrainedModel) and type(model.config) is type(text)


def local_checkpoint(path: str | Path, weights: bool = True) -> Path:
    """Return the folder of a checkpoint, downloaded if `path` is a name on the hub."""
    if (folder := model_folder(path)) is not None:
        return folder
    patterns = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(str(path), allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = f" ({str(error).splitlines()[0]})" if isinstance(error, HfHubHTTPError) else ""
        problem = f"no such folder, and the Hugging Face hub gives no model of this name{reason}"
        raise ConfigError(f"model {str(path)!r}: {problem}; check the path, or download the model first") from error


def load_config(path: str | Path, cls: Any = transformers.AutoConfig, **changes: Any) -> Any:
    """Return the transformers config of a checkpoint, which names neither code nor kernels to fetch.

    `cls`: class of the config; by default the one of the checkpoint's `model_type`.
    """
    folder = local_checkpoint(path, weights=False)
    with opening(folder, "config of a model"):
        config = cls.from_pretrained(folder, **_NO_CODE, **changes)
        for kind in (part.get("rope_type", "default") for part in rope_parts(config.get_text_config())):
            expect(kind in ROPE_KINDS, f"its rope_type is {kind!r}; expected one of {', '.join(ROPE_KINDS)}")
        config._attn_implementation = config._experts_implementation = None  # the file may name kernels to download
        for part in (config, config.get_text_config()):  # some classes have no such field, and tie nothing
            part.tie_word_embeddings = getattr(part, "tie_word_embeddings", False)
    if own := vars(config).get("auto_map"):
        _warn_once(
            "%s names code of its own (auto_map: %s), which rlite never runs. The model is computed as transformers' "
            "%r; if that code computes something else, so does this run",
            *(str(path), json.dumps(own), config.model_type),
        )
    return config


def load_tokenizer(path: str | Path, reads_text: bool = True) -> Any:
    """Return the tokenizer of a checkpoint."""
    folder = local_checkpoint(path, weights=False)
    with opening(folder, "tokenizer"):
        _expect_few_added_tokens(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **_NO_CODE)
        tokenizer("a")  # some files fail at the first text
        check_template_limits(tokenizer)
    if reads_text and len(tokenizer.get_vocab()) <= len(tokenizer.get_added_vocab()):
        raise ConfigError(f"model {path}: no tokenizer: copy tokenizer.json and tokenizer_config.json into its folder")
    return tokenizer


def end_ids(path: str | Path, config: Any = None) -> tuple[int, ...]:
    """Return a model's own end tokens, from generation_config.json if it exists, else from the config."""
    folder = local_checkpoint(path, weights=False)
    if (folder / GENERATION).exists():
        with opening(folder, GENERATION):
            found = GenerationConfig.from_pretrained(folder).eos_token_id
    else:
        found = (config or load_config(folder)).get_text_config().eos_token_id
    return (found,) if isinstance(found, int) else tuple(found or ())


def add_end_ids(folder: Path, tokens: Collection[int]) -> None:
    """Add end tokens to generation_config.json of a checkpoint, which is made if it does not exist."""
    if not tokens:
        return
    own, path = end_ids(folder), folder / GENERATION
    if not path.exists():  # transformers then reads the model's config, with its other tokens
        made = GenerationConfig.from_model_config(load_config(folder))
        made._from_model_config = False
        made.to_json_file(path)
    kept: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "eos_token_id": [*dict.fromkeys((*own, *tokens))]}, indent=2) + "\n")


def make_model(config: Any, dtype: torch.dtype | None = None) -> Any:
    """Return transformers' causal language model of a config with new weights.

    `config`: from `load_config`. Of a multimodal model, its text model is made.
    """
    with opening(config._name_or_path, "config of a causal language model"):
        config = causal_config(config)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, **_NO_CODE)


def meta_model(config: Any, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Any:
    """Return what `make_model` makes, with parameters on meta, real buffers, and tied weights tied."""
    with real_tensors(device), meta_parameters():
        model = make_model(config, dtype)
    with real_tensors(device):  # accelerate registers a new parameter for each name, so tied weights are apart
        model.tie_weights()
    kept = model._keep_in_fp32_modules_strict or ()
    for name, buffer in model.named_buffers():
        if buffer.dtype in (torch.float16, torch.bfloat16) and any(part in name for part in kept):  # routers' biases
            buffer.data = buffer.data.float()
    return model


def stored_dtype(path: str | Path, config: Any) -> torch.dtype:
    """Return the dtype of a checkpoint's weights: the config's, else bfloat16 if quantised, else the first tensor's."""
    if config.dtype is not None:
        return config.dtype
    if vars(config).get("quantization_config") is not None:
        return torch.bfloat16
    reader = CheckpointReader(path)
    return reader.dtype(reader.names()[0])


def load_model(cls: Any, path: str | Path, **changes: Any) -> Any:
    """Return a checkpoint's model with its weights in float32 on the CPU, as transformers reads it."""
    config = load_config(path, **changes)
    check_plain(config, path, reads=())
    given = {"config": config, "dtype": torch.float32, "output_loading_info": True}
    with opening(path, "model"):
        model, found = cls.from_pretrained(path, **given, **_NO_CODE)
        prefix = f"{model.base_model_prefix}." if model.get_output_embeddings() is None else ""
        wrong = [name for key in ("missing_keys", "unexpected_keys") for name in found[key] if name.startswith(prefix)]
        expect(not wrong, f"{len(wrong)} tensors are missing or left over, such as {wrong[:1]}")
    return model


def load_adapter(cls: Any, model: Any, folder: str | Path) -> Any:
    """Return a model with an adapter beside its weights."""
    with opening(folder, "adapter"):
        return cls.from_pretrained(model, str(folder))


@contextmanager
def opening(folder: str | Path, what: str) -> Iterator[None]:
    """Convert any error of reading a folder inside the block to CheckpointError."""
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # the error says it
    try:
        for file in sorted(Path(folder).iterdir()) if Path(folder).is_dir() else ():
            if file.name.endswith(READ):
                _expect_readable(file)
            if file.name == "config.json":  # transformers' readers of anything else read it, too
                _expect_sizes(json.loads(file.read_bytes()))
        yield
    except RliteError:
        raise
    except BaseException as error:  # of any kind: the files are a stranger's, and their parsers are of others
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":  # a panic of tokenizers
            raise
        if "trust_remote_code" in str(error):
            problem = f"{folder}: the {what} needs code of its own (auto_map), which rlite never runs"
            raise ConfigError(f"{problem}. Use a model whose type transformers has") from error
        raise CheckpointError(f"{folder}: no usable {what}: {summary(error)}") from error
    finally:
        logging.set_verbosity(level)


def _expect_readable(file: Path) -> None:
    with reading(file) as stream:
        size = stream.seek(0, 2)
    is_small = size <= MAX_FILE_BYTES or file.suffix == ".safetensors"
    expect(is_small, f"{file.name} has {size / 2**20:.0f} MiB, more than any model needs")


def _expect_sizes(values: Any) -> None:
    """Refuse sizes that no model has, before memory is taken for them."""
    expect(isinstance(values, Mapping), "config.json holds no mapping")
    for name, value in values.items():
        if isinstance(value, Mapping):
            _expect_sizes(value)
        elif isinstance(value, int):
            limit = MAX_LAYERS if _LAYERS.search(str(name)) else MAX_SIZE
            expect(abs(value) < limit or "theta" in name, f"{name}={value} is larger than in any model")


def _expect_few_added_tokens(folder: Path) -> None:
    for name, key in (("tokenizer.json", "added_tokens"), ("tokenizer_config.json", "added_tokens_decoder")):
        if (folder / name).exists():
            count = len(json.loads((folder / name).read_bytes()).get(key) or ())
            expect(count <= MAX_ADDED_TOKENS, f"{name} adds {count} tokens, expected at most {MAX_ADDED_TOKENS}")


def quantised(reason: str) -> str:
    """Return the message for a checkpoint whose weights are quantised."""
    return (
        f"the checkpoint is quantised ({reason}); rlite reads float32, float16, bfloat16, MXFP4, and fp8 with scales "
        "per block. Use the original, or write one: load the model with transformers, call dequantize() and "
        "save_pretrained()"
    )


def summary(error: BaseException) -> str:
    """Return an error's message in one line, with its kind if it is not rlite's own."""
    text = textwrap.shorten(str(error), 200, placeholder=" ...")
    return text if isinstance(error, RliteError) else f"{type(error).__name__}: {text}"


def rope_parts(config: transformers.PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the rotary parameters of a config: of all layers, and by kind of layer."""
    rope = vars(config).get("rope_parameters") or {}
    return [part for part in (rope, *rope.values()) if isinstance(part, dict)]


def padding_token(tokenizer: Any, vocab_size: int, ends: Collection[int]) -> int | None:
    """Return the id of a token for padding with which no row ends, preferably the tokenizer's own; None without one.

    transformers scores the last token that is not the padding: of a row that ends with it, the one before.
    """
    added = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    named = [i for i in added if "pad" in tokenizer.added_tokens_decoder[i].content.lower()]
    known = [tokenizer.pad_token_id, *named, tokenizer.unk_token_id, tokenizer.bos_token_id, *added]
    return next((token for token in known if token is not None and token not in ends and token < vocab_size), None)


def causal_lm_class(path: str | Path, carrier: type) -> Any:
    """Return a subclass of the train module `carrier` and the causal language model of the checkpoint at `path`."""
    return _carried_class(path, carrier, transformers.MODEL_FOR_CAUSAL_LM_MAPPING, "causal language model")


def score_class(path: str | Path, carrier: type) -> Any:
    """Return a subclass of the score module `carrier` and the sequence classification of the checkpoint at `path`."""
    classes = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    return _carried_class(path, carrier, classes, "sequence classification for models")


def _carried_class(path: str | Path, carrier: type, classes: Mapping[type, type], what: str) -> Any:
    config = load_config(path)
    check_plain(config, path)
    of_text = causal_config(config)
    if type(of_text) not in classes:
        raise ConfigError(f"{path}: transformers has no {what} of type {config.model_type!r}")
    model = classes[type(of_text)]
    return type(f"{carrier.__name__}{model.__name__}", (carrier, model), {})


@contextmanager
def real_tensors(device: torch.device | str = "cpu") -> Iterator[None]:
    """Make parameters and buffers on `device` inside the block, even within `init_empty_weights` or a device mode."""
    patched = nn.Module.register_parameter, nn.Module.register_buffer
    nn.Module.register_parameter = _original(patched[0], "Module.register_parameter")  # type: ignore[method-assign]
    nn.Module.register_buffer = _original(patched[1], "Module.register_buffer")  # type: ignore[method-assign]
    try:
        with torch.device(device):
            yield
    finally:
        nn.Module.register_parameter, nn.Module.register_buffer = patched  # type: ignore[method-assign]


def meta_parameters() -> AbstractContextManager[None]:
    """Return a context in which new parameters are on meta and cost nothing; buffers (rotary `inv_freq`) stay real."""
    return init_empty_weights(include_buffers=False)


def _original(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return torch's own method below any number of patches, each of which keeps its predecessor in its closure."""
    while function.__qualname__ != name:
        inner = [c.cell_contents for c in function.__closure__ or () if callable(c.cell_contents)]
        function = next(f for f in inner if getattr(f, "__qualname__", "") == name or getattr(f, "__closure__", None))
    return function


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Show no progress bars of transformers inside the block, and no deprecation warnings."""
    with ExitStack() as stack:
        if logging.is_progress_bar_enabled():
            stack.callback(logging.enable_progress_bar)
        logging.disable_progress_bar()
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        yield
