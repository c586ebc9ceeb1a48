{{/* ---- the Service for clients ------------------------------------------------------------------------------ */}}

{{/* "true" if clients from outside reach only nodes with a pod: the policy is Local, and the type is for the outside. */}}
{{- define "pulsar-trio-proxy.onlyLocal" -}}
{{- if and (ne .Values.service.type "ClusterIP") (ne .Values.service.externalTrafficPolicy "Cluster") -}}true{{- end -}}
{{- end -}}

{{/* "true" if in addition the load balancer finds these nodes by its own checks. */}}
{{- define "pulsar-trio-proxy.checksNodes" -}}
{{- if .Values.service.healthCheck.intervalSeconds -}}{{- include "pulsar-trio-proxy.onlyLocal" . -}}{{- end -}}
{{- end -}}

{{/* Seconds for which a pod that ends must accept clients: 10, until all nodes know that it ends; with a load balancer to
     nodes with a pod, until that has noticed (by its checks, or by the pod's readiness) and 5 for what is between. */}}
{{- define "pulsar-trio-proxy.secondsToLeave" -}}
{{- $check := .Values.service.healthCheck -}}
{{- $readiness := .Values.probes.readiness -}}
{{- if not (and (eq .Values.service.type "LoadBalancer") (include "pulsar-trio-proxy.onlyLocal" .)) -}}
10
{{- else if include "pulsar-trio-proxy.checksNodes" . -}}
{{- add (mul $check.intervalSeconds $check.failureThreshold) 5 -}}
{{- else -}}
{{- add (mul $readiness.periodSeconds $readiness.failureThreshold) 5 -}}
{{- end -}}
{{- end -}}

{{/* The path of the readiness probe. A pod that ends is no longer in the Service, whatever the probe says. But as long as
     the probe succeeds, its node sends it the clients that a load balancer still brings there, and drops them otherwise. A
     load balancer that looks at the pods instead of the nodes leaves the node once the probe fails. */}}
{{- define "pulsar-trio-proxy.readinessPath" -}}
{{- ternary "/readyz?leaving=ready" "/readyz" (eq (include "pulsar-trio-proxy.checksNodes" .) "true") -}}
{{- end -}}

{{/* The number for a listener in `service.ports` or `service.nodePorts`: by its own port in the pod, else by its port's
     name in the Service; empty if there is none. Call: include "pulsar-trio-proxy.numberOf" (list .Values.service.ports $listener) */}}
{{- define "pulsar-trio-proxy.numberOf" -}}
{{- $numbers := index . 0 -}}{{- $listener := index . 1 -}}
{{- get $numbers (toString $listener.port) | default (get $numbers $listener.service) | default "" -}}
{{- end -}}

{{/* The listeners (JSON list) with `servicePort` and `nodePort` (0: Kubernetes chooses one). */}}
{{- define "pulsar-trio-proxy.servicePorts" -}}
{{- $service := .Values.service -}}
{{- $ports := list -}}
{{- $known := list "pulsar" "pulsarssl" "pulsarsni" "http" -}}
{{- $taken := dict -}}
{{- range include "pulsar-trio-proxy.listeners" . | fromJsonArray -}}
{{- $port := include "pulsar-trio-proxy.numberOf" (list $service.ports .) | default .port | int -}}
{{- $nodePort := include "pulsar-trio-proxy.numberOf" (list $service.nodePorts .) | default 0 | int -}}
{{- $known = append $known .service -}}
{{- $known = append $known (toString (int .port)) -}}
{{- $suffix := .suffix -}}
{{- range $key := list (printf "service.ports: %d" $port) (ternary (printf "service.nodePorts: %d" $nodePort) "" (gt $nodePort 0)) -}}
{{- if hasKey $taken (cat $suffix $key) -}}
{{- fail (printf "%s is the port of two listeners; give each its own" $key) -}}
{{- end -}}
{{- if $key -}}{{- $_ := set $taken (cat $suffix $key) true -}}{{- end -}}
{{- end -}}
{{- $ports = append $ports (merge (dict "servicePort" $port "nodePort" $nodePort) .) -}}
{{- end -}}
{{- range $table, $numbers := dict "ports" $service.ports "nodePorts" $service.nodePorts -}}
{{- range $name, $_ := $numbers -}}
{{- if not (has $name $known) -}}
{{- fail (printf "service.%s.%s: no listener has this name or port; there are %s" $table $name (join ", " ($known | uniq))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $ports | toJson -}}
{{- end -}}

{{/* "true" if the listeners' certificate is that of the Service for HTTP, too. */}}
{{- define "pulsar-trio-proxy.certifiesHttp" -}}
{{- with .Values.http -}}
{{- and .enabled (not .plain) (not .existingSecret) (not .inClientsService) -}}
{{- end -}}
{{- end -}}

{{/* The ports of the Service with this suffix, as YAML; empty: it has none. Call: (list . "-http") */}}
{{- define "pulsar-trio-proxy.portsOfService" -}}
{{- $outside := and (not (index . 1)) (ne (index . 0).Values.service.type "ClusterIP") -}}
{{- range include "pulsar-trio-proxy.servicePorts" (index . 0) | fromJsonArray }}
{{- if eq .suffix (index $ 1) }}
- name: {{ .service }}
  port: {{ .servicePort | int }}
  targetPort: {{ .name }}
  protocol: TCP
  {{- if and $outside .nodePort }}
  nodePort: {{ .nodePort | int }}
  {{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Errors for fields of the Service that its type does not have, or that contradict each other. */}}
{{- define "pulsar-trio-proxy.refuseService" -}}
{{- $service := .Values.service -}}
{{- $balanced := eq $service.type "LoadBalancer" -}}
{{- if and (eq $service.internalTrafficPolicy "Local") $service.trafficDistribution (or (eq $service.type "ClusterIP") (include "pulsar-trio-proxy.onlyLocal" .)) -}}
{{- fail "service.trafficDistribution: has no effect, since all clients go to pods on their node (internalTrafficPolicy, externalTrafficPolicy); remove it" -}}
{{- end -}}
{{- with $service.trafficDistribution -}}
{{- $since := ternary "1.31" "1.34" (eq . "PreferClose") -}}
{{- if not (semverCompare (printf ">=%s-0" $since) $.Capabilities.KubeVersion.Version) -}}
{{- fail (printf "service.trafficDistribution: %s needs Kubernetes %s, and this is %s; remove it, or tell helm template the version (--kube-version)" . $since $.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $service.ipFamilyPolicy "SingleStack") (gt (len $service.ipFamilies) 1) -}}
{{- fail "service.ipFamilies: two need ipFamilyPolicy PreferDualStack or RequireDualStack" -}}
{{- end -}}
{{- $byIPv6 := has "IPv6" $service.ipFamilies -}}
{{- if or $byIPv6 (hasSuffix "DualStack" $service.ipFamilyPolicy) -}}
{{- $config := include "pulsar-trio-proxy.config" . | fromJson -}}
{{- range concat $config.listener (ternary ($config.http_listener | default list) list .Values.http.inClientsService) -}}
{{- if not (hasPrefix "[" (.bind | default "")) -}}
{{- fail (printf "%s: clients by IPv6 would not reach the listener at %s; set bindAddress: \"[::]\" (config.listener: bind there)" (ternary "service.ipFamilies" "service.ipFamilyPolicy" $byIPv6) (.bind | default "0.0.0.0")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $delay := dig "shutdown" "delay_ms" 0 (include "pulsar-trio-proxy.effectiveConfig" . | fromJson) -}}
{{- $needed := include "pulsar-trio-proxy.secondsToLeave" . | int -}}
{{- if and $balanced (include "pulsar-trio-proxy.onlyLocal" .) (lt (divf $delay 1000.0) (float64 $needed)) -}}
{{- fail (printf "config.shutdown.delay_ms: the load balancer sends clients for up to %d s to a node whose last pod ends (service.healthCheck: interval × failures, or those of the readiness probe; and 5 s); raise it to %d000, remove it, or set service.healthCheck if it notices sooner" $needed $needed) -}}
{{- end -}}
{{- end -}}
