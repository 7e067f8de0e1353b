"""A real Prometheus that scrapes a sidecar, started for tests: it asks, evaluates our rules, and is asked.

`scripts/get_prometheus.py` puts the programs where they are found.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.vllm.real_vllm import free_port, wait_until

CONFIGURATION = """\
global:
  scrape_interval: {interval}
  evaluation_interval: {interval}
rule_files: [{rules}]
scrape_configs:
  - job_name: gc-sidecar
    static_configs:
      - targets: [{targets}]
"""
START_DEADLINE_S = 30.0


class Prometheus:
    """`with Prometheus(...) as prometheus:` is one that scrapes every second, and none afterwards."""

    def __init__(
        self,
        programs: Path,
        targets: Sequence[str],
        directory: Path,
        rules: Path | None = None,
        interval: str = "1s",
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._directory = directory
        configuration = directory / "prometheus.yaml"
        configuration.write_text(
            CONFIGURATION.format(
                interval=interval,
                rules=json.dumps(str(rules)) if rules else "",
                targets=", ".join(json.dumps(target) for target in targets),
            )
        )
        self._command = [
            str(programs / "prometheus"),
            f"--config.file={configuration}",
            f"--storage.tsdb.path={directory / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--rules.alert.resend-delay=1s",
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Prometheus:
        log = self._cleanup.enter_context((self._directory / "prometheus.log").open("wb"))
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        if not wait_until(self._is_ready, START_DEADLINE_S):
            self.__exit__(None, None, None)
            log_text = (self._directory / "prometheus.log").read_text()
            raise AssertionError(f"Prometheus did not start:\n{log_text}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=20)
        self._cleanup.close()

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
        """Whether the last scrape of every target went well."""
        targets = self._get("/api/v1/targets")["activeTargets"]
        return bool(targets) and all(target["health"] == "up" for target in targets)


def hurried(rules: Path, directory: Path) -> Path:
    """A copy of the rules whose alerts do not wait: everything but `for:` and `keep_firing_for:` is as it is."""
    text = re.sub(r"(?m)^(\s+(?:keep_firing_)?for:).*$", r"\1 0s", rules.read_text())
    copy = directory / "hurried.rules.yaml"
    copy.write_text(text)
    return copy
