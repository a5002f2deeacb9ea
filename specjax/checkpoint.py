"""From a name or a folder to a model in memory, on one device or sharded over a mesh."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specjax.models.decoder import DecoderTarget, unstack
from specjax.models.quantised import check_scheme, held, quantise, refuse_faults
from specjax.sampling_params import SamplingParams
from specjax.sharding import parameter_formats, parameter_shardings
from specjax.tokenizer import Tokenizer

log = logging.getLogger("specjax")

DTYPES = ("float32", "bfloat16", "float16")

# Hugging Face's names for what `SamplingParams` holds.
GENERATION = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
UNSAMPLED = ("repetition_penalty", "max_tokens")


@dataclass(frozen=True)
class Model:
    """A target with its parameters, its tokenizer and its limits.

    Unpacks into the first three: ``target, params, tokenizer = load(...)``. ``generation`` holds
    the sampling that the model's makers recommend, in Hugging Face's words.
    """

    target: Any
    params: Any
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_position: int
    dtype: str = "float32"
    generation: Mapping[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.target, self.params, self.tokenizer))

    @property
    def sampling_params(self) -> SamplingParams:
        """What ``generation`` asks for, where a request to `LLM` asks for nothing itself.

        A file that asks for what cannot be is left aside, with a warning.
        """
        given: dict[str, Any] = {
            ours: self.generation[theirs]
            for theirs, ours in GENERATION.items()
            if self.generation.get(theirs) is not None
        }
        if self.generation.get("do_sample") is False:
            given = {key: given[key] for key in given if key in UNSAMPLED} | {"temperature": 0.0}
        try:
            return SamplingParams(**given)
        except ValueError as fault:
            log.warning("the model's generation_config.json is left aside: %s", fault)
            return SamplingParams()


def resolve_dtype(dtype: str) -> str:
    """``auto`` is bfloat16 on a TPU and on GPUs of compute capability 8.0 or more, else float32."""
    if dtype == "auto":
        chosen = "bfloat16" if _has_fast_bfloat16() else "float32"
        log.info("dtype auto: %s on %s", chosen, jax.devices()[0].device_kind)
        return chosen
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not known; choose auto, {', '.join(DTYPES)}")
    return dtype


def load(
    model: str | Path,
    *,
    mesh: Mesh | None = None,
    dtype: str | None = None,
    quantization: str | None = None,
) -> Model:
    """``(target, params, tokenizer)`` of a checkpoint folder, a Hugging Face folder, GGUF or name.

    The latter three are converted once into the cache folder. ``mesh``: where the parameters go,
    shard by shard as they are read; the host never holds the whole model. ``dtype``: of the
    parameters and the cache, cast as they are read; None is the stored one, "auto" this machine's
    best. ``quantization`` ("int8", "int4") quantises plain weights once they are read; None takes
    what the checkpoint holds. Raises ValueError with one sentence for anything that is not a sound
    checkpoint.
    """
    from ckpt_convert import fetch, store

    if not isinstance(model, str | Path):
        raise ValueError(f"the model is {model!r}: give a name, a path or a loaded Model")
    dtype = None if dtype is None else resolve_dtype(dtype)
    check_scheme(quantization)
    folder = fetch.resolve(model)
    manifest = store.read_manifest(folder)
    config, dtype = manifest.config, dtype or manifest.dtype
    stored = manifest.quantization
    check_stored(folder, stored, quantization)
    tokenizer = Tokenizer.load(folder)
    target = DecoderTarget(config, dtype=dtype, stacked=True, quantization=stored)
    shardings = None
    if mesh is not None:
        shardings = parameter_shardings(mesh, target.parameter_axes(), target.abstract_params())
    checkpoint = store.load(folder, dtype=jnp.dtype(dtype), shardings=shardings)
    params = checkpoint.params
    if quantization is not None and stored is None:
        params = _quantised(target, params, quantization)
        target = replace(target, quantization=quantization)
    params = held(params, jax.default_backend())
    if mesh is not None:
        formats = parameter_formats(mesh, target.parameter_axes(), params)
        params = jax.device_put(params, formats, donate=True)
    if mesh is None and jax.default_backend() == "cpu":
        target, params = _for_cpu(target, params)
    return Model(
        target=target,
        params=params,
        tokenizer=tokenizer,
        eos_ids=_eos_ids(checkpoint.eos_ids, tokenizer.eos_id, config.vocab_size),
        vocab_size=config.vocab_size,
        max_position=config.max_position,
        dtype=dtype,
        generation=checkpoint.generation,
    )


def _eos_ids(named: Sequence[int], tokenizers: int | None, rows: int) -> tuple[int, ...]:
    """Every id that ends a text: chat models often name one in the tokenizer's settings only."""
    every = dict.fromkeys((*named, *(() if tokenizers is None else (tokenizers,))))
    return tuple(id for id in every if 0 <= id < rows)


def check_stored(model: Any, stored: str | None, wanted: str | None) -> None:
    """Refuses to quantise weights that are quantised already, in another way."""
    if wanted is not None and stored is not None and wanted != stored:
        raise ValueError(
            f"{model} holds {stored} weights, which cannot be made {wanted}: leave quantization "
            f"out, or convert the original with --quantize {wanted}"
        )


def check_loaded(model: Model, wanted: str | None, dtype: str) -> None:
    """Refuses to quantise or to cast a model that is in memory already."""
    check_scheme(wanted)
    if dtype != "auto" and resolve_dtype(dtype) != model.dtype:
        raise ValueError(
            f"the loaded model is of {model.dtype}: load it with dtype={dtype!r}, or leave it out"
        )
    stored = getattr(model.target, "quantization", None)
    check_stored("the loaded model", stored, wanted)
    if wanted is not None and stored is None:
        raise ValueError(
            f"the model is loaded with plain weights: load it with quantization={wanted!r}"
        )


def _quantised(target, params, quantization):
    quantised = jax.jit(lambda plain: quantise(plain, target.parameter_axes(), quantization))
    params = quantised(params)
    refuse_faults(params)
    return params


def _for_cpu(target, params):
    """The unrolled layer loop, which copies no weight out of a stack, with a float32 cache.

    A CPU moves floats in float32 only: to write into a 16-bit cache, or to take a layer out of
    stacked 16-bit weights, XLA would widen the whole of it. Quantised weights stay stacked: a
    layer's floats are made where it is taken out, and outside the scan XLA makes all of them first.
    """
    if target.quantization is not None:
        return replace(target, dtype="float32"), params
    return replace(target, dtype="float32", stacked=False), unstack(params)


def _has_fast_bfloat16() -> bool:
    device = jax.devices()[0]
    if device.platform == "tpu":
        return True
    capability = getattr(device, "compute_capability", None)
    return device.platform == "gpu" and capability is not None and float(capability) >= 8.0
