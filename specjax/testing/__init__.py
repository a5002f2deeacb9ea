"""Proofs that speculation leaves the target's law alone.

- `exact`: the law of one round of a rule in law form, by enumeration, to rounding error.
- `joint`: laws of whole sequences, and how often each one came out of a generation.
- `pearson`: how far counts are from a law, and the smallest bias that would have been seen.
- `tables`: small language models whose laws can be written down.
- `reference`: the sampling transforms by full sorts in NumPy, for one vector at a time.
- `identity`: speculative output against plain output, token by token.
- `hlo`: what a compiled loop does with its cache, read from its HLO.
- `mutants`: rules with one fault each, which the proofs must find.
"""
