#!/bin/sh
# Compares predictions with real steps of three small models of two families: `make validate`.
# Profiling and validation take turns, because a host is faster or slower for minutes; each turn adds measurements.
# The same command continues where it stopped. MINUTES, COUNT (plans of each model) and OUTPUT can be set.
set -eu
began=$(date +%s)
minutes=${MINUTES:-19} count=${COUNT:-20} output=${OUTPUT:-runs/validate}
galvatron=${GALVATRON:-galvatron} ranks=2 length=64 batch=8
models="llama-128 qwen2-192 llama-256" folder=$(dirname "$0")/../benchmarks/models

for turn in 1 2 3; do
    "$galvatron" profile hardware --output "$output/profiles" --nproc $ranks --end_mb 8 --turns $((2 * turn))
    for model in $models; do
        "$galvatron" profile model "$folder/$model" --output "$output/profiles" --nproc $ranks --seq_length $length \
            --profile_mode batch --profile_max_batch_size $batch --max_tp_deg $ranks --sequence_parallel 1 --turns $turn
    done
    pending=3
    for model in $models; do
        left=$((minutes - ($(date +%s) - began) / 60))
        [ $turn -lt 3 ] || left=$((left / pending)) pending=$((pending - 1))
        "$galvatron" validate "$folder/$model" --profiles "$output/profiles" --output "$output/$model" --nproc $ranks \
            --count "$count" --global_train_batch_size $batch --visits $turn --minutes $((left > 0 ? left : 1))
    done
done
