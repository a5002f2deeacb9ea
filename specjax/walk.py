"""Going down a draft while some child carries the token that the target wants."""

from jaxtyping import Array, Int

from specjax import tree
from specjax.types import AcceptResult, Draft


def walk(draft: Draft, wanted: Int[Array, " N"]) -> AcceptResult:
    """Accepts the longest path on which each token is the one ``wanted`` after its parent."""
    nodes = draft.tokens.shape[0]
    stands = draft.tokens == wanted[draft.parents]
    node, depth = tree.longest_path(draft.parents, stands)
    return AcceptResult(
        path=tree.path_to(draft.parents, node, nodes),
        num_accepted=depth,
        next_token=wanted[node],
    )
