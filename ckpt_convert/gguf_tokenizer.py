"""The tokenizer in a GGUF file's metadata, rebuilt as ``tokenizer.json``.

llama.cpp names how text is split before the merges (``tokenizer.ggml.pre``); each name stands for
the pre-tokenizer, normaliser and BOS habit that its models' own ``tokenizer.json`` has.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_convert.errors import ConversionError

CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + _ENDING
    + r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + _ENDING
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Splitting:
    """How one ``tokenizer.ggml.pre`` prepares text for byte-level BPE.

    ``pattern`` None is GPT-2's own; ``digits`` cuts every digit off first; ``whole_words`` takes a
    piece that is in the vocabulary as it is, without merging; ``bos`` is what files that don't say
    whether to add BOS mean.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    bos: bool = False


GPT2 = Splitting()
SINGLE_DIGITS = Splitting(digits=True)
LLAMA3 = Splitting(LLAMA3_SPLIT, whole_words=True, bos=True)
QWEN2 = Splitting(QWEN2_SPLIT, nfc=True)
CL100K = Splitting(LLAMA3_SPLIT)
O200K = Splitting(O200K_SPLIT)
TEKKEN = Splitting(TEKKEN_SPLIT, whole_words=True, bos=True)

SPLITTINGS = {
    "default": GPT2,
    "gpt-2": GPT2,
    "mpt": GPT2,
    "olmo": GPT2,
    "jais": GPT2,
    "trillion": GPT2,
    "smollm": SINGLE_DIGITS,
    "starcoder": SINGLE_DIGITS,
    "refact": SINGLE_DIGITS,
    "command-r": SINGLE_DIGITS,
    "codeshell": SINGLE_DIGITS,
    "exaone": SINGLE_DIGITS,
    "minerva": SINGLE_DIGITS,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "falcon3": LLAMA3,
    "smaug-bpe": LLAMA3,
    "dbrx": CL100K,
    "gpt-4o": O200K,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "tekken": TEKKEN,
}


def tokenizer_files(fields: Mapping[str, Any]) -> dict[str, bytes]:
    """``tokenizer.json`` and ``tokenizer_config.json`` of GGUF metadata, {} where it has no tokens.

    Raises ``ConversionError`` naming a tokenizer model or pre-tokenizer that is not known.
    """
    vocabulary = _field(fields, "tokens")
    if vocabulary is None:
        return {}
    build = _builder(_field(fields, "model"))
    tokenizer, add_bos = build(fields)
    settings = _tokenizer_config(fields, vocabulary, add_bos)
    texts = {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False),
    }
    return {name: text.encode() for name, text in texts.items()}


def _field(fields: Mapping[str, Any], key: str, default: Any = None) -> Any:
    return fields.get(f"tokenizer.ggml.{key}", default)


def _builder(model: str | None) -> Callable[[Mapping[str, Any]], tuple[Any, bool]]:
    builders = {"gpt2": byte_level_bpe, "llama": sentencepiece_bpe}
    if model not in builders:
        raise ConversionError(
            f"the GGUF tokenizer {model!r} is not supported (supported: {', '.join(builders)})"
        )
    return builders[model]


def byte_level_bpe(fields: Mapping[str, Any]) -> tuple[Any, bool]:
    """GPT-2's kind of tokenizer: ``(tokenizer, whether it adds BOS)``."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = _field(fields, "pre", "default")
    if pre not in SPLITTINGS:
        raise ConversionError(
            f"the GGUF pre-tokenizer {pre!r} is not supported "
            f"(supported: {', '.join(sorted(SPLITTINGS))}); convert the safetensors instead"
        )
    splitting = SPLITTINGS[pre]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(_field(fields, "tokens"))},
            merges=_merges(fields),
            ignore_merges=splitting.whole_words,
        )
    )
    if splitting.nfc:
        tokenizer.normalizer = normalizers.NFC()
    own_pattern = splitting.pattern is None
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own_pattern)]
    if splitting.digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(tokenizer, fields)
    add_bos = _field(fields, "add_bos_token", splitting.bos)
    _add_template(tokenizer, fields, add_bos)
    return tokenizer, add_bos


def sentencepiece_bpe(fields: Mapping[str, Any]) -> tuple[Any, bool]:
    """Llama 2's kind: BPE over text with "▁" for blanks, unknown characters byte by byte."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = _field(fields, "tokens")
    unknown = tokens[_field(fields, "unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_merges(fields) or merges_from_scores(tokens, _field(fields, "scores")),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    blanks: list[Any] = [normalizers.Replace(" ", "▁")]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if _field(fields, "add_space_prefix", True):
        blanks.insert(0, normalizers.Prepend("▁"))
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(blanks)
    tokenizer.decoder = decoders.Sequence(steps)
    _add_special_tokens(tokenizer, fields)
    add_bos = _field(fields, "add_bos_token", True)
    _add_template(tokenizer, fields, add_bos)
    return tokenizer, add_bos


def _merges(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    # A merge is two pieces around the one blank that is not the first character.
    pairs = []
    for merge in _field(fields, "merges", []):
        cut = merge.index(" ", 1)
        pairs.append((merge[:cut], merge[cut + 1 :]))
    return pairs


def merges_from_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that a scored SentencePiece vocabulary implies, best first.

    Every split of a token into two tokens is a merge; its rank is the token's own score.
    """
    ids = {token: index for index, token in enumerate(tokens)}
    ranked = [
        (-scores[index], index, token[:cut], token[cut:])
        for index, token in enumerate(tokens)
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    ranked.sort(key=lambda merge: (merge[0], merge[1], ids[merge[2]], ids[merge[3]]))
    return [(left, right) for *_, left, right in ranked]


def _add_special_tokens(tokenizer: Any, fields: Mapping[str, Any]) -> None:
    """Keep control tokens and user-defined ones whole in text, as llama.cpp does."""
    from tokenizers import AddedToken

    marked = list(zip(_field(fields, "tokens"), _field(fields, "token_type", []), strict=False))
    control = [token for token, kind in marked if kind == CONTROL]
    defined = [token for token, kind in marked if kind == USER_DEFINED]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in control]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])


def _add_template(tokenizer: Any, fields: Mapping[str, Any], add_bos: bool) -> None:
    from tokenizers import processors

    ends = [
        _special(fields, "bos_token_id") if add_bos else None,
        _special(fields, "eos_token_id") if _field(fields, "add_eos_token", False) else None,
    ]
    first, last = ends
    if not (first or last):
        return
    single = [first, "$A", last]
    pair = [first, "$A", last, first and f"{first}:1", "$B:1", last and f"{last}:1"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[piece for piece in single if piece],
        pair=[piece for piece in pair if piece],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ends if token],
    )


def _special(fields: Mapping[str, Any], key: str) -> str | None:
    index = _field(fields, key)
    return None if index is None else _field(fields, "tokens")[index]


def _tokenizer_config(
    fields: Mapping[str, Any], vocabulary: list[str], add_bos: bool
) -> dict[str, Any]:
    named = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": add_bos,
        "add_eos_token": _field(fields, "add_eos_token", False),
    }
    settings |= {
        name: vocabulary[index]
        for name, key in named.items()
        if (index := _field(fields, key)) is not None
    }
    if "tokenizer.chat_template" in fields:
        settings["chat_template"] = fields["tokenizer.chat_template"]
    return settings
