"""Text to token ids and back, and chats to prompts, with a model's own ``tokenizer.json``."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from blink_ref.errors import BlinkError
from blink_ref.model.chat import MARK, ChatTemplate, quote
from blink_ref.model.config import bos_and_eos, model_name, read_json

# Characters whose UTF-8 holds every byte that UTF-8 can hold.
EVERY_BYTE = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000, 0x1000)]))


class Tokenizer:
    """The tokenizer of one model. Text goes in and comes out byte for byte; nothing is stripped.

    ``eos_ids`` are the ids that end a text, ``vocab`` the number of ids that have a text (a model may
    pad its embedding to more).
    """

    def __init__(self, path: Path) -> None:
        self.model = model_name(path)
        # Two tokenizers, since whether control tokens are parsed is a state and not an argument.
        self._plain, self._control = _parse(path / "tokenizer.json"), _parse(path / "tokenizer.json")
        self._plain.encode_special_tokens = True
        self.vocab = self._plain.get_vocab_size(with_added_tokens=True)
        _, self.eos_ids = bos_and_eos(path)
        added = self._plain.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = {token.content: token_id for token_id, token in added.items() if token.special}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._special_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        file = path / "tokenizer_config.json"
        settings = read_json(file) if file.exists() else {}
        names = _special_names(settings)
        self._template = _template(path, settings, names)
        self._bos = self._leading_bos(settings, names)
        self._byte_of = _bytes_by_letter(self._plain)
        # SmolLM2's vocabulary lacks six control characters.
        lacking = [byte for letter, byte in self._byte_of.items() if self._plain.token_to_id(letter) is None]
        self._unknown_bytes = bytes(lacking)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and the configs' token ids in ``path``.

        Raises BlinkError: a file is missing or corrupt.
        """
        return cls(path)

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Token ids of ``text``.

        Control tokens written in the text (``<|im_end|>``) are read as plain characters, unless
        ``allow_special`` says that whoever wrote the text may steer the model. The begin-of-text token
        is put first if the model's tokenizer wants that and the text does not begin with it.

        Raises BlinkError: the text holds a lone surrogate, which has no bytes, or a character that the
        vocabulary lacks (the library would drop it silently).
        """
        ids = self._ids(self._control if allow_special else self._plain, text)
        return ids if ids[: len(self._bos)] == self._bos else self._bos + ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ``ids``; an incomplete UTF-8 sequence shows as U+FFFD."""
        return self._plain.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for within a text; none of an id that pads the vocabulary."""
        if (token := self._added.get(token_id) or self._plain.id_to_token(token_id)) is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if self._byte_of:
            return bytes(self._byte_of[letter] for letter in token)
        if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", token):  # SentencePiece's, for what has no token
            return bytes.fromhex(byte[1])
        return token.replace("▁", " ").encode()

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt that the model's chat template makes of ``messages`` (``role`` and ``content`` each).

        Raises BlinkError: the model has no template, or the template refuses the messages.
        """
        if self._template is None:
            raise BlinkError(f"{self.model} has no chat template; send it plain prompts")
        return self._template.render(messages, add_generation_prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of the rendered chat: control tokens of the template count, those of a user do not.

        Raises BlinkError: as ``chat`` and ``encode``.
        """
        text = self.chat(quote(messages, self._special_pattern), add_generation_prompt)
        if MARK not in text:
            return self._ids(self._control, text)
        ids: list[int] = []
        for part in self._special_pattern.split(text):
            if part in self._special:
                ids.append(self._special[part])
            else:
                ids += self._ids(self._plain, part.replace(MARK, ""))
        return ids

    def _ids(self, tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise BlinkError(
                f"character {error.start} of the text is a lone surrogate, {text[error.start]!a}; "
                "send valid Unicode"
            ) from None
        if len(raw.translate(None, self._unknown_bytes)) < len(raw):
            at = next(i for i, char in enumerate(text) if set(char.encode()) & set(self._unknown_bytes))
            raise BlinkError(
                f"character {at} of the text, {text[at]!a}, has no token in the vocabulary of {self.model}; "
                "leave it out"
            )
        # A batch of one: encode would hold the GIL, and a huge prompt would stall every other stream.
        return tokenizer.encode_batch([text], add_special_tokens=False)[0].ids

    def _leading_bos(self, settings: dict[str, Any], names: Mapping[str, str]) -> list[int]:
        bos = self._plain.token_to_id(names.get("bos_token", ""))
        if bos is None:
            return []
        wanted = settings.get("add_bos_token")
        if wanted is None:
            # Llama 3 has no such setting; its tokenizer.json adds the token by a post-processor.
            wanted = self._plain.encode("").ids[:1] == [bos]
        return [bos] if wanted else []


def _parse(file: Path) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower, not even for a missing file
        raise BlinkError(f"{file} cannot be read as a tokenizer ({error}); fetch the model again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _bytes_by_letter(tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for; empty for another vocabulary."""
    if not isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel):
        return {}
    mapping = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = "".join(piece for piece, _ in mapping.pre_tokenize_str(EVERY_BYTE))
    return dict(zip(letters, EVERY_BYTE.encode(), strict=True))


def _special_names(settings: dict[str, Any]) -> dict[str, str]:
    """``bos_token``, ``eos_token`` and so on, which are strings or objects with a ``content``."""
    named = {
        key: settings[key] for key in ("bos_token", "eos_token", "pad_token", "unk_token") if settings.get(key)
    }
    return {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}


def _template(path: Path, settings: dict[str, Any], names: Mapping[str, str]) -> ChatTemplate | None:
    """The template of ``chat_template.jinja``, or the one in the settings; of several, the default."""
    file = path / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.exists() else settings.get("chat_template")
    if isinstance(source, list):
        source = next((item["template"] for item in source if item["name"] == "default"), None)
    return None if source is None else ChatTemplate(model_name(path), source, names)
