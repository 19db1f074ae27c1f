"""Finding and filling templates."""

from __future__ import annotations

import pytest

from flexc.codegen import templates
from flexc.errors import InternalError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty template folder inside an installed package."""
    package = tmp_path / "flexc"
    (package / "_templates").mkdir(parents=True)
    monkeypatch.setattr(templates, "__file__", str(package / "codegen" / "templates.py"))
    for function in (templates.template_folder, templates._environment):
        function.cache_clear()
    yield package / "_templates"
    for function in (templates.template_folder, templates._environment):
        function.cache_clear()


def test_a_checkout_reads_the_templates_beside_the_package():
    assert (templates.template_folder() / "cpu" / "attention.py.j2").is_file()


def test_an_installed_package_reads_its_own_copy(folder):
    (folder.parent.parent / "templates").mkdir()
    (folder / "a.j2").write_text("{{ x }}\n")
    assert templates.template_folder() == folder
    assert templates.render("a.j2", x=3) == "3\n"
    assert templates.template_source("a.j2") == "{{ x }}\n"


def test_missing_templates_are_named(folder):
    folder.rmdir()
    templates.template_folder.cache_clear()
    with pytest.raises(InternalError, match="the kernel templates are missing: expected .*_templates or .*templates"):
        templates.template_folder()


def test_a_missing_template_is_named(folder):
    with pytest.raises(InternalError, match=r"no template none\.j2 in"):
        templates.render("none.j2")


def test_a_hole_that_was_not_given_is_named(folder):
    (folder / "a.j2").write_text("{{ x }} {{ block_q }}")
    with pytest.raises(InternalError, match=r"template a\.j2: 'block_q' is undefined"):
        templates.render("a.j2", x=3)


def test_blocks_leave_no_blank_lines_and_nothing_is_escaped(folder):
    (folder / "a.j2").write_text("a\n{% if x %}\n  b < {{ x }}\n{% endif %}\nc\n")
    assert templates.render("a.j2", x="<&>") == "a\n  b < <&>\nc\n"
