"""Settings: each value is read at use, bad values and unknown names raise, the README lists what the table holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from flexc import settings
from flexc.errors import SettingError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for row in settings.TABLE:
        monkeypatch.delenv(row.variable, raising=False)


def test_defaults_are_those_of_the_table():
    current = settings.current()
    for row in settings.TABLE:
        assert getattr(current, row.field) == row.default


def test_table_and_dataclass_have_the_same_fields():
    assert [row.field for row in settings.TABLE] == [field.name for field in dataclasses.fields(settings.Settings)]


def test_every_variable_has_the_prefix():
    assert all(row.variable.startswith(settings.PREFIX) for row in settings.TABLE)


def test_a_change_is_seen_by_the_next_call(monkeypatch):
    assert not settings.current().eager
    monkeypatch.setenv("FLEXC_EAGER", "1")
    assert settings.current().eager
    monkeypatch.setenv("FLEXC_EAGER", "0")
    assert not settings.current().eager


def test_empty_means_unset(monkeypatch):
    monkeypatch.setenv("FLEXC_DUMP", "")
    assert settings.current().dump is None


@pytest.mark.parametrize(("text", "value"), [("1", True), ("on", True), ("TRUE", True), ("0", False), ("off", False), ("no", False)])
def test_switch_values(monkeypatch, text, value):
    monkeypatch.setenv("FLEXC_CHECK", text)
    assert settings.current().check is value


@pytest.mark.parametrize(("text", "size_bytes"), [("1024", 1024), ("500MB", 500_000_000), ("2GiB", 2 * 2**30), ("1.5 kib", 1536)])
def test_sizes(monkeypatch, text, size_bytes):
    monkeypatch.setenv("FLEXC_CACHE_SIZE", text)
    assert settings.current().cache_size_bytes == size_bytes


def test_folders_become_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLEXC_DUMP", "stages")
    assert settings.current().dump == tmp_path / "stages"


def test_home_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FLEXC_CACHE_DIR", "~/kernels")
    assert settings.current().cache_dir == tmp_path / "kernels"


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("FLEXC_EAGER", "maybe", "FLEXC_EAGER: expected 0 or 1, got 'maybe'"),
        ("FLEXC_CACHE_SIZE", "much", "FLEXC_CACHE_SIZE: expected a number of bytes such as 500MB or 2GiB, got 'much'"),
        ("FLEXC_CACHE_SIZE", "-1", "FLEXC_CACHE_SIZE: expected a number of bytes"),
        ("FLEXC_CACHE_SIZE", "3 bananas", "FLEXC_CACHE_SIZE: expected a number of bytes"),
        ("FLEXC_OVERRIDE", "/nowhere/at/all", "FLEXC_OVERRIDE: expected a folder that exists, got '/nowhere/at/all'"),
        ("FLEXC_DUMP", __file__, "FLEXC_DUMP: expected a folder, this is a file, got"),
    ],
)
def test_bad_value_raises(monkeypatch, variable, text, message):
    monkeypatch.setenv(variable, text)
    with pytest.raises(SettingError, match=message):
        settings.current()
    with pytest.raises(ValueError, match=variable):
        settings.current()


def test_misspelt_name_raises_and_the_right_one_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("FLEXC_DUMP", str(tmp_path))
    monkeypatch.setenv("FLEXC_CACHEDIR", "/tmp")
    with pytest.raises(SettingError, match=r"FLEXC_CACHEDIR: no such setting; did you mean FLEXC_CACHE_DIR\?"):
        settings.current()


def test_unlike_name_raises_with_the_known_ones(monkeypatch, tmp_path):
    monkeypatch.setenv("FLEXC_DUMP", str(tmp_path / "other"))
    monkeypatch.setenv("FLEXC_ZZZZ", "1")
    with pytest.raises(SettingError, match="FLEXC_ZZZZ: no such setting; known: FLEXC_CACHE_DIR, "):
        settings.current()


def test_what_changes_code_is_in_the_key(monkeypatch):
    before = settings.current().key()
    assert before == {"eager": False, "check": False}
    monkeypatch.setenv("FLEXC_CHECK", "1")
    assert settings.current().key() != before


def test_readme_lists_the_table():
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    assert settings.markdown_table() in readme, "README.md: replace its table by what flexc.settings.markdown_table() returns"
