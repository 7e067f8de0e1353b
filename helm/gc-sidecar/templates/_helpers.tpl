{{/* Names. */}}

{{- define "gc-sidecar.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 40, so that suffix and revision fit into a label's 63 behind it. */}}
{{- define "gc-sidecar.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* A Job's template cannot change: each revision is another Job. */}}
{{- define "gc-sidecar.jobName" -}}
{{- list (include "gc-sidecar.fullname" .) .Values.benchmark.suffix (toString .Release.Revision) | compact | join "-" -}}
{{- end -}}

{{- define "gc-sidecar.selectorLabels" -}}
app.kubernetes.io/name: {{ include "gc-sidecar.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: {{ .Values.mode }}
{{- end -}}

{{- define "gc-sidecar.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "gc-sidecar.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: gc-sidecar
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Of Job and Deployment: the queue of Kueue is read there. */}}
{{- define "gc-sidecar.workloadLabels" -}}
{{ include "gc-sidecar.labels" . }}
{{- with .Values.queue.name }}
kueue.x-k8s.io/queue-name: {{ . }}
{{- end }}
{{- with .Values.queue.priorityClass }}
kueue.x-k8s.io/priority-class: {{ . }}
{{- end }}
{{- with .Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "gc-sidecar.podLabels" -}}
{{ include "gc-sidecar.labels" . }}
{{- with .Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (dict "image" .Values.x.image "tag" DEFAULT) */}}
{{- define "gc-sidecar.imageName" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ default .tag .image.tag }}
{{- end -}}
{{- end -}}

{{- define "gc-sidecar.ownImage" -}}
{{- include "gc-sidecar.imageName" (dict "image" .Values.image "tag" .Chart.AppVersion) -}}
{{- end -}}

{{- define "gc-sidecar.engineImage" -}}
{{- include "gc-sidecar.imageName" (dict "image" .Values.vllm.image "tag" "latest") -}}
{{- end -}}

{{- define "gc-sidecar.benchmarkImage" -}}
{{- if .Values.benchmark.image.repository -}}
{{- include "gc-sidecar.imageName" (dict "image" .Values.benchmark.image "tag" "latest") -}}
{{- else -}}
{{- include "gc-sidecar.engineImage" . -}}
{{- end -}}
{{- end -}}

{{/* What is asked for and what can be had. Each answers "true" or nothing. */}}

{{- define "gc-sidecar.nativeSidecars" -}}
{{- if semverCompare ">=1.29-0" .Capabilities.KubeVersion.Version }}true{{ end -}}
{{- end -}}

{{- define "gc-sidecar.operatorFound" -}}
{{- if .Capabilities.APIVersions.Has "monitoring.coreos.com/v1" }}true{{ end -}}
{{- end -}}

{{/* (dict "root" $ "enabled" true|false|"auto") */}}
{{- define "gc-sidecar.wanted" -}}
{{- if eq (toString .enabled) "auto" -}}
{{- include "gc-sidecar.operatorFound" .root -}}
{{- else if .enabled -}}
true
{{- end -}}
{{- end -}}

{{/* By itself it gives way to a ServiceMonitor: with both, every sum counts twice. */}}
{{- define "gc-sidecar.podMonitorWanted" -}}
{{- $enabled := .Values.monitoring.podMonitor.enabled -}}
{{- $other := and (eq .Values.mode "serve") (include "gc-sidecar.serviceMonitorWanted" .) -}}
{{- if not (and (eq (toString $enabled) "auto") $other) -}}
{{- include "gc-sidecar.wanted" (dict "root" . "enabled" $enabled) -}}
{{- end -}}
{{- end -}}

{{- define "gc-sidecar.serviceMonitorWanted" -}}
{{- include "gc-sidecar.wanted" (dict "root" . "enabled" .Values.monitoring.serviceMonitor.enabled) -}}
{{- end -}}

{{- define "gc-sidecar.prometheusRuleWanted" -}}
{{- include "gc-sidecar.wanted" (dict "root" . "enabled" .Values.monitoring.prometheusRule.enabled) -}}
{{- end -}}

{{- define "gc-sidecar.engineHasGpus" -}}
{{- if or .Values.vllm.gpu.count .Values.vllm.claims }}true{{ end -}}
{{- end -}}

{{- define "gc-sidecar.reportsToFile" -}}
{{- $report := .Values.benchmark.results.report -}}
{{- if or (eq $report "file") (and (eq $report "auto") .Values.benchmark.results.existingClaim) }}true{{ end -}}
{{- end -}}

{{/* Requests equal limits in every container: the pod is Guaranteed, and no neighbour's load is measured. */}}
{{- define "gc-sidecar.resources" -}}
limits:
  {{- range $name, $quantity := . }}
  {{ $name }}: {{ $quantity | toString | quote }}
  {{- end }}
requests:
  {{- range $name, $quantity := . }}
  {{ $name }}: {{ $quantity | toString | quote }}
  {{- end }}
{{- end -}}

{{/* (dict "root" $ "user" {uid, gid} "readOnly" bool "extra" map): what the Pod Security Standard `restricted` asks for. */}}
{{- define "gc-sidecar.securityContext" -}}
{{- $context := dict
      "allowPrivilegeEscalation" false
      "capabilities" (dict "drop" (list "ALL"))
      "privileged" false
      "readOnlyRootFilesystem" .readOnly
      "runAsNonRoot" true
      "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- if not .root.Values.openshift -}}
{{- $_ := set $context "runAsUser" (int .user.uid) -}}
{{- $_ := set $context "runAsGroup" (int .user.gid) -}}
{{- if eq (int .user.uid) 0 -}}
{{- $_ := set $context "runAsNonRoot" false -}}
{{- end -}}
{{- end -}}
{{- toYaml (mergeOverwrite $context (deepCopy (default dict .extra))) -}}
{{- end -}}

{{/* The measuring container's user: vLLM's in vLLM's image, ours in any other. */}}
{{- define "gc-sidecar.benchmarkUser" -}}
{{- if .Values.benchmark.user -}}
{{- toJson .Values.benchmark.user -}}
{{- else if .Values.benchmark.image.repository -}}
{{- toJson .Values.sidecar.user -}}
{{- else -}}
{{- toJson .Values.vllm.user -}}
{{- end -}}
{{- end -}}

{{/* The seconds in 45m or 1h30m; none in nothing. */}}
{{- define "gc-sidecar.seconds" -}}
{{- $units := dict "h" 3600 "m" 60 "s" 1 "d" 86400 -}}
{{- $seconds := 0 -}}
{{- range regexFindAll "[0-9]+(\\.[0-9]+)?(ms|[hmsd])" (toString .) -1 -}}
{{- if not (hasSuffix "ms" .) -}}
{{- $seconds = addf $seconds (mulf (float64 (regexFind "^[0-9.]+" .)) (get $units (regexFind "[hmsd]$" .))) -}}
{{- end -}}
{{- end -}}
{{- int64 $seconds -}}
{{- end -}}

{{/* Whether somebody is to read vLLM's own metrics. */}}
{{- define "gc-sidecar.engineScraped" -}}
{{- $monitoring := .Values.monitoring -}}
{{- if or (and $monitoring.podMonitor.engine (include "gc-sidecar.podMonitorWanted" .)) (and $monitoring.serviceMonitor.engine (include "gc-sidecar.serviceMonitorWanted" .)) -}}
true
{{- end -}}
{{- end -}}
