"""Which blocks of keys each block of queries needs: a mask graph and lengths become a BlockMap. Imports ir."""

from flexc.sparsity.blockmap import EMPTY, FULL, PARTIAL, BlockMap
from flexc.sparsity.certificate import Certificate
from flexc.sparsity.classify import classify
from flexc.sparsity.proof import Proof
from flexc.sparsity.runs import Runs
from flexc.sparsity.walk import Walk, walk_of

__all__ = ["EMPTY", "FULL", "PARTIAL", "BlockMap", "Certificate", "Proof", "Runs", "Walk", "classify", "walk_of"]
