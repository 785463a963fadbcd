"""Make smollm2_more.json and smollm2_logits.npz with transformers; see README.md beside this file.

pip install torch transformers blink-ref
python tests/data/make_smollm2_goldens.py
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers

from blink_ref.model.config import ModelConfig
from blink_ref.model.reference import Reference
from blink_ref.model.store import resolve
from blink_ref.model.weights import Weights

HERE = Path(__file__).parent
TOKENS = 48
KEPT = 64  # logits kept a position: the largest

LONG = """It is a truth universally acknowledged, that a single man in possession of a good fortune, must be \
in want of a wife.

However little known the feelings or views of such a man may be on his first entering a neighbourhood, this \
truth is so well fixed in the minds of the surrounding families, that he is considered as the rightful \
property of some one or other of their daughters.

"My dear Mr. Bennet," said his lady to him one day, "have you heard that Netherfield Park is let at last?"

Mr. Bennet replied that he had not.

"But it is," returned she; "for Mrs. Long has just been here, and she told me all about it."

Mr. Bennet made no answer.

"Do not you want to know who has taken it?" cried his wife impatiently.

"You want to tell me, and I have no objection to hearing it."

This was invitation enough.

"Why, my dear, you must know, Mrs. Long says that Netherfield is taken by a young man of large fortune from \
the north of England; that he came down on Monday in a chaise and four to see the place, and was so much \
delighted with it that he agreed with Mr. Morris immediately; that he is to take possession before \
Michaelmas, and some of his servants are to be in the house by the end of next week."

"What is his name?"

"Bingley."

Question: What is the name of the man who has taken Netherfield Park?
Answer:"""
PROMPTS = {
    "story": "Once upon a time, in a village at the edge of a dark forest, there lived an old clockmaker who",
    "code": 'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self):\n',
    "french": "La tour Eiffel est située à Paris. Elle a été construite en",
    "long": LONG,
}
CHAT = [
    {"role": "system", "content": "You are a careful teacher. Answer briefly."},
    {"role": "user", "content": "Why is the sky blue?"},
    {"role": "assistant", "content": "Because air scatters blue light more than red light."},
    {"role": "user", "content": "And why are sunsets red?"},
]


def greedy(model, ids):
    """Up to TOKENS greedy ids after ``ids``, and how far each led the runner-up."""
    out, margins, past, fresh = [], [], None, ids
    while len(out) < TOKENS and out[-1:] != [model.config.eos_token_id]:
        step = model(torch.tensor([fresh]), past_key_values=past, use_cache=True)
        first, second = step.logits[0, -1].topk(2).values.tolist()
        out.append(int(step.logits[0, -1].argmax()))
        margins.append(round(first - second, 4))
        past, fresh = step.past_key_values, out[-1:]
    return out, margins


def more(model, tokenizer):
    """The items of smollm2_more.json."""
    chat = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    for name, prompt in {**PROMPTS, "chat": chat}.items():
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        out, margins = greedy(model, ids)
        yield {
            "name": name,
            "prompt": prompt,
            "prompt_ids": ids,
            "output_ids": out,
            "output_text": tokenizer.decode(out),
            "top1_minus_top2": margins,
        }


@torch.no_grad()
def main():
    path = resolve("smollm2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    config = ModelConfig.load(path)
    reference = Reference(config, Weights.load(path, config))

    items = list(more(model, tokenizer))
    made = {
        "model": "smollm2",
        "compute_dtype": "float32",
        "eos": model.config.eos_token_id,
        "made_by": {"torch": torch.__version__, "transformers": transformers.__version__},
        "chat_messages": CHAT,
        "items": items,
    }
    (HERE / "smollm2_more.json").write_text(json.dumps(made, indent=1) + "\n")

    kept = {}
    golden = json.loads((HERE / "smollm2_golden.json").read_text())["items"]
    for number, item in enumerate([*golden, *items]):
        ids = item["prompt_ids"] + item["output_ids"]
        logits = model(torch.tensor([ids])).logits[0]
        gap = np.abs(logits.numpy() - reference.logits(ids)).max()
        least = min(item["top1_minus_top2"])
        print(f"{len(ids)} positions, least margin {least}, NumPy reference within {gap:.1e}")
        if number < len(golden):
            top = logits.topk(KEPT)
            kept[f"ids{number}"] = top.indices.numpy().astype(np.uint16)
            kept[f"logits{number}"] = top.values.numpy()
    np.savez_compressed(HERE / "smollm2_logits.npz", **kept)


if __name__ == "__main__":
    main()
