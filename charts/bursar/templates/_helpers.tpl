{{/* The labels of every object. */}}
{{- define "bursar.labels" -}}
{{ include "bursar.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* The labels that never change. */}}
{{- define "bursar.selector" -}}
app.kubernetes.io/name: bursar
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* An image reference: of (dict "image" ... "chart" .Chart). */}}
{{- define "bursar.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* The name of a part's objects: of (dict "part" "agent" "release" .Release). */}}
{{- define "bursar.name" -}}
{{ printf "%s-%s" .release.Name .part | trunc 63 | trimSuffix "-" }}
{{- end }}
