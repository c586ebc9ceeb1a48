{{/* ---- where the proxy's pods may connect to ---------------------------------------------------------------- */}}

{{/* The rules for egress (YAML list): DNS, the brokers, other upstreams of HTTP, what authentication asks, then
     `networkPolicy.egress`. Where a
     network plugin decides behind a Service, it sees the pods' addresses and ports; so a peer is named only where the
     brokers' pods are known. Call: (list . $effectiveConfig) */}}
{{- define "pulsar-trio-proxy.egress" -}}
{{- $root := index . 0 -}}{{- $config := index . 1 -}}
# DNS, of any address: a node's cache has a link-local one. OpenShift's DNS pods are at port 5353.
- ports:
    {{- range $port := list 53 5353 }}
    {{- range list "UDP" "TCP" }}
    - port: {{ $port }}
      protocol: {{ . }}
    {{- end }}
    {{- end }}
# Brokers
- ports:
    {{- if contains "+srv://" $config.brokers.service_url }}
    # SRV records say which ports brokers have.
    - port: 1
      endPort: 65535
      protocol: TCP
    {{- else }}
    {{- range include "pulsar-trio-proxy.brokerPorts" $config.brokers | fromJsonArray }}
    - port: {{ . }}
      protocol: TCP
    {{- end }}
    {{- with include "pulsar-trio-proxy.derivedWebUrl" (list $root $config) }}
    - port: {{ include "pulsar-trio-proxy.port" (list . "") }}
      protocol: TCP
    {{- end }}
    {{- end }}
  {{- with include "pulsar-trio-proxy.brokerPeers" (list $root $config.brokers) | fromJsonArray }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- with include "pulsar-trio-proxy.webPorts" (list $root $config) | fromJsonArray }}
# HTTP is passed on there
- ports:
    {{- range . }}
    - port: {{ . }}
      protocol: TCP
    {{- end }}
{{- end }}
{{- with include "pulsar-trio-proxy.issuerPorts" (list $root $config) | fromJsonArray }}
# Issuers of tokens, Kubernetes' API server as one of them, HTTP proxies
- ports:
    {{- range . }}
    - port: {{ . }}
      protocol: TCP
    {{- end }}
{{- end }}
{{- if eq (dig "method" "" ($config.brokers.credentials | default dict)) "sasl" }}
# Kerberos
- ports:
    {{- range list "UDP" "TCP" }}
    - port: 88
      protocol: {{ . }}
    {{- end }}
{{- end }}
{{- with $root.Values.networkPolicy.egress }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The port of a URL's first host. Call: include "pulsar-trio-proxy.port" (list "https://[::1]:8443/path" "443") */}}
{{- define "pulsar-trio-proxy.port" -}}
{{- $authority := index . 0 | trim | splitList "://" | last | splitList "/" | first | splitList "@" | last -}}
{{- (splitn ":" 2 ($authority | splitList "]" | last))._1 | default (index . 1) -}}
{{- end -}}

{{/* The ports at which brokers are dialled (JSON list of texts). Call: include "pulsar-trio-proxy.brokerPorts" $effectiveConfig.brokers */}}
{{- define "pulsar-trio-proxy.brokerPorts" -}}
{{- $default := ternary "6651" "6650" (hasPrefix "pulsar+ssl" .service_url) -}}
{{- $ports := list -}}
{{- range .service_url | splitList "://" | last | splitList "," -}}
{{- $ports = append $ports (include "pulsar-trio-proxy.port" (list . $default)) -}}
{{- end -}}
{{- if not .through_proxy -}}
{{- range concat (list .allowed_ports) .port_pairs -}}
{{- range . -}}
{{- $ports = append $ports (int . | toString) -}}
{{- end -}}
{{- end -}}
{{- if and (or .allowed_hosts .allowed_addresses) (not .allowed_ports) -}}
{{- $ports = concat $ports (list "6650" "6651") -}}
{{- end -}}
{{- end -}}
{{- $ports | uniq | sortAlpha | toJson -}}
{{- end -}}

{{/* `brokers.web_service_url`, if it is derived from a Pulsar release; else empty. Call: (list . $effectiveConfig) */}}
{{- define "pulsar-trio-proxy.derivedWebUrl" -}}
{{- $own := dig "brokers" "web_service_url" "" ((index . 0).Values.config | default dict) -}}
{{- if not $own -}}{{- (index . 1).brokers.web_service_url -}}{{- end -}}
{{- end -}}

{{/* The URLs of HTTP's upstreams other than the brokers (JSON list of texts). Call with the effective configuration. */}}
{{- define "pulsar-trio-proxy.furtherWebUrls" -}}
{{- $urls := list .http.function_worker_url .http.websocket_url -}}
{{- range .http.routes -}}
{{- $urls = append $urls .url -}}
{{- end -}}
{{- without $urls "" | toJson -}}
{{- end -}}

{{/* The ports of HTTP's upstreams, but those of a Pulsar release's brokers (JSON list of texts); brokers may redirect to
     `allowed_ports`. Call: (list . $effectiveConfig) */}}
{{- define "pulsar-trio-proxy.webPorts" -}}
{{- $config := index . 1 -}}
{{- $ports := list -}}
{{- if $config.http_listener -}}
{{- $urls := include "pulsar-trio-proxy.furtherWebUrls" $config | fromJsonArray -}}
{{- if not (include "pulsar-trio-proxy.derivedWebUrl" .) -}}
{{- $urls = append $urls $config.brokers.web_service_url -}}
{{- end -}}
{{- range $urls -}}
{{- $default := ternary "443" "80" (hasPrefix "https:" .) -}}
{{- range without (. | splitList "://" | last | splitList ",") "" -}}
{{- $ports = append $ports (include "pulsar-trio-proxy.port" (list . $default)) -}}
{{- end -}}
{{- end -}}
{{- if $ports -}}
{{- range $config.brokers.allowed_ports -}}
{{- $ports = append $ports (int . | toString) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $ports | uniq | sortAlpha | toJson -}}
{{- end -}}

{{/* The peers at which brokers are (JSON list); empty: any. Known are the pods of a Pulsar release, from which the URL
     is derived. Networks of `allowed_addresses` may be those of pods or of Services, which network plugins know by their
     pods alone: all pods are peers beside them. Call: (list . $effectiveConfig.brokers) */}}
{{- define "pulsar-trio-proxy.brokerPeers" -}}
{{- $root := index . 0 -}}{{- $brokers := index . 1 -}}
{{- $own := dig "brokers" dict ($root.Values.config | default dict) -}}
{{- $peers := list -}}
{{- if not (get $own "service_url") -}}
{{- if get $own "allowed_addresses" -}}
{{- $peers = append $peers (dict "namespaceSelector" dict) -}}
{{- range $brokers.allowed_addresses -}}
{{- $network := ternary . (printf "%s/%s" . (ternary "128" "32" (contains ":" .))) (contains "/" .) -}}
{{- $peers = append $peers (dict "ipBlock" (dict "cidr" $network)) -}}
{{- end -}}
{{- else if not (get $own "allowed_hosts") -}}
{{- $peer := dict "podSelector" (dict "matchLabels" (dict "component" "broker")) -}}
{{- with $root.Values.brokers.namespace -}}
{{- $_ := set $peer "namespaceSelector" (dict "matchLabels" (dict "kubernetes.io/metadata.name" .)) -}}
{{- end -}}
{{- $peers = append $peers $peer -}}
{{- end -}}
{{- end -}}
{{- $peers | toJson -}}
{{- end -}}

{{/* The ports of issuers that are asked, and of the HTTP proxies in `extraEnv` on the way to them (JSON list of texts).
     Call: (list . $effectiveConfig) */}}
{{- define "pulsar-trio-proxy.issuerPorts" -}}
{{- $root := index . 0 -}}{{- $config := index . 1 -}}
{{- $urls := list -}}
{{- if $config.authentication.enabled -}}
{{- $urls = concat $urls (dig "allowed_issuers" list ($config.authentication.oidc | default dict)) -}}
{{- end -}}
{{- with include "pulsar-trio-proxy.kubernetesIssuer" $root | fromJson -}}
{{- /* The port of the API server's Service, and the usual one behind it; an issuer that it names is at 443. */ -}}
{{- $urls = concat $urls (.api_server | default "" | empty | ternary (list "https://s" "https://s:6443") (list .api_server)) -}}
{{- if eq (.discovery | default "") "trusted_issuer" -}}{{- $urls = append $urls "https://issuer" -}}{{- end -}}
{{- end -}}
{{- with $config.brokers.credentials -}}
{{- if eq .method "oauth2" -}}
{{- $urls = append $urls (.issuer_url | default "") -}}
{{- end -}}
{{- end -}}
{{- if $urls -}}
{{- range $root.Values.extraEnv -}}
{{- if and (has (upper .name) (list "HTTP_PROXY" "HTTPS_PROXY" "ALL_PROXY")) .value -}}
{{- $urls = append $urls .value -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $ports := list -}}
{{- range $urls -}}
{{- $ports = append $ports (include "pulsar-trio-proxy.port" (list . (ternary "443" "80" (hasPrefix "https:" .)))) -}}
{{- end -}}
{{- $ports | uniq | sortAlpha | toJson -}}
{{- end -}}
