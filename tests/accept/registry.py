"""The rules of the registry by what they promise: a newcomer lands in every test that fits it."""

from specjax.accept import RULES

SAMPLING = {name: rule for name, rule in RULES.items() if rule.lossless and not rule.greedy_only}
TREES = {name: rule for name, rule in SAMPLING.items() if rule.trees}
LOSSY = {name: rule for name, rule in RULES.items() if not rule.lossless}

# In law form: their law is computed. The others are walks: they emit plain decoding's tokens.
LAW_FORM = {name: rule for name, rule in RULES.items() if hasattr(rule, "stop_law")}
LAWS = {name: rule for name, rule in LAW_FORM.items() if rule.lossless}
TREE_LAWS = {name: rule for name, rule in LAWS.items() if rule.trees}
LAWS_OF_DRAWN = {name: rule for name, rule in LAWS.items() if rule.draws == "sample"}
WALKS = {name: rule for name, rule in RULES.items() if name not in LAW_FORM}
