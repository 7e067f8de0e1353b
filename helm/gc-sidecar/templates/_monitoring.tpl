{{/* (dict "port" NAME "settings" map): one endpoint of a PodMonitor or ServiceMonitor. */}}
{{- define "gc-sidecar.endpoint" -}}
port: {{ .port }}
path: /metrics
interval: {{ .settings.interval }}
scrapeTimeout: {{ .settings.scrapeTimeout }}
{{- with .settings.relabelings }}
relabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "settings" map): metadata of a monitoring object, without its name. */}}
{{- define "gc-sidecar.monitoringMetadata" -}}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "gc-sidecar.labels" .root | nindent 2 }}
  {{- with .settings.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .settings.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
