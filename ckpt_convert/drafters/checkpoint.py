"""A drafter's checkpoint folder, written and read with the store that models' folders use."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_convert import store
from ckpt_convert.drafters.drafter import Format
from ckpt_convert.drafters.rules import parameters
from ckpt_convert.errors import ConversionError

MAP = "draft_to_target"


@dataclass(frozen=True)
class DrafterManifest:
    """What a drafter's ``config.json`` says, arrays aside."""

    method: str
    config: Any
    dtype: str
    source: str
    source_sha256: str
    target: str | None = None
    kind: str = store.DRAFTER
    files: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DrafterCheckpoint:
    """A drafter in memory: how it drafts, its network's configuration and its parameters.

    ``target`` is the name that the source gave the model it drafts for, where it gave one.
    """

    path: Path
    method: str
    config: Any
    params: dict[str, Any]
    target: str | None

    def describe(self) -> str:
        """What a reader wants to know, a line each."""
        import jax

        size = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return "\n".join([f"parameters  {size / 1e6:,.1f} million", *describe(self)])


def describe(drafter: Any) -> list[str]:
    """Lines about a ``method``, its ``config`` and its ``target``."""
    config, lines = drafter.config, [f"method      {drafter.method}"]
    if drafter.target:
        lines.append(f"drafts for  {drafter.target}")
    reduced = getattr(config, "reduced", False)
    drafts = f", of which {config.draft_vocab_size:,} are drafted" if reduced else ""
    lines.append(f"vocabulary  {config.vocab_size:,}{drafts}")
    taps = getattr(config, "taps", None)
    if taps is not None:
        after = ", ".join(map(str, taps)) or "1, L // 2 - 1 and L - 4 (the method's default)"
        lines.append(f"taps        after the target's layers {after}")
    layout = getattr(config, "layout", None)
    if layout is not None:
        lines.append(f"layout      {layout}, {config.block_size} slots, {config.num_drafts} drafts")
    if borrowed := _borrowed(config):
        lines.append(f"borrows     the target's {' and '.join(borrowed)}")
    return lines


def _borrowed(config: Any) -> list[str]:
    parts = [part for part in ("embedding", "head") if not getattr(config, f"own_{part}", True)]
    if getattr(config, "tied", False) and config.own_embedding:
        return []
    return parts


def abstract(form: Format, config: Any, dtype: Any) -> dict[str, Any]:
    """Shape and type of every parameter of a drafter of this format, its map of ids aside."""
    return parameters(form.rules(config), form.sizes(config), dtype)


def read_drafter_manifest(path: str | Path, formats: Mapping[str, Format]) -> DrafterManifest:
    """What a drafter's folder says of itself; no array is read.

    Raises ``ConversionError`` for a folder that is no drafter's or is incomplete.
    """
    path = Path(path)
    entries = store.read_entries(path)
    if entries.get("kind") != store.DRAFTER:
        raise ConversionError(f"{path} is a model, no drafter; read it with ckpt_convert.load")
    try:
        form = formats[entries["method"]]
        entries["config"] = store.rebuilt(form.config, entries["config"])
        manifest = DrafterManifest(**entries)
    except (KeyError, TypeError, ValueError) as fault:
        raise store.damaged_manifest(path, fault) from None
    store.check_files(path, manifest.files)
    return manifest


def load_drafter(
    path: str | Path, formats: Mapping[str, Format], *, dtype: Any = None, shardings: Any = None
) -> DrafterCheckpoint:
    """See `ckpt_convert.load_drafter`."""
    import jax
    import jax.numpy as jnp

    path = Path(path)
    manifest = read_drafter_manifest(path, formats)
    wanted = jnp.dtype(dtype if dtype is not None else manifest.dtype)
    tree = abstract(formats[manifest.method], manifest.config, wanted)
    if getattr(manifest.config, "reduced", False):
        draft_ids = (manifest.config.draft_vocab_size,)
        tree[MAP] = jax.ShapeDtypeStruct(draft_ids, jnp.int32)
    params = store.restored(path, store.placed(tree, shardings))
    return DrafterCheckpoint(path, manifest.method, manifest.config, params, manifest.target)
