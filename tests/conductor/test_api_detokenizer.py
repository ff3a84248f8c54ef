"""Streamed text is the tokenizer's own decoding, whatever the tokenizer and wherever the tokens end."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from moonpool.conductor.text.detokenizer import MAX_PENDING_BYTES, DetokenizerFactory, decode_all

CORPUS = [
    "In the beginning God created the heaven and the earth. ",
    "naïve café, Привет мир, 你好世界, 👩‍👩‍👧 🇩🇪 ",
    "def f(x):\n\treturn  x  # twice\n",
]


def byte_level() -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    core.add_tokens([AddedToken("<think>", special=False), AddedToken("日本", special=False)])
    return core


def sentencepiece(*steps: decoders.Decoder) -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁a", "the", "ing", "▁▁", "é", "▁x▁y", ".", "\n", "你"]
    core = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    core.decoder = decoders.Sequence(list(steps))
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    core.add_tokens([AddedToken("▁added", special=False)])
    return core


def metaspace(scheme: str) -> Tokenizer:
    pieces = ["<s>", "▁", "▁the", "a", "b▁c", "▁▁", "é"]
    core = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    core.add_special_tokens(["<s>"])
    return core


def wordpiece() -> Tokenizer:
    pieces = ["[UNK]", "hello", "##ing", "world", "##s", "the"]
    core = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece(cleanup=False)
    core.add_special_tokens(["[UNK]"])
    return core


LLAMA = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
TOKENIZERS = {
    "byte-level": byte_level(),
    "llama": sentencepiece(*LLAMA),
    "gemma": sentencepiece(*LLAMA[:3]),
    "metaspace": metaspace("always"),
    "metaspace-bare": metaspace("never"),
    "wordpiece": wordpiece(),
}
FACTORIES = {name: DetokenizerFactory(core) for name, core in TOKENIZERS.items()}

cases = pytest.mark.parametrize("name", TOKENIZERS)


def test_the_common_tokenizers_are_read_by_table() -> None:
    kinds = {name: factory.kind for name, factory in FACTORIES.items()}
    assert kinds == {
        "byte-level": "byte-level",
        "llama": "sentencepiece",
        "gemma": "sentencepiece",
        "metaspace": "sentencepiece",
        "metaspace-bare": "sentencepiece",
        "wordpiece": "window",
    }


@cases
@pytest.mark.parametrize("skip_special", [True, False])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_joined_are_the_tokenizers_decoding(
    name: str, skip_special: bool, data: st.DataObject
) -> None:
    core, factory = TOKENIZERS[name], FACTORIES[name]
    # Past the vocabulary too: models are padded. Runs of byte tokens stay below the bound on purpose.
    size = core.get_vocab_size() + 3
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=MAX_PENDING_BYTES))
    streamed = decode_all(factory.new(skip_special=skip_special), ids)
    assert streamed == core.decode(ids, skip_special_tokens=skip_special)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60), cut=st.integers(0, 200))
def test_what_follows_a_prompt_continues_its_text(text: str, cut: int) -> None:
    core, factory = TOKENIZERS["byte-level"], FACTORIES["byte-level"]
    ids = core.encode(text, add_special_tokens=False).ids
    prompt, rest = ids[:cut], ids[cut:]
    # A prompt may end within a character; then the whole character belongs to what follows.
    detokenizer = factory.new()
    before = "".join(map(detokenizer.push, prompt))
    assert before + decode_all(factory.new(prompt), rest) == core.decode(ids)


@pytest.mark.parametrize(
    ("prompt", "rest", "expected"),
    [
        (["▁the"], ["▁the"], " the"),  # a space inside the text stays
        ([], ["▁the"], "the"),  # the one in front of it goes
        (["<s>"], ["▁the"], "the"),
        (["<0xE4>", "<0xBD>", "<0xA0>"], ["▁the"], " the"),  # the prompt's last character is not repeated
        (["▁a", "<0xE4>", "<0xBD>"], ["<0xA0>", "the"], "你the"),  # half of it was the prompt's
        (["▁a"], ["<0xE4>", "<0xBD>"], "\N{REPLACEMENT CHARACTER}" * 2),
    ],
)
def test_sentencepiece_after_a_prompt(prompt: list[str], rest: list[str], expected: str) -> None:
    core = TOKENIZERS["llama"]
    context = [core.token_to_id(token) for token in prompt]
    assert decode_all(FACTORIES["llama"].new(context), map(core.token_to_id, rest)) == expected


def test_a_character_is_shown_as_soon_as_it_is_complete() -> None:
    detokenizer = FACTORIES["byte-level"].new()
    core = TOKENIZERS["byte-level"]
    alphabet = core.get_vocab()
    ids = [alphabet[chr(byte)] for byte in "é".encode()]  # both bytes are printable as they are
    assert [detokenizer.push(token_id) for token_id in ids] == ["", "é"]


def test_a_long_run_of_byte_tokens_is_let_out() -> None:
    core = TOKENIZERS["llama"]
    detokenizer = FACTORIES["llama"].new()
    ids = [core.token_to_id(f"<0x{byte:02X}>") for byte in ("ሰላም" * 40).encode()]
    held = shown = 0
    for token_id in ids:
        held += 1
        if piece := detokenizer.push(token_id):
            shown += len(piece)
            held = 0
        assert held <= MAX_PENDING_BYTES
    assert shown + len(detokenizer.flush()) == 120


def test_token_bytes_are_true_even_for_half_a_character() -> None:
    core = TOKENIZERS["byte-level"]
    factory = FACTORIES["byte-level"]
    ids = core.encode("你", add_special_tokens=False).ids
    assert b"".join(map(factory.token_bytes, ids)).decode() == "你"
    assert factory.token_bytes(core.token_to_id("<|eos|>")) == b"<|eos|>"
    assert factory.token_bytes(core.get_vocab_size() + 5) == b""


def test_a_decoder_nobody_knows_is_followed_by_window() -> None:
    core = byte_level()
    core.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("x", 0, 0)])
    factory = DetokenizerFactory(core)
    assert factory.kind == "window"
    ids = core.encode(CORPUS[0] + CORPUS[1], add_special_tokens=False).ids
    assert decode_all(factory.new(), ids) == core.decode(ids)


def test_random_byte_soup_never_fails() -> None:
    draw = random.Random(7)
    for name, core in TOKENIZERS.items():
        ids = [draw.randrange(core.get_vocab_size() + 9) for _ in range(3000)]
        assert decode_all(FACTORIES[name].new(), ids)
