{{- define "kvarts.name" -}}
{{- if contains "kvarts" .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-kvarts" (.Release.Name | trunc 45 | trimSuffix "-") }}{{ end }}
{{- end }}

{{- define "kvarts.selector" -}}
{app: kvarts, app.kubernetes.io/instance: {{ .Release.Name }}}
{{- end }}

{{- define "kvarts.labels" -}}
{app: kvarts, app.kubernetes.io/name: kvarts, app.kubernetes.io/instance: {{ .Release.Name }}, app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}}
{{- end }}

{{- define "kvarts.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{/* Checks of the values before a pod is made. */}}
{{- define "kvarts.check" -}}
{{- with .Values }}
{{- if and .grpc.enabled (not (and .grpc.tlsSecret .tokens.secret)) }}
{{- fail "grpc.enabled: gRPC over a network requires TLS and tokens: set grpc.tlsSecret and tokens.secret" }}
{{- end }}
{{- if .cluster.enabled }}
{{- if eq (empty .cluster.members) (empty .cluster.membersConfigMap) }}
{{- fail "cluster.enabled: set either cluster.members (etcd://...) or cluster.membersConfigMap, and not both" }}
{{- end }}
{{- if and .cluster.membersConfigMap (not .hostNetwork) }}
{{- fail "cluster.membersConfigMap: a file of members requires addresses that do not change when a pod restarts: set hostNetwork, or use etcd (cluster.members)" }}
{{- end }}
{{- end }}
{{- range $name, $value := .settings }}
{{- if has $name (list "KVARTS_CLUSTER_ADDRESS" "KVARTS_CLUSTER_ETCD_AUTHORITY" "KVARTS_CLUSTER_ETCD_CERTIFICATE" "KVARTS_CLUSTER_ETCD_KEY" "KVARTS_CLUSTER_ETCD_PASSWORD" "KVARTS_CLUSTER_LANE_PORT" "KVARTS_CLUSTER_LISTEN" "KVARTS_CLUSTER_MEMBERS" "KVARTS_CLUSTER_SECRET" "KVARTS_COLD_BUCKET" "KVARTS_CONFIG" "KVARTS_LIMITS_INDEX" "KVARTS_LIMITS_MEMORY" "KVARTS_LIMITS_SHARED" "KVARTS_LISTEN_GRPC" "KVARTS_LISTEN_METRICS" "KVARTS_LISTEN_OPEN_METRICS" "KVARTS_LISTEN_OPEN_NETWORK" "KVARTS_LISTEN_SOCKET" "KVARTS_STORE_DIRECTORIES" "KVARTS_TLS_CERTIFICATE" "KVARTS_TLS_CLIENT_AUTHORITY" "KVARTS_TLS_KEY") }}
{{- fail (printf "settings.%s: this variable is not allowed in settings, because the chart sets it, or because it affects access: use the corresponding value of the chart" $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
