#!/usr/bin/env bash
# Set-up: what swerve needs on a Debian 12 machine. Usage: scripts/setup.sh [check] [vm]
#
# Distribution packages, a virtual environment in .venv, the mounts of tracefs and bpffs, the RDMA tap, the pacer. `check` adds what `make check`
# needs, `vm` the second kernel and its emulator; either adds what tests and benchmarks run beside swerve. A step that
# is done already is skipped, so every make target may call this. Root is needed only for a step that has something to do. Writes to standard error alone.
set -euo pipefail
exec </dev/null 1>&2
cd "$(dirname "$0")/.."
root=$PWD
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV

PYTHON=/usr/bin/python3 # the distribution's: it is the one that sees python3-bpfcc
PACKAGES=(python3-bpfcc python3-venv linux-libc-dev iproute2 iperf3 iputils-ping ethtool bpftool kmod tcpdump chrony
	gcc libc6-dev libibverbs-dev librdmacm-dev rdma-core ibverbs-providers # the RDMA tap, and what tests stand in for
	ibverbs-utils perftest rdmacm-utils bpfcc-tools)                       # what tests and benchmarks compare with
CHECK_PACKAGES=(clang-format)
# Owners of routes that tests and benchmarks run beside swerve, in namespaces of their own.
ROUTING_PACKAGES=(frr bird2 dnsmasq-base isc-dhcp-client)
TEST_PACKAGES=(prometheus             # a real one asks `swerve metrics`
	openssl                       # certificates of servers that hooks call
	chromium chromium-driver tmux # what the report is opened in, and `swerve top`
	debootstrap dpkg-dev          # the Debian package is made, and tried in a root of its own
	systemd libseccomp2           # our units are checked and tried; nothing of it runs
	systemd-container)            # `make prove NAME=systemd_units` boots a root of its own
VM_PACKAGES=(linux-image-amd64 qemu-system-x86 busybox-static file) # file: virtme-ng reads the release with it

mkdir -p .setup
log=$root/.setup/log
: >"$log"
exec 9>.setup/lock
flock 9 # two makes at once: the second waits, then finds everything done

extras=dev
for part in "$@"; do
	case $part in
	check) PACKAGES+=("${CHECK_PACKAGES[@]}" "${ROUTING_PACKAGES[@]}" "${TEST_PACKAGES[@]}") ;;
	vm) PACKAGES+=("${VM_PACKAGES[@]}" "${ROUTING_PACKAGES[@]}" "${TEST_PACKAGES[@]}") extras=dev,vm ;;
	*) echo "set-up: unknown part '$part' (there are: check, vm)"; exit 2 ;;
	esac
done

# fail STEP ADVICE: say what failed, show the end of the log, stop.
fail() {
	echo "set-up: $1 failed"
	tail -n 15 "$log" | sed 's/^/    /'
	echo "set-up: what to do: $2"
	exit 1
}

# step NAME ADVICE COMMAND...: run it with its output in the log, and say how long it took.
step() {
	local name=$1 advice=$2 from=$EPOCHREALTIME
	shift 2
	"$@" >>"$log" 2>&1 9>&- || fail "$name" "$advice"
	echo "$name" "$from" "$EPOCHREALTIME" | awk '{ printf "set-up: %s: %.1f s\n", $1, $3 - $2 }'
}

as_root() {
	[ "$(id -u)" -eq 0 ] && return
	echo "set-up: $1 needs root; run it once as root (sudo make setup)"
	exit 1
}

mounted() { awk -v kind="$1" -v at="$2" '$2 == at && $3 == kind { found = 1 } END { exit !found }' /proc/self/mounts; }

# What Debian's scripts ask before they start a service. Ours says no while packages are installed, and goes again.
POLICY=/usr/sbin/policy-rc.d POLICY_MARK="# made by swerve's scripts/setup.sh"
forbid_starts() {
	if [ -e $POLICY ] && ! grep -qxF "$POLICY_MARK" $POLICY; then
		return # somebody else's: it stays, and `quiet` stops what it let start
	fi
	trap allow_starts EXIT
	printf '#!/bin/sh\n%s\nexit 101\n' "$POLICY_MARK" >$POLICY && chmod 755 $POLICY
}
allow_starts() {
	if grep -qsxF "$POLICY_MARK" $POLICY; then rm -f $POLICY; fi
}

install_packages() {
	export DEBIAN_FRONTEND=noninteractive
	apt-get -q -o Acquire::Retries=3 update
	forbid_starts || return
	apt-get -q -y -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 install --no-install-recommends "$@"
	local status=$?
	allow_starts
	return $status
}

# quiet SERVICE DAEMON: tests run daemons of their own. The service would steer the machine itself, its clock or its
# routes, now and at every boot.
quiet() {
	update-rc.d "$1" disable || return
	if [ -d /run/systemd/system ]; then
		systemctl disable --now "$1.service"
	elif pidof "$2"; then
		service "$1" stop
	fi
}

# A machine has one time service, and installing chrony removes any other. One that is at work stays.
time_service_at_work() {
	[ -d /run/systemd/system ] && systemctl is-active --quiet systemd-timesyncd ntp ntpsec openntpd
}

install_python() {
	# Begin anew unless what is there is an environment of this very place on the distribution's Python.
	if [ "$(.venv/bin/python -c 'import sys; print(sys.prefix, sys.base_prefix)' 2>&1)" != "$root/.venv /usr" ]; then
		"$PYTHON" -m venv --clear --system-site-packages .venv
	fi
	.venv/bin/python -m pip --disable-pip-version-check --no-input install -e ".[$extras]"
}

missing=()
for package in "${PACKAGES[@]}"; do
	if [ "$package" = chrony ] && time_service_at_work; then
		echo "set-up: chrony is left out: it would take the place of the time service that is at work here"
		continue
	fi
	[ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
	as_root "installing packages (${missing[*]})"
	command -v apt-get >/dev/null || fail packages "install by hand what corresponds to: ${missing[*]}"
	step packages "try 'apt-get update && apt-get install ${missing[*]}' by hand (network? package sources?)" \
		install_packages "${missing[@]}"
	for each in "chrony chrony chronyd" "frr frr zebra" "bird2 bird bird" "prometheus prometheus prometheus"; do # package, service, daemon
		read -r package service daemon <<<"$each"
		if [[ " ${missing[*]} " == *" $package "* ]]; then
			step "$package" "keep it from running by itself: systemctl disable --now $service" quiet "$service" "$daemon"
		fi
	done
fi

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>>"$log" ||
	fail python "swerve needs Python 3.11 or newer as $PYTHON (Debian 12 has it)"
# stamp EXTRAS: what the environment was made from; another value means that it has to be made again.
stamp() { { echo "$root $1" && "$PYTHON" -V && cat pyproject.toml scripts/setup.sh; } | sha256sum; }
if [ ! -x .venv/bin/swerve ] || [ "$(cat ".setup/$extras" 2>/dev/null)" != "$(stamp "$extras")" ]; then
	step python "is the Python package index reachable? The whole log is in $log" install_python
	for done in dev "$extras"; do stamp "$done" >".setup/$done"; done
fi

if ! mounted tracefs /sys/kernel/tracing; then
	as_root "mounting tracefs"
	step tracefs "the kernel needs CONFIG_FTRACE; in a container, let the host mount it and pass it in" \
		mount -t tracefs tracefs /sys/kernel/tracing
fi
if ! mounted bpf /sys/fs/bpf; then
	as_root "mounting bpffs"
	step bpffs "the kernel needs CONFIG_BPF_SYSCALL; in a container, let the host mount it and pass it in" \
		mount -t bpf bpf /sys/fs/bpf
fi

# What of ours is compiled for user space: the RDMA tap, the pacer of probes, the NCCL plugin; made anew when its sources are newer.
native_is_built() {
	tap=pytools/sources/rdma/tap pacer=pytools/sources/probing nccl=pytools/sources/jobs/nccl
	[ -f $tap/swerve-tap.so ] && [ -f $pacer/swerve-pacer ] && [ -f $nccl/libnccl-profiler-swerve.so ] &&
		[ -z "$(find $tap/*.[ch] bpf/swerve.h -newer $tap/swerve-tap.so -print -quit)" ] &&
		[ -z "$(find $pacer/pacer.c bpf/swerve.h -newer $pacer/swerve-pacer -print -quit)" ] &&
		[ -z "$(find $nccl/*.[ch] -newer $nccl/libnccl-profiler-swerve.so -print -quit)" ]
}
if ! native_is_built; then
	step native "it needs a C compiler and libibverbs' headers (gcc libc6-dev libibverbs-dev)" \
		.venv/bin/python -m pytools.kernel.native
fi
