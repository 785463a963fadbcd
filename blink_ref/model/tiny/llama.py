"""The tiny model as train.py trains it: configuration, PyTorch modules, and the file of its weights.

A Llama (Touvron et al. 2023, arXiv 2302.13971) whose configuration and parameter names are those of
Hugging Face's ``LlamaForCausalLM``. Shapes: B rows of S tokens, D hidden, H heads, K kv heads,
d head size, F ffn, V vocabulary.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
}


class RMSNorm(nn.RMSNorm):
    def __init__(self) -> None:
        super().__init__(CONFIG["hidden_size"], eps=CONFIG["rms_norm_eps"])


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def rope_table(length: int) -> tuple[Tensor, Tensor]:
    """cos and sin [length, d] in float32, rounded once from float64 (Su et al. 2021, arXiv 2104.09864)."""
    d = CONFIG["head_dim"]
    frequency = CONFIG["rope_theta"] ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, heads, S, d]: element i is paired with element i + d/2, as Hugging Face lays it out."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        D, d = CONFIG["hidden_size"], CONFIG["head_dim"]
        H, K = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
        self.q_proj, self.o_proj = linear(D, H * d), linear(H * d, D)
        self.k_proj, self.v_proj = linear(D, K * d), linear(D, K * d)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, S, _ = x.shape
        q, k, v = (
            projection(x).view(B, S, -1, CONFIG["head_dim"]).transpose(1, 2)  # [B, H or K, S, d]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(B, S, -1))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        D, ffn = CONFIG["hidden_size"], CONFIG["intermediate_size"]
        self.gate_proj, self.up_proj, self.down_proj = linear(D, ffn), linear(D, ffn), linear(ffn, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(), RMSNorm()
        self.self_attn, self.mlp = Attention(), MLP()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Llama(nn.Module):
    """Token ids [B, S] to logits [B, S, V]; the head is the embedding table, transposed."""

    cos: Tensor
    sin: Tensor

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(CONFIG["vocab_size"], CONFIG["hidden_size"]),
                "layers": nn.ModuleList(Layer(dropout) for _ in range(CONFIG["num_hidden_layers"])),
                "norm": RMSNorm(),
            }
        )
        self.dropout = nn.Dropout(dropout)
        cos, sin = rope_table(CONFIG["max_position_embeddings"])
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # 2 L branches add to the residual stream; GPT-2 starts the matrix that ends each one smaller.
                ends_branch = name.endswith(("o_proj.weight", "down_proj.weight"))
                branches = 2 * CONFIG["num_hidden_layers"] if ends_branch else 1
                nn.init.normal_(parameter, std=CONFIG["initializer_range"] / math.sqrt(branches))

    def forward(self, tokens: Tensor) -> Tensor:
        S = tokens.shape[1]
        x = self.dropout(self.model["embed_tokens"](tokens))
        for layer in self.model["layers"]:
            x = layer(x, self.cos[:S], self.sin[:S])
        return F.linear(self.model["norm"](x), self.model["embed_tokens"].weight)


def save_weights(model: Llama, path: Path) -> None:
    """Write the weights as BF16 safetensors: 8-byte header length, JSON header, then the tensors.

    The header is padded with spaces so that the tensors, and with them a mapping of the file, start at a
    multiple of 64 bytes.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, parameter in model.named_parameters():
        raw = parameter.detach().cpu().bfloat16().view(torch.int16).numpy().tobytes()
        header[name] = {
            "dtype": "BF16",
            "shape": list(parameter.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
