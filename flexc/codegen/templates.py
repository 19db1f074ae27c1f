"""Find and fill the kernel templates: one function, the same in an installed wheel and in a checkout."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexc.errors import InternalError

if TYPE_CHECKING:
    import jinja2


@cache
def template_folder() -> Path:
    """Where templates/ is: `flexc/_templates` in a wheel, `templates/` beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_templates", package.parent / "templates"):
        if folder.is_dir():
            return folder
    raise InternalError(f"the kernel templates are missing: expected {package / '_templates'} or {package.parent / 'templates'}")


@cache
def _environment() -> jinja2.Environment:
    import jinja2  # a process that finds all it needs in the cache does without

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_folder()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def template_source(name: str) -> str:
    """The text of a template such as "cpu/attention.py.j2"; part of a kernel's key."""
    return (template_folder() / name).read_text(encoding="utf-8")


def render(name: str, **holes: Any) -> str:
    """The template with its holes filled.

    Raises:
        InternalError: the template is missing, or a hole that it reaches was not given.
    """
    import jinja2

    try:
        return _environment().get_template(name).render(**holes)
    except jinja2.TemplateNotFound as error:
        raise InternalError(f"no template {name} in {template_folder()}") from error
    except jinja2.UndefinedError as error:
        raise InternalError(f"template {name}: {error.message}") from error
