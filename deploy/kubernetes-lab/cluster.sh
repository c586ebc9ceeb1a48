#!/usr/bin/env bash
# cluster.sh up|down|exec CMD...: a real one-node Kubernetes inside private namespaces; run setup.sh once before.
# `down`, or the end of one holder process, ends everything inside. Images: every *.image.tar in $WORK/images is imported by `up`.
set -euo pipefail
. "$(dirname "$0")/common.sh"
WORK=${K8S_LAB:-$HOME/.cache/kubernetes-lab}; KBIN=$WORK/bin; RUN=$WORK/run
NODE=labnode; NODEIP=10.77.0.1; PODCIDR=10.78.0.0/24; SVCCIDR=10.79.0.0/24
PIDF=$RUN/holder.pid; IDENTITYF=$RUN/holder.identity; CGROUPSF=$RUN/cgroups
ns() { nsenter -t "$(cat "$PIDF")" -m -n -u -i -p -C -- "$@"; }
log() { printf '%s %s\n' "$(date +%T)" "$*"; }
wait_for() { local n=$1; shift; for _ in $(seq "$n"); do "$@" >/dev/null 2>&1 && return 0; sleep 0.5; done; log "TIMEOUT: $*"; return 1; }

up() {
  needs_cgroup_v1
  if runs; then echo "The node runs already: $0 down" >&2; exit 1; fi
  local cgroup; for cgroup in $(kubepods_cgroups); do
    if [ -d "$cgroup" ] && find "$cgroup" -name cgroup.procs -exec cat {} + | grep -q .; then
      echo "$cgroup has processes: another kubelet uses it" >&2; exit 1; fi; done
  T0=$(date +%s); rm -rf "$RUN"; mkdir -p "$RUN"/{log,etcd,containerd,ctrstate,kubelet,cni,pki,cg,fakesys,manifests}
  # 1. private namespaces; killing the holder (pid 1 of its pid namespace) ends everything inside
  setsid unshare --mount --net --uts --ipc --pid --cgroup --fork --mount-proc --kill-child bash -c 'exec sleep infinity' </dev/null >/dev/null 2>&1 &
  local holder=$!; wait_for 120 pgrep -P "$holder"; pgrep -P "$holder" > "$PIDF"
  wait_for 120 ns true
  identity "$(cat "$PIDF")" > "$IDENTITYF"; kubepods_cgroups > "$CGROUPSF"; wait_for 120 runs
  ns bash -s <<EOF
set -e
mount --make-rprivate /
hostname $NODE
# own sysfs (net) and own cgroup mounts: cgroup namespace roots them at this session's cgroups
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /sys/fs/cgroup
for c in cpu cpuacct cpuset memory devices freezer blkio pids; do mkdir -p /sys/fs/cgroup/\$c; mount -t cgroup -o \$c cgroup /sys/fs/cgroup/\$c || rmdir /sys/fs/cgroup/\$c; done
mkdir -p /sys/fs/cgroup/systemd; mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
# host-wide sysctls: hand kubelet private copies so that the machine's own stay as they are
for f in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
  t=$RUN/fakesys/\$(echo \$f | tr / _); cat /proc/sys/\$f > \$t; mount --bind \$t /proc/sys/\$f; done
mount -t tmpfs tmpfs /run; mkdir -p /run/containerd
ip link set lo up
ip link add eth0 type bridge; ip addr add $NODEIP/24 dev eth0; ip link set eth0 up; ip route add default via $NODEIP dev eth0
echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables 2>/dev/null || true
printf 'nameserver $NODEIP\n' > $RUN/resolv.conf
printf '127.0.0.1 localhost\n$NODEIP $NODE\n' > $RUN/hosts; mount --bind $RUN/hosts /etc/hosts
# a name server that refuses at once, instead of the machine's own, which cannot be reached from here
printf 'nameserver 127.0.0.1\n' > $RUN/node-resolv.conf; mount --bind $RUN/node-resolv.conf /etc/resolv.conf
EOF
  log "namespaces ready (holder $(cat "$PIDF"))"
  # 2. credentials
  ( cd "$RUN/pki"; openssl genrsa -out sa.key 2048 2>/dev/null; openssl rsa -in sa.key -pubout -out sa.pub 2>/dev/null
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ca.key -out ca.crt -days 30 -subj /CN=lab-ca 2>/dev/null
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout api.key -out api.csr -subj /CN=kube-apiserver 2>/dev/null
    openssl x509 -req -in api.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -out api.crt -extfile <(echo "subjectAltName=DNS:localhost,DNS:kubernetes,DNS:kubernetes.default.svc,IP:127.0.0.1,IP:$NODEIP,IP:10.79.0.1") 2>/dev/null
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout fp.key -out fp.csr -subj /CN=front-proxy 2>/dev/null
    openssl x509 -req -in fp.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -out fp.crt -extfile <(echo extendedKeyUsage=clientAuth) 2>/dev/null
    echo "labadmin,admin,1,system:masters" > tokens.csv )
  cat > "$RUN/kubeconfig" <<EOF
apiVersion: v1
kind: Config
clusters: [{name: lab, cluster: {server: "https://127.0.0.1:6443", certificate-authority: $RUN/pki/ca.crt}}]
users: [{name: admin, user: {token: labadmin}}]
contexts: [{name: lab, context: {cluster: lab, user: admin}}]
current-context: lab
EOF
  # 3. etcd + control plane
  bg() { local n=$1; shift; ns setsid nohup nice -n 19 "$@" >"$RUN/log/$n.log" 2>&1 </dev/null & }
  bg etcd "$KBIN/etcd" --data-dir /run/etcd --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380
  bg kube-apiserver "$KBIN/kube-apiserver" --etcd-servers=http://127.0.0.1:2379 --service-cluster-ip-range=$SVCCIDR --bind-address=0.0.0.0 --advertise-address=$NODEIP --secure-port=6443 \
    --tls-cert-file=$RUN/pki/api.crt --tls-private-key-file=$RUN/pki/api.key --token-auth-file=$RUN/pki/tokens.csv --authorization-mode=Node,RBAC \
    --service-account-issuer=https://kubernetes.default.svc --service-account-key-file=$RUN/pki/sa.pub --service-account-signing-key-file=$RUN/pki/sa.key \
    --allow-privileged=true --enable-admission-plugins=NodeRestriction,PodSecurity --kubelet-certificate-authority= --profiling=false --kubelet-preferred-address-types=InternalIP --requestheader-client-ca-file=$RUN/pki/ca.crt --requestheader-allowed-names=front-proxy --requestheader-username-headers=X-Remote-User --requestheader-group-headers=X-Remote-Group --requestheader-extra-headers-prefix=X-Remote-Extra- --proxy-client-cert-file=$RUN/pki/fp.crt --proxy-client-key-file=$RUN/pki/fp.key --enable-aggregator-routing=true
  wait_for 600 ns curl -sk https://127.0.0.1:6443/readyz -o /dev/null -f -H 'Authorization: Bearer labadmin'
  log "apiserver ready after $(( $(date +%s)-T0 )) s"
  bg kube-controller-manager "$KBIN/kube-controller-manager" --kubeconfig=$RUN/kubeconfig --service-account-private-key-file=$RUN/pki/sa.key --root-ca-file=$RUN/pki/ca.crt --use-service-account-credentials=true --cluster-cidr=$PODCIDR --allocate-node-cidrs=false --leader-elect=false
  bg kube-scheduler "$KBIN/kube-scheduler" --kubeconfig=$RUN/kubeconfig --leader-elect=false
  # 4. containerd + CNI + kubelet + kube-proxy
  cat > "$RUN/containerd.toml" <<EOF
version = 2
root = "$RUN/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "lab.local/pause:1"
  restrict_oom_score_adj = true
  disable_apparmor = true
  tolerate_missing_hugetlb_controller = true
  disable_hugetlb_controller = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$RUN/cni"
EOF
  cat > "$RUN/cni/10-lab.conflist" <<EOF
{"cniVersion":"1.0.0","name":"lab","plugins":[
 {"type":"bridge","bridge":"cni0","isGateway":true,"ipMasq":true,"hairpinMode":true,"ipam":{"type":"host-local","dataDir":"/run/cni-ipam","ranges":[[{"subnet":"$PODCIDR"}]],"routes":[{"dst":"0.0.0.0/0"}]}},
 {"type":"portmap","capabilities":{"portMappings":true}}]}
EOF
  bg containerd containerd --config "$RUN/containerd.toml"
  wait_for 600 ns ctr -a /run/containerd/containerd.sock version
  for i in "$WORK"/images/*.image.tar; do [ -e "$i" ] && ns ctr -n k8s.io images import "$i" >/dev/null; done
  log "containerd ready, images imported after $(( $(date +%s)-T0 )) s"
  cat > "$RUN/kubelet.yaml" <<EOF
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
cgroupDriver: cgroupfs
cgroupRoot: /
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
clusterDNS: [$NODEIP]
clusterDomain: cluster.local
resolvConf: $RUN/resolv.conf
staticPodPath: $RUN/manifests
failSwapOn: false
imagePullProgressDeadline: 0s
syncFrequency: 5s
nodeStatusUpdateFrequency: 5s
evictionHard: {memory.available: "50Mi", nodefs.available: "1%", imagefs.available: "1%", nodefs.inodesFree: "1%"}
localStorageCapacityIsolation: false
featureGates: {KubeletInUserNamespace: true}
EOF
  sed -i '/imagePullProgressDeadline/d' "$RUN/kubelet.yaml"
  bg kubelet "$KBIN/kubelet" --config=$RUN/kubelet.yaml --kubeconfig=$RUN/kubeconfig --root-dir=$RUN/kubelet --hostname-override=$NODE --node-ip=$NODEIP --v=2
  bg kube-proxy "$KBIN/kube-proxy" --kubeconfig=$RUN/kubeconfig --hostname-override=$NODE --proxy-mode=iptables --cluster-cidr=$PODCIDR --conntrack-max-per-core=0 --conntrack-tcp-timeout-established=0 --conntrack-tcp-timeout-close-wait=0
  export KUBECONFIG=$RUN/kubeconfig
  wait_for 600 bash -c "nsenter -t $(cat "$PIDF") -m -n -p -C $KBIN/kubectl --kubeconfig $RUN/kubeconfig get node $NODE -o jsonpath='{.status.conditions[?(@.type==\"Ready\")].status}' | grep -q True"
  log "node Ready after $(( $(date +%s)-T0 )) s"
}
# Whether the holder that `up` has noted is there, and not another process that has got its number since.
runs() { [ -s "$PIDF" ] && [ -s "$IDENTITYF" ] && is_same "$(cat "$PIDF")" "$(cat "$IDENTITYF")"; }
down() {
  if runs; then kill -9 "$(cat "$PIDF")" 2>/dev/null || true; sleep 1
  elif [ -s "$PIDF" ] && [ -d "/proc/$(cat "$PIDF")" ]; then log "process $(cat "$PIDF") is not the node's, and is left alone"; fi
  local mount cgroup
  for mount in $(awk -v r="$RUN/" 'index($2, r) == 1 {print $2}' /proc/mounts | sort -r); do umount -l "$mount" || true; done
  # The kubelet's cgroups, and only where this node made them; rmdir takes none that has processes.
  if [ -s "$CGROUPSF" ]; then while read -r cgroup; do
    if [ -d "$cgroup" ]; then find "$cgroup" -depth -type d -exec rmdir {} \; 2>/dev/null || true; fi; done <"$CGROUPSF"; fi
  rm -rf "$RUN" 2>/dev/null || true
}
case ${1:-} in up) up;; down) down;; exec) shift; ns env KUBECONFIG=$RUN/kubeconfig PATH="$KBIN:$PATH" "$@";; *) echo "usage: $0 up|down|exec"; exit 2;; esac
