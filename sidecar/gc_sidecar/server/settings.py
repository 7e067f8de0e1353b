"""The configuration of `gc-sidecar serve`: flags first, then environment variables, then defaults.

Every flag has the variable of the same name: `--run-dir` is `GC_SIDECAR_RUN_DIR`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

PREFIX = "GC_SIDECAR_"
DEFAULT_OPEN_HOST, DEFAULT_OPEN_PORT = "127.0.0.1", 9471


class SettingsError(ValueError):
    """A configuration that cannot be used; `str()` of it says what to change."""


def _split(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _check_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        port_is_sound = parts.port is None or parts.port > 0
    except ValueError:
        port_is_sound = False
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_sound:
        raise ValueError(f"{url!r} is not an address like http://localhost:8000")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("an engine's address has no user, query or fragment")
    return url.rstrip("/")


def _check_port(value: Any) -> Any:
    # Kubernetes gives every pod a variable for each service of its namespace: a service named gc-sidecar
    # makes it GC_SIDECAR_PORT=tcp://10.0.0.1:9470, which is no setting of ours.
    return None if isinstance(value, str) and value.startswith("tcp://") else value


Url = Annotated[str, AfterValidator(_check_url)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Settings(BaseSettings):
    """See the module. Unknown variables are ignored, for the agent and the client share the prefix."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="ignore", frozen=True
    )

    engine_url: Annotated[tuple[Url, ...], NoDecode, BeforeValidator(_split)] = ()
    run_dir: str | None = None
    host: str = "127.0.0.1"
    port: Annotated[Port | None, BeforeValidator(_check_port)] = 9470
    open_host: str | None = None
    open_port: Annotated[Port | None, BeforeValidator(_check_port)] = None
    token_file: str | None = None
    allowed_host: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = ()
    engine_token_file: str | None = None
    read_only_page: bool = False
    max_maintain_pause_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "text"] = "json"

    @property
    def control_address(self) -> tuple[str, int]:
        """Where the control listener binds."""
        return self.host, 9470 if self.port is None else self.port

    @property
    def open_address(self) -> tuple[str, int] | None:
        """Where the open listener binds; None where it was not asked for."""
        if self.open_host is None and self.open_port is None:
            return None
        port = DEFAULT_OPEN_PORT if self.open_port is None else self.open_port
        return self.open_host or DEFAULT_OPEN_HOST, port


def load_settings(flags: Mapping[str, Any]) -> Settings:
    """The settings, with those of `flags` that are not None before the environment's.

    Raises SettingsError.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        settings = Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "settings"
        flag = f"--{name.replace('_', '-')}"
        where = flag if name in given else f"{PREFIX}{name.upper()}"
        raise SettingsError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None
    if not is_loopback(settings.host) and settings.token_file is None:
        raise SettingsError(
            f"--host {settings.host} is not a loopback address: whoever reaches it controls the engine,"
            " so it needs --token-file FILE with a bearer token (or bind 127.0.0.1, and give probes and"
            " Prometheus --open-port)"
        )
    if settings.run_dir is not None and not os.path.isabs(settings.run_dir):
        settings = settings.model_copy(update={"run_dir": os.path.abspath(settings.run_dir)})
    return settings


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine alone. Only what is sure by itself counts: no name is resolved."""
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
