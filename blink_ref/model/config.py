"""What a model's ``config.json`` says, checked, and the RoPE table that follows from it."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blink_ref.errors import BlinkError

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a Llama-architecture model (Touvron et al. 2023; rotary: Su et al. 2021).

    ``rope_scaling`` is None for plain RoPE, else a dict whose ``rope_type`` is ``linear`` or
    ``llama3``. ``dtype`` is the one that the config declares for the stored weights.
    """

    name: str
    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    rms_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tied: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]
    dtype: str

    @classmethod
    def load(cls, path: Path) -> "ModelConfig":
        """Read ``config.json`` and, where there is one, ``generation_config.json`` in ``path``.

        What ``config.json`` leaves out has the default of transformers' ``LlamaConfig``; the
        generation config's token ids win, as in transformers' ``generate``.

        Raises BlinkError: a file is missing or corrupt, the architecture is another one, or the
        sizes contradict each other.
        """
        file = path / "config.json"
        raw = read_json(file)
        _refuse_other_architectures(raw, file)
        heads = _positive(raw, "num_attention_heads", file, int)
        hidden = _positive(raw, "hidden_size", file, int)
        theta, scaling = _rope(raw, file)
        bos_id, eos_ids = bos_and_eos(path)
        config = cls(
            name=model_name(path),
            vocab=_positive(raw, "vocab_size", file, int),
            hidden=hidden,
            ffn=_positive(raw, "intermediate_size", file, int),
            layers=_positive(raw, "num_hidden_layers", file, int),
            heads=heads,
            kv_heads=_positive(raw, "num_key_value_heads", file, int, heads),
            head_dim=_positive(raw, "head_dim", file, int, hidden // heads),
            context=_positive(raw, "max_position_embeddings", file, int, 2048),
            rms_eps=_positive(raw, "rms_norm_eps", file, float, 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tied=raw.get("tie_word_embeddings") is True,
            bos_id=bos_id,
            eos_ids=eos_ids,
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        )
        _refuse_contradictions(config, raw, file)
        return config

    @property
    def parameters(self) -> int:
        """Number of weights; a tied embedding counts once."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.hidden


def rope_table(config: ModelConfig, positions: int) -> np.ndarray:
    """Cosines and sines of RoPE, float32 [positions, head_dim]: cos in [:, :d/2], sin in [:, d/2:].

    Dimension i is rotated with dimension i + d/2 (the half-split order of Hugging Face
    checkpoints). Angles are float64 and rounded once: at position 100,000 a float32 angle is
    already wrong in its third digit.

    Raises BlinkError: the scaling is of another type or lacks a number.
    """
    angle = np.outer(np.arange(positions, dtype=np.float64), _rope_frequencies(config))
    return np.hstack([np.cos(angle), np.sin(angle)]).astype(np.float32)


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``. Raises BlinkError: missing, unreadable, or not an object."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BlinkError(
            f"{file} is missing; a model is a directory in Hugging Face layout: "
            "config.json, *.safetensors, tokenizer.json"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise BlinkError(f"{file} cannot be read ({error}); fetch the model again") from None
    if not isinstance(value, dict):
        raise BlinkError(f"{file} holds a {type(value).__name__}, not an object; fetch the model again")
    return value


def model_name(path: Path) -> str:
    """What to call the model in ``path``: the folder's name, or ``org/name`` in the hub's cache."""
    # There the folder is .../models--org--name/snapshots/<commit>.
    path = path.resolve()
    if path.parent.name == "snapshots":
        return path.parents[1].name.removeprefix("models--").replace("--", "/")
    return path.name


def bos_and_eos(path: Path) -> tuple[int | None, tuple[int, ...]]:
    """The begin-of-text id, if any, and every id that ends a text, of the model in ``path``.

    Raises BlinkError: ``config.json`` is missing or corrupt, or an id is no integer.
    """
    file = path / "generation_config.json"
    raw, generation = read_json(path / "config.json"), read_json(file) if file.exists() else {}

    def ids(key: str, default: int) -> tuple[int, ...]:
        value = generation.get(key)
        if value is None:
            value = raw.get(key, default)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int for item in listed):
            raise BlinkError(f"{path}: {key} is {value!r}; it must be a token id, a list of them, or null")
        return tuple(listed)

    bos = ids("bos_token_id", 1)
    return (bos[0] if bos else None), ids("eos_token_id", 2)


def _positive(raw: dict[str, Any], key: str, where: Path | str, kind: type, default: float | None = None) -> Any:
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise BlinkError(f"{where}: {key} is missing; it must be a positive {kind.__name__}")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 < value < 2**63 and kind(value) == value):
        raise BlinkError(f"{where}: {key} is {value!r}; it must be a positive {kind.__name__}")
    return kind(value)


def _refuse_other_architectures(raw: dict[str, Any], file: Path) -> None:
    architecture = raw.get("architectures") or raw.get("model_type")
    if architecture not in (["LlamaForCausalLM"], "llama"):
        raise BlinkError(f"{file}: architecture {architecture!r} is not served; only LlamaForCausalLM is")
    # What is listed here changes the arithmetic, so that ignoring it would give wrong tokens.
    for key, served in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("quantization_config", None),
    ):
        if (value := raw.get(key)) not in (None, served):
            raise BlinkError(f"{file}: {key} is {value!r}, which is not served; only {served!r} is")


def _rope(raw: dict[str, Any], file: Path) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta``, ``rope_scaling``."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise BlinkError(f"{file}: rope scaling is {scaling!r}; it must be an object or null")
    part = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if part != 1.0:
        raise BlinkError(f"{file}: partial_rotary_factor is {part!r}, which is not served; only 1.0 is")
    holder = scaling if "rope_theta" in scaling else raw
    theta = _positive(holder, "rope_theta", file, float, 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    return theta, None if kind == "default" else {**scaling, "rope_type": kind}


def _rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Angle per position of each pair of dimensions, float64 [head_dim/2]."""
    frequency = config.rope_theta ** -(np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    kind = scaling.get("rope_type")
    if kind not in ("linear", "llama3"):
        raise BlinkError(f"{config.name}: rope_type {kind!r} is not served; only default, linear and llama3 are")

    def number(key: str, default: float | None = None) -> float:
        return _positive(scaling, key, config.name, float, default)

    slowed = frequency / number("factor")
    if kind == "linear":
        return slowed
    # Llama 3.1: waves that turn less than `low` times in the trained context are slowed, those that
    # turn more than `high` times are kept, and those between are blended.
    low, high = number("low_freq_factor"), number("high_freq_factor")
    if high <= low:
        raise BlinkError(f"{config.name}: high_freq_factor {high} must be above low_freq_factor {low}")
    turns = number("original_max_position_embeddings", config.context) * frequency / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - keep) * slowed + keep * frequency


def _refuse_contradictions(config: ModelConfig, raw: dict[str, Any], file: Path) -> None:
    if raw.get("head_dim") is None and config.hidden % config.heads:
        raise BlinkError(
            f"{file}: hidden_size {config.hidden} is no multiple of num_attention_heads {config.heads}, "
            "and there is no head_dim"
        )
    if config.heads % config.kv_heads:
        raise BlinkError(
            f"{file}: num_attention_heads {config.heads} is no multiple of num_key_value_heads {config.kv_heads}"
        )
    if config.head_dim % 2:
        raise BlinkError(f"{file}: head_dim is {config.head_dim}; RoPE needs an even one")
    special = config.eos_ids if config.bos_id is None else (config.bos_id, *config.eos_ids)
    for token in special:
        if not 0 <= token < config.vocab:
            raise BlinkError(f"{file}: special token {token} is outside the vocabulary of {config.vocab}")
    if config.dtype not in DTYPES:
        raise BlinkError(f"{file}: dtype {config.dtype!r} is not served; only {', '.join(DTYPES)} are")
    _rope_frequencies(config)
