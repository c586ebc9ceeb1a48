{{/* ---- Deployment or DaemonSet ------------------------------------------------------------------------------- */}}

{{/* Not empty if the pods are a DaemonSet's. */}}
{{- define "pulsar-trio-proxy.isDaemonSet" -}}
{{- if eq .Values.workload.kind "DaemonSet" -}}true{{- end -}}
{{- end -}}

{{/* Not empty if the pods use the node's network: its addresses and ports are theirs. */}}
{{- define "pulsar-trio-proxy.hostNetwork" -}}
{{- if .Values.workload.daemonSet.hostNetwork -}}true{{- end -}}
{{- end -}}

{{/* DaemonSet's `updateStrategy`. Without one a new pod is ready before the old one ends, unless both would need the
     same port of the node. YAML. */}}
{{- define "pulsar-trio-proxy.daemonSetStrategy" -}}
{{- $values := .Values.workload.daemonSet -}}
{{- $onNode := or $values.hostNetwork $values.hostPorts -}}
{{- $unavailable := ternary 1 0 (not (empty $onNode)) -}}
{{- $chosen := dict "type" "RollingUpdate" "rollingUpdate" (dict "maxUnavailable" $unavailable "maxSurge" (sub 1 $unavailable)) -}}
{{- with $values.updateStrategy -}}
{{- $chosen = . -}}
{{- if hasKey . "rollingUpdate" -}}
{{- $zero := list "0" "0%" -}}
{{- $surges := not (has (dig "rollingUpdate" "maxSurge" 0 . | toString) $zero) -}}
{{- $goesDown := not (has (dig "rollingUpdate" "maxUnavailable" 1 . | toString) $zero) -}}
{{- if eq $surges $goesDown -}}
{{- fail "workload.daemonSet.updateStrategy.rollingUpdate: Kubernetes takes either maxUnavailable or maxSurge (without maxUnavailable it uses 1); set one of them to 0 and the other one higher" -}}
{{- end -}}
{{- if and $surges $onNode -}}
{{- fail "workload.daemonSet.updateStrategy.rollingUpdate.maxSurge: a port of a node cannot be used by the old and the new pod at the same time (hostPorts, hostNetwork); set maxSurge: 0 and maxUnavailable: 1" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $chosen | toYaml -}}
{{- end -}}

{{/* The ports of the proxy's container, with those of the node that lead to them. YAML. */}}
{{- define "pulsar-trio-proxy.containerPorts" -}}
{{- $hostPorts := .Values.workload.daemonSet.hostPorts -}}
{{- $ports := list -}}
{{- $admin := dict "name" "admin" "service" "admin" "port" (include "pulsar-trio-proxy.adminPort" . | int) -}}
{{- range append (include "pulsar-trio-proxy.listeners" . | fromJsonArray) $admin -}}
{{- $port := dict "name" .name "containerPort" (int .port) "protocol" "TCP" -}}
{{- with get $hostPorts .service -}}
{{- $_ := set $port "hostPort" (int .) -}}
{{- end -}}
{{- $ports = append $ports $port -}}
{{- end -}}
{{- $ports | toYaml -}}
{{- end -}}

{{/* Not empty if there is a PodDisruptionBudget. Kubernetes computes none for a DaemonSet's pods but from a number of pods
     that must stay; with `maxUnavailable` it would allow no eviction at all. */}}
{{- define "pulsar-trio-proxy.hasBudget" -}}
{{- $pdb := .Values.pdb -}}
{{- if and $pdb.enabled (include "pulsar-trio-proxy.isDaemonSet" .) -}}
{{- if not (has (toString $pdb.maxUnavailable) (list "" "1")) -}}
{{- fail "pdb.maxUnavailable: Kubernetes cannot count a DaemonSet's pods and would allow no eviction; leave it out, or set pdb.maxUnavailable: \"\" and pdb.minAvailable to a number" -}}
{{- else if hasSuffix "%" (toString $pdb.minAvailable) -}}
{{- fail "pdb.minAvailable: Kubernetes cannot count a DaemonSet's pods, so a percentage allows no eviction; set a number" -}}
{{- end -}}
{{- end -}}
{{- if and $pdb.enabled (or (not (include "pulsar-trio-proxy.isDaemonSet" .)) (ne (toString $pdb.minAvailable) "")) -}}true{{- end -}}
{{- end -}}

{{/* An error for values that the workload's kind cannot follow, or that open more than they seem to. */}}
{{- define "pulsar-trio-proxy.refuseWorkload" -}}
{{- if and (dig "preStop" "sleep" dict .Values.lifecycle) (not (semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version)) -}}
{{- fail (printf "lifecycle.preStop.sleep: needs Kubernetes 1.30, and this is %s; leave it out: the proxy itself waits for shutdown.delay_ms" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if include "pulsar-trio-proxy.isDaemonSet" . -}}
{{- range $scaler := list "autoscaling" "keda" -}}
{{- if get (get $.Values $scaler) "enabled" -}}
{{- fail (printf "%s.enabled: a DaemonSet has one pod on each node; set it to false, or workload.kind: Deployment" $scaler) -}}
{{- end -}}
{{- end -}}
{{- include "pulsar-trio-proxy.refuseHostPorts" . -}}
{{- include "pulsar-trio-proxy.refuseHostNetwork" . -}}
{{- end -}}
{{- end -}}

{{/* An error for ports of nodes that lead nowhere, or that two listeners want. */}}
{{- define "pulsar-trio-proxy.refuseHostPorts" -}}
{{- $names := list -}}
{{- range include "pulsar-trio-proxy.listeners" . | fromJsonArray -}}
{{- $names = append $names .service -}}
{{- end -}}
{{- $names = append $names "admin" -}}
{{- $used := dict -}}
{{- range $name, $port := .Values.workload.daemonSet.hostPorts -}}
{{- if not (has $name $names) -}}
{{- fail (printf "workload.daemonSet.hostPorts.%s: there is no such port; there are %s" $name (join ", " $names)) -}}
{{- end -}}
{{- with get $used (toString $port) -}}
{{- fail (printf "workload.daemonSet.hostPorts.%s: %d is the port of %s already; choose another" $name (int $port) .) -}}
{{- end -}}
{{- $_ := set $used (toString $port) $name -}}
{{- end -}}
{{- end -}}

{{/* An error for what does not hold where the node's network, or a port of it, leads to the pods. */}}
{{- define "pulsar-trio-proxy.refuseHostNetwork" -}}
{{- $daemonSet := .Values.workload.daemonSet -}}
{{- $adminOnNode := or $daemonSet.hostNetwork (hasKey $daemonSet.hostPorts "admin") -}}
{{- if and $daemonSet.hostNetwork $daemonSet.hostPorts -}}
{{- fail "workload.daemonSet.hostPorts: with hostNetwork the pods' ports are the node's own; leave hostPorts out, or set hostNetwork: false" -}}
{{- end -}}
{{- if and $adminOnNode (not .Values.adminToken.secret) (not $daemonSet.openAdminPort) -}}
{{- fail "workload.daemonSet: everybody who reaches the node would reach the admin port (hostNetwork, hostPorts.admin); set adminToken.secret, or openAdminPort: true if that is wanted" -}}
{{- end -}}
{{- if and $daemonSet.openAdminPort (or (not $adminOnNode) .Values.adminToken.secret) -}}
{{- fail "workload.daemonSet.openAdminPort: has no effect with adminToken.secret, or without hostNetwork and hostPorts.admin; leave it out" -}}
{{- end -}}
{{- end -}}

{{/* ---- pods of the analytics ------------------------------------------------------------------------------- */}}

{{/* Labels of the analytics' pods, as YAML. Call: include "pulsar-trio-proxy.analyticsPodLabels" (list . "receiver") */}}
{{- define "pulsar-trio-proxy.analyticsPodLabels" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}
{{- $own := include "pulsar-trio-proxy.labels" . | fromYaml -}}
{{- if eq $component "receiver" -}}
{{- $_ := set $own "component" "pulsar-proxy-analytics-receiver" -}}
{{- end -}}
{{- $labels := (get $root.Values.analytics $component).podLabels -}}
{{- range $key, $_ := $labels -}}
{{- if hasKey $own $key -}}
{{- fail (printf "analytics.%s.podLabels: %s is the chart's own label, or one of commonLabels; leave it out" $component $key) -}}
{{- end -}}
{{- end -}}
{{- merge $own $labels | toYaml -}}
{{- end -}}
