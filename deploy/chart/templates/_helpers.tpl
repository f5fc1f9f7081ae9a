{{- define "tollhouse.labels" -}}
app.kubernetes.io/name: tollhouse
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{/* Each engine by its own name; a shared address would reach only one of them. */}}
{{- define "tollhouse.upstreams" -}}
{{- $name := printf "%s-engine" .Release.Name -}}
{{- range $number := until (int .Values.engine.replicas) -}}
tcp://{{ $name }}-{{ $number }}.{{ $name }}:7000 {{ end -}}
{{- end }}
