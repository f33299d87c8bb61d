#!/bin/sh
# scripts/convert_llama_g2h.sh under Galvatron's name: the folders can be set here or from the environment.
set -eu
INPUT_PATH=${INPUT_PATH:-llama2-7b-galvatron}  # folder of the checkpoint, such as output/checkpoints/step-00001000
OUTPUT_PATH=${OUTPUT_PATH:-llama2-7b-hf-new}   # folder of the Hugging Face model, which is made
export INPUT_PATH OUTPUT_PATH
exec sh "$(dirname "$0")/../scripts/convert_llama_g2h.sh" "$@"
