#!/usr/bin/env bash
# Prints which device an environment is for, `cpu` or `cuda`, and after a blank why: what DEVICE says, else what the
# environment was made for, else what this machine has.
#   device.sh ENVIRONMENT [DEV]     DEV: the folder of device files, /dev
set -euo pipefail
environment=$1
dev=${2:-/dev}

case ${DEVICE:-} in
    cpu | cuda) echo "$DEVICE as DEVICE says" && exit ;;
    '') ;;
    *) echo "setup: DEVICE=$DEVICE is neither cpu nor cuda: say one of them, or unset it to take what this machine has" >&2 && exit 1 ;;
esac
if [ -f "$environment/.device" ]; then
    echo "$(<"$environment/.device") as $environment was made for it; DEVICE=cpu or DEVICE=cuda makes it anew"
    exit
fi
# Of a driver without a GPU it fails, or lists nothing; of a machine without a driver it is missing.
if listed=$(nvidia-smi --list-gpus 2>/dev/null) && [[ $listed == "GPU "* ]]; then
    first=${listed%%$'\n'*}
    echo "cuda as nvidia-smi lists ${first%% (UUID*}; DEVICE=cpu overrides"
elif files=("$dev"/nvidia[0-9]*) && [ -e "${files[0]}" ]; then
    echo "cuda as ${files[0]} is there; DEVICE=cpu overrides"
else
    echo "cpu as nvidia-smi lists no GPU and there is no $dev/nvidia0; DEVICE=cuda overrides"
fi
