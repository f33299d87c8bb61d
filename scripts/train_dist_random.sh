#!/bin/sh
# Trains a few steps on random tokens, without checkpoints, to see how fast a plan is: see train_dist.sh for the
# variables.
set -eu

unset DATA_ARGS
export DATA_PATH=random TRAIN_ITERS="${TRAIN_ITERS:-20}" SAVE_INTERVAL="${SAVE_INTERVAL:-0}" LOG_INTERVAL="${LOG_INTERVAL:-1}"
exec sh "$(dirname "$0")/train_dist.sh" --resume_from_checkpoint none "$@"
