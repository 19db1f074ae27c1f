"""Every exception a user of flexc can meet. Each also inherits the builtin that fits, so `except TypeError` keeps working."""


class FlexcError(Exception):
    """Base of all errors raised by flexc."""


class TraceError(FlexcError, TypeError):
    """The user's function cannot become a graph: names the expression, the user's line, why, and what to write instead."""

    def __init__(self, what: str, *, where: object = None, why: str = "", instead: str = ""):
        lines = [what]
        if where is not None:
            lines.append(f"  at {where}")
        if why:
            lines.append(f"  why: {why}")
        if instead:
            lines.append(f"  instead: {instead}")
        super().__init__("\n".join(lines))
        self.what, self.where, self.why, self.instead = what, where, why, instead


class ShapeError(FlexcError, ValueError):
    """Sizes of the inputs do not fit each other: names both."""


class InputError(FlexcError, TypeError):
    """An argument has the wrong type, dtype or device."""


class IndexRangeError(FlexcError, IndexError):
    """A captured tensor was indexed outside its bounds (raised under FLEXC_CHECK=1)."""


class UnsupportedError(FlexcError, NotImplementedError):
    """Legal, but not available on this backend or device: names the limit and the backend."""


class NoCompileError(FlexcError, RuntimeError):
    """A call needs a kernel that is not compiled yet, and FLEXC_NO_COMPILE=1 forbids compiling: names the variant and why."""


class SettingError(FlexcError, ValueError):
    """A FLEXC_* variable has a value that is not one of its values."""


class ToolchainError(FlexcError, ImportError):
    """A package or tool that a backend needs is missing or unusable: names it and how to get it."""


class InternalError(FlexcError, AssertionError):
    """A promise of flexc to itself is broken; carries the graph as text. Please report it."""
