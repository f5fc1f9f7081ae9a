{{- define "tollhouse.labels" -}}
app.kubernetes.io/name: tollhouse
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{/* Of one component: (list $ "gateway"). */}}
{{- define "tollhouse.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: tollhouse
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Each engine by its own name; a shared address would reach only one of them. */}}
{{- define "tollhouse.upstreams" -}}
{{- $name := printf "%s-engine" .Release.Name -}}
{{- range $number := until (int .Values.engine.replicas) -}}
tcp://{{ $name }}-{{ $number }}.{{ $name }}:7000 {{ end -}}
{{- end }}

{{/* Every setting that is not secret. */}}
{{- define "tollhouse.settings" -}}
{{ toYaml .Values.settings }}
TOLLHOUSE_UPSTREAMS: {{ include "tollhouse.upstreams" . | trim | quote }}
TOLLHOUSE_EXPORT_DIR: /exports
{{- end }}

{{/* Pods start anew when a setting changes, or the Secret; a rendering without a cluster sees no Secret. */}}
{{- define "tollhouse.checksums" -}}
{{- $secret := lookup "v1" "Secret" .Release.Namespace .Values.secretName | default dict -}}
checksum/settings: {{ include "tollhouse.settings" . | sha256sum | quote }}
checksum/secret: {{ get $secret "data" | toJson | sha256sum | quote }}
{{- end }}

{{/* What all pods have in common: the user that owns its volumes, and the registry's Secrets. */}}
{{- define "tollhouse.pod" -}}
securityContext: {runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001, fsGroupChangePolicy: OnRootMismatch, seccompProfile: {type: RuntimeDefault}}
automountServiceAccountToken: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "tollhouse.container" -}}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
{{- end }}

{{- define "tollhouse.environment" -}}
envFrom:
  - configMapRef: {name: "{{ .Release.Name }}-settings"}
  - secretRef: {name: "{{ .Values.secretName }}"}
{{- end }}

{{/* Of a worker: its process for /metrics ends with it. The first probe leaves time for the broker. */}}
{{- define "tollhouse.workerProbes" -}}
startupProbe: {httpGet: {path: /healthz, port: metrics}, periodSeconds: 3, failureThreshold: 40}
readinessProbe: {httpGet: {path: /readyz, port: metrics}, periodSeconds: 10, timeoutSeconds: 5}
livenessProbe: {httpGet: {path: /healthz, port: metrics}, periodSeconds: 10, failureThreshold: 3}
{{- end }}

{{/* A claim's class and size: (dict "storageClass" … "size" …). */}}
{{- define "tollhouse.storage" -}}
{{- with .storageClass }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end }}

{{- define "tollhouse.modelVolume" -}}
- name: models
  persistentVolumeClaim: {claimName: {{ .Values.models.existingClaim | default (printf "%s-models" .Release.Name) | quote }}}
{{- end }}

{{/* Of a network policy: whose pods may read metrics. */}}
{{- define "tollhouse.fromMonitoring" -}}
{{- with .Values.networkPolicy.monitoringNamespace }}
from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: {{ . | quote }}}}}]
{{- end }}
{{- end }}

{{/* A claim that pods of several machines share: (dict "root" $ "name" … "claim" …). */}}
{{- define "tollhouse.sharedClaim" -}}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: "{{ .root.Release.Name }}-{{ .name }}"
  labels:
    {{- include "tollhouse.labels" .root | nindent 4 }}
  annotations: {helm.sh/resource-policy: keep}
spec:
  accessModes: [ReadWriteMany]
  {{- include "tollhouse.storage" .claim | nindent 2 }}
{{- end }}
