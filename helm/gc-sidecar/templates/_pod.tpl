{{/* The pod of Job and Deployment: metadata and spec. */}}
{{- define "gc-sidecar.pod" -}}
{{- $benchmark := eq .Values.mode "benchmark" -}}
{{- $native := include "gc-sidecar.nativeSidecars" . -}}
{{- $annotations := dict "kubectl.kubernetes.io/default-container" ($benchmark | ternary "benchmark" "vllm") -}}
{{- if $benchmark -}}
{{- /* Nothing that tidies up nodes ends a measurement. */ -}}
{{- $_ := set $annotations "cluster-autoscaler.kubernetes.io/safe-to-evict" "false" -}}
{{- $_ := set $annotations "karpenter.sh/do-not-disrupt" "true" -}}
{{- end -}}
metadata:
  labels:
    {{- include "gc-sidecar.podLabels" . | nindent 4 }}
  annotations:
    {{- toYaml (mergeOverwrite $annotations (deepCopy .Values.podAnnotations)) | nindent 4 }}
spec:
  {{- if $benchmark }}
  restartPolicy: Never
  {{- end }}
  automountServiceAccountToken: false
  # A Service called `vllm` would set VLLM_PORT, which vLLM takes for its own.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
  {{- with .Values.serviceAccountName }}
  serviceAccountName: {{ . }}
  {{- end }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- range $field := list "priorityClassName" "runtimeClassName" "schedulerName" }}
  {{- with get $.Values $field }}
  {{ $field }}: {{ . }}
  {{- end }}
  {{- end }}
  securityContext:
    {{- include "gc-sidecar.podSecurityContext" . | nindent 4 }}
  {{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "resourceClaims" }}
  {{- with get $.Values $field }}
  {{ $field }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  initContainers:
    {{- with .Values.extraInitContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    - {{ include "gc-sidecar.installAgent" . | indent 6 | trim }}
    {{- if $native }}
    - {{ include "gc-sidecar.sidecar" . | indent 6 | trim }}
    {{- end }}
    {{- if $benchmark }}
    # No probe: it would keep the benchmark's container back, and hide a crash loop. `run` waits for the engine.
    - {{ include "gc-sidecar.engine" . | indent 6 | trim }}
    {{- end }}
  containers:
    {{- if $benchmark }}
    - {{ include "gc-sidecar.benchmark" . | indent 6 | trim }}
    {{- else }}
    - {{ include "gc-sidecar.engine" . | indent 6 | trim }}
    {{- if not $native }}
    - {{ include "gc-sidecar.sidecar" . | indent 6 | trim }}
    {{- end }}
    {{- end }}
    {{- with .Values.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "gc-sidecar.volumes" . | nindent 4 }}
{{- end -}}

{{- define "gc-sidecar.podSecurityContext" -}}
{{- /* A cache of terabytes is not walked at every start. */ -}}
{{- $context := dict
      "fsGroupChangePolicy" "OnRootMismatch"
      "runAsNonRoot" (or .Values.openshift (ne (int .Values.vllm.user.uid) 0))
      "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- /* The group that all containers have, whatever their users: the run directory is shared through it. */ -}}
{{- if not .Values.openshift -}}
{{- $_ := set $context "fsGroup" (int .Values.sidecar.fsGroup) -}}
{{- end -}}
{{- toYaml (mergeOverwrite $context (deepCopy .Values.podSecurityContext)) -}}
{{- end -}}

{{- define "gc-sidecar.volumes" -}}
{{- $cache := .Values.vllm.cache -}}
- name: agent
  emptyDir:
    sizeLimit: 32Mi
- name: run-dir
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.sidecar.runDir.sizeLimit }}
- name: home
  emptyDir:
    sizeLimit: 10Gi
- name: cache
  {{- if $cache.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ $cache.existingClaim }}
  {{- else if $cache.volume }}
  {{- toYaml $cache.volume | nindent 2 }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ $cache.sizeLimit }}
  {{- end }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.vllm.shm.sizeLimit }}
- name: tmp
  emptyDir:
    sizeLimit: 10Gi
{{- if eq .Values.mode "benchmark" }}
- name: benchmark-home
  emptyDir:
    sizeLimit: 1Gi
- name: benchmark-tmp
  emptyDir:
    sizeLimit: 1Gi
- name: results
  {{- if .Values.benchmark.results.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .Values.benchmark.results.existingClaim }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .Values.benchmark.results.sizeLimit }}
  {{- end }}
{{- end }}
{{- with .Values.sidecar.control.existingSecret }}
- name: control-token
  secret:
    secretName: {{ . }}
    defaultMode: 288 # 0440
    items:
      - key: {{ $.Values.sidecar.control.key }}
        path: token
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
