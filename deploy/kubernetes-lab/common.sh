# shellcheck shell=bash
# Functions shared by setup.sh and cluster.sh.

# needs_cgroup_v1 [FILE]: exits with an error if this process has no cgroup of version 1 for memory.
needs_cgroup_v1() {
  grep -qE '^[0-9]+:([^:]*,)?memory(,[^:]*)?:' "${1:-/proc/self/cgroup}" ||
    { echo "The node needs cgroups of version 1, and this machine has none (it has version 2 only)." >&2; exit 1; }
}

# identity PID: what tells a process from a later one with its number: this boot, and when it started (field 22 of its
# line, the 20th behind the name in brackets, which may hold anything). Fails without such a process.
identity() {
  local stat; stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
  echo "$(cat /proc/sys/kernel/random/boot_id) $(cut -d ' ' -f 20 <<<"${stat##*) }")"
}

# is_same PID IDENTITY: whether the process is the `sleep` of this identity.
is_same() { [ -n "$2" ] && [ "$(cat "/proc/$1/comm" 2>/dev/null)" = sleep ] && [ "$(identity "$1")" = "$2" ]; }

# kubepods_cgroups [FILE [ROOT]]: where a kubelet that starts in this session's cgroups makes its own, one folder a line.
kubepods_cgroups() {
  local names path name
  while IFS=: read -r _ names path; do
    for name in ${names//,/ }; do
      name=${2:-/sys/fs/cgroup}/${name#name=}${path%/}
      if [ -d "$name" ]; then echo "$name/kubepods"; fi
    done
  done <"${1:-/proc/self/cgroup}"
}
