"""The pytest plugin: specjax's tests of a sampler as fixtures, there wherever specjax is installed.

Nothing heavy is imported before a fixture is asked for: the plugin is loaded by every run of
pytest in that environment.
"""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def joint_law_test() -> Callable[..., Any]:
    """`specjax.testing.joint_law_test`: draws from a sampler and tests the law of its sequences."""
    from specjax.testing.joint import joint_law_test

    return joint_law_test


@pytest.fixture(scope="session")
def assert_lossless() -> Callable[..., Any]:
    """``assert_lossless(sampler, target, **options)``: fails with the report where the law breaks.

    Takes what `joint_law_test` takes, and returns its result.
    """
    from specjax.testing.joint import joint_law_test

    def check(sampler: Any, target: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        result = joint_law_test(sampler, target, **options)
        if not result.passed:
            pytest.fail(str(result), pytrace=False)
        return result

    return check


@pytest.fixture(scope="session")
def law_tables() -> Any:
    """`specjax.testing.TABLES`: small language models whose laws are known."""
    from specjax.testing.tables import TABLES

    return TABLES
