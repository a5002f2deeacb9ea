"""What can't be planned is refused: rows, outcomes, checks, levels and biases that are none."""

import numpy as np
import pytest

from specjax.testing.power_analysis import power, rows_needed, smallest_tv

pytestmark = pytest.mark.fast

REFUSED = {
    "power of more than all": (power, (100, 3.0), {}, r"tv is 3.0: .* lies in \(0, 1\]"),
    "power below 0": (power, (100, -0.1), {}, "tv is -0.1: .* lies in"),
    "power of NaN": (power, (100, np.nan), {}, "tv is nan: .* lies in"),
    "power of no rows": (power, (-1, 0.1), {}, "rows is -1: it must be at least 0"),
    "power of no outcome": (power, (100, 0.1), {"cells": 0}, "cells is 0: it must be at least 1"),
    "power of no check": (power, (100, 0.1), {"checks": 0}, "checks is 0: it must be at least 1"),
    "power at no level": (power, (100, 0.1), {"alpha": 0.0}, "alpha is 0.0: it must lie between"),
    "rows of no outcome": (rows_needed, (0.1,), {"cells": 0}, "cells is 0"),
    "rows of no check": (rows_needed, (0.1,), {"checks": -1}, "checks is -1"),
    "rows at no level": (rows_needed, (0.1,), {"alpha": 2.0}, "alpha is 2.0"),
    "rows for certainty": (rows_needed, (0.1,), {"probability": 1.0}, "probability is 1.0: it"),
    "bias of no rows": (smallest_tv, (-1,), {}, "rows is -1: it must be at least 0"),
    "bias of no outcome": (smallest_tv, (9,), {"cells": 0}, "cells is 0"),
    "bias of no check": (smallest_tv, (9,), {"checks": 0}, "checks is 0"),
    "bias at no level": (smallest_tv, (9,), {"alpha": -1.0}, "alpha is -1.0"),
    "bias for certainty": (smallest_tv, (9,), {"probability": 0.0}, "probability is 0.0"),
}


@pytest.mark.parametrize("function, values, named, sentence", REFUSED.values(), ids=list(REFUSED))
def test_a_plan_that_is_none_is_refused(function, values, named, sentence):
    with pytest.raises(ValueError, match=sentence):
        function(*values, **named)


def test_no_rows_find_nothing():
    assert power(0, 0.5) < 1e-5
    assert smallest_tv(0) == 1.0
