#!/bin/sh
# scripts/convert_llama_h2g.sh under Galvatron's name: the folders can be set here or from the environment.
set -eu
INPUT_PATH=${INPUT_PATH:-llama2-7b-hf}           # folder of the Hugging Face model
OUTPUT_PATH=${OUTPUT_PATH:-llama2-7b-galvatron}  # folder of the checkpoint, which is made
export INPUT_PATH OUTPUT_PATH
exec sh "$(dirname "$0")/../scripts/convert_llama_h2g.sh" "$@"
