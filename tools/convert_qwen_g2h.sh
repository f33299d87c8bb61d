#!/bin/sh
exec sh "$(dirname "$0")/../scripts/convert_qwen_g2h.sh" "$@"
