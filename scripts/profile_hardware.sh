#!/bin/sh
# Writes five scripts beside this one. Each measures one thing of the cluster and writes its file into configs:
#   profile_allreduce.sh     allreduce_bandwidth_*.json    all-reduce bandwidth of every kind of group
#   profile_p2p.sh           p2p_bandwidth_*.json          bandwidth between pipeline stages
#   profile_allreduce_sp.sh  sp_time_*.json                all-reduce, all-gather, reduce-scatter by message size
#   profile_all2all.sh       sp_time_*.json                all-to-all by message size
#   profile_overlap.sh       overlap_coefficient.json      how much work and messages slow each other down
# `galvatron profile hardware` measures all of it at once. What one has measured the others do not measure again.
# Each variable can be set from the environment. `None` leaves an option alone. All options: docs/en/profile.md.
set -eu

# Launch: on several nodes the written scripts are started on each, with its NODE_RANK.
NUM_NODES=${NUM_NODES:-1}
NUM_GPUS_PER_NODE=${NUM_GPUS_PER_NODE:-8}
MASTER_ADDR=${MASTER_ADDR:-None}
MASTER_PORT=${MASTER_PORT:-None}
NODE_RANK=${NODE_RANK:-0}
HOSTFILE=${HOSTFILE:-${hostfile:-None}}

PROFILE_HARDWARE_ARGS=${PROFILE_HARDWARE_ARGS:-"
    --output ${OUTPUT:-configs}
    --start_mb ${START_MB:-1}
    --end_mb ${END_MB:-1024}
    --scale ${SCALE:-2}
    --max_tp_size ${MAX_TP_SIZE:-None}
    --max_pp_deg ${MAX_PP_DEG:-None}
    --avg_or_min_or_first ${AVG_OR_MIN_OR_FIRST:-min}
    --overlap_time_multiply ${OVERLAP_TIME_MULTIPLY:-1}
    --time_budget_s ${TIME_BUDGET_S:-None}
    --backend ${BACKEND:-None}
    --mpi_path ${MPI_PATH:-None}"}

folder=$(dirname "$0")
for part in allreduce p2p allreduce_sp all2all overlap; do
    cat >"$folder/profile_$part.sh" <<SCRIPT
#!/bin/sh
# Written by profile_hardware.sh, which says what this measures. Variables can be set from the environment; further
# options given behind the script's name win.
set -eu

NUM_NODES=\${NUM_NODES:-$NUM_NODES}
NUM_GPUS_PER_NODE=\${NUM_GPUS_PER_NODE:-$NUM_GPUS_PER_NODE}
MASTER_ADDR=\${MASTER_ADDR:-$MASTER_ADDR}
MASTER_PORT=\${MASTER_PORT:-$MASTER_PORT}
NODE_RANK=\${NODE_RANK:-$NODE_RANK}
HOSTFILE=\${HOSTFILE:-$HOSTFILE}
PROFILE_HARDWARE_ARGS=\${PROFILE_HARDWARE_ARGS:-"$PROFILE_HARDWARE_ARGS"}

# shellcheck disable=SC2086 - the variable holds several words
exec "\${GALVATRON:-galvatron}" profile hardware --parts $part \\
    --num_nodes "\$NUM_NODES" --num_gpus_per_node "\$NUM_GPUS_PER_NODE" --node_rank "\$NODE_RANK" \\
    --master_addr "\$MASTER_ADDR" --master_port "\$MASTER_PORT" --hostfile "\$HOSTFILE" \\
    \$PROFILE_HARDWARE_ARGS "\$@"
SCRIPT
    chmod +x "$folder/profile_$part.sh"
    echo "written: $folder/profile_$part.sh"
done
