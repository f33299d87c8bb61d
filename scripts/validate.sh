#!/bin/sh
# Compares predictions with real steps of three small models of two families: `make validate`.
# Profiling and validation take turns, because a host is faster or slower for minutes; each turn adds measurements.
# The same command continues where it stopped. MINUTES, COUNT (plans of each model) and OUTPUT can be set.
set -eu
began=$(date +%s)
minutes=${MINUTES:-19} count=${COUNT:-20} output=${OUTPUT:-runs/validate}
galvatron=${GALVATRON:-galvatron} ranks=2 length=64 batch=8
models="llama-128 qwen2-192 llama-256"

config() { # FAMILY LAYERS HIDDEN INTERMEDIATE HEADS KV_HEADS
    mkdir -p "$output/$1-$3/model"
    cat >"$output/$1-$3/model/config.json" <<EOF
{"model_type": "$1", "num_hidden_layers": $2, "hidden_size": $3, "intermediate_size": $4, "num_attention_heads": $5,
 "num_key_value_heads": $6, "vocab_size": 2048, "max_position_embeddings": $length, "rms_norm_eps": 1e-6,
 "rope_theta": 10000.0, "initializer_range": 0.02, "tie_word_embeddings": false}
EOF
}

config llama 4 128 352 4 4
config qwen2 6 192 512 8 4
config llama 4 256 688 8 8
for turn in 1 2 3; do
    "$galvatron" profile hardware --output "$output/profiles" --nproc $ranks --end_mb 8 --turns $((2 * turn))
    for model in $models; do
        "$galvatron" profile model "$output/$model/model" --output "$output/profiles" --nproc $ranks --seq_length $length \
            --profile_mode batch --profile_max_batch_size $batch --max_tp_deg $ranks --sequence_parallel 1 --turns $turn
    done
    pending=3
    for model in $models; do
        left=$((minutes - ($(date +%s) - began) / 60))
        [ $turn -lt 3 ] || left=$((left / pending)) pending=$((pending - 1))
        "$galvatron" validate "$output/$model/model" --profiles "$output/profiles" --output "$output/$model" --nproc $ranks \
            --count "$count" --global_train_batch_size $batch --visits $turn --minutes $((left > 0 ? left : 1))
    done
done
