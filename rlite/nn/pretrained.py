"""The one place that opens model folders, which are the work of strangers.

No code of a folder runs, and nobody is asked whether it may. A folder that cannot be used ends in one message. The
tensors of a checkpoint are compared with the model's, so that none is left out unnoticed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

from rlite.data.chat.template import check_template_limits
from rlite.errors import CheckpointError, ConfigError, RliteError
from rlite.files import reading
from rlite.nn.architecture import rope_parts, summary
from rlite.nn.base import meta_parameters, real_tensors
from rlite.nn.folders import model_folder
from rlite.runtime.parallel.shards import CheckpointReader
from rlite.wording import counted

PLAIN = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_QUANTISED = re.compile(r"scale|zero|absmax|quant|packed|g_idx|_blocks$|SCB$")
_REBUILT = re.compile(r"rotary_emb\.inv_freq|(^|\.)position_ids$")
"""buffers of old checkpoints that every class computes itself"""


def check_plain(config: Any, path: str | Path) -> None:
    """Refuse a checkpoint whose config says that its weights are quantised.

    Args:
        config: the config of the checkpoint.
        path: the checkpoint, for messages.

    Raises:
        CheckpointError: the weights are quantised.
    """
    for part in (config, config.get_text_config()):
        for key in ("quantization_config", "compression_config"):
            if (found := vars(part).get(key)) is not None:
                method = found.get("quant_method") if isinstance(found, Mapping) else None
                raise CheckpointError(f"{path}: {_quantised(f'its config has {key}, method {method}')}")


def check_fit(
    reader: Any,
    expected: Collection[str],
    path: str | Path,
    model: nn.Module,
    leaves_out: Callable[[str], bool] = lambda name: False,
) -> None:
    """Refuse a checkpoint with tensors that the model would leave out or read as other numbers.

    The code that reads the tensors refuses missing ones and other shapes.

    Args:
        reader: a `CheckpointReader`, or another reader of its interface.
        expected: the checkpoint's names of the model's parameters.
        path: the checkpoint, for messages.
        model: the model; of a transformers class, tied names and names to ignore are known.
        leaves_out: whether the model leaves out a tensor of this name on purpose.

    Raises:
        CheckpointError: the message names a tensor and the remedy.
    """
    names = set(reader.names())
    problem = _other_type(reader, sorted(names.intersection(expected))) or _untied(reader, names, model)
    problem = problem or _left_over(reader, sorted(names.difference(expected)), model, leaves_out)
    if problem:
        raise CheckpointError(f"{path}: {problem}")


def _other_type(reader: Any, names: Iterable[str]) -> str | None:
    wrong = next((name for name in names if reader.dtype(name) not in PLAIN), None)
    return wrong and _quantised(f"{wrong} is of type {reader.dtype(wrong)}")


def _untied(reader: Any, names: Collection[str], model: nn.Module) -> str | None:
    for name, source in _tied(model).items():
        if {name, source} <= set(names) and not torch.equal(reader.read(name), reader.read(source)):
            return (
                f"the config ties {name} to {source}, and the file holds two different tensors. Set "
                '"tie_word_embeddings": false in config.json, or write the folder again with save_pretrained()'
            )
    return None


def _left_over(reader: Any, names: Iterable[str], model: nn.Module, leaves_out: Callable[[str], bool]) -> str | None:
    """Return a text about the tensors that the model neither has nor makes itself, None if there are none."""
    tied, buffers = _tied(model), dict(model.named_buffers())
    ignored = [_REBUILT, *(vars(model).get("_keys_to_ignore_on_load_unexpected") or ())]

    def is_known(name: str) -> bool:
        if name in tied or leaves_out(name) or any(re.search(pattern, name) for pattern in ignored):
            return True
        return name in buffers and torch.equal(reader.read(name).to(buffers[name]), buffers[name])

    left = [name for name in names if not is_known(name)]
    if scale := next(filter(_QUANTISED.search, left), None):
        return _quantised(f"it holds {scale}")
    if not left:
        return None
    own = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))  # the class that FSDP extends
    return (
        f"it holds {counted(len(left), 'tensor')} that {own.__name__} does not have, such as {left[0]}; they "
        "would be left out. Use a model whose class has them, or a checkpoint without them"
    )


def _tied(model: nn.Module) -> Mapping[str, str]:
    """Return tied parameters of a transformers model, each with the name of the parameter that it is tied to."""
    return model.get_expanded_tied_weights_keys(all_submodels=True) if isinstance(model, PreTrainedModel) else {}


def _quantised(reason: str) -> str:
    return (
        f"the checkpoint is quantised ({reason}); rlite reads float32, float16 and bfloat16. Use the original, or "
        "write one: load the model with transformers, call dequantize() and save_pretrained()"
    )


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


def local_checkpoint(path: str | Path, weights: bool = True) -> Path:
    """Return the folder of a checkpoint, downloaded if `path` is a name on the hub.

    Args:
        path: a folder or a name.
        weights: download the weights, too.

    Raises:
        ConfigError: there is neither such a folder nor such a name.
    """
    if (folder := model_folder(path)) is not None:
        return folder
    patterns = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(str(path), allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = f" ({str(error).splitlines()[0]})" if isinstance(error, HfHubHTTPError) else ""
        raise ConfigError(
            f"model {str(path)!r}: no such folder, and the Hugging Face hub gives no model of this name{reason}; "
            "check the path, or download the model first"
        ) from error


def load_config(path: str | Path, cls: Any = AutoConfig, **changes: Any) -> Any:
    """Return the transformers config of a checkpoint, which names neither code nor kernels to fetch.

    Args:
        path: folder or hub name of the checkpoint.
        cls: class of the config; by default the one of the checkpoint's `model_type`.
        changes: values that replace those of the file.

    Raises:
        CheckpointError: the config is unusable.
        ConfigError: there is no such checkpoint.
    """
    folder = local_checkpoint(path, weights=False)
    with opening(folder, "config of a model"):
        config = cls.from_pretrained(folder, **_NO_CODE, **changes)
        for kind in (part.get("rope_type", "default") for part in rope_parts(config.get_text_config())):
            _expect(kind in ROPE_KINDS, f"its rope_type is {kind!r}; expected one of {', '.join(ROPE_KINDS)}")
        config._attn_implementation = config._experts_implementation = None  # the file may name kernels to download
    if own := vars(config).get("auto_map"):
        _warn_once(
            "%s names code of its own (auto_map: %s), which rlite never runs. The model is computed as transformers' "
            "%r; if that code computes something else, so does this run",
            *(str(path), json.dumps(own), config.model_type),
        )
    return config


def load_tokenizer(path: str | Path, reads_text: bool = True) -> Any:
    """Return the tokenizer of a checkpoint.

    Args:
        path: folder or hub name of the checkpoint.
        reads_text: refuse a tokenizer without a vocabulary, which transformers makes of config.json alone.

    Raises:
        CheckpointError: the tokenizer is unusable.
        ConfigError: there is no such checkpoint, or it has no tokenizer.
    """
    folder = local_checkpoint(path, weights=False)
    with opening(folder, "tokenizer"):
        _expect_few_added_tokens(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, **_NO_CODE)
        tokenizer("a")  # some files fail at the first text
        check_template_limits(tokenizer)
    if reads_text and len(tokenizer.get_vocab()) <= len(tokenizer.get_added_vocab()):
        raise ConfigError(f"model {path}: no tokenizer: copy tokenizer.json and tokenizer_config.json into its folder")
    return tokenizer


def end_ids(path: str | Path, config: Any = None) -> tuple[int, ...]:
    """Return a model's own end tokens, from generation_config.json if it exists, else from the config.

    Args:
        path: folder or hub name of the checkpoint.
        config: the config of the checkpoint, if it is known already.

    Raises:
        CheckpointError: the file is unusable.
    """
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

    Args:
        config: from `load_config`.
        dtype: type of the weights.

    Raises:
        CheckpointError: transformers makes no causal language model of this config.
    """
    with opening(config._name_or_path, "config of a causal language model"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **_NO_CODE)


def meta_model(config: Any, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Any:
    """Return what `make_model` makes, with parameters on meta, real buffers, and tied weights tied.

    Args:
        config: from `load_config`.
        dtype: type of the weights.
        device: device of the buffers.

    Raises:
        CheckpointError: transformers makes no causal language model of this config.
    """
    with real_tensors(device), meta_parameters():
        model = make_model(config, dtype)
    with real_tensors(device):  # accelerate registers a new parameter for each name, so tied weights are apart
        model.tie_weights()
    return model


def stored_dtype(path: str | Path, config: Any) -> torch.dtype:
    """Return the dtype of a checkpoint's weights: the config's, else that of its first tensor."""
    if config.dtype is not None:
        return config.dtype
    reader = CheckpointReader(path)
    return reader.dtype(reader.names()[0])


def load_model(cls: Any, path: str | Path, **changes: Any) -> Any:
    """Return a checkpoint's model with its weights in float32 on the CPU, as transformers reads it.

    Args:
        cls: class of transformers, such as `AutoModelForCausalLM`.
        path: folder of the checkpoint.
        changes: values that replace those of its config.

    Raises:
        CheckpointError: the model is unusable, or the folder lacks or adds a tensor below the head.
    """
    config = load_config(path, **changes)
    check_plain(config, path)
    given = {"config": config, "dtype": torch.float32, "output_loading_info": True}
    with opening(path, "model"):
        model, found = cls.from_pretrained(path, **given, **_NO_CODE)
        prefix = f"{model.base_model_prefix}." if model.get_output_embeddings() is None else ""
        wrong = [name for key in ("missing_keys", "unexpected_keys") for name in found[key] if name.startswith(prefix)]
        _expect(not wrong, f"{len(wrong)} tensors are missing or left over, such as {wrong[:1]}")
    return model


def load_adapter(cls: Any, model: Any, folder: str | Path) -> Any:
    """Return a model with an adapter beside its weights.

    Args:
        cls: class of PEFT.
        model: the base model.
        folder: folder of the adapter.

    Raises:
        CheckpointError: the adapter is unusable.
    """
    with opening(folder, "adapter"):
        return cls.from_pretrained(model, str(folder))


@contextmanager
def opening(folder: str | Path, what: str) -> Iterator[None]:
    """Convert any error of reading a folder inside the block to CheckpointError.

    Args:
        folder: the folder.
        what: the part of it that is read, for messages.

    Yields:
        None.

    Raises:
        CheckpointError: a file is no regular file or too large, or its reader failed.
        ConfigError: the folder's own code would have to run.
        RliteError: as raised inside the block.
    """
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
            raise ConfigError(
                f"{folder}: the {what} needs code of its own (auto_map), which rlite never runs. Use a model whose "
                "type transformers has"
            ) from error
        raise CheckpointError(f"{folder}: no usable {what}: {summary(error)}") from error
    finally:
        logging.set_verbosity(level)


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


def _expect_readable(file: Path) -> None:
    with reading(file) as stream:
        size = stream.seek(0, 2)
    is_small = size <= MAX_FILE_BYTES or file.suffix == ".safetensors"
    _expect(is_small, f"{file.name} has {size / 2**20:.0f} MiB, more than any model needs")


def _expect_sizes(values: Any) -> None:
    """Refuse sizes that no model has, before memory is taken for them."""
    _expect(isinstance(values, Mapping), "config.json holds no mapping")
    for name, value in values.items():
        if isinstance(value, Mapping):
            _expect_sizes(value)
        elif isinstance(value, int):
            limit = MAX_LAYERS if _LAYERS.search(str(name)) else MAX_SIZE
            _expect(abs(value) < limit or "theta" in name, f"{name}={value} is larger than in any model")


def _expect_few_added_tokens(folder: Path) -> None:
    for name, key in (("tokenizer.json", "added_tokens"), ("tokenizer_config.json", "added_tokens_decoder")):
        if (folder / name).exists():
            count = len(json.loads((folder / name).read_bytes()).get(key) or ())
            _expect(count <= MAX_ADDED_TOKENS, f"{name} adds {count} tokens, expected at most {MAX_ADDED_TOKENS}")
