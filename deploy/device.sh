#!/usr/bin/env bash
# Prints the device to install for, `cpu` or `cuda`, and after a blank the reason. In order: the variable DEVICE, the
# device an existing environment was made for, the hardware of this machine.
#   device.sh ENVIRONMENT [DEV]     DEV: the folder of device files, default /dev
set -euo pipefail
environment=$1
dev=${2:-/dev}

case ${DEVICE:-} in
    cpu | cuda) echo "$DEVICE DEVICE=$DEVICE is set" && exit ;;
    '') ;;
    *) echo "setup: DEVICE=$DEVICE is neither cpu nor cuda: set one of them, or unset it to detect the hardware" >&2 && exit 1 ;;
esac
if [ -f "$environment/.device" ]; then
    echo "$(<"$environment/.device") $environment was made for it; DEVICE=cpu or DEVICE=cuda rebuilds it"
    exit
fi
# Without a GPU nvidia-smi fails or lists nothing; without a driver it is not installed.
if listed=$(nvidia-smi --list-gpus 2>/dev/null) && [[ $listed == "GPU "* ]]; then
    first=${listed%%$'\n'*}
    echo "cuda nvidia-smi lists ${first%% (UUID*}; DEVICE=cpu overrides"
elif files=("$dev"/nvidia[0-9]*) && [ -e "${files[0]}" ]; then
    echo "cuda ${files[0]} exists; DEVICE=cpu overrides"
else
    echo "cpu nvidia-smi lists no GPU and no $dev/nvidia* exists; DEVICE=cuda overrides"
fi
