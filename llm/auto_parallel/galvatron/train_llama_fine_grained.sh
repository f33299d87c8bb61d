#!/bin/sh
# Trains Llama: as train_qwen_fine_grained.sh, which says what variables there are, with another model by default.
set -eu

export MODEL="${MODEL:-llama2-7b}"
exec sh "$(dirname "$0")/train_qwen_fine_grained.sh" "$@"
