"""A real Prometheus that scrapes a sidecar, started for tests: it asks, evaluates our rules, and is asked.

`scripts/get_prometheus.py` puts the programs where they are found; promtool is run here too.
"""

from __future__ import annotations

import json
import re
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from scripts.get_prometheus import find_prometheus
from tests.vllm.real_vllm import free_port, wait_until

CONFIGURATION = """\
global:
  scrape_interval: 1s
  evaluation_interval: 1s
rule_files: [{rules}]
scrape_configs:
  - job_name: gc-sidecar
    static_configs:
      - targets: [{target}]
"""
START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 20.0
PROMTOOL_DEADLINE_S = 60.0


def programs() -> Path:
    """The directory that holds prometheus and promtool; without them there is nothing to prove."""
    found = find_prometheus()
    if found is None:
        pytest.fail("this needs a real Prometheus: python scripts/get_prometheus.py")
    return found


def promtool(*arguments: str | Path, given: str = "") -> subprocess.CompletedProcess[str]:
    """promtool, run to its end with `given` on its standard input."""
    command = [programs() / "promtool", *arguments]
    return subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=PROMTOOL_DEADLINE_S
    )


class Prometheus:
    """`with Prometheus(...) as prometheus:` is one that scrapes every second, and none afterwards."""

    def __init__(self, target: str, directory: Path, rules: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log_path = directory / "prometheus.log"
        configuration = directory / "prometheus.yaml"
        configuration.write_text(
            CONFIGURATION.format(rules=json.dumps(str(rules)), target=json.dumps(target))
        )
        self._command = [
            str(programs() / "prometheus"),
            f"--config.file={configuration}",
            f"--storage.tsdb.path={directory / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--rules.alert.resend-delay=1s",
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Prometheus:
        with self._log_path.open("wb") as log:
            process = self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        wait_until(lambda: process.poll() is not None or self._is_ready(), START_DEADLINE_S)
        if process.poll() is not None or not self._is_ready():
            self.__exit__(None, None, None)
            raise AssertionError(f"Prometheus did not start:\n{self._log_path.read_text()}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(timeout=STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            document = json.load(answer)
        assert document["status"] == "success", document
        return document["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples that an instant query gives now."""
        samples: list[dict[str, Any]] = self._get("/api/v1/query", query=expression)["result"]
        return samples

    def value(self, expression: str) -> float | None:
        """The one value of a query; None where it gives nothing."""
        samples = self.query(expression)
        assert len(samples) <= 1, f"{expression} gives {len(samples)} samples"
        return float(samples[0]["value"][1]) if samples else None

    def firing(self) -> set[str]:
        """The alerts that fire now."""
        alerts = self._get("/api/v1/alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def rules(self) -> list[dict[str, Any]]:
        """Every rule, recording and alerting."""
        groups = self._get("/api/v1/rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def unhealthy_rules(self) -> dict[str, str]:
        """The rules whose last evaluation failed, and why."""
        return {rule["name"]: rule["lastError"] for rule in self.rules() if rule["health"] == "err"}

    def is_scraping(self) -> bool:
        """Whether the last scrape went well."""
        targets = self._get("/api/v1/targets")["activeTargets"]  # none for a moment after the start
        return [target["health"] for target in targets] == ["up"]


def hurried(rules: Path, directory: Path) -> Path:
    """A copy of the rules whose alerts do not wait: everything but `for:` and `keep_firing_for:` is as it is."""
    text = re.sub(r"(?m)^(\s+(?:keep_firing_)?for:).*$", r"\1 0s", rules.read_text())
    copy = directory / "hurried.rules.yaml"
    copy.write_text(text)
    return copy
