"""Which blocks of keys each block of queries needs: a mask graph and lengths become a BlockMap. Imports ir."""

from flexc.sparsity.blockmap import EMPTY, FULL, PARTIAL, BlockMap, Runs, Walk, row_work, runs_of, walk_of
from flexc.sparsity.classify import classify

__all__ = ["EMPTY", "FULL", "PARTIAL", "BlockMap", "Runs", "Walk", "classify", "row_work", "runs_of", "walk_of"]
