# Shared by the scripts in this folder: where things are, and how a long step is run and shown.
# shellcheck shell=bash

ROOT=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
VENV=$ROOT/.venv
LOG=$VENV/setup.log

say() { printf '%s\n' "$@"; }
die() { printf '%s\n' "$@" >&2; exit 1; }

# The comment at the head of a script is its help.
usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; }

# Puts .venv/ to use for the commands that follow.
use_venv() {
    export PATH="$VENV/bin:$PATH" PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"  # for python -m experiments
    suit_ranks
}

# What ranks need of Open MPI, wherever it is from.
suit_ranks() {
    if [[ $(id -u) == 0 ]]; then  # in a container, say; Open MPI refuses root unless told twice
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    fi
    # Ranks that wait must not take the core from ranks that work: 250 times faster with more ranks than cores.
    export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}
}

# run_step TITLE COMMAND…: runs COMMAND with its output in $LOG, and shows how long and how far it is.
# Its exit status is left in STATUS. (Not returned: `run_step … || …` would switch `set -e` off inside COMMAND.)
run_step() {
    local title="[$STEP/$STEPS] $1" began=$SECONDS elapsed next_line=30
    shift
    printf '\n=== %s\n' "$title" >>"$LOG"
    STEP_START=$(wc -l <"$LOG")
    say "$title …"

    set -m  # the command becomes a process group of its own, which an interrupt can end as a whole
    (set -e; "$@") </dev/null >>"$LOG" 2>&1 &
    CHILD=$!
    set +m
    while kill -0 "$CHILD" 2>/dev/null; do
        elapsed=$((SECONDS - began))
        if [[ -t 1 ]]; then  # a line that is written over again and again, so it must not wrap
            printf '\r\033[K%.*s' "$((${COLUMNS:-80} - 1))" "      … $elapsed s  $(last_news)"
        elif ((elapsed >= next_line)); then
            say "      … $elapsed s  $(last_news)"
            next_line=$((elapsed + 30))
        fi
        sleep 0.5
    done
    STATUS=0
    wait "$CHILD" || STATUS=$?
    CHILD=
    [[ ! -t 1 ]] || printf '\r\033[K'
    elapsed=$((SECONDS - began))
    if [[ $STATUS == 0 ]]; then say "      done in $elapsed s"; else say "      failed after $elapsed s"; fi
}

# step TITLE HINT COMMAND…: a step that must succeed.
step() {
    local title=$1 hint=$2
    shift 2
    run_step "$title" "$@"
    [[ $STATUS == 0 ]] || die "" "Set-up failed at step $STEP of $STEPS: $title." "" "$(step_log | error_lines)" \
        "" "What to do: $hint" "The whole log: $LOG"
}

step_log() { tail -n "+$((STEP_START + 1))" "$LOG"; }

# What the step is at, by the last line of its log that tells: pip's, CMake's or ninja's.
last_news() {
    step_log | awk '
        match($0, /Downloading [^ \/]+ \([^)]*\)/) { news = "d" substr($0, RSTART + 1, RLENGTH - 1) }
        /^ *Installing collected packages:/        { news = "installing " NF - 3 " packages" }
        /^ *Building wheel for .* started/         { news = "preparing the build of " $4 }
        /^ *Running CMake in /                     { news = "configuring (CMake)" }
        /^ *\[[0-9]+\/[0-9]+\]/                    { split($1, of, /[][\/]/); news = "compiling: " of[2] " of " of[3] " steps" }
        /^ *Building wheel for .* finished/        { news = "built; packing the wheel" }
        END { print substr(news, 1, 60) }'
}

# The compiler's own errors, which pip buries under its closing remarks, then the last lines.
error_lines() {
    local text
    text=$(cat)
    {
        head -n -15 <<<"$text" | grep -oE '[^/ ]+:[0-9]+:[0-9]+: (fatal )?error: .*' | sort -u | head -n 5
        tail -n 15 <<<"$text"
    } | cut -c 1-200 | sed 's/^/    /'
}

CHILD=
interrupted() {
    trap '' INT TERM HUP
    if [[ -n $CHILD ]]; then
        kill -TERM -- "-$CHILD" 2>/dev/null || true
        wait "$CHILD" 2>/dev/null || true
    fi
    say "" "Interrupted. Run the same command again to go on." >&2
    exit 130
}
