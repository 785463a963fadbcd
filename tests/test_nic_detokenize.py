"""Incremental detokenization against decoding the whole at once."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from blink_ref.config import cache_dir
from blink_ref.model.store import TINY
from blink_ref.model.tokenizer import Tokenizer
from blink_ref.nic.detokenize import KEEP, UNKNOWN, Detokenizer


class Simple:
    """A vocabulary around a decoder of the `tokenizers` library; counts the tokens it decodes."""

    def __init__(self, vocabulary, decoder, special=()):
        self.library = Library(models.WordLevel({word: n for n, word in enumerate(vocabulary)}, vocabulary[0]))
        self.library.decoder = decoder
        self.library.add_special_tokens(list(special))
        self.size = self.library.get_vocab_size()
        self.decoded = 0

    def decode(self, ids, skip_special=True):
        self.decoded += len(ids)
        return self.library.decode(list(ids), skip_special_tokens=skip_special)


def letters():
    """The character that stands for each byte in a byte-level vocabulary (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_level():
    """All bytes, some pairs that cut characters in two, and two special tokens (ids 262 and 263)."""
    of = letters()
    parts = [b"\xf0\x9f", b"\x98\x80", b"\x80\xf0\x9f\x98", b"\xe2\x82", b"\xac", b" the"]
    words = of + ["".join(of[byte] for byte in part) for part in parts if len(part) > 1] + ["".join(of[97:100])]
    return Simple(words, decoders.ByteLevel(), ["<|end|>", "<|start|>"])


def byte_fallback():
    """Words with a space in front, and bytes as <0xE2>: SentencePiece as Llama 2 uses it."""
    words = ["▁", "▁a", "a", "▁it", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    strip = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Simple(words, strip, ["</s>"])


def pieces(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(token) for token in ids), detokenizer.finish()]


BYTES = byte_level()
# Random bytes seldom make a character; mix in those that begin and continue one.
IDS = st.lists(
    st.one_of(
        st.integers(0, BYTES.size - 1),
        st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xED, 0xA0, 0xC3, 0xFF, 32, 65]),
        st.sampled_from(range(256, BYTES.size)),
    ),
    max_size=80,
)


@settings(max_examples=300)
@given(IDS)
def test_the_pieces_joined_are_the_whole(ids):
    assert "".join(pieces(BYTES, ids)) == BYTES.decode(ids)


@settings(max_examples=300)
@given(st.text(max_size=60))
def test_valid_text_is_never_sent_with_a_broken_character(text):
    sent = pieces(BYTES, list(text.encode()))
    assert "".join(sent) == text
    if UNKNOWN not in text:
        assert all(UNKNOWN not in piece for piece in sent)


def test_a_character_is_sent_with_its_last_byte_and_not_later():
    assert pieces(BYTES, list("a€😀b".encode())) == ["a", "", "", "€", "", "", "", "😀", "b", ""]


def test_an_unfinished_character_is_shown_at_the_end():
    assert pieces(BYTES, [65, 0xE2, 0x82]) == ["A", "", "", UNKNOWN]


def test_special_tokens_have_no_text_even_within_a_character():
    end = BYTES.size - 1
    assert pieces(BYTES, [65, end, 0xE2, end, 0x82, 0xAC, end]) == ["A", "", "", "", "", "€", "", ""]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(["▁", "▁a", "a", "▁it", "é", "</s>"]), max_size=60))
def test_spaces_of_sentencepiece_words_are_kept(words):
    tokenizer = byte_fallback()
    ids = [tokenizer.library.token_to_id(word) for word in words]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=300)
@given(st.text(max_size=60))
@example("000000\x800000\U00010000")  # the window was once cut while its last character was incomplete
def test_bytes_of_sentencepiece_become_characters(text):
    tokenizer = byte_fallback()
    ids = [tokenizer.library.token_to_id(f"<0x{byte:02X}>") for byte in ("x" + text).encode()]
    sent = pieces(tokenizer, ids)
    assert "".join(sent) == "x" + text
    if UNKNOWN not in text:
        assert all(UNKNOWN not in piece for piece in sent)


@pytest.mark.parametrize(
    "cycle",
    [
        [65],
        [0xFF],
        [0x80],
        [0xE2],
        [BYTES.size - 1],
        [0x80, 0xF0, 0x9F, 0x98],
        [65, BYTES.size - 1, BYTES.size - 2],
    ],
)
def test_a_token_costs_the_same_however_long_the_answer(cycle):
    tokenizer = byte_level()
    ids = (cycle * 3000)[:3000]
    sent = pieces(tokenizer, ids)
    assert tokenizer.decoded <= len(ids) * (2 * KEEP + 2)
    assert "".join(sent) == tokenizer.decode(ids)


@pytest.mark.parametrize("path", [TINY, cache_dir() / "models" / "smollm2"], ids=["tiny", "smollm2"])
def test_the_models_tokenizers_stream_what_they_decode(path):
    if not (path / "tokenizer.json").exists():
        pytest.skip(f"{path} is not there; `blink-ref model pull {path.name}` brings it")
    tokenizer = Tokenizer.load(path)

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.integers(0, tokenizer.vocab - 1), max_size=60))
    def holds(ids):
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)

    holds()
    text = "It was — naïvely — 日本語 and 😀👩‍👩‍👧, “quoted”."
    sent = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(sent) == text
    assert all(UNKNOWN not in piece for piece in sent)
