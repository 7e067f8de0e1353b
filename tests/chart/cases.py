"""The matrix of values that the chart is rendered with: every switch at least once on each of its sides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.chart.rendering import PRESETS, Document, render

SERVE = {"mode": "serve"}
TOKEN = {"existingSecret": "token"}
AIPERF = {"repository": "aiperf", "tag": "1"}
LIMITS = {"limits": {"cpu": "1", "memory": "1Gi"}}
EVERYTHING: dict[str, Any] = {
    "imagePullSecrets": [{"name": "regcred"}],
    "serviceAccountName": "benchmarks",
    "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-B200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {
                    "topologyKey": "kubernetes.io/hostname",
                    "labelSelector": {"matchLabels": {"a": "b"}},
                }
            ]
        }
    },
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "topology.kubernetes.io/zone",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"a": "b"}},
        }
    ],
    "priorityClassName": "benchmarks",
    "runtimeClassName": "nvidia",
    "schedulerName": "kai-scheduler",
    "queue": {"name": "gpus", "priorityClass": "high"},
    "commonLabels": {"team": "inference"},
    "labels": {"on": "the-workload"},
    "annotations": {"example.org/on": "the workload"},
    "podLabels": {"kai.scheduler/queue": "gpus"},
    "podSecurityContext": {"supplementalGroups": [3000]},
    "podAnnotations": {"example.org/on": "the pod", "karpenter.sh/do-not-disrupt": "false"},
    "extraVolumes": [{"name": "prompts", "configMap": {"name": "prompts"}}],
    "extraContainers": [{"name": "beside", "image": "busybox:1", "resources": LIMITS}],
    "extraInitContainers": [
        {
            "name": "before",
            "image": "busybox:1",
            "resources": {**LIMITS, "requests": LIMITS["limits"]},
        }
    ],
    "sidecar": {
        "extraArgs": ["--log-format=text"],
        "extraEnv": [{"name": "A", "value": "b"}],
        "port": 19470,
        "openPort": 19471,
    },
    "vllm": {
        "args": ["--served-model-name={{ .Release.Name }}"],
        "port": 18000,
        "plugins": ["mine"],
        "hfToken": {"existingSecret": "hf"},
        "extraEnv": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "extraEnvFrom": [{"configMapRef": {"name": "engine"}}],
        "extraVolumeMounts": [{"name": "prompts", "mountPath": "/prompts"}],
        "resources": {"cpu": 32, "memory": "200Gi", "rdma/hca": 4, "ephemeral-storage": "1Ti"},
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"], "drop": ["ALL"]}},
    },
    "benchmark": {
        "extraArgs": ["--kill-after=20s"],
        "maxStallShare": 0,
        "extraEnv": [{"name": "A", "value": "b"}],
        "extraEnvFrom": [{"configMapRef": {"name": "client"}}],
        "extraVolumeMounts": [{"name": "prompts", "mountPath": "/prompts"}],
        "maxPause": "20ms",
        "requireClean": True,
        "timeout": "1h30m",
        "owner": "me",
        "ttlSecondsAfterFinished": 0,
        "suspend": True,
        "suffix": "run-7",
        "retryOnDisruption": False,
        "observeClient": False,
        "maxRssGrowth": "",
    },
}
MONITORING = {
    "monitoring": {
        "podMonitor": {
            "enabled": True,
            "engine": True,
            "labels": {"release": "prometheus"},
            "annotations": {"a": "b"},
            "relabelings": [{"targetLabel": "cluster", "replacement": "b200"}],
            "metricRelabelings": [{"action": "labeldrop", "regex": "pod_template_hash"}],
        },
        "prometheusRule": {"enabled": True, "labels": {"role": "alert-rules"}},
        "dashboards": {"enabled": True, "annotations": {"grafana_folder": "vLLM"}},
    },
    "networkPolicy": {
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]
    },
}


@dataclass(frozen=True)
class Case:
    """Values, and the Kubernetes that knows what they ask for."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    preset: str = ""
    since: str = "1.29"

    def __str__(self) -> str:
        return self.name

    def render(self, **options: Any) -> list[Document]:
        """The objects."""
        return render(self.values, preset=self.preset, **options)


CASES = [
    Case("defaults"),
    *(Case(f"preset {preset}", preset=preset) for preset in PRESETS),
    Case("serve", SERVE, since="1.25"),
    Case("serve a preset", SERVE, preset="b200-dp4", since="1.25"),
    Case("serve over the board", {**SERVE, "transport": "board"}, since="1.25"),
    Case(
        "serve with a ServiceMonitor",
        {
            **SERVE,
            "monitoring": {
                "podMonitor": {"enabled": False},
                "serviceMonitor": {"enabled": True, "engine": True, "labels": {"a": "b"}},
            },
        },
        since="1.25",
    ),
    Case("serve, recreated", {**SERVE, "serve": {"replicas": 3, "strategy": {"type": "Recreate"}}}, since="1.25"),
    Case("serve on OpenShift", {**SERVE, "openshift": True}, since="1.25"),
    Case("serve with everything", {**EVERYTHING, **SERVE}, since="1.25"),
    Case(
        "serve with the control listener exposed",
        {
            **SERVE,
            "sidecar": {"control": {**TOKEN, "expose": True, "allowedHosts": ["gc.example.org"]}},
            "networkPolicy": {
                "controlFrom": [{"podSelector": {"matchLabels": {"a": "b"}}}],
                "engineFrom": [{"podSelector": {"matchLabels": {"c": "d"}}}],
            },
        },
        since="1.25",
    ),
    Case("board", {"transport": "board"}),
    Case("board with plugins", {"transport": "board", "vllm": {"plugins": ["mine"]}}),
    Case("dev", {"transport": "dev"}),
    Case("observe only", {"benchmark": {"policy": "off"}}),
    Case("budget", {"benchmark": {"policy": "budget", "pauseBudget": "3ms"}}),
    Case("OpenShift", {"openshift": True}),
    Case("everything", EVERYTHING),
    Case("everything monitored", MONITORING),
    Case("control listener with a token", {"sidecar": {"control": {"existingSecret": "t", "key": "k"}}}),
    Case(
        "results and cache in claims",
        {"benchmark": {"results": {"existingClaim": "results"}}, "vllm": {"cache": {"existingClaim": "models"}}},
    ),
    Case("results in a file", {"benchmark": {"results": {"report": "file"}}}),
    Case("cache on the node", {"vllm": {"cache": {"volume": {"hostPath": {"path": "/nvme/cache"}}}}}),
    Case(
        "GPUs by claim",
        {
            "vllm": {"gpu": {"count": 0, "product": "NVIDIA-B200"}, "claims": [{"name": "gpus"}]},
            "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "four-b200"}],
        },
        since="1.33",
    ),
    Case("a MIG profile", {"vllm": {"gpu": {"resource": "nvidia.com/mig-7g.180gb"}}}),
    Case("another client", {"benchmark": {"image": AIPERF, "command": ["aiperf", "profile"]}}),
    Case("a user for the client", {"benchmark": {"user": {"uid": 1000, "gid": 1000}}}),
    Case(
        "images by digest",
        {"image": {"digest": f"sha256:{'a' * 64}"}, "vllm": {"image": {"digest": f"sha256:{'b' * 64}"}}},
    ),
    Case("an image that needs root", {"vllm": {"user": {"uid": 0, "name": "root", "home": "/root"}}}),
    Case("no NetworkPolicy", {"networkPolicy": {"enabled": False}}),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
BENCHMARKS = [case for case in CASES if case.values.get("mode") != "serve"]
SERVED = [case for case in CASES if case.values.get("mode") == "serve"]
