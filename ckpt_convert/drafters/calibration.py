"""Which reading of a drafter is the right one: the one whose drafts the target agrees with.

A block's layout or the meaning of tapped layers, read wrongly, gives no error, only drafts that are
hardly ever accepted. A short text is enough to tell.
"""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ckpt_convert.errors import ConversionError
from specjax.models.dflash import (
    FILL_IN,
    LAYOUTS,
    DFlashConfig,
    block_hidden,
    block_logits,
    block_tokens,
    context_features,
    context_keys_values,
)
from specjax.models.draft_layer import borrowed
from specjax.models.eagle import EagleConfig, eagle_features
from specjax.models.eagle3 import (
    Eagle3Config,
    eagle3_features,
    eagle3_logits,
    even_taps,
    fuse_taps,
)
from specjax.models.linear import head
from specjax.models.markov import markov_shift

log = logging.getLogger("specjax")

# A draft of the tokens behind a place in the text, in order.
Propose = Callable[[int], Sequence[int]]
# The target's residual streams of a text of L tokens after some of its layers, [L, F, E]; may raise
# ValueError for layers that the target has not.
Tapped = Callable[[tuple[int, ...]], jax.Array]
# By so many standard errors a difference is no accident.
SURE = 3.0


@dataclass(frozen=True)
class Calibration:
    """How many drafts of each reading the target accepted: ``accepted[name]`` [places]."""

    chosen: str
    accepted: Mapping[str, np.ndarray]

    @property
    def best(self) -> str:
        """The reading with the most accepted drafts; the chosen one where it is among them."""
        most = max(rounds.mean() for rounds in self.accepted.values())
        names = [name for name, rounds in self.accepted.items() if rounds.mean() == most]
        return self.chosen if self.chosen in names else names[0]

    @property
    def chosen_is_worse(self) -> bool:
        """True where the best reading is better by more than chance, place by place."""
        gain = self.accepted[self.best] - self.accepted[self.chosen]
        error = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else np.inf
        return bool(gain.mean() > SURE * error)

    def check(self) -> None:
        """Raise ``ConversionError`` where the chosen reading is worse by half, warn where by less.

        By more than chance, that is.
        """
        if not self.chosen_is_worse:
            return
        found, best = (self.accepted[name].mean() for name in (self.chosen, self.best))
        said = (
            f"read as {self.chosen}, {found:.2f} drafts are accepted a round, and {best:.2f} read "
            f"as {self.best}"
        )
        if found < best / 2:
            raise ConversionError(f"{said}; convert the drafter again, saying so")
        log.warning("%s", said)

    def __str__(self) -> str:
        width = max(map(len, self.accepted))
        lines = [f"{'reading':<{width}}  accepted  first"]
        for name, rounds in self.accepted.items():
            marks = "  chosen" * (name == self.chosen) + "  best" * (name == self.best)
            first = np.mean(rounds > 0)
            lines.append(f"{name:<{width}}  {rounds.mean():8.2f}  {first:5.1%}{marks}")
        return "\n".join(lines)


def calibrate(
    readings: Mapping[str, Propose], tokens: np.ndarray, places: Sequence[int], chosen: str
) -> Calibration:
    """Let every reading draft behind each of ``places`` of a text that the target wrote.

    ``tokens`` [L] are the prompt and the target's own most likely tokens after it, so that a draft
    is accepted where it equals them. ``chosen`` is the reading to be judged. Raises
    ``ConversionError`` where there is no such reading, and for places without a token on either
    side.
    """
    last = len(tokens) - 2
    if not len(places) or not 1 <= min(places) <= max(places) <= last:
        raise ConversionError(
            f"drafts are judged behind places from 1 to {last} of a text of {len(tokens)} tokens; "
            "give some of these"
        )
    if chosen not in readings:
        raise ConversionError(f"{chosen!r} is none of the readings ({', '.join(readings)})")
    return Calibration(
        chosen,
        {
            name: np.array([_agreed(propose(place), tokens[place + 1 :]) for place in places])
            for name, propose in readings.items()
        },
    )


def _agreed(draft: Sequence[int], tokens: np.ndarray) -> int:
    """How many drafts in a row are right."""
    length = min(len(draft), len(tokens))
    wrong = np.flatnonzero(np.asarray(draft[:length]) != tokens[:length])
    return int(wrong[0]) if len(wrong) else length


def block_readings(
    config: DFlashConfig,
    params: Mapping[str, Any],
    tokens: np.ndarray,
    tapped: Tapped,
    *,
    embed: jax.Array | None = None,
    matrix: jax.Array | None = None,
) -> dict[str, Propose]:
    """Both layouts, with the tapped layers as they are and one earlier and later.

    ``tapped`` is asked about ``tokens`` [L]. ``embed`` and ``matrix`` are the target's embedding
    and head, for what the drafter lacks. The name of the reading that ``config`` itself is comes
    from `block_reading`.
    """
    readings = {}
    for taps, features in _streams(tapped, _shifted(config.taps)):
        # One program for all: neither the layout nor the taps change what is computed.
        plain = replace(config, layout=FILL_IN, taps=config.taps)
        slots = functools.partial(
            _slots, plain, params, features[None], jnp.asarray(tokens[None]), embed, matrix
        )
        for layout in LAYOUTS:
            read = replace(config, layout=layout, taps=taps)
            readings[block_reading(read)] = functools.partial(_drafts, read, slots)
    return readings


def _shifted(taps: tuple[int, ...]) -> list[tuple[int, ...]]:
    """``taps`` as they are, one layer earlier and one later."""
    return [tuple(tap + shift for tap in taps) for shift in (0, -1, 1)]


def _streams(
    tapped: Tapped, candidates: Iterable[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], jax.Array]]:
    """Those of the candidates that the target has, with its streams."""
    for taps in dict.fromkeys(candidates):
        with contextlib.suppress(ValueError):
            if min(taps) >= 0:
                yield taps, tapped(taps)


def next_readings(
    config: EagleConfig,
    params: Mapping[str, Any],
    tokens: np.ndarray,
    features: jax.Array,
    *,
    embed: jax.Array | None = None,
    matrix: jax.Array | None = None,
) -> dict[str, Propose]:
    """EAGLE-1's and 2's embeddings, raw and scaled, each reading drafting one token.

    ``features`` [L, E] are the target's states of ``tokens`` [L] after its last norm. The name of
    the reading that ``config`` itself is comes from `next_reading`.
    """
    readings = {}
    for scale in (1.0, math.sqrt(config.layer.hidden_size)):
        read = replace(config, embedding_scale=scale)
        drafts = _next_drafts(read, params, jnp.asarray(tokens), features, embed, matrix)
        readings[next_reading(read)] = _one_by_one(drafts)
    return readings


def next_reading(config: EagleConfig) -> str:
    """What a reading is called in `next_readings`."""
    return "raw embeddings" if config.embedding_scale == 1.0 else "scaled embeddings"


def tapped_readings(
    config: Eagle3Config,
    params: Mapping[str, Any],
    tokens: np.ndarray,
    tapped: Tapped,
    target_layers: int,
    *,
    embed: jax.Array | None = None,
    matrix: jax.Array | None = None,
) -> dict[str, Propose]:
    """EAGLE-3 with the residual normed and not, after the tapped layers and others.

    The others are one layer earlier and later and, where the configuration names none, evenly
    spread over the target's ``target_layers`` layers. Each reading drafts one token. ``tapped`` is
    asked about ``tokens`` [L]. The name of the reading that ``config`` itself is comes from
    `tapped_reading`.
    """
    candidates = _shifted(config.taps_in(target_layers))
    if not config.taps:
        candidates.append(even_taps(target_layers, config.num_taps))
    readings = {}
    for taps, features in _streams(tapped, candidates):
        for normed in (False, True):
            # The taps change nothing of what is computed: one program for all.
            read = replace(config, taps=(), norm_before_residual=normed)
            drafts = _next_drafts(read, params, jnp.asarray(tokens), features, embed, matrix)
            name = tapped_reading(replace(read, taps=taps), target_layers)
            readings[name] = _one_by_one(drafts)
    return readings


def tapped_reading(config: Eagle3Config, target_layers: int) -> str:
    """What a reading is called in `tapped_readings`."""
    after = ", ".join(map(str, config.taps_in(target_layers)))
    residual = "after" if config.norm_before_residual else "before"
    return f"after layers {after}, the residual {residual} its norm"


def _one_by_one(drafts: jax.Array) -> Propose:
    found = np.asarray(drafts)
    # The state at a place and the token after it tell the token after that.
    return lambda place: [int(found[place - 1])]


@functools.partial(jax.jit, static_argnums=0)
def _next_drafts(config, params, tokens, features, embed, matrix):
    """The most likely token behind each token but the first [L - 1], in the target's ids."""
    positions = jnp.arange(tokens.shape[0] - 1)[None]
    known, follows = features[None, :-1], tokens[None, 1:]
    if isinstance(config, EagleConfig):
        state, _ = eagle_features(config, params, follows, known, positions, embed=embed)
        logits = head(state, borrowed(None, matrix, "head"))
    else:
        fused = fuse_taps(config, params, known)
        state, _ = eagle3_features(config, params, follows, fused, positions, embed=embed)
        logits = eagle3_logits(config, params, state, matrix=matrix)
    best = jnp.argmax(logits[0], axis=-1)
    ids = params.get("draft_to_target")
    return best if ids is None else ids[best]


def block_reading(config: DFlashConfig) -> str:
    """What a reading is called in `block_readings`."""
    return f"{config.layout} after layers {', '.join(map(str, config.taps))}"


def _drafts(config: DFlashConfig, slots: Callable[..., jax.Array], place: int) -> list[int]:
    skipped = config.block_size - config.num_drafts
    return [int(token) for token in slots(jnp.int32(place), jnp.int32(skipped))[skipped:]]


@functools.partial(jax.jit, static_argnums=0)
def _slots(config, params, features, tokens, embed, matrix, place, skipped):
    """Each slot's most likely token, those from number ``skipped`` on drafted left to right."""
    positions = jnp.arange(tokens.shape[1])[None]
    # Features end before the anchor, whose own the target has not computed yet.
    known = jnp.where(positions < place, positions, -1)
    context = context_features(config, params, features)
    pairs = context_keys_values(config, params, context, positions)
    anchor = tokens[:, place]
    places = place + jnp.arange(config.block_size)[None]
    block = block_tokens(config, anchor)
    hidden = block_hidden(config, params, block, places, pairs, known, embed=embed)
    logits = block_logits(config, params, hidden, matrix=matrix)[0]
    ids = params.get("draft_to_target")
    if config.markov is None:
        best = jnp.argmax(logits, axis=-1)
        return best if ids is None else ids[best]
    previous, state, drafts = anchor, jnp.zeros((1, config.markov.rank), hidden.dtype), []
    for slot in range(config.block_size):
        shift, after = markov_shift(config.markov, params, previous, hidden[:, slot], state)
        token = jnp.argmax(logits[slot] + shift[0])[None].astype(anchor.dtype)
        drafts.append(token[0])
        begun = slot >= skipped
        previous, state = jnp.where(begun, token, previous), jnp.where(begun, after, state)
    return jnp.stack(drafts)
