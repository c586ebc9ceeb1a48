{{/* ---- the brokers of apache/pulsar-helm-chart ------------------------------------------------------------- */}}

{{/* The release whose Secrets are mounted; empty: none is named. */}}
{{- define "pulsar-trio-proxy.secretsRelease" -}}
{{- .Values.auth.pulsarRelease | default .Values.brokers.pulsarRelease -}}
{{- end -}}

{{/* The name of its brokers' Service. That chart prefixes its objects with the release's name, and with `-pulsar` behind
     it where the name does not contain that. */}}
{{- define "pulsar-trio-proxy.brokerService" -}}
{{- $release := .Values.brokers.pulsarRelease | default .Values.auth.pulsarRelease | default "pulsar" -}}
{{- $fullname := ternary $release (printf "%s-pulsar" $release) (contains "pulsar" $release) -}}
{{- printf "%s-broker" ($fullname | trunc 63 | trimSuffix "-") -}}
{{- end -}}

{{/* `brokers.service_url`, `brokers.allowed_hosts` and, with a listener for HTTP, `brokers.web_service_url` for its brokers
     (YAML), or `{}` where `config` names brokers. The
     Service has one address for all brokers, and each broker advertises its pod's name below the headless Service: relays
     go to pods of this StatefulSet there. Rules in `config` are taken alone, since a target must meet all of them. */}}
{{- define "pulsar-trio-proxy.derivedBrokers" -}}
{{- $explicit := get (.Values.config | default dict) "brokers" | default dict -}}
{{- $brokers := dict -}}
{{- if not (get $explicit "service_url") -}}
{{- $service := include "pulsar-trio-proxy.brokerService" . -}}
{{- $zone := printf "%s.svc.%s" (.Values.brokers.namespace | default .Release.Namespace) .Values.clusterDomain -}}
{{- $endpoint := ternary "pulsar+ssl://%s.%s:6651" "pulsar://%s.%s:6650" .Values.brokers.tls -}}
{{- $_ := set $brokers "service_url" (printf $endpoint $service $zone) -}}
{{- if and (include "pulsar-trio-proxy.hasHttp" .) (not (get $explicit "web_service_url")) -}}
{{- $web := ternary "https://%s.%s:8443" "http://%s.%s:8080" .Values.brokers.tls -}}
{{- $_ := set $brokers "web_service_url" (printf $web $service $zone) -}}
{{- end -}}
{{- if not (or (get $explicit "allowed_hosts") (get $explicit "allowed_addresses")) -}}
{{- $_ := set $brokers "allowed_hosts" (list (printf "%s-*.%s-headless.%s" $service $service $zone)) -}}
{{- end -}}
{{- else if .Values.brokers.tls -}}
{{- fail "brokers.tls: config.brokers.service_url says whether brokers use TLS (pulsar+ssl://); remove brokers.tls" -}}
{{- else if .Values.brokers.namespace -}}
{{- fail "brokers.namespace: config.brokers.service_url says where the brokers are; remove one of them" -}}
{{- end -}}
{{- $brokers | toYaml -}}
{{- end -}}

{{/* What NOTES.txt says of the brokers and of relays' targets. Call: include "pulsar-trio-proxy.brokerNotes" $effectiveConfig */}}
{{- define "pulsar-trio-proxy.brokerNotes" -}}
Brokers: {{ .brokers.service_url }}
{{- if .brokers.through_proxy }}
  another proxy's, to which all relays go
{{- else }}
Relays go to these brokers (their hosts, names below them, their addresses)
{{- with .brokers.allowed_hosts }}, and to hosts named {{ join ", " . }}{{ end }}
{{- with .brokers.allowed_addresses }}{{ ternary " in" ", and to hosts in" (not (empty $.brokers.allowed_hosts)) }} {{ join ", " . }}{{ end }}
{{- with .brokers.allowed_ports }}, also at the ports {{ join ", " . }}{{ end }}.
If brokers advertise other names or addresses, clients get "Target broker cannot be validated.", and helm test says what
to set: config.brokers.allowed_hosts (patterns of names), config.brokers.allowed_addresses (networks).
{{- end }}
{{- end -}}
