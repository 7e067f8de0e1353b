{{/* What a schema cannot say, or cannot say well. Included once by each workload. */}}
{{- define "gc-sidecar.check" -}}
{{- if and (eq .Values.mode "benchmark") (not (include "gc-sidecar.nativeSidecars" .)) -}}
{{- fail (printf "mode: benchmark needs Kubernetes 1.29 or later, and this is %s: vLLM and gc-sidecar run beside the benchmark as native sidecars (init containers with restartPolicy: Always). Before 1.29 they would keep the Job from ever ending." .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and (eq .Values.mode "serve") (eq .Values.transport "dev") -}}
{{- fail "transport: dev is refused with mode: serve: it sets VLLM_SERVER_DEV_MODE=1, which lets everybody who reaches vLLM's port call any method of its workers. Take transport: plugin, or board." -}}
{{- end -}}
{{- if and .Values.sidecar.control.expose (not .Values.sidecar.control.existingSecret) -}}
{{- fail "sidecar.control.expose: true needs sidecar.control.existingSecret: beyond loopback the control listener does not start without a token. kubectl create secret generic gc-sidecar-control --from-literal=token=\"$(openssl rand -hex 32)\"" -}}
{{- end -}}
{{- if and (eq .Values.mode "benchmark") (include "gc-sidecar.serviceMonitorWanted" .) (ne (toString .Values.monitoring.serviceMonitor.enabled) "auto") -}}
{{- fail "monitoring.serviceMonitor.enabled: true needs mode: serve: a benchmark has no Service. Take monitoring.podMonitor." -}}
{{- end -}}
{{- if and (eq .Values.mode "serve") (include "gc-sidecar.serviceMonitorWanted" .) (include "gc-sidecar.podMonitorWanted" .) -}}
{{- fail "monitoring.podMonitor.enabled and monitoring.serviceMonitor.enabled are both on: every pod would be scraped twice, and every sum be double." -}}
{{- end -}}
{{- if and (eq .Values.transport "dev") .Values.monitoring.podMonitor.engine -}}
{{- fail "monitoring.podMonitor.engine: true cannot be had with transport: dev: vLLM then listens on loopback." -}}
{{- end -}}
{{- if and .Values.vllm.gpu.count (hasKey .Values.vllm.resources .Values.vllm.gpu.resource) -}}
{{- fail (printf "vllm.resources names %s, and vllm.gpu.count is %d: say it once, in vllm.gpu." .Values.vllm.gpu.resource (int .Values.vllm.gpu.count)) -}}
{{- end -}}
{{- if and .Values.vllm.cache.existingClaim .Values.vllm.cache.volume -}}
{{- fail "vllm.cache.existingClaim and vllm.cache.volume are both set: the cache is one volume." -}}
{{- end -}}
{{- if not (or .Values.vllm.image.tag .Values.vllm.image.digest) -}}
{{- fail "vllm.image needs vllm.image.tag or vllm.image.digest: two runs of `latest` are not the same engine." -}}
{{- end -}}
{{- if and .Values.vllm.claims .Values.vllm.gpu.count -}}
{{- fail (printf "vllm.claims brings the GPUs, and vllm.gpu.count asks for %d more of %s: set vllm.gpu.count to 0." (int .Values.vllm.gpu.count) .Values.vllm.gpu.resource) -}}
{{- end -}}
{{- $ports := list (int .Values.vllm.port) (int .Values.sidecar.port) (int .Values.sidecar.openPort) -}}
{{- if ne (len (uniq $ports)) 3 -}}
{{- fail (printf "vllm.port, sidecar.port and sidecar.openPort are %s: one pod has each port once." (join ", " $ports)) -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.metricsFrom) (or (eq .Values.mode "benchmark") .Values.networkPolicy.engineFrom) (include "gc-sidecar.engineScraped" .) -}}
{{- fail "monitoring.podMonitor.engine and serviceMonitor.engine need networkPolicy.metricsFrom: vLLM's metrics are on the port of its API, which would be open to the whole cluster." -}}
{{- end -}}
{{- if eq .Values.mode "benchmark" -}}
{{- $waits := add (include "gc-sidecar.seconds" .Values.benchmark.engineTimeout) (include "gc-sidecar.seconds" .Values.benchmark.timeout) -}}
{{- if ge $waits (int64 .Values.benchmark.activeDeadlineSeconds) -}}
{{- fail (printf "benchmark.engineTimeout and benchmark.timeout are %d s together, and benchmark.activeDeadlineSeconds is %d: at that deadline Kubernetes removes the pod, its log and its verdict. Raise it." $waits (int64 .Values.benchmark.activeDeadlineSeconds)) -}}
{{- end -}}
{{- end -}}
{{- with .Values.benchmark.image -}}
{{- if and .repository (not (or .tag .digest)) -}}
{{- fail "benchmark.image.repository needs benchmark.image.tag or benchmark.image.digest: two runs of `latest` are not the same benchmark." -}}
{{- end -}}
{{- end -}}
{{- $instead := dict
      "VLLM_SERVER_DEV_MODE" "transport: dev"
      "VLLM_PLUGINS" "vllm.plugins"
      "GC_SIDECAR_RUN_DIR" "no other"
      "PYTHONPATH" "the image's own, before which with-agent puts ours"
      "HOME" "vllm.user.home"
      "USER" "vllm.user.name"
      "LOGNAME" "vllm.user.name" -}}
{{- if .Values.vllm.hfToken.existingSecret -}}
{{- $_ := set $instead "HF_TOKEN" "vllm.hfToken alone" -}}
{{- end -}}
{{- range .Values.vllm.extraEnv -}}
{{- if hasKey $instead .name -}}
{{- fail (printf "vllm.extraEnv sets %s, which the chart sets itself or leaves to the image. Take %s." .name (get $instead .name)) -}}
{{- end -}}
{{- end -}}
{{- range .Values.vllm.args -}}
{{- if regexMatch "^--port(=|$)" . -}}
{{- fail (printf "vllm.args has %s: take vllm.port, which the sidecar and the probes know too." .) -}}
{{- end -}}
{{- if and (eq $.Values.transport "dev") (regexMatch "^--host(=|$)" .) -}}
{{- fail (printf "vllm.args has %s: with transport: dev vLLM listens on loopback alone." .) -}}
{{- end -}}
{{- end -}}
{{- $claims := list -}}
{{- range .Values.resourceClaims -}}{{- $claims = append $claims .name -}}{{- end -}}
{{- range .Values.vllm.claims -}}
{{- if not (has .name $claims) -}}
{{- fail (printf "vllm.claims names %q, which resourceClaims does not have." .name) -}}
{{- end -}}
{{- end -}}
{{- range $list := list "extraContainers" "extraInitContainers" -}}
{{- range get $.Values $list -}}
{{- $container := .name -}}
{{- $limits := dig "resources" "limits" dict . -}}
{{- $requests := dig "resources" "requests" $limits . -}}
{{- range $resource := list "cpu" "memory" -}}
{{- if or (not (get $limits $resource)) (ne (get $limits $resource | toString) (get $requests $resource | default (get $limits $resource) | toString)) -}}
{{- fail (printf "%s: container %q needs resources.limits.%s, and a request that equals it: otherwise the whole pod is no longer Guaranteed, and a benchmark measures its neighbours." $list $container $resource) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.mode "benchmark") (gt (len (include "gc-sidecar.jobName" .)) 63) -}}
{{- fail (printf "benchmark.suffix is too long: the Job's name %q has more than 63 characters." (include "gc-sidecar.jobName" .)) -}}
{{- end -}}
{{- end -}}
