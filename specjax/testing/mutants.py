"""Rules with one fault each. A proof that cannot tell them from the real ones proves nothing.

The faults are those that shipped elsewhere: each leaves the output plausible and its law wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.accept import law
from specjax.noise import Noise
from specjax.sampling import first_argmax
from specjax.types import NO_PARENT, AcceptResult, Draft


@dataclass(frozen=True)
class TargetForResidual:
    """A law whose next token is drawn from the target's law after a rejection, too."""

    law: Any

    def stop_law(self, draft, log_p):
        return self.law.stop_law(draft, log_p)

    def residual(self, draft, log_p, aux, node):
        return log_p[node]


@dataclass(frozen=True)
class SoftmaxedResidual:
    """A law whose residual mass is put through a softmax instead of being divided by its sum."""

    law: Any

    def stop_law(self, draft, log_p):
        return self.law.stop_law(draft, log_p)

    def residual(self, draft, log_p, aux, node):
        return jnp.exp(self.law.residual(draft, log_p, aux, node))


@dataclass(frozen=True)
class UnmaskedPadding:
    """A law that takes the padding of a chain for drafted tokens."""

    law: Any

    def stop_law(self, draft, log_p):
        return self.law.stop_law(_unmasked(draft), log_p)

    def residual(self, draft, log_p, aux, node):
        return self.law.residual(_unmasked(draft), log_p, aux, node)


def _unmasked(draft: Draft) -> Draft:
    index = jnp.arange(draft.parents.shape[-1])
    parents = jnp.where(draft.parents == NO_PARENT, index - 1, draft.parents)
    return Draft(draft.tokens, parents, draft.log_q)


@dataclass(frozen=True)
class Mutant:
    """``rule`` deciding as ``fault(rule, draft, log_p, noise)`` does, a module-level function."""

    rule: Any
    fault: Callable[..., AcceptResult]

    @property
    def draws(self) -> str:
        return self.rule.draws

    @property
    def lossless(self) -> bool:
        return False

    @property
    def trees(self) -> bool:
        return self.rule.trees

    @property
    def greedy_only(self) -> bool:
        return self.rule.greedy_only

    def __call__(self, draft: Draft, log_p: Float[Array, "N V"], noise: Noise) -> AcceptResult:
        return self.fault(self.rule, draft, log_p, noise)


def target_for_residual(rule, draft: Draft, log_p, noise: Noise) -> AcceptResult:
    """After a rejection, draws from the target's law: what was rejected may come again."""
    return law.sample(TargetForResidual(rule), draft, log_p, noise)


def fresh_noise(rule, draft: Draft, log_p, noise: Noise) -> AcceptResult:
    """Draws the next token anew: that draft and target disagreed is then forgotten."""
    result = rule(draft, log_p, noise)
    node = result.path[result.num_accepted]
    anew = log_p[node] + noise.accept(log_p.shape[-1])
    return result.replace(next_token=first_argmax(anew))
