{{/* The memory limit, in bytes, below which the proxy does not start: proxy/config/memory.py, with the least for all that
     `config.limits` leaves open, and one forwarder where their number is left to it. Call: (list . $effectiveConfig) */}}
{{- define "pulsar-trio-proxy.memoryNeededBytes" -}}
{{- $root := index . 0 -}}{{- $config := index . 1 -}}
{{- $given := dig "limits" dict ($root.Values.config | default dict) -}}
{{- $cluster := $config.cluster -}}{{- $limits := $config.limits -}}
{{- $mib := 1048576 -}}
{{- $forwarders := max 1 (int $cluster.forwarders) -}}
{{- $httpWorkers := ternary (int $cluster.http_workers) 0 (gt (len $config.http_listener) 0) -}}
{{- $workers := add 1 $forwarders $cluster.lookup_workers $cluster.auth_workers $httpWorkers -}}
{{- $processes := add (mul 96 $mib) (mul 20 $mib $workers) -}}
{{- $holders := add $forwarders $cluster.lookup_workers -}}
{{- $answers := ternary (max (int64 $limits.max_topic_lists_bytes) (int64 $limits.max_broker_frame_bytes)) (int64 $limits.max_broker_frame_bytes) (hasKey $given "max_topic_lists_bytes") -}}
{{- $lookups := ternary (int64 $limits.max_lookup_bytes) (min (int64 $limits.max_lookup_bytes) (max $mib (mul 4 $limits.max_command_bytes))) (hasKey $given "max_lookup_bytes") -}}
{{- $connections := ternary (int64 $limits.max_connections) (min 100 (int64 $limits.max_connections)) (hasKey $given "max_connections") -}}
{{- $unauthenticated := int64 $limits.max_unauthenticated_connections | default (min 32 (max 1 (div $connections 4))) -}}
{{- $brokerTls := ternary 1 0 (hasPrefix "pulsar+ssl" $config.brokers.service_url) -}}
{{- $clientTls := 0 -}}
{{- range $config.listener -}}
{{- if .tls -}}{{- $clientTls = 1 -}}{{- end -}}
{{- end -}}
{{- $used := add $processes (mulf $answers $holders 1.1 | floor | int64) (mul $lookups $holders) (mul $unauthenticated $limits.max_command_bytes) (mul $connections (add 24576 (mul 49152 (add $brokerTls $clientTls)))) -}}
{{- if $httpWorkers -}}
{{- $httpTls := 0 -}}
{{- range $config.http_listener -}}
{{- if .tls -}}{{- $httpTls = 1 -}}{{- end -}}
{{- end -}}
{{- $bodies := mul $httpWorkers (max (mul 64 $mib) (int64 $config.http.max_replay_bytes)) -}}
{{- $used = add $used $bodies (mul $config.http.max_connections (add 24576 (mul 49152 $httpTls))) (mul 262144 $config.http.max_requests) -}}
{{- end -}}
{{- /* The smallest number of which 15/16, rounded up, are enough: the rest is the program's reserve. */ -}}
{{- add1 (div (mul 16 (sub $used 1)) 15) -}}
{{- end -}}

{{/* A quantity as Kubernetes has it (250m, 1.5Gi, 2) as a number. */}}
{{- define "pulsar-trio-proxy.quantity" -}}
{{- $number := toString . -}}{{- $factor := 1.0 -}}
{{- range $suffix, $value := dict "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- if hasSuffix $suffix $number -}}
{{- $number = trimSuffix $suffix $number -}}{{- $factor = $value -}}
{{- end -}}
{{- end -}}
{{- mulf $number $factor | printf "%.3f" -}}
{{- end -}}

{{/* A duration (1h30m, 15s, 500ms) in milliseconds. */}}
{{- define "pulsar-trio-proxy.milliseconds" -}}
{{- $total := 0.0 -}}
{{- $units := dict "i" 1 "s" 1000 "m" 60000 "h" 3600000 "d" 86400000 "w" 604800000 "y" 31536000000 -}}
{{- $text := . | replace "ms" "i" -}}
{{- range $unit, $_ := $units -}}
{{- $text = $text | replace $unit (printf "%s " $unit) -}}
{{- end -}}
{{- range splitList " " (trim $text) -}}
{{- $unit := trunc -1 . -}}
{{- $total = addf $total (mulf (trimSuffix $unit .) (get $units $unit)) -}}
{{- end -}}
{{- printf "%.0f" $total -}}
{{- end -}}

{{/* A number or percent of pods as a number; Kubernetes rounds a budget's percent up. Call: (list "50%" 3) */}}
{{- define "pulsar-trio-proxy.shareOfPods" -}}
{{- $text := index . 0 | toString -}}
{{- if hasSuffix "%" $text -}}
{{- divf (mulf (trimSuffix "%" $text) (index . 1)) 100 | ceil | int -}}
{{- else -}}
{{- int (index . 0) -}}
{{- end -}}
{{- end -}}
