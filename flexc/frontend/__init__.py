"""Python function → ir.Graph: the function is built again with its captures replaced, and called with symbols."""

from flexc.frontend.callables import arity as arity
from flexc.frontend.functions import where as where
from flexc.frontend.specialise import constant as constant
from flexc.frontend.specialise import runtime as runtime
from flexc.frontend.trace import Binding as Binding
from flexc.frontend.trace import Captures as Captures
from flexc.frontend.trace import Trace as Trace
from flexc.frontend.trace import clear_cache as clear_cache
from flexc.frontend.trace import trace as trace
