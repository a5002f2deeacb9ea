"""The target's own first layers as the drafter (LayerSkip, Elhoushi et al., arXiv 2404.16710).

The draft model shares the target's parameters, its final norm and its head, and keeps a cache of
its own. Without early-exit training its acceptance is modest; it needs no second checkpoint.
"""

from specjax.draft.host import Built, Host
from specjax.draft.model import ModelDrafter


def build(host: Host, *, exit_layer: int, num_speculative_tokens: int = 3) -> Built:
    """A `ModelDrafter` over the first ``exit_layer`` layers of the target."""
    if not hasattr(host.target, "first_layers"):
        raise ValueError(
            f"early_exit needs a target with first_layers(); {type(host.target).__name__} has none"
        )
    drafter = ModelDrafter(
        model=host.target.first_layers(exit_layer),
        num_speculative_tokens=num_speculative_tokens,
        vocab_size=host.vocab_size,
        max_context=host.max_context,
        prefill_chunk=host.prefill_chunk,
    )
    return Built(drafter, host.params)
