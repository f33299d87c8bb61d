#!/bin/sh
# Converts a Hugging Face Qwen2 (safetensors) to a checkpoint that any plan loads.
# Both variables can be set from the environment. Options: galvatron convert h2g --help, docs/en/convert.md.
set -eu

INPUT_PATH=${INPUT_PATH:-qwen2.5-7b-hf}           # folder of the Hugging Face model
OUTPUT_PATH=${OUTPUT_PATH:-qwen2.5-7b-galvatron}  # folder of the checkpoint, which is made

exec "${GALVATRON:-galvatron}" convert h2g "$INPUT_PATH" "$OUTPUT_PATH" --family qwen "$@"
