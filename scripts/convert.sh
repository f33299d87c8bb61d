#!/bin/sh
# Converts a checkpoint, as the name it is called by says: convert_FAMILY_h2g.sh a Hugging Face model (safetensors) to
# a checkpoint that any plan loads, convert_FAMILY_g2h.sh a checkpoint, a run's or a converted one, to such a model.
# INPUT_PATH and OUTPUT_PATH, both folders, can be set from the environment. Options: docs/en/convert.md.
set -eu

name=$(basename "$0" .sh)
case $name in
    convert_llama*) family=llama model=llama2-7b ;;
    convert_qwen*) family=qwen model=qwen2.5-7b ;;
    *) echo "$0: call it by one of its other names, such as convert_llama_h2g.sh" >&2 && exit 2 ;;
esac
case $name in
    *_g2h) way=g2h input=$model-galvatron output=$model-hf-new ;;
    *) way=h2g input=$model-hf output=$model-galvatron ;;
esac
exec "${GALVATRON:-galvatron}" convert $way "${INPUT_PATH:-$input}" "${OUTPUT_PATH:-$output}" --family $family "$@"
