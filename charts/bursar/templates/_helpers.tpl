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

{{/* The resource that counts device memory, and the one that counts managed memory. */}}
{{- define "bursar.device" -}}
bursar.dev/gpu-memory-{{ include "bursar.unit" . }}
{{- end }}
{{- define "bursar.managed" -}}
bursar.dev/managed-memory-{{ include "bursar.unit" . }}
{{- end }}
{{- define "bursar.unit" -}}
{{ get (dict "1Gi" "gib" "512Mi" "512mib" "256Mi" "256mib") .Values.quantum }}
{{- end }}

{{/* The bytes of one quantum. */}}
{{- define "bursar.quantum" -}}
{{ get (dict "1Gi" "1073741824" "512Mi" "536870912" "256Mi" "268435456") .Values.quantum }}
{{- end }}

{{/* CEL: every container of a pod that may request memory. */}}
{{- define "bursar.cel.containers" -}}
object.spec.containers + object.spec.?initContainers.orValue([])
{{- end }}

{{/* CEL: the containers that a request adds: all containers of a created pod, or added ephemeral ones. Existing
containers of a pod may be older than the policy. */}}
{{- define "bursar.cel.added" -}}
oldObject == null ? dyn({{ include "bursar.cel.containers" . }}) : dyn(object.spec.?ephemeralContainers.orValue([])
.filter(c, !oldObject.spec.?ephemeralContainers.orValue([]).exists(o, o.name == c.name)))
{{- end }}

{{/* CEL: a container sets NVIDIA_VISIBLE_DEVICES to a value that may select a GPU. */}}
{{- define "bursar.cel.sees" -}}
c.?env.orValue([]).exists(e, e.name == 'NVIDIA_VISIBLE_DEVICES' && (has(e.valueFrom) || !(e.?value.orValue('') in ['', 'void', 'none'])))
{{- end }}

{{/* Requests that create pods, or add ephemeral containers to a pod. */}}
{{- define "bursar.pods" -}}
- apiGroups: [""]
  apiVersions: [v1]
  operations: [CREATE]
  resources: [pods]
- apiGroups: [""]
  apiVersions: [v1]
  operations: [UPDATE]
  resources: [pods/ephemeralcontainers]
{{- end }}

{{/* CEL: a pod requests GPU memory. */}}
{{- define "bursar.cel.asks" -}}
({{ include "bursar.cel.containers" . }}).exists(c, c.?resources.?limits.orValue({}).exists(r, r in ['{{ include "bursar.device" . }}', '{{ include "bursar.managed" . }}']))
{{- end }}

{{/* The namespaces whose pods a policy matches: of (dict "exempt" [further names] "root" .). */}}
{{- define "bursar.policed" -}}
namespaceSelector:
  matchExpressions:
    - key: kubernetes.io/metadata.name
      operator: NotIn
      values: {{ concat (list "kube-system" .root.Release.Namespace) .root.Values.policies.exemptNamespaces .exempt | uniq | toJson }}
{{- end }}
