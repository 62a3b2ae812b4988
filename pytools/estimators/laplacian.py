"""Weighted graph Laplacians: solving them by conjugate gradients, and distances over their edges. Pure numpy.

A vertex is an integer, an edge a pair of them; all vertices are connected. On random regular graphs, which are
expanders, a dozen or two iterations do whatever the size.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.intp]

_TINY: Final = 1e-300


class Graph:
    """Edges in both directions, sorted by where they lead, so that sums over a vertex's edges are contiguous.

    Parameters
    ----------
    tails, heads : ndarray of int, shape (edges,)
        Both ends of each edge; there is at least one.
    vertices : int
        How many there are; each must have an edge.
    """

    def __init__(self, tails: Places, heads: Places, vertices: int) -> None:
        self.tails, self.heads, self.vertices = tails, heads, vertices
        both_from = np.concatenate([tails, heads])
        both_to = np.concatenate([heads, tails])
        order = np.argsort(both_to, kind="stable")
        self.sources = both_from[order]  # of each half edge
        self.edge = order % len(tails)  # which edge it is half of
        self.signs = np.where(order < len(tails), 1.0, -1.0)  # -1: it leads from head to tail
        self.counts = np.bincount(both_to, minlength=vertices)
        self.begins = np.concatenate([[0], np.cumsum(self.counts)[:-1]]).astype(np.intp)

    def at_vertices(self, halves: Floats) -> Floats:
        """Sum over the half edges that lead to each vertex."""
        sums: Floats = np.add.reduceat(halves, self.begins)
        return sums

    def divergence(self, flows: Floats) -> Floats:
        """What flows into each vertex, given what flows from tail to head of each edge."""
        return self.at_vertices(flows[self.edge] * self.signs)

    def along(self, values: Floats) -> Floats:
        """Head less tail of each edge."""
        differences: Floats = values[self.heads] - values[self.tails]
        return differences

    def degrees(self, weights: Floats) -> Floats:
        return self.at_vertices(weights[self.edge])

    def neighbourhood_mean(self, values: Floats) -> Floats:
        mean: Floats = (values + self.at_vertices(values[self.sources])) / (1 + self.counts)
        return mean

    def dense(self, weights: Floats) -> Floats:
        matrix = np.zeros((self.vertices, self.vertices))
        np.add.at(matrix, (self.tails, self.heads), -weights)
        matrix += matrix.T
        matrix[np.diag_indices(self.vertices)] = -matrix.sum(axis=1)
        return matrix

    def solve(self, weights: Floats, right: Floats, tolerance: float, start: Floats | None = None) -> Floats:
        """Potentials x of mean zero with L x = right.

        No vertex is held: on an expander every mode is then equally stiff, but for the one that is of no interest.

        Parameters
        ----------
        weights : ndarray, shape (edges,)
            Positive.
        right : ndarray, shape (vertices,)
            Of sum zero.
        tolerance : float
            Of the residual, relative to the right side, both scaled by the diagonal.
        """
        half_weights = weights[self.edge]
        diagonal = self.degrees(weights)

        def apply(x: Floats) -> Floats:
            result: Floats = diagonal * x - self.at_vertices(half_weights * x[self.sources])
            return result

        x: Floats = np.zeros_like(right) if start is None else start
        residual = right if start is None else right - apply(start)
        wanted = tolerance**2 * float((right * right / diagonal).sum())
        preconditioned = residual / diagonal
        direction = preconditioned
        energy = float(residual @ preconditioned)
        for _ in range(4 * self.vertices + 10):
            if energy <= wanted:
                break
            image = apply(direction)
            step = energy / max(float(direction @ image), _TINY)
            x = x + step * direction
            residual = residual - step * image
            preconditioned = residual / diagonal
            new = float(residual @ preconditioned)
            direction = preconditioned + (new / energy) * direction
            energy = new
        x = x - float(np.add.reduce(x)) / self.vertices
        return x

    def distances(self, forward: Floats, backward: Floats, ground: int) -> Floats:
        """Shortest way from the ground to each vertex, edges costing differently along and against their direction.

        Bellman and Ford's algorithm, all vertices at once; infinite costs close an edge.
        """
        costs = np.where(self.signs > 0, forward[self.edge], backward[self.edge])
        far = np.full(self.vertices, np.inf)
        far[ground] = 0.0
        for _ in range(self.vertices):
            nearer = np.minimum(far, np.minimum.reduceat(far[self.sources] + costs, self.begins))
            if (nearer == far).all():
                break
            far = nearer
        return far


def spanning_levels(tails: Places, heads: Places, vertices: int, root: int) -> list[tuple[Places, Places]]:
    """A breadth-first tree: for each level, the edges taken and whether each is taken from head to tail.

    Returns
    -------
    list of (edges, reversed)
        `reversed` holds 1 where the head was reached first.
    """
    order = np.argsort(np.concatenate([tails, heads]), kind="stable")
    leads_to = np.concatenate([heads, tails])[order]
    edge = order % max(len(tails), 1)
    against = order // max(len(tails), 1)
    counts = np.bincount(np.concatenate([tails, heads]), minlength=vertices)
    begins = np.cumsum(counts) - counts
    reached = np.zeros(vertices, np.bool_)
    reached[root] = True
    frontier = np.array([root], np.intp)
    levels = []
    while len(frontier):
        many = counts[frontier]
        halves = np.repeat(begins[frontier] - np.cumsum(many) + many, many) + np.arange(int(many.sum()))
        halves = halves[~reached[leads_to[halves]]]
        frontier, first = np.unique(leads_to[halves], return_index=True)
        if len(frontier):
            levels.append((edge[halves[first]], against[halves[first]]))
            reached[frontier] = True
    return levels
