#!/bin/sh
# From nothing to a trained model on this machine's CPU: text, profiles, a searched plan, training, and a comparison.
# Everything lands in runs/quickstart; each command is printed, and works by hand.
set -eu
cd "$(dirname "$0")/.."

model=examples/tiny-qwen2 out=runs/quickstart processes=4 seq=128

title() {
    printf '\n[%s/6] %s\n' "$1" "$2"
}

run() {
    printf '$ galvatron %s\n' "$*"
    galvatron "$@"
}

title 1 "text: Python's standard library, tokenised"
run data prepare --standard_library --vocab_size 2048 --limit_mib 4 --output $out/data/python

title 2 "profiles: $processes processes and the model, measured in two minutes at most"
run profile hardware --nproc $processes --end_mb 16 --time_budget_s 60 --output $out/profiles
run profile model $model --nproc $processes --seq $seq --profile_mode batch --profile_max_batch_size 4 \
    --max_tp_deg $processes --sequence_parallel 1 --time_budget_s 60 --output $out/profiles

title 3 "plan: the fastest one within a budget that is tight on purpose"
run search $model --profiles $out/profiles --time_profile_mode batch --gpus $processes --memory_constraint 0.07 \
    --batch 16 --seq $seq --mixed_precision fp32 --default_dp_type ddp --sp_space tp+sp --no_global_memory_buffer --output $out/plan.json

title 4 "training: 40 steps on $processes processes"
run train $out/plan.json --model $model --input_dir $out/data/python --nproc $processes --num_nodes 1 --node_rank 0 \
    --max_steps 40 --learning_rate 2e-3 --min_learning_rate 2e-4 --warmup_steps 5 \
    --save_steps 0 --resume_from_checkpoint none --output_dir $out

title 5 "the same plan and one process: losses and gradients, compared"
run parity $out/plan.json --model $model

title 6 "predicted and measured"
run report $out/plan.json --log $out/train_log.jsonl --output $out/report.html
