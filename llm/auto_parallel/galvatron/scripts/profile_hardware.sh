#!/bin/sh
# Writes five scripts next to this one. Each measures one thing of the cluster and writes its file into configs:
#   profile_allreduce.sh     allreduce_bandwidth_*.json    all-reduce bandwidth of every kind of group
#   profile_p2p.sh           p2p_bandwidth_*.json          bandwidth between pipeline stages
#   profile_allreduce_sp.sh  sp_time_*.json                all-reduce, all-gather, reduce-scatter by message size
#   profile_all2all.sh       sp_time_*.json                all-to-all by message size
#   profile_overlap.sh       overlap_coefficient.json      how much work and messages slow each other down
# `galvatron profile hardware` measures all of it at once. Each uses the measurements of the others.
# Each variable can be set from the environment; options given behind the script's name win, and are written, too. A
# block that is set as a whole (PROFILE_HARDWARE_ARGS="--end_mb 64 …") stands for all of its lines.
# `None` leaves an option alone. All options: docs/en/profile.md.
set -euf

# PROFILE_HARDWARE_ARGS.
[ -n "${PROFILE_HARDWARE_ARGS:-}" ] || set -- \
    --output "${OUTPUT:-configs}" \
    --start_mb "${START_MB:-1}" \
    --end_mb "${END_MB:-1024}" \
    --scale "${SCALE:-2}" \
    --max_tp_size "${MAX_TP_SIZE:-None}" \
    --max_pp_deg "${MAX_PP_DEG:-None}" \
    --time_budget_s "${TIME_BUDGET_S:-None}" \
    --mpi_path "${MPI_PATH:-None}" \
    "$@"
# shellcheck disable=SC2086 - it holds several words
set -- ${PROFILE_HARDWARE_ARGS:-} "$@"

# launch. PaddleNLP's way to name nodes and devices: "python -m paddle.distributed.launch --ips … --gpus 0,1,2,3".
# Without it NUM_NODES and what follows; on several nodes the written scripts are started on each, with its NODE_RANK.
launch=${launch:-None}
if [ "$launch" = None ]; then NUM_GPUS_PER_NODE=${NUM_GPUS_PER_NODE:-8}; fi

# A value as a word of a script: its content is never run as code.
quoted() {
    printf "'"
    printf '%s' "$1" | sed "s/'/'\\\\''/g"
    printf "'"
}

# A line of a script that sets a variable which the environment does not.
default() {
    # shellcheck disable=SC2016 - expanded when that script runs
    printf '[ -n "${%s:-}" ] || %s=%s\n' "$1" "$1" "$(quoted "$2")"
}

words=
for word in "$@"; do words="$words $(quoted "$word")"; done
folder=$(dirname "$0")
for part in allreduce p2p allreduce_sp all2all overlap; do
    script=$folder/profile_$part.sh
    cat >"$script.part" <<SCRIPT
#!/bin/sh
# Written by profile_hardware.sh, which says what this measures. Variables can be set from the environment; further
# options given behind the script's name win.
set -euf

$(default NUM_NODES "${NUM_NODES:-None}")
$(default NUM_GPUS_PER_NODE "${NUM_GPUS_PER_NODE:-None}")
$(default MASTER_ADDR "${MASTER_ADDR:-None}")
$(default MASTER_PORT "${MASTER_PORT:-None}")
$(default NODE_RANK "${NODE_RANK:-None}")
$(default HOSTFILE "${HOSTFILE:-${hostfile:-None}}")
$(default launch "$launch")

[ -n "\${PROFILE_HARDWARE_ARGS:-}" ] || set -- $words "\$@"
# shellcheck disable=SC2086 - the variable holds several words
set -- \${PROFILE_HARDWARE_ARGS:-} "\$@"

exec "\${GALVATRON:-galvatron}" profile hardware --parts $part \\
    --num_nodes "\$NUM_NODES" --num_gpus_per_node "\$NUM_GPUS_PER_NODE" --node_rank "\$NODE_RANK" \\
    --master_addr "\$MASTER_ADDR" --master_port "\$MASTER_PORT" --hostfile "\$HOSTFILE" --launch "\$launch" \\
    "\$@"
SCRIPT
    chmod +x "$script.part"
    mv "$script.part" "$script"
    echo "written: $script"
done
