#!/bin/sh
exec sh "$(dirname "$0")/../scripts/convert_llama_g2h.sh" "$@"
