"""Models of a given shape with random weights; those on a GPU are the same ones for transformers."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from blink_ref.model.config import ModelConfig
from blink_ref.model.weights import Weights, layer_shapes, save_safetensors

LLAMA_1B = ModelConfig(
    name="llama-3.2-1b-shape",
    vocab=128256,
    hidden=2048,
    ffn=8192,
    layers=16,
    heads=32,
    kv_heads=8,
    head_dim=64,
    context=4096,
    rms_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=None,
    tied=True,
    bos_id=None,
    eos_ids=(128001,),
    dtype="bfloat16",
)
"""Llama-3.2-1B's sizes, without its RoPE scaling."""

LLAMA_8B = replace(
    LLAMA_1B,
    name="llama-3.1-8b-shape",
    hidden=4096,
    ffn=14336,
    layers=32,
    head_dim=128,
    tied=False,
)
"""Llama-3.1-8B's."""

WIDE = ModelConfig(
    name="wide-shape",
    vocab=8192,
    hidden=512,
    ffn=1536,
    layers=8,
    heads=8,
    kv_heads=4,
    head_dim=64,
    context=2048,
    rms_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    tied=True,
    bos_id=None,
    eos_ids=(2,),
    dtype="bfloat16",
)
"""For a CPU: the width of a small model, but few layers, each a large part of a step."""


def random_weights(config: ModelConfig, torch, seed: int = 0):
    """Normal(0, 0.02) bfloat16 weights made on the GPU: (Weights on the host, the same flat tensor on the GPU).

    In the flat array: the embedding, then the output matrix if it is another, then layer by layer Q, K, V, OUT,
    GATE, UP, DOWN.
    """
    shapes = layer_shapes(config)
    sizes = [rows * cols for rows, cols in shapes]
    embedding = config.vocab * config.hidden
    head = 0 if config.tied else embedding
    start = embedding + head
    layers = start + np.arange(config.layers)[:, None] * sum(sizes)
    matrix = (layers + np.concatenate([[0], np.cumsum(sizes)[:-1]])).astype(np.int64)
    n = start + config.layers * sum(sizes)
    generator = torch.Generator(device="cuda").manual_seed(seed)
    flat = torch.empty(n, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02, generator=generator)
    host = flat.view(torch.int16).cpu().numpy().view(np.uint16)
    norm = np.ones((2 * config.layers + 1, config.hidden), np.float32)
    return Weights(flat=host, matrix=matrix, norm=norm, embed=0, head=head), flat


def write_folder(folder: Path, config: ModelConfig, weights: Weights) -> None:
    """The model as files, in Hugging Face layout; without a tokenizer, which an engine does not need."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
        "eos_token_id": list(config.eos_ids),
        "torch_dtype": config.dtype,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    save_safetensors(folder / "model.safetensors", weights.named(config))


def transformers_model(config: ModelConfig, weights: Weights, flat, torch, transformers, dtype):
    """A ``LlamaForCausalLM`` on the GPU, of torch's `dtype`, with the weights of :func:`random_weights`."""
    hf = transformers.LlamaConfig(
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab,
        tie_word_embeddings=config.tied,
        max_position_embeddings=config.context,
        rms_norm_eps=config.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    )
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            model = transformers.LlamaForCausalLM(hf).to(dtype).eval()
    finally:
        torch.set_default_dtype(usual)
    state = model.state_dict()

    def put(name: str, at: int) -> None:
        target = state[name]
        target.copy_(flat[at : at + target.numel()].view(target.shape).to(dtype))

    put("model.embed_tokens.weight", weights.embed)
    if not config.tied:
        put("lm_head.weight", weights.head)
    kinds = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    for layer, offsets in enumerate(weights.matrix):
        for kind, at in zip(kinds, offsets, strict=True):
            put(f"model.layers.{layer}.{kind}_proj.weight", int(at))
    return model
