"""The tokenizer out of a GGUF file, against an independent byte-level BPE and Transformers' own."""

import json

import numpy as np
import pytest
import regex
from convert.tiny_checkpoints import hf_tensors, write_gguf
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from ckpt_convert import ConversionError, convert
from ckpt_convert.gguf_tokenizer import merges_from_scores, tokenizer_files

CORPUS = [
    "Hello world, it's we'll and I'M: DON'T!",
    "  two  spaces\tand\ttabs \n\n\n   \n trailing   ",
    "def f(x):\n    if  12 <= x < 3456:\n        return [x, 7]\n",
    "prices: 10,000.50 $ and 3 % of 2024; 1st 2nd",
    "Привет, мир! Καλημέρα κόσμε. שלום עולם",
    "日本語のテキスト、中文文本。한국어 텍스트",
    "العربية ١٢٣ हिन्दी १२ ไทย ๑๒",
    "🙂👩‍👩‍👧 é é ﬁ ǆ naïve",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "x\r\ny\u00a0z\u200bw",
    "",
]

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte: itself where printable, else from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + place) for place, byte in enumerate(rest)
    }


LETTERS = byte_letters()


def encode_by_hand(text, vocabulary, merges, special, patterns):
    """Byte-level BPE as the papers tell it: split, then merge the best-ranked pair, repeat."""
    ids = {token: index for index, token in enumerate(vocabulary)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    encoded = []
    for part in regex.split("(" + "|".join(map(regex.escape, special)) + ")", text):
        if part in special:
            encoded.append(ids[part])
            continue
        pieces = [part]
        for pattern in patterns:
            cut = regex.compile(f"({pattern})")
            pieces = [bit for piece in pieces for bit in cut.split(piece) if bit]
        for piece in pieces:
            symbols = [LETTERS[byte] for byte in piece.encode()]
            while len(symbols) > 1:
                pairs = list(zip(symbols, symbols[1:], strict=False))
                best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
                if best not in ranks:
                    break
                at = pairs.index(best)
                symbols[at : at + 2] = ["".join(best)]
            encoded += [ids[symbol] for symbol in symbols if symbol in ids]
    return encoded


@pytest.fixture(scope="module")
def real(smollm2):
    """SmolLM2's tokenizer as converted, with its vocabulary, merges and special tokens."""
    content = json.loads((smollm2 / "tokenizer.json").read_text())
    vocabulary = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    merges = [" ".join(merge) for merge in content["model"]["merges"]]
    special = [token["content"] for token in content["added_tokens"]]
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json")), vocabulary, merges, special


@pytest.mark.network
@pytest.mark.parametrize("text", CORPUS)
def test_the_real_tokenizer_equals_bpe_by_hand_both_ways(real, text):
    tokenizer, vocabulary, merges, special = real
    encoded = tokenizer.encode(text).ids
    assert encoded == encode_by_hand(text, vocabulary, merges, special, [r"\p{N}", GPT2_SPLIT])
    assert tokenizer.decode(encoded, skip_special_tokens=False) == text


@pytest.mark.network
def test_the_real_tokenizer_equals_transformers_own(real):
    """But for blanks before a digit, which Transformers' GGUF reader does not cut off.

    "smollm" files cut every digit off first, so "a  1" has the two blanks in one piece; the second
    assertion keeps that difference known.
    """
    tokenizer, vocabulary, merges, special = real
    fields = {
        "tokenizer_type": "gpt2",
        "pre_tokenizer_type": "smollm",
        "tokens": vocabulary,
        "token_type": [3 if token in special else 1 for token in vocabulary],
        "merges": merges,
    }
    theirs, _ = convert_gguf_tokenizer("llama", fields)
    alike = [
        text for text in CORPUS if not regex.search(r"\s\s\p{N}|\s[\p{N}--0-9]", text, regex.V1)
    ]
    assert len(alike) >= 8
    for text in alike:
        ids = tokenizer.encode(text).ids
        assert ids == theirs.encode(text).ids
        assert theirs.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("a  1").tokens == ["a", "ĠĠ", "1"]
    assert theirs.encode("a  1").tokens == ["a", "Ġ", "Ġ", "1"]


@pytest.mark.network
def test_the_real_chat_template_renders(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.encode("hi") == tokenizer.encode("hi", add_special_tokens=False)


def byte_level_fields(pre: str, **changes) -> dict:
    """A small byte-level vocabulary: specials, all bytes, some merges."""
    merges = ["a b", "ab c", "Ġ a", "1 2", "12 3", "Ġ Ġ", "Ã ©"]
    special = ["<bos>", "<eos>", "<tool call>"]
    tokens = special + list(LETTERS.values()) + [merge.replace(" ", "") for merge in merges]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return fields | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def tokens_of(fields, folder, text, **options) -> list[str]:
    for name, content in tokenizer_files(fields).items():
        (folder / name).write_bytes(content)
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, **options).tokens


@pytest.mark.fast
@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "  123", ["Ġ", "Ġ", "123"]),
        ("smollm", "  123", ["ĠĠ", "1", "2", "3"]),
        ("qwen2", "  123", ["Ġ", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "1231", ["123", "1"]),
        ("dbrx", "1231", ["123", "1"]),
        ("gpt-4o", "1231", ["123", "1"]),
        ("llama-bpe", "ab<tool call>c", ["ab", "<tool call>", "c"]),
        ("gpt-2", "abc<eos>", ["abc", "<eos>"]),
        ("gpt-2", "e\u0301", ["e", "Ì", "ģ"]),
        ("qwen2", "e\u0301", ["Ã©"]),
    ],
)
def test_each_pre_tokenizer_splits_its_own_way(tmp_path, pre, text, expected):
    fields = byte_level_fields(pre)
    assert tokens_of(fields, tmp_path, text, add_special_tokens=False) == expected


@pytest.mark.fast
@pytest.mark.parametrize(
    ("pre", "flags", "expected"),
    [
        ("gpt-2", {}, ["ab"]),
        ("llama-bpe", {}, ["<bos>", "ab"]),
        ("llama-bpe", {"add_bos_token": False}, ["ab"]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, ["<bos>", "ab", "<eos>"]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(tmp_path, pre, flags, expected):
    assert tokens_of(byte_level_fields(pre, **flags), tmp_path, "ab") == expected
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["add_bos_token"] == (expected[0] == "<bos>")
    assert (config["bos_token"], config["eos_token"]) == ("<bos>", "<eos>")


@pytest.mark.fast
def test_sentencepiece_merges_blanks_and_bytes(tmp_path):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "a", "b", "▁a", "ab", "▁ab"]
    scores = [0.0] * len(pieces) + [-9.0, -8.0, -7.0, -2.0, -3.0, -1.0]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + words,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 6,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    assert tokens_of(fields, tmp_path, "ab é") == ["<s>", "▁ab", "▁", "<0xC3>", "<0xA9>"]
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("ab é", "ba ab", " b", "日本"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert merges_from_scores(pieces + words, scores) == [
        ("▁", "ab"),
        ("▁a", "b"),
        ("▁", "a"),
        ("a", "b"),
    ]
    fields["tokenizer.ggml.add_space_prefix"] = False
    assert tokens_of(fields, tmp_path, "ab", add_special_tokens=False) == ["ab"]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (byte_level_fields("no-such-split"), "'no-such-split'"),
        ({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"]}, "'bert'"),
    ],
)
def test_unknown_tokenizers_are_refused_by_name(tmp_path, fields, named):
    with pytest.raises(ConversionError, match=named):
        tokenizer_files(fields)


@pytest.mark.fast
def test_a_file_with_its_tokenizer(tmp_path):
    """The embedding has a row per token, so the model's 64 rows take the first 64 tokens."""
    fields = byte_level_fields("gpt-2")
    fields["tokenizer.ggml.tokens"] = fields["tokenizer.ggml.tokens"][:64]
    fields["tokenizer.ggml.token_type"] = fields["tokenizer.ggml.token_type"][:64]
    fields["tokenizer.ggml.merges"] = []
    del fields["tokenizer.ggml.merges"]
    fields["tokenizer.chat_template"] = "{{ messages[0].content }}"
    fields["tokenizer.ggml.eot_token_id"] = 2
    write_gguf(tmp_path / "model.gguf", "qwen2", hf_tensors("qwen2"), tokenizer=fields)
    conversion = convert(tmp_path / "model.gguf", tmp_path / "converted")
    assert conversion.tokenizer_files == ("tokenizer.json", "tokenizer_config.json")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "converted")
    assert len(tokenizer) == conversion.config.vocab_size == 64
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    )
    np.testing.assert_array_equal(tokenizer.encode("<eos><bos>"), [1, 0])
