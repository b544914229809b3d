"""Random forests as plain arrays: scikit-learn grows them, and is not needed afterwards.

A tree asks at each node whether a feature is at most a threshold, left if so, and its leaf is the
answer; a forest's answer is the mean of its trees (Breiman 2001). With all features fixed but one,
that is a step function of this one: its steps lie at the thresholds met on the way down, so it is
stored exactly as sorted thresholds and a value for each interval, and asked by one search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.costs.paradyse.steps import DEPTH, SEED, TREES, Steps, need_scikit_learn, single
from headrace.errors import CostError

__all__ = ["Forest", "fit_forest"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forest:
    """Trees over ``features`` features, one after the other in flat arrays.

    ``roots`` [trees] are their first nodes. Node i asks ``feature[i]`` for at most
    ``threshold[i]`` and goes on at ``left[i]`` or else at ``right[i]``; a leaf has the feature -1
    and the answer ``value[i]``. Children stand behind their parents. ``importances`` [features]
    is the share of the squared error that each feature's questions take away.
    Raises CostError for arrays that are no such trees.
    """

    features: int
    roots: Ints
    feature: Ints
    threshold: Floats
    left: Ints
    right: Ints
    value: Floats
    importances: tuple[float, ...]

    def __post_init__(self) -> None:
        nodes, asks = len(self.value), self.feature >= 0
        arrays = (self.feature, self.threshold, self.left, self.right)
        behind = np.arange(nodes)[asks] if len(asks) == nodes else np.empty(0)
        whole = (
            len(self.roots) > 0
            and all(len(array) == nodes for array in arrays)
            and len(self.importances) == self.features
            and bool((self.feature < self.features).all())
            and bool(((self.roots >= 0) & (self.roots < nodes)).all())
            and all(
                bool(((child[asks] > behind) & (child[asks] < nodes)).all())
                for child in (self.left, self.right)
            )
            and bool(np.isfinite(self.value).all() and np.isfinite(self.threshold).all())
        )
        if not whole:
            raise CostError("forest", got="arrays that are no trees", hint="fit it again")

    def __call__(self, features: ArrayLike) -> Floats:
        """Answers [n] to ``features`` [n, features]."""
        return self._answers(single(features))

    def _answers(self, features: Floats) -> Floats:
        found = np.zeros(len(features))
        for root in self.roots:  # in the order of the trees, so that sums round as the library's
            found += self.value[self._leaves(features, root)]
        return found / len(self.roots)

    def _leaves(self, features: Floats, root: int) -> Ints:
        """The leaf of one tree for each row."""
        nodes = np.full(len(features), root)
        rows = np.arange(len(features))
        while len(rows := rows[self.feature[nodes[rows]] >= 0]):
            at = nodes[rows]
            low = features[rows, self.feature[at]] <= self.threshold[at]
            nodes[rows] = np.where(low, self.left[at], self.right[at])
        return nodes

    def steps(self, fixed: Sequence[float], free: int) -> Steps:
        """The answers as a function of feature ``free``, the others being ``fixed``."""
        row = single(fixed)
        breaks = np.unique([x for root in self.roots for x in self._breaks(row, free, int(root))])
        features = np.tile(row, (len(breaks) + 1, 1))
        # An interval's upper end belongs to it, so the breaks stand for all but the last.
        features[:, free] = [*breaks, np.inf]
        values = self._answers(features)
        kept = np.flatnonzero(np.diff(values))
        return Steps(
            breaks=tuple(breaks[kept].tolist()),
            values=tuple(values[[*kept, len(breaks)]].tolist()),
        )

    def _breaks(self, row: Floats, free: int, root: int) -> Iterator[float]:
        """The thresholds of ``free`` that rows like this one can meet in one tree."""
        waiting = [root]
        while waiting:
            node = waiting.pop()
            asked = int(self.feature[node])
            if asked == free:
                yield float(self.threshold[node])
                waiting += [int(self.left[node]), int(self.right[node])]
            elif asked >= 0:
                low = row[asked] <= self.threshold[node]
                waiting.append(int((self.left if low else self.right)[node]))


def fit_forest(features: ArrayLike, values: ArrayLike) -> Forest:
    """A random forest through ``values`` [n] at ``features`` [n, features]: 50 trees of depth 10
    at most. The same points give the same forest. Raises MissingExtra without scikit-learn."""
    need_scikit_learn()
    from sklearn.ensemble import RandomForestRegressor

    grown = RandomForestRegressor(n_estimators=TREES, max_depth=DEPTH, random_state=SEED)
    x = np.asarray(features, dtype=np.float64)
    grown.fit(x, np.asarray(values, dtype=np.float64))
    trees = [tree.tree_ for tree in grown.estimators_]
    roots = np.cumsum([0, *(tree.node_count for tree in trees)])[:-1]

    def joined(name: str, kind: Any) -> Any:
        return np.concatenate([getattr(tree, name) for tree in trees]).astype(kind)

    def children(name: str) -> Ints:
        each = [getattr(tree, name) + root for tree, root in zip(trees, roots, strict=True)]
        return np.concatenate(each).astype(np.int64)

    asks = joined("children_left", np.int64) >= 0
    return Forest(
        features=x.shape[1],
        roots=roots.astype(np.int64),
        feature=np.where(asks, joined("feature", np.int64), -1),
        threshold=np.where(asks, joined("threshold", np.float64), 0.0),
        left=np.where(asks, children("children_left"), -1),
        right=np.where(asks, children("children_right"), -1),
        value=np.concatenate([tree.value[:, 0, 0] for tree in trees]),
        importances=tuple(grown.feature_importances_.tolist()),
    )
