"""Wrong values are refused by a message that names them, by every Helm."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.chart.cases import LIMITS
from tests.chart.rendering import CHART, HELMS, template

# The value, and what the message has to name it by: its path, or its own name where it should not be there at all.
BY_SCHEMA: list[tuple[str, Any, str]] = [
    ("mode", "bench", "mode"),
    ("mode", True, "mode"),
    ("transport", "rpc", "transport"),
    ("openshift", "yes", "openshift"),
    ("modus", "benchmark", "modus"),
    ("image.repository", "Not An Image", "image.repository"),
    ("image.tag", 1.0, "image.tag"),
    ("image.digest", "sha1:abc", "image.digest"),
    ("image.pullPolicy", "Sometimes", "image.pullPolicy"),
    ("image.name", "gc-sidecar", "name"),
    ("vllm.model", "", "vllm.model"),
    ("vllm.command", [], "vllm.command"),
    ("vllm.args", "--enforce-eager", "vllm.args"),
    ("vllm.port", 80000, "vllm.port"),
    ("vllm.plugins", ["a b"], "vllm.plugins"),
    ("vllm.gpu.count", "four", "vllm.gpu.count"),
    ("vllm.gpu.count", -1, "vllm.gpu.count"),
    ("vllm.gpu.resource", "gpu", "vllm.gpu.resource"),
    ("vllm.gpus", 4, "gpus"),
    ("vllm.resources.limits", {"cpu": "4"}, "vllm.resources.limits"),
    ("vllm.resources.memory", "64 GB", "vllm.resources.memory"),
    ("vllm.resources.cpu", None, "cpu"),
    ("vllm.user.uid", -1, "vllm.user.uid"),
    ("vllm.user.home", "home", "vllm.user.home"),
    ("vllm.cache.sizeLimit", "much", "vllm.cache.sizeLimit"),
    ("vllm.hfToken.token", "hf_secret", "token"),
    ("vllm.extraEnv", [{"value": "b"}], "vllm.extraEnv"),
    ("vllm.extraEnv", [{"name": "A", "value": 1}], "vllm.extraEnv.0.value"),
    ("vllm.probes.startup.failureThreshold", 0, "vllm.probes.startup.failureThreshold"),
    ("vllm.probes.startup.httpGet", {"path": "/"}, "httpGet"),
    ("sidecar.logLevel", "loud", "sidecar.logLevel"),
    ("sidecar.control.token", "secret", "token"),
    ("sidecar.user.uid", 0, "sidecar.user.uid"),
    ("sidecar.fsGroup", 0, "sidecar.fsGroup"),
    ("sidecar.openPort", "metrics", "sidecar.openPort"),
    ("benchmark.policy", "frozen", "benchmark.policy"),
    ("benchmark.pauseBudget", "5", "benchmark.pauseBudget"),
    ("benchmark.lease", 120, "benchmark.lease"),
    ("benchmark.timeout", "1 hour", "benchmark.timeout"),
    ("benchmark.maxRssGrowth", "lots", "benchmark.maxRssGrowth"),
    ("benchmark.maxStallShare", 5, "benchmark.maxStallShare"),
    ("benchmark.requireClean", "true", "benchmark.requireClean"),
    ("benchmark.command", "vllm bench serve", "benchmark.command"),
    ("benchmark.results.report", "s3", "benchmark.results.report"),
    ("benchmark.results.mountPath", "results", "benchmark.results.mountPath"),
    ("benchmark.activeDeadlineSeconds", 0, "benchmark.activeDeadlineSeconds"),
    ("benchmark.ttlSecondsAfterFinished", "1h", "benchmark.ttlSecondsAfterFinished"),
    ("benchmark.suffix", "Run_7", "benchmark.suffix"),
    ("benchmark.backoffLimit", 3, "backoffLimit"),
    ("serve.service.type", "Headless", "serve.service.type"),
    ("serve.replicas", "2", "serve.replicas"),
    ("monitoring.podMonitor.enabled", "yes", "monitoring.podMonitor.enabled"),
    ("monitoring.podMonitor.interval", 15, "monitoring.podMonitor.interval"),
    ("monitoring.dashboards.labels.grafana_dashboard", 1, "monitoring.dashboards.labels.grafana_dashboard"),
    ("networkPolicy.metricsFrom", {}, "networkPolicy.metricsFrom"),
    ("nodeSelector", ["gpu"], "nodeSelector"),
    ("tolerations", {"key": "a"}, "tolerations"),
    ("queue", "gpus", "queue"),
    ("podLabels.a", 1, "podLabels.a"),
    ("extraContainers", [{"name": "a"}], "extraContainers"),
]  # fmt: skip

DEV_MODE = {"name": "VLLM_SERVER_DEV_MODE", "value": "1"}

# What a schema cannot say, and the words that the reason has to have.
BY_REASON: list[tuple[dict[str, Any], str]] = [
    ({"mode": "serve", "transport": "dev"}, "transport: dev is refused with mode: serve"),
    ({"sidecar": {"control": {"expose": True}}}, "sidecar.control.existingSecret"),
    ({"monitoring": {"serviceMonitor": {"enabled": True}}}, "monitoring.serviceMonitor.enabled"),
    (
        {"transport": "dev", "monitoring": {"podMonitor": {"engine": True}}},
        "monitoring.podMonitor.engine",
    ),
    ({"vllm": {"resources": {"nvidia.com/gpu": 4}}}, "vllm.gpu.count"),
    (
        {"vllm": {"cache": {"existingClaim": "a", "volume": {"emptyDir": {}}}}},
        "vllm.cache.existingClaim",
    ),
    ({"vllm": {"gpu": {"count": 0}, "claims": [{"name": "gpus"}]}}, 'vllm.claims names "gpus"'),
    ({"benchmark": {"suffix": "s" * 63}}, "benchmark.suffix"),
    ({"benchmark": {"image": {"repository": "aiperf"}}}, "benchmark.image.tag"),
    (
        {
            "mode": "serve",
            "monitoring": {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}},
        },
        "scraped twice",
    ),
    ({"vllm": {"image": {"tag": ""}}}, "vllm.image.tag"),
    (
        {
            "resourceClaims": [{"name": "g", "resourceClaimTemplateName": "b200"}],
            "vllm": {"claims": [{"name": "g"}]},
        },
        "set vllm.gpu.count to 0",
    ),
    ({"vllm": {"port": 9470}}, "one pod has each port once"),
    (
        {"monitoring": {"podMonitor": {"enabled": True, "engine": True}}},
        "networkPolicy.metricsFrom",
    ),
    ({"benchmark": {"timeout": "3h30m"}}, "are 15300 s together"),
    (
        {
            "vllm": {
                "hfToken": {"existingSecret": "hf"},
                "extraEnv": [{"name": "HF_TOKEN", "value": "x"}],
            }
        },
        "vllm.extraEnv sets HF_TOKEN",
    ),
    # What is refused as a value must not come in by a side door.
    (
        {"mode": "serve", "vllm": {"extraEnv": [DEV_MODE]}},
        "vllm.extraEnv sets VLLM_SERVER_DEV_MODE",
    ),
    ({"vllm": {"extraEnv": [{"name": "VLLM_PLUGINS", "value": "mine"}]}}, "vllm.plugins"),
    ({"vllm": {"args": ["--port=8001"]}}, "vllm.args has --port=8001"),
    ({"transport": "dev", "vllm": {"args": ["--host", "0.0.0.0"]}}, "vllm.args has --host"),
    (
        {"extraContainers": [{"name": "greedy", "image": "a"}]},
        'extraContainers: container "greedy"',
    ),
    (
        {
            "extraInitContainers": [
                {"name": "fine", "image": "a", "resources": LIMITS},
                {
                    "name": "greedy",
                    "image": "a",
                    "resources": {**LIMITS, "requests": {"cpu": "500m"}},
                },
            ]
        },
        'extraInitContainers: container "greedy"',
    ),
]


def nested(path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {head: nested(rest, value) if rest else value}


@pytest.mark.parametrize("name", HELMS)
@pytest.mark.parametrize(
    ("path", "value", "named"), BY_SCHEMA, ids=[f"{path}={value}" for path, value, _ in BY_SCHEMA]
)
def test_a_wrong_value_is_refused_by_a_message_that_names_it(
    path: str, value: Any, named: str, name: str
) -> None:
    result = template(nested(path, value), name)

    assert result.returncode != 0
    # Helm 3 writes a.b, Helm 4 '/a/b'; both number the items of lists.
    message = result.stderr.replace("/", ".")
    assert "schema" in message
    assert named in message, message


@pytest.mark.parametrize("name", HELMS)
@pytest.mark.parametrize(("values", "reason"), BY_REASON, ids=[reason for _, reason in BY_REASON])
def test_values_that_do_not_go_together_are_refused_with_the_reason(
    values: dict[str, Any], reason: str, name: str
) -> None:
    result = template(values, name)

    assert result.returncode != 0
    assert reason in result.stderr


def test_a_refusal_names_the_exposed_listener_s_remedy_in_both_modes() -> None:
    for mode in ("benchmark", "serve"):
        result = template({"mode": mode, "sidecar": {"control": {"expose": True}}})
        assert "kubectl create secret" in result.stderr


def test_schema_and_values_have_the_same_keys() -> None:
    """But for `global`, which Helm itself may bring, and maps that a user fills."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    definitions = schema["definitions"]

    def resolved(node: dict[str, Any]) -> dict[str, Any]:
        return definitions[node["$ref"].rpartition("/")[2]] if "$ref" in node else node

    def compare(node: dict[str, Any], values: Any, path: str) -> list[str]:
        node = resolved(node)
        if "properties" not in node or node.get("additionalProperties") is not False:
            return []
        if not values:  # filled by the user: `benchmark.user`
            return []
        both = set(node["properties"]) & set(values)
        found = [f"{path}{key}" for key in set(node["properties"]) ^ set(values)]
        for key in both:
            found += compare(node["properties"][key], values[key], f"{path}{key}.")
        return found

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    optional = {"global"} | {
        f"vllm.probes.{kind}.{field}"
        for kind in ("startup", "liveness", "readiness")
        for field in ("initialDelaySeconds", "timeoutSeconds")
    }

    assert set(compare(schema, values, "")) <= optional
