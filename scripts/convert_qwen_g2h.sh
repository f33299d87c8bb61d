#!/bin/sh
# Converts a checkpoint of a Qwen2, a run's or a converted one, to a Hugging Face model (safetensors).
# Both variables can be set from the environment. Options: galvatron convert g2h --help, docs/en/convert.md.
set -eu

INPUT_PATH=${INPUT_PATH:-qwen2.5-7b-galvatron}  # folder of the checkpoint, such as output/checkpoints/step-00001000
OUTPUT_PATH=${OUTPUT_PATH:-qwen2.5-7b-hf-new}   # folder of the Hugging Face model, which is made

exec "${GALVATRON:-galvatron}" convert g2h "$INPUT_PATH" "$OUTPUT_PATH" --family qwen "$@"
