"""Causal language models of Hugging Face transformers, trained on bytes."""

import hashlib
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duotone.errors import UserError
from duotone_lab.training.model import VOCABULARY
from duotone_lab.training.presets import Preset

CONFIG, WEIGHTS = "config.json", ("*.safetensors", "pytorch_model*.bin")
EXPERTS, CHOSEN = 8, 2
"""The number of experts of a mixture, and of those that a token goes to, for classes that let us choose."""

RANDOM = ("drop", "jitter")
"""Numbers of a config whose names contain these become zero: a held-out loss must not change the random state."""


class NextByte:
    """Mixed in before a causal model: forward(tokens, targets), int64 (batch, tokens), gives the mean loss in nats."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = super().forward(input_ids=tokens, use_cache=False).logits  # type: ignore[misc]
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True)
class HuggingFace:
    """A folder with a config.json, or a class of transformers in the sizes of a preset. UserError if it is neither.

    Weights are those of the folder, in fp32. If it has none, they are random. Modules keep their names.
    """

    source: str

    def outline(self, preset: Preset) -> nn.Module:
        """The model on torch's current default device, with random weights."""
        auto, config = self._transformers().AutoModelForCausalLM, self.config(preset)
        with self._usable():
            return _next_byte(auto.from_config(config, dtype=torch.float32, trust_remote_code=False))

    def build(self, preset: Preset, seed: int) -> nn.Module:
        """The model with fp32 parameters on the CPU, a function of the arguments alone."""
        if self.has_weights:
            return self._load(preset)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.outline(preset)

    def describe(self, preset: Preset) -> str:
        """The model in one line."""
        config = self.config(preset)
        weights = f"{'its own' if self.has_weights else 'random'} weights"
        return f"{config.model_type}, {config.num_hidden_layers} layers of {config.hidden_size}, {weights}"

    def digest(self, preset: Preset) -> str:
        """A digest of all fields of the config that change the results."""
        entries = self.config(preset).to_dict().items()
        decisive = {key: value for key, value in entries if key not in ("transformers_version", "dtype")}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def has_weights(self) -> bool:
        """Whether the folder has files of weights, and not a configuration alone."""
        return any(path for pattern in WEIGHTS for path in Path(self.source).glob(pattern))

    def config(self, preset: Preset) -> Any:
        """The config, without dropout; UserError if it cannot take the bytes and the context of the preset."""
        transformers = self._transformers()
        with self._usable():
            if Path(self.source, CONFIG).is_file():
                options = {"local_files_only": True, "trust_remote_code": False}
                config = transformers.AutoConfig.from_pretrained(self.source, **options)
            else:
                kind = self._class(transformers).config_class
                fields = {*inspect.signature(kind).parameters, *kind.attribute_map}
                config = kind(**{name: size for name, size in _sizes(preset).items() if name in fields})
        if hasattr(config, "is_decoder"):
            config.is_decoder = True  # an encoder would see the byte that it is to predict
        for name, value in config.to_dict().items():
            if isinstance(value, float) and any(part in name for part in RANDOM):
                setattr(config, name, 0.0)
        for field, least in {"vocab_size": VOCABULARY, "max_position_embeddings": preset.model.context}.items():
            if (size := getattr(config, field, least)) < least:
                needs = f"the preset {preset.name} trains on bytes and needs at least {least}"
                raise UserError(f"hf:{self.source} has {field} {size}, but {needs}: give another model or preset")
        return config

    def _load(self, preset: Preset) -> nn.Module:
        auto, config = self._transformers().AutoModelForCausalLM, self.config(preset)
        options = {"local_files_only": True, "trust_remote_code": False, "output_loading_info": True}
        with self._usable():
            model, info = auto.from_pretrained(self.source, config=config, dtype=torch.float32, **options)
        if missing := sorted(info["missing_keys"]):
            remedy = "give a folder that a causal language model was saved to"
            raise UserError(f"the weights in {self.source} lack {missing[0]} of {type(model).__name__}: {remedy}")
        return _next_byte(model)

    def _class(self, transformers: ModuleType) -> Any:
        names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        if self.source not in names:
            what = "a folder with a config.json nor a causal language model of transformers"
            remedy = "give such a folder, or a class such as LlamaForCausalLM"
            raise UserError(f"hf:{self.source} is neither {what}: {remedy}")
        return getattr(transformers, self.source)

    def _transformers(self) -> ModuleType:
        """The package, set to report only errors. UserError if it is not installed."""
        try:
            import transformers
        except ImportError as error:
            remedy = "pip install 'transformers>=5'"
            raise UserError(f"--model hf:{self.source} needs transformers, which is not installed: {remedy}") from error
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        return transformers

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Whatever transformers raises is a UserError of one line."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(f"hf:{self.source} cannot be built ({first}): give another folder or class") from error


def _next_byte(model: nn.Module) -> nn.Module:
    """The model in training. Its forward returns the loss."""
    kind = type(model)
    model.__class__ = type(kind.__name__, (NextByte, kind), {"__module__": kind.__module__})
    return model.train()


def _sizes(preset: Preset) -> dict[str, object]:
    """The preset in the words of a config."""
    model = preset.model
    return {
        **dict.fromkeys(("num_experts", "num_local_experts"), EXPERTS),
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), model.hidden),
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), model.heads),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        "vocab_size": VOCABULARY,
        "hidden_size": model.dim,
        "num_experts_per_tok": CHOSEN,
        "num_hidden_layers": model.layers,
        "head_dim": model.dim // model.heads,
        "max_position_embeddings": model.context,
        "tie_word_embeddings": model.tied,
    }
