#!/bin/sh
# train.sh MICRO_BATCH [options of train.py]
set -eu
micro_batch=$1
shift
echo "training with a micro-batch of $micro_batch"
# exec: the signal to stop then reaches Python itself.
exec "${PYTHON:-python3}" "$(dirname "$0")/train.py" --micro-batch "$micro_batch" "$@"
