{{/* All refusals of combinations of values: configmap.yaml includes this once. Each ends the rendering with
     `key: what is wrong; what to do`. The types of single values are checked by values.schema.json. */}}
{{- define "pulsar-trio-proxy.refusals" -}}
{{- $config := include "pulsar-trio-proxy.effectiveConfig" . | fromJson -}}
{{- $listeners := include "pulsar-trio-proxy.listeners" . | fromJsonArray -}}
{{- include "pulsar-trio-proxy.refuseValuesWithoutEffect" (dict
  "path" ""
  "values" (omit .Values "config" "global" "enabled")
  "defaults" (.Files.Get "files/values.json" | fromJson)
  "conditions" (include "pulsar-trio-proxy.valuesWithoutEffect" (list . $config $listeners) | fromYaml)
  "unmet" ""
) -}}
{{- include "pulsar-trio-proxy.refuseImages" . -}}
{{- include "pulsar-trio-proxy.refuseTls" . -}}
{{- include "pulsar-trio-proxy.refuseHttp" (list . $config) -}}
{{- include "pulsar-trio-proxy.refuseRoutes" . -}}
{{- include "pulsar-trio-proxy.refuseAuth" (list . $config) -}}
{{- include "pulsar-trio-proxy.refuseConfig" (list . $config) -}}
{{- include "pulsar-trio-proxy.refusePorts" (list . $config $listeners) -}}
{{- include "pulsar-trio-proxy.refuseResources" (list . $config) -}}
{{- include "pulsar-trio-proxy.refuseService" . -}}
{{- include "pulsar-trio-proxy.refuseWorkload" . -}}
{{- include "pulsar-trio-proxy.refusePods" . -}}
{{- include "pulsar-trio-proxy.refuseNumbersOfPods" . -}}
{{- include "pulsar-trio-proxy.refuseMonitoring" . -}}
{{- include "pulsar-trio-proxy.refuseAnalytics" . -}}
{{- end -}}

{{/* ---- images, TLS, authentication -------------------------------------------------------------------------- */}}

{{/* An error for a repository that contains a tag or a digest. */}}
{{- define "pulsar-trio-proxy.refuseImages" -}}
{{- range $path, $image := dict "image" .Values.image "analytics.image" .Values.analytics.image -}}
{{- if or (contains "@" $image.repository) (contains ":" ($image.repository | splitList "/" | last)) -}}
{{- fail (printf "%s.repository: %s contains a tag or a digest; put it into %s.tag or %s.digest" $path $image.repository $path $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* An error for a listener's TLS without a certificate, or with one that nobody can issue. */}}
{{- define "pulsar-trio-proxy.refuseTls" -}}
{{- with .Values.tls -}}
{{- if .enabled -}}
{{- if and .existingSecret .certManager.enabled -}}
{{- fail "tls.existingSecret and tls.certManager.enabled: only one of them can bring the certificate; leave the other out" -}}
{{- end -}}
{{- if not (or .existingSecret .certManager.enabled) -}}
{{- fail "tls.enabled: the listener has no certificate; set tls.existingSecret or tls.certManager.enabled" -}}
{{- end -}}
{{- if and .requireClientCertificate (not .clientCa.secret) -}}
{{- fail "tls.requireClientCertificate: no authority signs clients' certificates; set tls.clientCa.secret" -}}
{{- end -}}
{{- if and .sessionTickets (ne .minimumVersion "1.3") -}}
{{- fail "tls.sessionTickets: those of TLS 1.2 have no forward secrecy; set tls.minimumVersion to 1.3" -}}
{{- end -}}
{{- if and .sessionTickets .clientCa.secret -}}
{{- fail "tls.sessionTickets: the certificate of a client that resumes a session is not checked again; leave out tls.clientCa.secret, or this" -}}
{{- end -}}
{{- if get ($.Values.config | default dict) "listener" -}}
{{- fail "tls.enabled: config.listener names listeners of your own; put tls tables into config.listener, and leave tls out" -}}
{{- end -}}
{{- if .certManager.enabled -}}
{{- include "pulsar-trio-proxy.refuseCertificate" .certManager -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if ne .Values.proxyProtocol.mode "off" -}}
{{- if get (.Values.config | default dict) "listener" -}}
{{- fail "proxyProtocol.mode: config.listener names listeners of your own; put proxy_protocol into config.listener, and leave proxyProtocol out" -}}
{{- end -}}
{{- if not .Values.proxyProtocol.sources -}}
{{- fail "proxyProtocol.mode: needs proxyProtocol.sources; name the networks from which the load balancers' connections come" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.sni.enabled (get (.Values.config | default dict) "listener") -}}
{{- fail "sni.enabled: config.listener names listeners of your own; put routing: sni into one of config.listener, and leave sni out" -}}
{{- end -}}
{{- end -}}

{{/* An error for a listener for HTTP without upstreams or with two owners, and for an Ingress that takes the paths of every
     host. Call: (list . $effectiveConfig) */}}
{{- define "pulsar-trio-proxy.refuseHttp" -}}
{{- $root := index . 0 -}}{{- $config := index . 1 -}}
{{- if and $root.Values.http.enabled (get ($root.Values.config | default dict) "http_listener") -}}
{{- fail "http.enabled: config.http_listener names listeners of your own; leave one of them out" -}}
{{- end -}}
{{- if and $config.http_listener (not $config.brokers.web_service_url) -}}
{{- fail "config.brokers.web_service_url: is empty, so HTTP has nowhere to go; write http://HOST:PORT or https://HOST:PORT, where the brokers serve HTTP" -}}
{{- end -}}
{{- with $root.Values.http.ingress -}}
{{- if and .enabled (not .hostname) -}}
{{- fail "http.ingress.hostname: is empty, so the paths of every host of the controller would lead to the brokers' admin API; name the host" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* An error for routes of a Gateway that lead nowhere, or not to what they are for. The admin port is none of these
     ports. */}}
{{- define "pulsar-trio-proxy.refuseRoutes" -}}
{{- $ports := dict -}}
{{- range include "pulsar-trio-proxy.listeners" . | fromJsonArray -}}
{{- $_ := set $ports .service . -}}
{{- end -}}
{{- range $table := list "httpRoutes" "tcpRoutes" "tlsRoutes" -}}
{{- range $name, $_ := get $.Values.gateway $table -}}
{{- if not (hasKey $ports $name) -}}
{{- fail (printf "gateway.%s: no port of a listener has the name %s; there are %s" $table $name (keys $ports | sortAlpha | join ", ")) -}}
{{- end -}}
{{- $port := get $ports $name -}}
{{- if and (eq $table "httpRoutes") (ne $port.kind "http") -}}
{{- fail (printf "gateway.httpRoutes: %s is the port of Pulsar's binary protocol; use gateway.tcpRoutes or gateway.tlsRoutes" $name) -}}
{{- end -}}
{{- if and (eq $table "tlsRoutes") (not $port.tls) -}}
{{- fail (printf "gateway.tlsRoutes: the listener %s has no TLS; use gateway.tcpRoutes, or enable tls" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* An error for a certificate that cert-manager refuses. Its bounds: the API reference's `duration` and `renewBefore`.
     Call: include "pulsar-trio-proxy.refuseCertificate" .Values.tls.certManager */}}
{{- define "pulsar-trio-proxy.refuseCertificate" -}}
{{- if not .issuerRef.name -}}
{{- fail "tls.certManager.issuerRef.name: is empty; name the Issuer or ClusterIssuer" -}}
{{- end -}}
{{- if not (or .serviceNames .dnsNames .ipAddresses) -}}
{{- fail "tls.certManager.serviceNames: without them the certificate has no name; set tls.certManager.dnsNames or .ipAddresses" -}}
{{- end -}}
{{- $duration := include "pulsar-trio-proxy.milliseconds" .duration | float64 -}}
{{- $renewBefore := include "pulsar-trio-proxy.milliseconds" .renewBefore | float64 -}}
{{- if lt $duration 3600000.0 -}}
{{- fail (printf "tls.certManager.duration: cert-manager refuses %s; set 1h or more" .duration) -}}
{{- end -}}
{{- if lt $renewBefore 300000.0 -}}
{{- fail (printf "tls.certManager.renewBefore: cert-manager refuses %s; set 5m or more" .renewBefore) -}}
{{- end -}}
{{- if ge $renewBefore $duration -}}
{{- fail (printf "tls.certManager.renewBefore: %s is not less than tls.certManager.duration (%s); lower it" .renewBefore .duration) -}}
{{- end -}}
{{- end -}}

{{/* An error for authentication without its Secrets, and for a token of the proxy that every client could use.
     Call: (list . $effectiveConfig) */}}
{{- define "pulsar-trio-proxy.refuseAuth" -}}
{{- $root := index . 0 -}}{{- $config := index . 1 -}}
{{- with $root.Values.auth -}}
{{- if and .token.enabled (not (or (include "pulsar-trio-proxy.secretsRelease" $root) .token.keySecret.name)) -}}
{{- fail "auth.token.enabled: the key's Secret is unknown; set auth.pulsarRelease or auth.token.keySecret.name" -}}
{{- end -}}
{{- if .proxyToken.enabled -}}
{{- if not (or (include "pulsar-trio-proxy.secretsRelease" $root) .proxyToken.secret.name) -}}
{{- fail "auth.proxyToken.enabled: the token's Secret is unknown; set auth.pulsarRelease or auth.proxyToken.secret.name" -}}
{{- end -}}
{{- if not (or $config.authentication.enabled .proxyToken.withoutClientAuthentication) -}}
{{- fail "auth.proxyToken.enabled: clients do not authenticate themselves (auth.token, config.authentication), so everybody who reaches the proxy has its role at the brokers; set auth.proxyToken.withoutClientAuthentication: true if this is wanted" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $root.Values.ingress -}}
{{- if and .enabled (not $root.Values.adminToken.secret) -}}
{{- fail "ingress.enabled: anybody could read the names of principals and brokers; set adminToken.secret" -}}
{{- end -}}
{{- if and .enabled (not .paths) -}}
{{- fail "ingress.enabled: no path is reachable; set ingress.paths" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* ---- the configuration ------------------------------------------------------------------------------------ */}}

{{/* An error for configurations that cannot work in a pod, and for a secret in `config`: every account that may read
     ConfigMaps could read it. Call: (list . $effectiveConfig) */}}
{{- define "pulsar-trio-proxy.refuseConfig" -}}
{{- $root := index . 0 -}}{{- $config := index . 1 -}}
{{- if get ($config.brokers.credentials | default dict) "token" -}}
{{- fail "config.brokers.credentials.token: would be in a ConfigMap; put it into a Secret and name that (auth.proxyToken.secret), or mount it (extraVolumes) and name the file (config.brokers.credentials.file)" -}}
{{- end -}}
{{- range $plugin, $options := $config.authentication.plugins -}}
{{- include "pulsar-trio-proxy.refuseSecretOptions" (dict "path" (printf "config.authentication.plugins.%s" $plugin) "options" $options) -}}
{{- end -}}
{{- include "pulsar-trio-proxy.refuseServiceUrl" $config.brokers.service_url -}}
{{- $admin := $config.admin.bind -}}
{{- if or (hasPrefix "127." $admin) (hasPrefix "localhost:" $admin) (hasPrefix "[::1]:" $admin) -}}
{{- fail "config.admin.bind: the kubelet's probes come from outside of the pod and do not reach loopback; leave it out" -}}
{{- end -}}
{{- $folders := list "/run/pulsar-trio-proxy/" "/tmp/" -}}
{{- range $root.Values.extraVolumeMounts -}}
{{- with .mountPath -}}
{{- $folders = append $folders (printf "%s/" (trimSuffix "/" .)) -}}
{{- end -}}
{{- end -}}
{{- $writable := false -}}
{{- range $folders -}}
{{- if hasPrefix . $config.cluster.runtime_dir -}}{{- $writable = true -}}{{- end -}}
{{- end -}}
{{- if not $writable -}}
{{- fail (printf "config.cluster.runtime_dir: all else is read-only; name a folder below %s" (join ", " $folders)) -}}
{{- end -}}
{{- $needed := include "pulsar-trio-proxy.secondsToEnd" $root | int -}}
{{- if lt (int $root.Values.terminationGracePeriodSeconds) $needed -}}
{{- fail (printf "terminationGracePeriodSeconds: %d is too short; lifecycle.preStop.sleep, shutdown.delay_ms, limits.drain_timeout_ms and 15 s for the rest need %d" (int $root.Values.terminationGracePeriodSeconds) $needed) -}}
{{- end -}}
{{- end -}}

{{/* An error for a plugin's option that looks like a secret by its name, in tables and lists, too. Names of files,
     addresses, identifiers and limits are none (`token_file`), nor are public keys and switches. What is in a table
     named in the plural (`keys`) is like it. Call: (dict "path" "config…" "options" map "secrets" false) */}}
{{- define "pulsar-trio-proxy.refuseSecretOptions" -}}
{{- range $name, $value := .options -}}
{{- $path := printf "%s.%s" $.path $name -}}
{{- $words := list -}}
{{- range $name | snakecase | splitList "_" -}}
{{- $words = append $words (trimAll "0123456789" .) -}}
{{- end -}}
{{- $words = without $words "" -}}
{{- $secret := $.secrets -}}
{{- range $word := $words -}}
{{- $secret = or $secret (has $word (list "key" "keys" "pass" "pwd" "apikey" "privatekey" "accesskey" "sharedkey" "signingkey")) -}}
{{- range list "passw" "passphrase" "secret" "token" "credential" -}}
{{- $secret = or $secret (contains . $word) -}}
{{- end -}}
{{- end -}}
{{- if or (has "public" $words) (has (last $words) (list "file" "files" "path" "paths" "dir" "directory" "url" "urls" "uri" "issuer" "audience" "claim" "header" "name" "id" "type" "algorithm" "algorithms" "ms" "seconds" "bytes" "max" "min")) -}}
{{- $secret = false -}}
{{- end -}}
{{- if kindIs "map" $value -}}
{{- include "pulsar-trio-proxy.refuseSecretOptions" (dict "path" $path "options" $value "secrets" (and $secret (hasSuffix "s" (last $words | default "")))) -}}
{{- else -}}
{{- if and $secret $value (not (kindIs "bool" $value)) -}}
{{- fail (printf "%s: looks like a secret, but config is in a ConfigMap; put it into a Secret, and mount that (extraVolumes, extraVolumeMounts) and name the file, if the plugin reads one, or set PULSAR_TRIO_PROXY__AUTHENTICATION__PLUGINS from it, the whole table (extraEnv, extraEnvFrom)" $path) -}}
{{- end -}}
{{- if kindIs "slice" $value -}}
{{- range $index, $entry := $value -}}
{{- if kindIs "map" $entry -}}
{{- include "pulsar-trio-proxy.refuseSecretOptions" (dict "path" (printf "%s[%d]" $path $index) "options" $entry) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* An error for a service URL that the proxy does not accept (proto/addresses.py: parse_broker_url). */}}
{{- define "pulsar-trio-proxy.refuseServiceUrl" -}}
{{- $key := "config.brokers.service_url" -}}
{{- $parts := splitn "://" 2 . -}}
{{- if not (has $parts._0 (list "pulsar" "pulsar+ssl" "pulsar+srv" "pulsar+ssl+srv")) -}}
{{- fail (printf "%s: %s does not begin with pulsar:// or pulsar+ssl://; the brokers' binary port is needed, not their HTTP port" $key .) -}}
{{- end -}}
{{- if and (hasSuffix "srv" $parts._0) (or (contains "," $parts._1) (contains ":" $parts._1)) -}}
{{- fail (printf "%s: %s has more than a name, but SRV records say the hosts and ports; write %s://NAME" $key . $parts._0) -}}
{{- end -}}
{{- range splitList "," ($parts._1 | default "") -}}
{{- $host := . | trim -}}{{- $port := "6650" -}}
{{- if hasPrefix "[" $host -}}
{{- $port = $host | splitList "]" | last | trimPrefix ":" | default $port -}}
{{- $host = $host | splitList "]" | first | trimPrefix "[" -}}
{{- else if contains ":" $host -}}
{{- $pair := splitn ":" 2 $host -}}
{{- $host = $pair._0 -}}{{- $port = $pair._1 | trimSuffix "/" -}}
{{- end -}}
{{- if not (trimSuffix "/" $host) -}}
{{- fail (printf "%s: %s names no host; write pulsar://HOST:PORT" $key $) -}}
{{- end -}}
{{- if or (contains "/" (trimSuffix "/" $host)) (contains "@" $host) (contains "?" $host) (contains " " $host) -}}
{{- fail (printf "%s: %s has more than hosts and ports; write pulsar://HOST:PORT" $key $) -}}
{{- end -}}
{{- if or (trimAll "0123456789" $port) (lt (atoi $port) 1) (gt (atoi $port) 65535) -}}
{{- fail (printf "%s: %s has no valid port; write pulsar://HOST:PORT" $key $) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* ---- ports ------------------------------------------------------------------------------------------------ */}}

{{/* An error for two listeners at one port, ports that the pod's user may not bind, and ports of the Service that
     Kubernetes refuses, beside those of servicePorts. Call: (list . $effectiveConfig $listeners) */}}
{{- define "pulsar-trio-proxy.refusePorts" -}}
{{- $root := index . 0 -}}{{- $config := index . 1 -}}{{- $listeners := index . 2 -}}
{{- $own := $root.Values.config | default dict -}}
{{- $lowest := include "pulsar-trio-proxy.lowestPort" $root | int -}}
{{- $keys := dict -}}
{{- $admin := dict "kind" "admin" "port" ($config.admin.bind | splitList ":" | last | int) "key" (ternary "config.admin.bind" "ports.admin" (ne (dig "admin" "bind" "" $own) "")) -}}
{{- range prepend $listeners $admin -}}
{{- $table := ternary "http_listener" "listener" (eq .kind "http") -}}
{{- $key := .key | default (ternary (printf "config.%s" $table) (printf "ports.%s" .service) (hasKey $own $table)) -}}
{{- $port := .port | int -}}
{{- with get $keys (toString $port) -}}
{{- fail (printf "%s: port %d is that of %s, too; in a pod each listener needs a port of its own" $key $port .) -}}
{{- end -}}
{{- $_ := set $keys (toString $port) $key -}}
{{- if lt $port $lowest -}}
{{- fail (printf "%s: the pod's user may not bind port %d; use %d or more (service.ports may be lower), or lower net.ipv4.ip_unprivileged_port_start in podSecurityContext.sysctls" $key $port $lowest) -}}
{{- end -}}
{{- end -}}
{{- with $root.Values.service -}}
{{- if and (eq (toString .clusterIP) "None") (ne .type "ClusterIP") -}}
{{- fail (printf "service.clusterIP: None (a headless Service) is not for service.type %s; leave it out" .type) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The lowest port that the proxy may bind: 1 as root, or as a sysctl says. A capability does not help another user. */}}
{{- define "pulsar-trio-proxy.lowestPort" -}}
{{- $lowest := 1024 -}}
{{- $pod := .Values.podSecurityContext | default dict -}}
{{- range $pod.sysctls -}}
{{- if eq .name "net.ipv4.ip_unprivileged_port_start" -}}
{{- $lowest = max 1 (atoi .value) -}}
{{- end -}}
{{- end -}}
{{- $user := dig "runAsUser" (dig "runAsUser" 10001 $pod) (.Values.securityContext | default dict) -}}
{{- ternary 1 $lowest (eq (toString $user) "0") -}}
{{- end -}}

{{/* ---- resources -------------------------------------------------------------------------------------------- */}}

{{/* An error for requests above limits, and a memory limit that is too small for the configuration: the proxy would not
     start. Call: (list . $effectiveConfig) */}}
{{- define "pulsar-trio-proxy.refuseResources" -}}
{{- $root := index . 0 -}}{{- $config := index . 1 -}}
{{- $all := dict "resources" $root.Values.resources "analytics.receiver.resources" $root.Values.analytics.receiver.resources "analytics.rollup.resources" $root.Values.analytics.rollup.resources "analytics.rollup.executors.resources" $root.Values.analytics.rollup.executors.resources -}}
{{- range $path, $_ := $all -}}
{{- $resources := get $all $path | default dict -}}
{{- $limits := $resources.limits | default dict -}}
{{- range $name, $request := $resources.requests -}}
{{- if hasKey $limits $name -}}
{{- $limit := get $limits $name -}}
{{- if gt (include "pulsar-trio-proxy.quantity" $request | float64) (include "pulsar-trio-proxy.quantity" $limit | float64) -}}
{{- fail (printf "%s.requests.%s: %v is more than %s.limits.%s (%v); lower it, or raise the limit" $path $name $request $path $name $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with dig "limits" "memory" "" ($root.Values.resources | default dict) -}}
{{- $needed := include "pulsar-trio-proxy.memoryNeededBytes" (list $root $config) | float64 -}}
{{- if lt (include "pulsar-trio-proxy.quantity" . | float64) $needed -}}
{{- fail (printf "resources.limits.memory: %v is too small; this configuration needs at least %dMi: raise it, or lower config.cluster.forwarders or what config.limits and, for HTTP, config.http set" . (divf $needed 1048576 | ceil | int)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* ---- pods ------------------------------------------------------------------------------------------------- */}}

{{/* An error for what Kubernetes refuses of a Deployment and its pods, and for labels that the chart sets itself. */}}
{{- define "pulsar-trio-proxy.refusePods" -}}
{{- range $key, $_ := include "pulsar-trio-proxy.selectorLabels" . | fromYaml -}}
{{- if hasKey $.Values.podLabels $key -}}
{{- fail (printf "podLabels: %s is the chart's own, by which the pods are found; leave it out" $key) -}}
{{- end -}}
{{- end -}}
{{- range $key, $value := .Values.commonLabels -}}
{{- if ne (get (include "pulsar-trio-proxy.labels" (list $ "proxy") | fromYaml) $key) $value -}}
{{- fail (printf "commonLabels: %s is the chart's own; leave it out" $key) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.dnsPolicy "None") (not (dig "nameservers" "" (.Values.dnsConfig | default dict))) -}}
{{- fail "dnsPolicy: None needs name servers; set dnsConfig.nameservers" -}}
{{- end -}}
{{- if and (not (include "pulsar-trio-proxy.isDaemonSet" .)) (ge (int .Values.minReadySeconds) (int .Values.progressDeadlineSeconds)) -}}
{{- fail "progressDeadlineSeconds: is not more than minReadySeconds, so no rollout could succeed; raise it" -}}
{{- end -}}
{{- with .Values.updateStrategy.rollingUpdate -}}
{{- if and (has (get . "maxUnavailable" | toString) (list "0" "0%")) (has (get . "maxSurge" | toString) (list "0" "0%")) -}}
{{- fail "updateStrategy.rollingUpdate.maxSurge: is 0, as maxUnavailable is, so no pod could be replaced; set it to 1 or more" -}}
{{- end -}}
{{- end -}}
{{- range $probe := list "startup" "liveness" -}}
{{- if gt (get (get $.Values.probes $probe) "successThreshold" | default 1 | int) 1 -}}
{{- fail (printf "probes.%s.successThreshold: Kubernetes takes only 1 there; leave it out" $probe) -}}
{{- end -}}
{{- end -}}
{{- if get .Values.probes.readiness "terminationGracePeriodSeconds" -}}
{{- fail "probes.readiness.terminationGracePeriodSeconds: a readiness probe ends no container; leave it out" -}}
{{- end -}}
{{- $volumes := list "config" "runtime" "tmp" -}}
{{- range include "pulsar-trio-proxy.secretMounts" . | fromJsonArray -}}
{{- $volumes = append $volumes (printf "secret-%s" .folder) -}}
{{- end -}}
{{- range .Values.extraVolumes -}}
{{- if has .name $volumes -}}
{{- fail (printf "extraVolumes: the volume %s is there already; give it another name" .name) -}}
{{- end -}}
{{- $volumes = append $volumes .name -}}
{{- end -}}
{{- range .Values.extraVolumeMounts -}}
{{- if not (has .name $volumes) -}}
{{- fail (printf "extraVolumeMounts: there is no volume %s; add it to extraVolumes" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The smallest number of pods that these values ask for. */}}
{{- define "pulsar-trio-proxy.podsMin" -}}
{{- ternary .Values.autoscaling.minReplicas .Values.replicaCount (or .Values.autoscaling.enabled .Values.keda.enabled) | int -}}
{{- end -}}

{{/* An error for an autoscaler that cannot compute, and for a PodDisruptionBudget that blocks every drain. */}}
{{- define "pulsar-trio-proxy.refuseNumbersOfPods" -}}
{{- with .Values.autoscaling -}}
{{- if and (or .enabled $.Values.keda.enabled) (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "autoscaling.minReplicas: %d is more than autoscaling.maxReplicas (%d); lower it" (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- if .enabled -}}
{{- if not (or .cpu.targetUtilization .connections.targetAverage .metrics) -}}
{{- fail "autoscaling.enabled: there is no metric; set autoscaling.cpu.targetUtilization, .connections.targetAverage or .metrics" -}}
{{- end -}}
{{- if .cpu.targetUtilization -}}
{{- range $path, $resources := include "pulsar-trio-proxy.resourcesOfContainers" $ | fromYaml -}}
{{- if not (or (dig "requests" "cpu" "" $resources) (dig "limits" "cpu" "" $resources)) -}}
{{- fail (printf "autoscaling.cpu.targetUtilization: is a part of the CPU requests, and %s has none; set requests.cpu there, or autoscaling.cpu.targetUtilization: 0" $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .Values.pdb -}}
{{- $pods := include "pulsar-trio-proxy.podsMin" $ | int -}}
{{- if and .enabled (not (include "pulsar-trio-proxy.isDaemonSet" $)) -}}
{{- if not (has (toString .maxUnavailable) (list "" "<nil>")) -}}
{{- if not (has (toString .minAvailable) (list "" "<nil>")) -}}
{{- fail "pdb.minAvailable: Kubernetes takes it or pdb.maxUnavailable; set pdb.maxUnavailable to \"\"" -}}
{{- end -}}
{{- if lt (include "pulsar-trio-proxy.shareOfPods" (list .maxUnavailable 100) | int) 1 -}}
{{- fail (printf "pdb.maxUnavailable: %v blocks the drain of every node; set it to 1 or more" .maxUnavailable) -}}
{{- end -}}
{{- else if has (toString .minAvailable) (list "" "<nil>") -}}
{{- fail "pdb.enabled: the budget has no number; set pdb.maxUnavailable or pdb.minAvailable" -}}
{{- else if and $pods (ge (include "pulsar-trio-proxy.shareOfPods" (list .minAvailable $pods) | int) $pods) -}}
{{- fail (printf "pdb.minAvailable: %v of %d pods (replicaCount, autoscaling.minReplicas) blocks the drain of every node; lower it" .minAvailable $pods) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The resources of the containers of the proxy's pods, as YAML by the path of their values. */}}
{{- define "pulsar-trio-proxy.resourcesOfContainers" -}}
{{- $found := dict "resources" (.Values.resources | default dict) -}}
{{- range $index, $container := .Values.extraContainers -}}
{{- $_ := set $found (printf "extraContainers[%d].resources" $index) ($container.resources | default dict) -}}
{{- end -}}
{{- $found | toYaml -}}
{{- end -}}

{{/* ---- monitoring and analytics ----------------------------------------------------------------------------- */}}

{{/* An error for pods that are scraped twice, or for longer than until the next scrape. */}}
{{- define "pulsar-trio-proxy.refuseMonitoring" -}}
{{- if and .Values.serviceMonitor.enabled .Values.podMonitor.enabled -}}
{{- fail "serviceMonitor.enabled and podMonitor.enabled: every pod would be scraped twice; disable one of them" -}}
{{- end -}}
{{- range $path, $monitor := dict "serviceMonitor" .Values.serviceMonitor "podMonitor" .Values.podMonitor -}}
{{- if gt (include "pulsar-trio-proxy.milliseconds" $monitor.scrapeTimeout | float64) (include "pulsar-trio-proxy.milliseconds" $monitor.interval | float64) -}}
{{- fail (printf "%s.scrapeTimeout: %s is more than %s.interval (%s); lower it" $path $monitor.scrapeTimeout $path $monitor.interval) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* An error for a rollup without a spool, and a receiver that is killed before it has answered pending requests. */}}
{{- define "pulsar-trio-proxy.refuseAnalytics" -}}
{{- with .Values.analytics -}}
{{- if and .rollup.enabled (not .receiver.enabled) -}}
{{- fail "analytics.rollup.enabled: the receiver's volume holds the spool; set analytics.receiver.enabled" -}}
{{- end -}}
{{- include "pulsar-trio-proxy.refuseRollup" $ -}}
{{- $drain := dig "limits" "drain_timeout_ms" 30000 .receiver.config -}}
{{- $needed := add (divf $drain 1000.0 | ceil | int) 5 -}}
{{- if lt (int .receiver.terminationGracePeriodSeconds) (int $needed) -}}
{{- fail (printf "analytics.receiver.terminationGracePeriodSeconds: %d is too short; limits.drain_timeout_ms and 5 s for the rest need %d" (int .receiver.terminationGracePeriodSeconds) $needed) -}}
{{- end -}}
{{- end -}}
{{- end -}}
