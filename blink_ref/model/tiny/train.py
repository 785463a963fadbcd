"""Train the tiny model: tokenizer, weights and configuration, from one text file.

    python corpus.py unpacked corpus.txt          # see corpus.py
    pip install torch tokenizers numpy
    python train.py corpus.txt out                # one GPU; on a CPU try --steps 20 --rows 2

Two kinds of document are learnt: chapters, ended by ``<|endoftext|>``, and dialogue from the same chapters
written as ChatML turns, so that a chat prompt is answered and the answer ends in ``<|im_end|>``.
"""

import argparse
import copy
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from llama import CONFIG, Llama, save_weights
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

END_OF_TEXT, IM_START, IM_END = SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

GENERATION_CONFIG: dict[str, Any] = {
    "bos_token_id": 0,
    "eos_token_id": [0, 2],
    "do_sample": True,
    "temperature": 0.8,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": END_OF_TEXT,
    "eos_token": END_OF_TEXT,
    "add_bos_token": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": CONFIG["max_position_embeddings"],
    "chat_template": "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
}

HELD_OUT_EVERY = 20  # one chapter in twenty is kept for validation
WARM_UP = 0.03  # of the schedule
LONGEST_TURN = 500  # characters; longer speeches stay out of the chat documents
PROMPTS = [
    "It is a truth universally acknowledged, that",
    "Elizabeth looked at him with surprise, and",
    f"{IM_START}user\nWhat do you think of Mr. Darcy?{IM_END}\n{IM_START}assistant\n",
]


def chat_documents(chapter: str) -> list[str]:
    """Runs of paragraphs that open with speech, in pairs, as ChatML turns of user and assistant."""
    runs: list[list[str]] = [[]]
    for paragraph in chapter.split("\n\n"):
        if paragraph.startswith('"') and len(paragraph) <= LONGEST_TURN:
            runs[-1].append(paragraph.replace('"', ""))
        elif runs[-1]:
            runs.append([])
    return [
        "".join(
            f"{IM_START}user\n{spoken}{IM_END}\n{IM_START}assistant\n{answer}{IM_END}\n"
            for spoken, answer in zip(run[0::2], run[1::2], strict=False)
        )
        for run in runs
        if len(run) >= 2
    ]


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Byte-level BPE: every byte is a token, so any text is encoded without loss."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def tokens_of(tokenizer: Tokenizer, documents: list[str]) -> Tensor:
    """All documents as one int64 vector, each document ended by ``<|endoftext|>``."""
    encoded = tokenizer.encode_batch([document + END_OF_TEXT for document in documents])
    return torch.tensor([token for document in encoded for token in document.ids])


def rounded(model: Llama) -> Llama:
    """A copy for evaluation whose float32 weights hold the values that bfloat16 will store."""
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(parameter.bfloat16())
    return twin


@torch.no_grad()
def validation_loss(model: Llama, tokens: Tensor) -> float:
    """Mean nats a token over windows of S tokens that follow each other, in float32."""
    S = CONFIG["max_position_embeddings"]
    total = 0.0
    for inputs, targets in zip(tokens[:-1].split(S), tokens[1:].split(S), strict=True):
        total += F.cross_entropy(model(inputs[None])[0], targets, reduction="sum").item()
    return total / (len(tokens) - 1)


@torch.no_grad()
def sample(model: Llama, tokenizer: Tokenizer, prompt: str, temperature: float, length: int = 120) -> str:
    """Continue a prompt by up to `length` tokens; temperature 0 takes the likeliest token every time."""
    device = model.cos.device
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.tensor([tokenizer.encode(prompt).ids], device=device)
    for _ in range(length):
        logits = model(tokens)[:, -1]
        if temperature == 0:
            following = logits.argmax(dim=-1, keepdim=True)
        else:
            following = (logits / temperature).softmax(dim=-1).multinomial(1, generator=generator)
        tokens = torch.cat([tokens, following], dim=1)
        if following.item() in GENERATION_CONFIG["eos_token_id"]:
            break
    return tokenizer.decode(tokens[0].tolist(), skip_special_tokens=False)


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over the first WARM_UP of the schedule, then half a cosine down to nothing."""
    if progress < WARM_UP:
        return peak * progress / WARM_UP
    return peak * math.cos(math.pi / 2 * (progress - WARM_UP) / (1 - WARM_UP)) ** 2


def train(model: Llama, training: Tensor, validation: Tensor, args: argparse.Namespace) -> tuple[Llama, float]:
    """Train `model` on random windows of the token vector `training`.

    Every 250 steps the weights, rounded to bfloat16, are validated, and written to disk if they are the best
    so far. Returns the best model and its validation loss, nats a token.
    """
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )
    device = training.device
    window = torch.arange(CONFIG["max_position_embeddings"] + 1, device=device)
    best, kept, step = math.inf, model, 0
    start = time.monotonic()
    while True:
        seconds = time.monotonic() - start
        progress = max(step / args.steps, seconds / args.seconds)
        if step % 250 == 0 or progress >= 1:
            candidate = rounded(model)
            loss = validation_loss(candidate, validation)
            print(f"step {step}: {loss:.4f} nats/token, {seconds:.1f} s", flush=True)
            if loss < best:
                best, kept = loss, candidate
                save_weights(kept, args.out / "model.safetensors")
        if progress >= 1:
            return kept, best
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, args.lr)
        rows = training[torch.randint(len(training) - len(window), (args.rows, 1), device=device) + window]
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(rows[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="text file that corpus.py wrote")
    parser.add_argument("out", type=Path, help="folder for the model; created if missing")
    parser.add_argument("--steps", type=int, default=4400, help="optimizer steps (default %(default)s)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="shorten the schedule to end in this time (default: none)",
    )
    parser.add_argument("--rows", type=int, default=16, help="rows of 1024 tokens a step (default %(default)s)")
    parser.add_argument("--dropout", type=float, default=0.1, help="default %(default)s")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (default %(default)s)")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    chapters = args.corpus.read_text(encoding="utf-8").split(END_OF_TEXT + "\n")[:-1]
    held_out = chapters[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    documents = [chapter for chapter in chapters if chapter not in held_out]
    chats = [chat for chapter in documents for chat in chat_documents(chapter)]
    tokenizer = train_tokenizer(documents)
    tokenizer.save(str(args.out / "tokenizer.json"))
    write_json(args.out / "config.json", CONFIG)
    write_json(args.out / "generation_config.json", GENERATION_CONFIG)
    write_json(args.out / "tokenizer_config.json", TOKENIZER_CONFIG)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    card = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    torch.manual_seed(0)
    training = tokens_of(tokenizer, documents + chats).to(device)
    validation = tokens_of(tokenizer, held_out).to(device)
    model = Llama(args.dropout).to(device)
    print(
        f"{sum(p.numel() for p in model.parameters())} parameters on {card}, PyTorch {torch.__version__}; "
        f"{len(training)} tokens to train on ({len(documents)} chapters, {len(chats)} chats), "
        f"{len(validation)} held out ({len(held_out)} chapters)"
    )
    kept, loss = train(model, training, validation, args)
    bits = loss * (len(validation) - 1) / math.log(2)
    bits_per_byte = bits / sum(len(chapter.encode()) for chapter in held_out)
    print(f"kept, rounded to bfloat16: {loss:.4f} nats/token, {bits_per_byte:.4f} bits/byte")
    for temperature in (0.0, 0.8):
        for prompt in PROMPTS:
            print(f"\ntemperature {temperature}: {sample(kept, tokenizer, prompt, temperature)}")


if __name__ == "__main__":
    main()
