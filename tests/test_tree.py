"""Trees as parent indices, against walks from each node to its root."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accept.instances import random_trees

from specjax import tree

pytestmark = pytest.mark.fast

NODES = 9


@pytest.fixture(scope="module")
def parents():
    return np.asarray(random_trees(2, 64, NODES, 4)[0])


def lineage(parents, node):
    """From the top of its tree, which is the root or padding, down to ``node``."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def test_ancestors_are_the_lineage(parents):
    reach = np.asarray(jax.jit(tree.ancestors)(jnp.asarray(parents)))
    for row in range(len(parents)):
        for node in range(NODES):
            assert np.flatnonzero(reach[row, node]).tolist() == sorted(lineage(parents[row], node))


def test_depth_and_reachability_follow_from_the_lineage(parents):
    depth = np.asarray(tree.depth(jnp.asarray(parents)))
    reachable = np.asarray(tree.reachable(jnp.asarray(parents)))
    for row, tops in enumerate(parents):
        lines = [lineage(tops, node) for node in range(NODES)]
        assert depth[row].tolist() == [len(line) - 1 for line in lines]
        assert reachable[row].tolist() == [line[0] == 0 for line in lines]
    assert not reachable.all() and depth.max() >= 4


def test_paths_lead_down_and_repeat_their_last_node(parents):
    paths = jax.vmap(jax.vmap(tree.path_to, in_axes=(None, 0, None)), in_axes=(0, None, None))(
        jnp.asarray(parents), jnp.arange(NODES), NODES
    )
    reachable = np.asarray(tree.reachable(jnp.asarray(parents)))
    for row, node in zip(*np.nonzero(reachable), strict=True):
        line = lineage(parents[row], int(node))
        assert paths[row, node].tolist() == line + [node] * (NODES - len(line))


def test_the_longest_standing_path_is_found(parents):
    stands = np.random.default_rng(0).random(parents.shape) < 0.6
    node, depth = jax.vmap(tree.longest_path)(jnp.asarray(parents), jnp.asarray(stands))
    for row, tops in enumerate(parents):
        lines = [lineage(tops, n) for n in range(NODES)]
        standing = [line for line in lines if line[0] == 0 and stands[row, line[1:]].all()]
        longest = max(len(line) for line in standing)
        assert int(depth[row]) == longest - 1
        assert lines[int(node[row])] in [line for line in standing if len(line) == longest]
    assert int(depth.max()) >= 2


def test_chains_are_trees():
    np.testing.assert_array_equal(tree.chain(2, 4), [[-1, 0, 1, 2]] * 2)
    padded = tree.padded_chain(jnp.array([0, 2, 3]), 4)
    np.testing.assert_array_equal(padded, [[-1, -1, -1, -1], [-1, 0, 1, -1], [-1, 0, 1, 2]])
    assert tree.reachable(padded).sum(axis=1).tolist() == [1, 3, 4]


def test_a_node_has_a_child_when_some_node_names_it(parents):
    for tops in parents[:8]:
        expected = [node in tops for node in range(NODES)]
        assert tree.has_child(jnp.asarray(tops)).tolist() == expected


def test_take_path_picks_the_nodes_of_each_row():
    values = jnp.arange(24).reshape(2, 4, 3)
    picked = tree.take_path(values, jnp.array([[0, 2], [0, 3]]))
    np.testing.assert_array_equal(picked[0], values[0, jnp.array([0, 2])])
    np.testing.assert_array_equal(picked[1], values[1, jnp.array([0, 3])])
