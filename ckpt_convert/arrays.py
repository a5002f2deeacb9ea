"""Parameters to and from the disk, as Orbax stores them."""

import asyncio
import contextlib
import gc
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# Bytes of a stored chunk: a parameter that is one chunk is written without a copy, and a larger one
# must not be read whole by every device that holds a part of it.
CHUNK = 256 << 20
# Parameters larger than this are read one at a time.
ALONE = 64 << 20


def nbytes(params: Mapping[str, Any]) -> int:
    """Bytes of all parameters together."""
    import jax

    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def save(path: Path, params: Mapping[str, Any], chunks: Mapping[str, Any] | None = None) -> None:
    """Write NumPy parameters, without a copy where a chunk holds them whole.

    ``chunks``: the shape of each one's chunks; None lets them be few and large.
    """
    import jax
    import orbax.checkpoint as ocp

    shapes = [] if chunks is None else jax.tree.leaves(chunks, is_leaf=_is_shape)
    leaves = jax.tree.leaves(params)
    handler = _handler({id(leaf): shape for leaf, shape in zip(leaves, shapes, strict=False)})
    registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, handler))
    by_size = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK), params)
    with _quiet():
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=True,
            use_zarr3=True,
            use_compression=False,  # weights do not compress, and reading is twice as fast
            type_handler_registry=registry,
        )
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(params, save_args=by_size))


def _handler(chunks: Mapping[int, tuple[int, ...]]) -> Any:
    """Orbax's own for NumPy, with the chunks of the arrays that are named by ``id``."""
    import orbax.checkpoint as ocp

    class Chunked(ocp.type_handlers.NumpyHandler):
        # Orbax takes the size of a chunk but not its shape, which its public interface ties to
        # arrays that lie on as many devices already. Were this method no longer called, devices
        # would read more than their own bytes, and nothing worse.
        async def _open_and_write(self, value, tspec, ts_context):
            shape = chunks.get(id(value))
            if shape is None:
                await super()._open_and_write(value, tspec, ts_context)
                return
            for settings in _settings_of_chunks(tspec["metadata"]):
                settings["chunk_shape"] = list(shape)
            async with turns:
                await _write_chunks(value, shape, tspec, ts_context)

    turns = asyncio.Lock()
    # Orbax would copy every array first, against changes that nobody makes here.
    return Chunked(deepcopy_host_arrays=False)


async def _write_chunks(
    value: np.ndarray, shape: tuple[int, ...], tspec: dict[str, Any], ts_context: Any
) -> None:
    """One chunk after the other: each must be copied into one piece, and only one at a time is."""
    import tensorstore

    stored = await tensorstore.open(
        tensorstore.Spec(tspec), create=True, open=True, context=ts_context
    )
    starts = [range(0, size, step) for size, step in zip(value.shape, shape, strict=True)]
    for start in itertools.product(*starts):
        part = tuple(slice(at, at + step) for at, step in zip(start, shape, strict=True))
        await stored[part].write(
            np.ascontiguousarray(value[part]), can_reference_source_data_indefinitely=True
        )


def _settings_of_chunks(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The places in an array's Zarr metadata that hold the shape of a chunk."""
    codecs = [codec["configuration"] for codec in metadata["codecs"] if "configuration" in codec]
    grid = metadata["chunk_grid"]["configuration"]
    return [grid, *(codec for codec in codecs if "chunk_shape" in codec)]


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple)


def restore(path: Path, abstract: Any) -> Any:
    """The parameters that ``abstract`` describes by ``jax.ShapeDtypeStruct`` with shardings."""
    import jax
    import orbax.checkpoint as ocp

    restored = {}
    for group in _read_groups(path, abstract, ocp.checkpoint_utils.construct_restore_args):
        restored |= group
    return jax.tree_util.tree_map_with_path(lambda place, _: restored[place], abstract)


def stream(path: Path, abstract: Any) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """Each parameter's path and values as NumPy has them; drop one before you ask for the next."""
    import jax
    import orbax.checkpoint as ocp

    def on_the_host(group: Any) -> Any:
        return jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), group)

    for group in _read_groups(path, abstract, on_the_host):
        while group:
            place, values = group.popitem()
            yield tuple(step.key for step in place), values
            del values


def _read_groups(
    path: Path, abstract: Any, arguments: Callable[[Any], Any]
) -> Iterator[dict[Any, Any]]:
    """Parameters by place, group by group: the host never holds a second copy of the model."""
    import jax
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        for group in _groups(abstract):
            wanted = ocp.args.PyTreeRestore(
                group, restore_args=arguments(group), partial_restore=True
            )
            with _quiet():
                tree = checkpointer.restore(path.absolute(), args=wanted)
            found = dict(jax.tree_util.tree_leaves_with_path(tree))
            del tree
            gc.collect(1)  # Orbax leaves the host's buffers in a reference cycle
            yield found
            del found


def _groups(abstract: Any) -> Iterator[dict[str, Any]]:
    """Subtrees of ``abstract``: each large parameter alone, largest first, then all small ones."""
    import jax

    leaves = sorted(
        jax.tree_util.tree_leaves_with_path(abstract), key=lambda entry: -_nbytes(entry[1])
    )
    for entry in leaves:
        if _nbytes(entry[1]) > ALONE:
            yield _subtree([entry])
    small = [entry for entry in leaves if _nbytes(entry[1]) <= ALONE]
    if small:
        yield _subtree(small)


def _nbytes(leaf: Any) -> int:
    return leaf.size * leaf.dtype.itemsize


def _subtree(leaves: list[tuple[Any, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves:
        node = tree
        for step in path[:-1]:
            node = node.setdefault(step.key, {})
        node[path[-1].key] = leaf
    return tree


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Orbax's reports off stderr: what is normal here, and faults that are raised as well.

    A writer that fails leaves other threads printing tracebacks of their own, some after it has
    returned; the caller gets the first fault as an exception all the same.
    """
    logger = logging.getLogger("absl")
    level, hooks = logger.level, (sys.excepthook, sys.unraisablehook, threading.excepthook)
    logger.setLevel(logging.CRITICAL + 1)
    sys.excepthook = sys.unraisablehook = threading.excepthook = lambda *fault: None
    try:
        yield
    except BaseException:
        hooks = _without_stragglers(hooks[0]), _without_stragglers(hooks[1]), hooks[2]
        raise
    finally:
        logger.setLevel(level)
        sys.excepthook, sys.unraisablehook, threading.excepthook = hooks


def _without_stragglers(report: Callable[..., Any]) -> Callable[..., Any]:
    """``report`` but for threads that find the event loop of a failed reader or writer gone."""

    def hook(first, *rest):
        # An excepthook gets type, value and trace; an unraisablehook one object that has them.
        fault = rest[0] if rest else first.exc_value
        if str(fault) != "Event loop is closed":
            report(first, *rest)

    return hook
