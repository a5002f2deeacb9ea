"""Drafters, one a file. To add one, write its file with a ``build`` and name it in `DRAFTERS`.

The keyword arguments of ``build`` are the options that ``speculative_config`` takes for it.
"""

from specjax.draft import early_exit, model, ngram, none
from specjax.draft.host import Built as Built
from specjax.draft.host import Host as Host
from specjax.draft.model import ModelDrafter as ModelDrafter
from specjax.draft.ngram import NGram as NGram
from specjax.draft.none import NoDraft as NoDraft

DRAFTERS = {
    "none": none.build,
    "ngram": ngram.build,
    "draft_model": model.build,
    "early_exit": early_exit.build,
}
