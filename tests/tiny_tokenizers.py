"""Tokenizers of every kind of decoder, small enough to be built by the tests."""

from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from specjax.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "한글 한글",
    "déjà vu, déjà vu",
    "👍🏽 👍🏽",
]


def byte_level(vocab_size: int = 290, corpus: Sequence[str] = CORPUS) -> Tokenizer:
    """A byte-level BPE, like GPT-2's, with two special tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    return Tokenizer(backend, named_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def byte_fallback() -> Tokenizer:
    """A BPE over ▁-marked words with a token for every byte, like Llama 2's."""
    words = ["▁", "a", "b", "c", "▁a", "▁b", "▁c", "▁▁", "你"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("▁", "a"), ("▁", "b"), ("▁", "c"), ("▁", "▁")]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    backend = Backend(
        models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, named_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def metaspace() -> Tokenizer:
    """The same kind of words, with the decoder that newer conversions of SentencePiece use."""
    tokens = ["<unk>", "▁", "a", "b", "c", "▁a", "▁b", "▁c", "▁▁"]
    merges = [("▁", "a"), ("▁", "b"), ("▁", "c"), ("▁", "▁")]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    return Tokenizer(backend)


def of_pieces(pieces: Sequence[str], **parts) -> Tokenizer:
    """A vocabulary of given texts; id i is the i-th of them."""
    backend = Backend(models.WordLevel({piece: id for id, piece in enumerate(pieces)}, pieces[0]))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, **parts)


def with_token_of_bytes(data: bytes) -> tuple[Tokenizer, int]:
    """A byte-level vocabulary with one more token, which stands for these bytes; and its id."""
    tokenizer = byte_level()
    token = "".join(tokenizer.id_to_token(id) for id in byte_ids(tokenizer, data))
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.add_tokens([token])
    return Tokenizer(backend), backend.token_to_id(token)


def bytes_of_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """The bytes that tokens of a byte-level vocabulary stand for, without its decoder."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of |= {chr(256 + place): byte for place, byte in enumerate(others)}
    return bytes(byte_of[c] for id in ids for c in tokenizer.backend.id_to_token(id))


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte, of a byte-level vocabulary or one with byte fallback."""
    single = ids_of_bytes(tokenizer)
    return [single[byte] for byte in data]


@cache
def ids_of_bytes(tokenizer: Tokenizer) -> dict[int, int]:
    single = {}
    for id in range(tokenizer.vocab_size):
        token = tokenizer.backend.id_to_token(id)
        if token.startswith("<0x"):
            single[int(token[3:5], 16)] = id
        elif len(token) == 1 and tokenizer.backend.token_to_id("<0x00>") is None:
            single[bytes_of_tokens(tokenizer, [id])[0]] = id
    return single
