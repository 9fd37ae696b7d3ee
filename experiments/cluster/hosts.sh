#!/usr/bin/env bash
# Usage: hosts.sh COMMAND [--id ID] [ARGUMENT…]        (as root)
#
# Several hosts on this machine, with links of a chosen speed between them: network namespaces (host0, host1, …)
# joined by a bridge, their links slowed down to a rate by the kernel's token buckets (tbf). What ranks on them
# send each other takes the time that it would take on such a network. They share this machine's files. Its processors
# are dealt out: what runs on a host keeps to its share, or to one that it shares with as many others as must be.
#
#   up --hosts N --rate RATE [--slow HOST=RATE]… [--delay TIME] [--pin yes|no]
#                        set them up; does nothing if they are up as asked
#   down                 end every process on them, and take them away; does nothing if there are none
#   status               say what is up, and what went over each link
#   exec HOST COMMAND…   run a command on a host, e.g. exec host0 mpirun -H host0:1,host1:1 python x.py,
#                        or exec host0 horovodrun --gloo --network-interface eth0 -H host0:1,host1:1 -np 2 python x.py
#   hold OPTIONS OF up   as up, then down when standard input ends: for programs, whose crash ends it too
#   traffic              the bytes on each link so far: HOST SENT RECEIVED, headers of every frame included
#   check                say what is missing here, if anything is (exit status 1)
#
#   RATE     as tc has it: 100mbit, 1gbit, 2.5gbit; 100mbit/1gbit sends with the first and receives with the second.
#            For --rate also a list with commas, one for each host.
#   --slow   a host with a rate of its own: 3=100mbit or host3=100mbit; more of them with commas
#   --delay  how much later each frame arrives (1ms, 200us); needs netem in the kernel
#   --pin    no: processors are not dealt out, and the kernel's scheduler moves what runs on the hosts among all of them
#   --id     several sets of hosts may be up, each under a name of small letters and digits (default: u and the user's
#            number). Namespaces are called hvdc-ID-…; nothing else on the machine is changed.

set -euo pipefail

# Called through bash, so that neither file needs its executable bit, which some installers drop.
AGENT=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/netns_agent.sh
STATES=/run/hvdcompress  # a folder for each set: what it was made with, its `ssh`
NETWORK=10.77.0  # seen by the hosts alone: their bridge lives in a namespace of its own
MOST=64

say() { printf '%s\n' "$@"; }
die() { printf '%s\n' "$@" >&2; exit 1; }

# The comment at the head of this file is its help.
usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; }

# ----------------------------------------------------------------------------------------------------------------------
# What the machine must have
# ----------------------------------------------------------------------------------------------------------------------

WITHOUT="Without emulated hosts, ranks on this machine still run (mpirun or horovodrun -np 4; python -m experiments run CONFIG
without --hosts): their bytes are counted rightly, but their times say nothing about a network."

check_tools() {
    [[ $(uname -s) == Linux ]] || die "Emulated hosts need Linux; this is $(uname -s)." "$WITHOUT"
    local tool package missing=""
    for tool in ip:iproute2 tc:iproute2 unshare:util-linux flock:util-linux taskset:util-linux; do
        package=${tool#*:}
        command -v "${tool%:*}" >/dev/null || [[ $missing == *$package* ]] || missing+=" $package"
    done
    [[ -z $missing ]] || die "Emulated hosts need Debian's$missing. Install with:" \
        "    apt-get update && apt-get install -y$missing" "$WITHOUT"
    [[ $(id -u) == 0 ]] || die "Emulated hosts need root, to make network namespaces. Try:" \
        "    sudo bash $0 ${*@Q}" "$WITHOUT"
}

# need WHAT MODULE COMMAND…: a command that fails where the kernel cannot do WHAT, or root is not allowed to.
need() {
    local what=$1 module=$2 error
    shift 2
    error=$("$@" 2>&1) || die "This machine cannot make $what: ${error:-$*}" \
        "Either its kernel lacks it (try: modprobe $module), or root may not use it here, as in a container that was" \
        "not started with --privileged." "$WITHOUT"
}

# Makes one host more than nothing, and takes it away again.
check_kernel() {
    trap 'remove_namespaces' EXIT
    make_switch
    make_host 0 1000000000 1000000000
    remove_namespaces
    trap - EXIT
}

# ----------------------------------------------------------------------------------------------------------------------
# What was asked for
# ----------------------------------------------------------------------------------------------------------------------

# bits RATE: in bits per second. tc's kbit is 1000 bits.
bits() {
    [[ $1 =~ ^([0-9]+(\.[0-9]+)?)(k|m|g)?bit$ ]] ||
        die "hosts.sh: $1 is not a rate: write 100mbit, 1gbit or 2.5gbit (bits, not bytes, a second)"
    local factor=1
    case ${BASH_REMATCH[3]} in k) factor=1000 ;; m) factor=1000000 ;; g) factor=1000000000 ;; esac
    awk -v rate="${BASH_REMATCH[1]}" -v factor="$factor" 'BEGIN { printf "%.0f\n", rate * factor }'
}

# pair RATE: "SENDS/RECEIVES" in bits per second, from RATE or RATE/RATE.
pair() {
    local up down
    up=$(bits "${1%%/*}") && down=$(bits "${1#*/}") || exit 1
    ((up >= 10000 && down >= 10000)) || die "hosts.sh: $1 is too slow: 10kbit is the least"
    say "$up/$down"
}

# Reads the options of `up` into HOSTS, RATES (one "sends/receives" for each host), DELAY and PIN.
HOSTS= DELAY= PIN=yes RATES=()
read_options() {
    local rate= entry number words=() slow=()
    while (($#)); do
        [[ $# -ge 2 ]] || die "hosts.sh: $1 needs a value, or is unknown; see $0 --help"
        case $1 in
            --hosts) HOSTS=$2 ;;
            --rate) rate=$2 ;;
            --slow) slow+=(${2//,/ }) ;;
            --delay) DELAY=$2 ;;
            --pin) PIN=$2 ;;
            *) die "hosts.sh: unknown argument $1; see $0 --help" ;;
        esac
        shift 2
    done
    [[ $HOSTS =~ ^[0-9]+$ ]] && ((HOSTS >= 2 && HOSTS <= MOST)) || die "hosts.sh: give --hosts, from 2 to $MOST"
    [[ -n $rate ]] || die "hosts.sh: give --rate, such as --rate 1gbit"
    [[ -z $DELAY || $DELAY =~ ^[0-9]+(\.[0-9]+)?(us|ms|s)$ ]] ||
        die "hosts.sh: $DELAY is not a time: write 200us or 1ms"
    [[ $PIN == yes || $PIN == no ]] || die "hosts.sh: --pin $PIN: write yes or no"
    words=(${rate//,/ })
    ((${#words[@]} == 1 || ${#words[@]} == HOSTS)) ||
        die "hosts.sh: --rate lists ${#words[@]} rates for $HOSTS hosts: give one for all, or one for each"
    for ((number = 0; number < HOSTS; number++)); do
        entry=$(pair "${words[number % ${#words[@]}]}") || exit 1
        RATES+=("$entry")
    done
    for entry in "${slow[@]}"; do
        [[ $entry =~ ^(host)?([0-9]+)=(.+)$ ]] || die "hosts.sh: --slow $entry: write HOST=RATE, such as 3=100mbit"
        number=${BASH_REMATCH[2]}
        ((number < HOSTS)) || die "hosts.sh: --slow $entry: there is no host$number, the last is host$((HOSTS - 1))"
        RATES[number]=$(pair "${BASH_REMATCH[3]}") || exit 1
    done
}

# ----------------------------------------------------------------------------------------------------------------------
# Namespaces and links
# ----------------------------------------------------------------------------------------------------------------------

space() { say "hvdc-$ID-$1"; }
spaces() { ip netns list 2>/dev/null | awk -v prefix="hvdc-$ID-" 'index($1, prefix) == 1 { print $1 }'; }

# The bridge has a namespace of its own, too: a firewall of this machine (Docker's drops what it does not know) never
# sees its frames, its names collide with nobody's, and it is gone when its namespace is.
make_switch() {
    SWITCH=$(space switch)
    need "network namespaces" "CONFIG_NET_NS" ip netns add "$SWITCH"
    need "bridges" bridge ip -n "$SWITCH" link add name bridge type bridge stp_state 0 forward_delay 0 mcast_snooping 0
    ip -n "$SWITCH" link set bridge up
    quiet_ipv6 "$SWITCH"
}

# Without it, hosts would look for routers on links whose bytes are being counted.
quiet_ipv6() {
    ip netns exec "$1" bash -c 'for each in all default; do
        file=/proc/sys/net/ipv6/conf/$each/disable_ipv6; [[ ! -w $file ]] || echo 1 >$file; done'
}

# make_host NUMBER SENDS RECEIVES: both in bits per second.
make_host() {
    local host=host$1 name
    name=$(space "$host")
    need "network namespaces" "CONFIG_NET_NS" ip netns add "$name"
    quiet_ipv6 "$name"
    need "pairs of linked interfaces" veth \
        ip -n "$SWITCH" link add name "$host" type veth peer name eth0 netns "$name"
    ip -n "$SWITCH" link set "$host" master bridge up
    ip -n "$name" link set lo up
    ip -n "$name" address add "$NETWORK.$(($1 + 1))/24" dev eth0
    ip -n "$name" link set eth0 gso_max_segs "$(frames_at_once "$2")" up
    # The same algorithm on every machine. (Some are set to others: BBR stops for 0.2 s every 10 s to look for delay.)
    ip netns exec "$name" bash -c 'echo cubic >/proc/sys/net/ipv4/tcp_congestion_control' 2>/dev/null || true
    shape "$name" eth0 "$2"                  # what the host sends
    shape "$SWITCH" "$host" "$3" "$DELAY"    # what the switch sends to the host
}

# TCP hands over up to 43 frames (64 kB) as one lump, which the virtual link carries as one: cheap, and the token bucket
# counts the headers that each of its frames would have. Up to 150 Mbit/s frames go one by one, as a lump would hold up
# all else for 4 ms and more; above, 4 hosts on 2 cores were seen to be busy with nothing but frames.
frames_at_once() { if (($1 <= 150000000)); then say 1; else say 43; fi; }

# shape NAMESPACE INTERFACE BITS [DELAY]: a token bucket on what leaves by the interface.
# burst: so much may leave at once after a pause. Too little, and the kernel's timers (some 50 us late, more when all
#   cores are busy) waste time that is never made up for; too much, and short messages cross for free. It is 1 ms of the
#   link, and what TCP hands over at once (two frames, or a lump) at least.
# limit: what waits for longer is dropped, as in a switch with so much memory. 50 ms: enough for TCP to fill the
#   link when several hosts send to one; and 30 frames at least.
shape() {
    local burst=$(($3 / 8000)) limit=$(($3 / 160)) least=3100
    (($(frames_at_once "$3") == 1)) || least=68000
    ((burst >= least)) || burst=$least
    ((limit >= 45000)) || limit=45000
    need "links of a chosen rate" sch_tbf \
        tc -n "$1" qdisc add dev "$2" root handle 1: tbf rate "${3}bit" burst "$burst" limit $((limit + burst))
    [[ -z ${4:-} ]] || need "links with a delay (leave out --delay)" sch_netem \
        tc -n "$1" qdisc add dev "$2" parent 1:1 handle 10: netem delay "$4" limit 100000
}

# Names for the hosts: `ip netns exec` lays this file over /etc/hosts.
write_names() {
    local number names="127.0.0.1 localhost"
    for ((number = 0; number < HOSTS; number++)); do
        names+=$'\n'"$NETWORK.$((number + 1)) host$number"
    done
    for ((number = 0; number < HOSTS; number++)); do
        mkdir -p "/etc/netns/$(space "host$number")"
        say "$names" >"/etc/netns/$(space "host$number")/hosts"
    done
}

# The processes in the network namespaces with these numbers.
processes() {
    { stat -L -c '%i %n' /proc/[0-9]*/ns/net 2>/dev/null || true; } |  # some have ended meanwhile
        awk -v ids=" $* " 'index(ids, " " $1 " ") { split($2, part, "/"); print part[3] }'
}

# Ends them, asking first.
end_processes() {
    local signal pids wait
    for signal in TERM KILL; do
        for ((wait = 0; wait < 30; wait++)); do
            pids=$(processes "$@")
            [[ -n $pids ]] || return 0
            # shellcheck disable=SC2086  # a list of numbers
            ((wait % 10)) || kill -s "$signal" $pids 2>/dev/null || true
            sleep 0.1
        done
    done
}

# Ends what runs on our hosts, and takes them away.
remove_namespaces() {
    local names name file files=() numbers=()
    names=$(spaces)
    for name in $names; do
        exec {file}<"/run/netns/$name"  # while it is open, no other namespace can get its number
        files+=("$file")
        numbers+=("$(stat -L -c %i "/run/netns/$name")")
    done
    end_processes "${numbers[@]}"
    for name in $names; do
        ip netns delete "$name" || true
    done
    rm -rf "/etc/netns/hvdc-$ID-"*
    end_processes "${numbers[@]}"  # who came in meanwhile; now nobody can
    for file in "${files[@]}"; do exec {file}<&-; done
    rmdir /etc/netns 2>/dev/null || true  # not if it holds anything
}

# ----------------------------------------------------------------------------------------------------------------------
# The commands
# ----------------------------------------------------------------------------------------------------------------------

# Who changes a set holds the lock on its folder; `hold` keeps it as long as it lives, and no longer.
# (Nothing that it starts lives on, so nobody inherits the lock.)
lock() {
    mkdir -p "$STATE" 2>/dev/null || mkdir -p "$STATE"  # somebody's `down` may just have removed the parent
    exec 9<"$STATE"
    flock -w "${1:-20}" 9 || die "The hosts '$ID' are in use by process $(noted holder), which takes them down when it" \
        "ends. Choose another --id, or end it."
}

noted() { sed -n "s/^$1=//p" "$STATE/state" 2>/dev/null || true; }

remove() {
    remove_namespaces
    rm -rf "$STATE"
    rmdir "$STATES" 2>/dev/null || true
}

is_up() { [[ $(spaces | wc -l) == $(($(noted hosts) + 1)) ]] 2>/dev/null; }

# Sets whose `hold` was killed: its lock is free, but its folder is there.
sweep() {
    local folder mine=$ID
    for folder in "$STATES"/*/; do
        STATE=${folder%/} ID=$(basename "$folder")
        [[ $ID != "$mine" && -n $(noted holder) ]] && (exec 9<"$STATE"; flock -n 9) && remove
    done 2>/dev/null
    ID=$mine STATE=$STATES/$mine
}

up() {
    local holder=$1 number asked
    shift
    read_options "$@"
    sweep
    lock
    asked="$HOSTS ${RATES[*]} $DELAY pin=$PIN"
    if [[ -z $holder && $(noted asked) == "$asked" ]] && is_up; then
        say "up already"
        return
    fi
    remove_namespaces
    trap 'remove' EXIT  # until all is there
    trap 'exit 130' INT TERM HUP
    printf '%s\n' "hosts=$HOSTS" "asked=$asked" "processors=$(processors)" "pin=$PIN" \
        ${holder:+"holder=$holder"} >"$STATE/state"
    write_names
    mkdir -p "$STATE/bin"
    printf '#!/usr/bin/env bash\nexec bash %q "$@"\n' "$AGENT" >"$STATE/bin/agent"
    chmod 755 "$STATE/bin/agent"
    ln -sf agent "$STATE/bin/ssh"
    make_switch
    for ((number = 0; number < HOSTS; number++)); do
        make_host "$number" "${RATES[number]%/*}" "${RATES[number]#*/}"
    done
    [[ -n $holder ]] || trap - EXIT INT TERM HUP
    say "up"
}

hold() {
    up $$ "$@"
    trap '' PIPE
    while read -r _; do :; done  # nothing comes, until whoever started us closes it, or dies
}

down() {
    [[ -e $STATE || -n $(spaces) ]] || return 0
    lock
    remove
}

# The processors that we may run on, such as "0 1 2 3".
processors() {
    local span spans
    IFS=, read -ra spans < <(sed -n 's/^Cpus_allowed_list:\s*//p' /proc/self/status)
    for span in "${spans[@]}"; do seq "${span%-*}" "${span#*-}"; done | xargs
}

# Those of host NUMBER, with commas; without pinning all of them. Left to the scheduler, four ranks with two threads
# each on two processors took now 150 and now 290 ms for the same exchange.
share() {
    local number=$1 all hosts each
    read -ra all < <(noted processors)
    hosts=$(noted hosts) each=$((${#all[@]} / hosts))
    [[ $(noted pin) == yes ]] || { say "${all[@]}" | xargs | tr ' ' ,; return; }
    if ((each)); then say "${all[@]:number * each:each}" | xargs | tr ' ' ,; else say "${all[number % ${#all[@]}]}"; fi
}

# exec HOST COMMAND…. What launchers need to know goes into the environment, where it is not set already.
run() {
    local host=$1 name
    shift
    name=$(space "$host")
    [[ -e /run/netns/$name ]] || die "hosts.sh: there is no $host among the hosts '$ID'; see $0 status"
    export HVDCOMPRESS_HOSTS=$ID
    [[ $PATH == "$STATE/bin":* ]] || export PATH=$STATE/bin:$PATH  # horovodrun finds our agent as `ssh`
    # Open MPI: reach other hosts by our agent, and send over the links alone (never through shared memory).
    export OMPI_MCA_plm_rsh_agent=$STATE/bin/agent OMPI_MCA_plm_rsh_no_tree_spawn=1
    export OMPI_MCA_btl=${OMPI_MCA_btl:-tcp,self}
    export OMPI_MCA_btl_tcp_if_include=eth0 OMPI_MCA_oob_tcp_if_include=eth0
    # Each host believes all processors to be its own, and would bind its rank to the first; and waiting ranks spin.
    export OMPI_MCA_hwloc_base_binding_policy=${OMPI_MCA_hwloc_base_binding_policy:-none}
    export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}
    # mpirun's daemons stay in its session, and so do all ranks. Linux schedules each session as a group (man 7 sched,
    # "autogroup"), and before 6.18.45 a group whose ranks poll could take a processor from all others for minutes
    # (upstream's revert of 6d71a9c61604 mends it): the rank of a second host there then never ran.
    export OMPI_MCA_orte_leave_session_attached=1
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
    # A host name of its own, too: Open MPI takes ranks with the same one for neighbours in memory.
    exec taskset -c "$(share "${host#host}")" ip netns exec "$name" unshare --uts \
        bash -c 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"' "$host" "$@"
}

# "HOST SENT RECEIVED" for each host, from the token buckets, which know every frame's full length.
traffic() {
    local number switch
    is_up || die "hosts.sh: the hosts '$ID' are not up"
    switch=$(space switch)
    for ((number = 0; number < $(noted hosts); number++)); do
        say "host$number $(sent "$(space "host$number")" eth0) $(sent "$switch" "host$number")"
    done
}

sent() { tc -n "$1" -s qdisc show dev "$2" | awk '/^ *Sent/ { print $2; exit }'; }

status() {
    local folder host sent received rates found=
    for folder in "$STATES"/*/; do
        [[ -e $folder/state ]] || continue
        STATE=${folder%/} ID=$(basename "$folder") found=1
        rates=($(noted asked))
        if ! is_up; then
            say "$ID: not up, but files are left; '$0 down --id $ID' removes them"
            continue
        fi
        if [[ -z $(noted holder) ]]; then say "$ID:"
        elif (exec 9<"$STATE"; flock -n 9); then say "$ID: left over by a crash; '$0 down --id $ID' removes it"
        else say "$ID: in use by process $(noted holder)"; fi
        while read -r host sent received; do
            say "  $host  $NETWORK.$((${host#host} + 1))  $(awk -v rates="${rates[${host#host} + 1]}" -v sent="$sent" \
                -v received="$received" 'BEGIN { split(rates, rate, "/")
                printf "sends at %g Mbit/s (%.1f MB so far), receives at %g Mbit/s (%.1f MB)",
                    rate[1] / 1e6, sent / 1e6, rate[2] / 1e6, received / 1e6 }')"
        done < <(traffic)
    done
    [[ -n $found ]] || say "no emulated hosts are up"
}

# ----------------------------------------------------------------------------------------------------------------------

arguments=("$@")
COMMAND=${1:-}
shift || true
ID=${HVDCOMPRESS_HOSTS:-u${SUDO_UID:-$(id -u)}}
rest=()
while (($#)); do  # --id may stand anywhere before HOST COMMAND…
    case $1 in
        --id) ID=${2:-}; shift ;;
        *) rest+=("$1"); [[ $COMMAND != exec ]] || { rest=("$@"); break; } ;;
    esac
    shift
done
set -- "${rest[@]}"
[[ $ID =~ ^[a-z0-9]{1,24}$ ]] || die "hosts.sh: --id must be 1 to 24 small letters and digits, not '$ID'"
STATE=$STATES/$ID

case $COMMAND in
    up | hold | exec | down | check | status | traffic) check_tools "${arguments[@]}" ;;&
    up) up "" "$@" ;;
    hold) hold "$@" ;;
    exec) (($# >= 2)) || die "hosts.sh: exec needs a host and a command"; run "$@" ;;
    down | status | traffic) (($# == 0)) || die "hosts.sh: unknown argument $1; see $0 --help"; "$COMMAND" ;;
    check) ID=check$$; check_kernel ;;
    "" | -h | --help) usage ;;
    *) die "hosts.sh: unknown command $COMMAND; see $0 --help" ;;
esac
