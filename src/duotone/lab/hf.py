"""Causal language models of Hugging Face transformers, trained on bytes."""

import hashlib
import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.lab.model import VOCABULARY
from duotone.lab.presets import Preset

CONFIG, WEIGHTS = "config.json", ("*.safetensors", "pytorch_model*.bin")
EXPERTS, CHOSEN = 8, 2
"""Of a class whose mixture of experts has a number of them to choose."""

RANDOM = ("drop", "jitter")
"""Numbers of a config whose names hold these are zero here: a held-out loss must not move the random state."""


class NextByte:
    """Mixed in before a causal model: forward(tokens, targets), int64 (batch, tokens), gives the mean loss in nats."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = super().forward(input_ids=tokens, use_cache=False).logits  # type: ignore[misc]
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True)
class HuggingFace:
    """A folder with a config.json, or a class of transformers in the sizes of a preset. UserError where it is neither.

    Weights are those of the folder where it has any, in fp32; else they are random. Modules keep their names.
    """

    given: str

    def outline(self, preset: Preset) -> nn.Module:
        """The model on torch's current default device, with random weights."""
        auto, config = _transformers(self.given).AutoModelForCausalLM, self.config(preset)
        try:
            return _next_byte(auto.from_config(config, dtype=torch.float32, trust_remote_code=False))
        except Exception as error:
            raise _unusable(self.given, error) from error

    def build(self, preset: Preset, seed: int) -> nn.Module:
        """The model on the CPU, a function of the preset and the seed alone."""
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
        """Of the config, as far as it decides what the model computes."""
        kept = {k: v for k, v in self.config(preset).to_dict().items() if k not in ("transformers_version", "dtype")}
        return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def has_weights(self) -> bool:
        return any(path for pattern in WEIGHTS for path in Path(self.given).glob(pattern))

    def config(self, preset: Preset) -> Any:
        """The config, without dropout; UserError where it cannot take the bytes and the context of the preset."""
        transformers = _transformers(self.given)
        try:
            if Path(self.given, CONFIG).is_file():
                config = transformers.AutoConfig.from_pretrained(
                    self.given, local_files_only=True, trust_remote_code=False
                )
            else:
                kind = _class(transformers, self.given).config_class
                known = {*inspect.signature(kind).parameters, *kind.attribute_map}
                config = kind(**{name: size for name, size in _sizes(preset).items() if name in known})
        except UserError:
            raise
        except Exception as error:
            raise _unusable(self.given, error) from error
        if hasattr(config, "is_decoder"):
            config.is_decoder = True  # an encoder would see the byte that it is to predict
        for name, value in config.to_dict().items():
            if isinstance(value, float) and any(part in name for part in RANDOM):
                setattr(config, name, 0.0)
        for field, least in {"vocab_size": VOCABULARY, "max_position_embeddings": preset.model.context}.items():
            found = getattr(config, field, least)
            if found < least:
                needs = f"the preset {preset.name} trains on bytes and needs at least {least}"
                raise UserError(f"hf:{self.given} has {field} {found}, but {needs}: give another model or preset")
        return config

    def _load(self, preset: Preset) -> nn.Module:
        auto, config = _transformers(self.given).AutoModelForCausalLM, self.config(preset)
        options = {"local_files_only": True, "trust_remote_code": False, "output_loading_info": True}
        try:
            model, info = auto.from_pretrained(self.given, config=config, dtype=torch.float32, **options)
        except Exception as error:
            raise _unusable(self.given, error) from error
        if missing := sorted(info["missing_keys"]):
            remedy = "give a folder that a causal language model was saved to"
            raise UserError(f"the weights in {self.given} lack {missing[0]} of {type(model).__name__}: {remedy}")
        return _next_byte(model)


def _next_byte(model: nn.Module) -> nn.Module:
    """The model in training, whose forward gives the loss."""
    kind = type(model)
    model.__class__ = type(kind.__name__, (NextByte, kind), {"__module__": kind.__module__})
    return model.train()


def _sizes(preset: Preset) -> dict[str, Any]:
    """The preset in the words of a config."""
    model = preset.model
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": model.dim,
        "intermediate_size": model.hidden,
        "moe_intermediate_size": model.hidden,
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.heads,
        "head_dim": model.dim // model.heads,
        "max_position_embeddings": model.context,
        "tie_word_embeddings": model.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _class(transformers: ModuleType, name: str) -> Any:
    """The causal language model called `name`; UserError where there is none."""
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if name not in names:
        what = "a folder with a config.json nor a causal language model of transformers"
        raise UserError(f"hf:{name} is neither {what}: give such a folder, or a class such as LlamaForCausalLM")
    return getattr(transformers, name)


def _transformers(given: str) -> ModuleType:
    """The package, which then reports errors alone; UserError where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        remedy = "pip install 'transformers>=5'"
        raise UserError(f"--model hf:{given} needs transformers, which is not installed: {remedy}") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _unusable(given: str, error: Exception) -> UserError:
    first = next(iter(str(error).splitlines()), type(error).__name__)
    return UserError(f"hf:{given} cannot be built ({first}): give another folder or class")
