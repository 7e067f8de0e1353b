"""Configuration: a flag wins over its variable, and what cannot be used is said in the flag's name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gc_sidecar.server.settings import SettingsError, is_loopback, load_settings


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("GC_SIDECAR_"):
            monkeypatch.delenv(name)


def test_the_defaults_are_safe() -> None:
    settings = load_settings({})
    assert settings.control_address == ("127.0.0.1", 9470)
    assert settings.open_address is None
    assert settings.engine_url == ()
    assert settings.run_dir is None


def test_every_flag_has_its_variable_and_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GC_SIDECAR_ENGINE_URL", "http://a:1/, http://b:2")
    monkeypatch.setenv("GC_SIDECAR_RUN_DIR", "/run/gc")
    monkeypatch.setenv("GC_SIDECAR_PORT", "1234")
    monkeypatch.setenv("GC_SIDECAR_ALLOWED_HOST", "x,y")
    monkeypatch.setenv("GC_SIDECAR_OPEN_HOST", "0.0.0.0")
    settings = load_settings({"port": "4321", "log_format": "text"})
    assert settings.engine_url == ("http://a:1", "http://b:2")
    assert settings.run_dir == "/run/gc"
    assert settings.control_address == ("127.0.0.1", 4321)
    assert settings.allowed_host == ("x", "y")
    assert settings.open_address == ("0.0.0.0", 9471)
    assert load_settings({"engine_url": ["http://c:3"]}).engine_url == ("http://c:3",)


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GC_SIDECAR_RUN_DIR", "")
    monkeypatch.setenv("GC_SIDECAR_ENGINE_URL", "")
    settings = load_settings({})
    assert settings.run_dir is None
    assert settings.engine_url == ()


def test_what_kubernetes_sets_for_a_service_of_our_name_is_no_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GC_SIDECAR_PORT", "tcp://10.96.0.7:9470")
    monkeypatch.setenv("GC_SIDECAR_SERVICE_HOST", "10.96.0.7")
    assert load_settings({}).control_address == ("127.0.0.1", 9470)


def test_a_relative_run_directory_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings({"run_dir": "run"}).run_dir == str(tmp_path / "run")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"port": "99999"}, "--port"),
        ({"port": "http"}, "--port"),
        ({"engine_url": ["localhost:8000"]}, "--engine-url"),
        ({"engine_url": ["ftp://a"]}, "--engine-url"),
        ({"engine_url": ["http://user:secret@a"]}, "no user"),
        ({"engine_url": ["http://a:notaport"]}, "--engine-url"),
        ({"log_level": "loud"}, "--log-level"),
        ({"host": "0.0.0.0"}, "--token-file"),
        ({"host": "::"}, "--token-file"),
        ({"host": "10.0.0.1"}, "--token-file"),
        ({"host": "my-host"}, "--token-file"),
        ({"host": ""}, "--token-file"),
    ],
)
def test_what_cannot_be_used_is_named(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        load_settings(flags)


def test_a_bad_variable_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GC_SIDECAR_OPEN_PORT", "many")
    with pytest.raises(SettingsError, match="GC_SIDECAR_OPEN_PORT"):
        load_settings({})


def test_beyond_loopback_a_token_file_is_enough() -> None:
    settings = load_settings({"host": "0.0.0.0", "token_file": "/token"})
    assert settings.control_address == ("0.0.0.0", 9470)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback_addresses(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "0.0.0.0", "::", "10.0.0.1", "localhost.x", "::ffff:10.0.0.1"]
)
def test_other_addresses(host: str) -> None:
    assert not is_loopback(host)
